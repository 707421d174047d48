"""`edgeqwen doctor`: what is in the way on this machine."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from edgeqwen.cli.places import cache_folder, models_folder, socket_option, socket_to_connect_to, state_folder
from edgeqwen.cli.threads import CPUS_HELP, THREADS_HELP, planned_threads

if TYPE_CHECKING:
    from edgeqwen.config import Config
    from edgeqwen.doctor.examination import Examination
    from edgeqwen.doctor.finding import Finding


@click.command("doctor", short_help="Look at this machine, and at a package, for what is in the way.")
@click.argument("package", required=False)
@click.option("--threads", type=int, metavar="N", help=THREADS_HELP)
@click.option("--cpus", metavar="LIST", help=CPUS_HELP)
@click.option("--context", type=int, metavar="N", help="As for serve.")
@click.option("--slots", type=int, metavar="N", help="As for serve.")
@click.option("--state-dir", metavar="DIR", help="As for serve.")
@click.option("--config", "config_path", type=click.Path(path_type=Path), metavar="FILE", help="As for serve.")
@socket_option
@click.option("--quick", is_flag=True, help="Without the short run that tells where the time goes.")
@click.option("--time", "times", is_flag=True, help="Compare the installed runtimes, for ten seconds; auto goes by it.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
def command(
    package: str | None,
    *,
    config_path: Path | None,
    socket_path: str | None,
    quick: bool,
    times: bool,
    as_json: bool,
    **flags: Any,
) -> int:
    """Say what processor, threads and memory `serve` would find here, who may ask at the socket and whether a daemon
    answers, check PACKAGE (a folder or a name; default: the only one installed), have it run for a few seconds, and
    name what costs speed. Exits with 0 if nothing keeps the daemon from serving, else as `serve` would.
    """
    from importlib.metadata import version

    from edgeqwen.config import load
    from edgeqwen.core.package import is_package
    from edgeqwen.cpu import read_processor
    from edgeqwen.doctor import examine
    from edgeqwen.doctor.examination import Subject
    from edgeqwen.doctor.trial import run_trial
    from edgeqwen.loading.choice import serves_checkpoint

    names = {
        "threads": "cpu.threads",
        "cpus": "cpu.cpus",
        "context": "kv.context",
        "slots": "kv.slots",
        "state_dir": "service.state_dir",
    }
    config = load(config_path, os.environ, {names[flag]: value for flag, value in flags.items()})
    state_dir = state_folder(config.service.state_dir, os.environ, is_root=os.geteuid() == 0)
    path = _package_path(package or config.model.package)
    problem = None
    if path is not None and serves_checkpoint(config.engine.runtime, path):
        problem = _checkpoint_finding(path, config)
        path = path if is_package(path) else None  # its spec says what to time
    examination = examine(
        Subject(
            processor=read_processor(),
            threads=planned_threads(**dataclasses.asdict(config.cpu)),
            runtime_version=version("onnxruntime"),
            state_dir=state_dir,
            package_path=path,
            kv=config.kv,
            cache_dir=cache_folder(config.service.cache_dir, os.environ, state_dir),
            socket_path=socket_to_connect_to(socket_path or config.socket.path or None),
            configured_runtime=config.engine.runtime,
        )
    )
    if problem is not None:
        examination = examination.with_trial(problem)
    if path is not None and not quick and not examination.exit_code:
        places = ("--threads", str(config.cpu.threads), "--cpus", config.cpu.cpus)
        examination = examination.with_trial(examination.trial_obstacle or run_trial(str(path), places))
    if times:
        examination = _timed(examination, config)
    click.echo(json.dumps(examination.to_dict()) if as_json else examination.to_text())
    return examination.exit_code


def _timed(examination: Examination, config: Config) -> Examination:
    """With the runtimes timed, and that kept; without, if a daemon is at work."""
    from edgeqwen.core.package import is_package, open_package
    from edgeqwen.core.speeds import speeds_path
    from edgeqwen.doctor.package import QWEN3
    from edgeqwen.doctor.runtimes import keep_timing, time_runtimes
    from edgeqwen.loading.choice import machine_of

    if obstacle := examination.trial_obstacle:
        return examination.with_trial(obstacle)
    subject = examination.subject
    path, manifest = subject.package_path, None
    if path is not None and is_package(path):
        manifest = open_package(path).manifest
    timing = time_runtimes(
        manifest.spec if manifest else QWEN3,
        quant=manifest.quant if manifest else "int8",
        flags=("--threads", str(config.cpu.threads), "--cpus", config.cpu.cpus),
        torch_flags=("--torch-mode", config.torch.mode, "--torch-weights", config.torch.weights),
    )
    lost = keep_timing(speeds_path(subject.state_dir, machine_of(subject.threads)), timing)
    return examination.with_timing(timing, *([lost] if lost else []))


def _checkpoint_finding(path: Path, config: Config) -> Finding | None:
    """What keeps torch from serving the checkpoint at `path`."""
    from edgeqwen.doctor.finding import Finding
    from edgeqwen.errors import EdgeqwenError
    from edgeqwen.loading.checkpoint_model import check_checkpoint

    runtime = config.engine.runtime
    try:
        check_checkpoint(path, config, "torch" if runtime == "auto" else runtime)
    except EdgeqwenError as error:
        text, _, advice = error.message.partition("; ")
        return Finding("error", "checkpoint", text, advice or "give another (--model)", error.exit_code)
    return None


def _package_path(given: str) -> Path | None:
    """The package meant; None if none was and there is not just one."""
    from edgeqwen.core.package import installed_models, resolve_model

    folder = models_folder()
    if not given and len(installed_models(folder)) != 1:
        return None
    return resolve_model(given, folder)
