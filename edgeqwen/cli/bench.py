"""`edgeqwen bench`: how fast a model is on this machine."""

from __future__ import annotations

import json
import os
from typing import Any

import click

from edgeqwen.cli.places import CODE_FOLDER, cache_folder, models_folder, state_folder
from edgeqwen.cli.threads import checked_processor, planned_threads, thread_options
from edgeqwen.config import KV_TYPES, TORCH_MODES, TORCH_WEIGHTS


@click.command("bench", short_help="Measure speed, load time and memory of a model.")
@click.argument("package", default="")
@click.option("--prompt", "num_prompt", type=click.IntRange(1), default=128, show_default=True, help="Prompt tokens.")
@click.option("--decode", "num_decode", type=click.IntRange(1), default=64, show_default=True, help="Generated tokens.")
@click.option("--streams", "num_streams", type=click.IntRange(1, 256), default=1, show_default=True, help="At once.")
@click.option("--kv", "kv_type", type=click.Choice(KV_TYPES), default="auto", show_default=True, help="Cache.")
@click.option(
    "--runtime", type=click.Choice(("onnx", "torch", "ipex")), default="onnx", show_default=True, help="As for serve."
)
@click.option("--torch-mode", type=click.Choice(TORCH_MODES), default="eager", show_default=True, help="As for serve.")
@click.option(
    "--torch-weights", type=click.Choice(TORCH_WEIGHTS), default="auto", show_default=True, help="As for serve."
)
@thread_options
@click.option("--json", "as_json", is_flag=True, help="One JSON line instead of words.")
def command(package: str, *, threads: int, cpus: str, as_json: bool, **options: Any) -> None:
    """Measure prompt and decode speed, load time and memory of PACKAGE (a folder or a name; default: the only
    one installed); with torch it may be a checkpoint.
    """
    processor, plan = checked_processor(), planned_threads(threads=threads, cpus=cpus)
    from edgeqwen.bench import BenchOptions, bench
    from edgeqwen.core.package import resolve_model

    path = resolve_model(package, models_folder())
    state = state_folder("", os.environ, is_root=os.geteuid() == 0)
    options["code_dir"] = cache_folder("", os.environ, state) / CODE_FOLDER
    report = bench(path, BenchOptions(**options), processor=processor, threads=plan).to_dict()
    if as_json:
        click.echo(json.dumps(report))
        return
    for key, value in report.items():
        click.echo(f"{key:14} {value}")
