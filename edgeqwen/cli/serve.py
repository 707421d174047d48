"""`edgeqwen serve`: the daemon in the foreground."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from edgeqwen.cli.places import (
    SYSTEM_STATE,
    cache_folder,
    models_folder,
    socket_to_listen_on,
    state_folder,
)
from edgeqwen.cli.threads import CPUS_HELP, THREADS_HELP, checked_processor, planned_threads
from edgeqwen.protocol.address import SYSTEM_SOCKET

if TYPE_CHECKING:
    from edgeqwen.loading import DaemonOptions
    from edgeqwen.service import Manager

BLAS_VARIABLE: Final = "OPENBLAS_NUM_THREADS"
"""numpy's library for matrices starts a thread for each CPU when it is loaded, and the daemon has no use for them."""

SETTINGS: Final = {
    "package": "model.package",
    "socket_path": "socket.path",
    "http_listen": "http.listen",
    "runtime": "engine.runtime",
    "context": "kv.context",
    "slots": "kv.slots",
    "kv_type": "kv.type",
    "threads": "cpu.threads",
    "cpus": "cpu.cpus",
    "state_dir": "service.state_dir",
    "cache_dir": "service.cache_dir",
    "idle_exit_s": "service.idle_exit_s",
}
"""Parameter of the command -> the setting that it is of."""


@click.command("serve", short_help="Load a model and serve it on a Unix socket.")
@click.option("--model", "package", metavar="PACKAGE|NAME", help="Default: the only installed model.")
@click.option(
    "--socket",
    "socket_path",
    metavar="PATH",
    help=f"Default: $XDG_RUNTIME_DIR/edgeqwen.sock; root: {SYSTEM_SOCKET}.",
)
@click.option("--http", "http_listen", metavar="HOST:PORT", help="Speak HTTP on this TCP address too.")
@click.option("--runtime", metavar="R", help="onnx (default) or fake:SCRIPT, scripted answers for tests.")
@click.option("--context", type=int, metavar="N", help="Tokens of one conversation. Default: the model's, up to 8192.")
@click.option("--slots", type=int, metavar="N", help="Conversations computed at once. Default: 8.")
@click.option("--kv", "kv_type", metavar="TYPE", help="Cache: fp32, int8 (a quarter of the memory) or auto.")
@click.option("--threads", type=int, metavar="N", help=THREADS_HELP)
@click.option("--cpus", metavar="LIST", help=CPUS_HELP)
@click.option(
    "--state-dir",
    metavar="DIR",
    help=f"Default: $STATE_DIRECTORY, else $XDG_STATE_HOME/edgeqwen; root: {SYSTEM_STATE}.",
)
@click.option("--cache-dir", metavar="DIR", help="Default: $CACHE_DIRECTORY, else `cache` in the state directory.")
@click.option(
    "--idle-exit", "idle_exit_s", type=float, metavar="S", help="End after S idle seconds; for socket activation."
)
@click.option(
    "--config",
    "config_path",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Settings in TOML; EDGEQWEN_* and flags come before them.",
)
def command(*, config_path: Path | None, **flags: Any) -> int:
    """Load a model and serve it on a Unix socket until SIGTERM or Ctrl-C."""
    from edgeqwen.errors import EdgeqwenError
    from edgeqwen.service import Inheritance, Manager, turn_away

    manager = Manager.take(os.environ, os.getpid(), Inheritance.take(os.environ, os.getpid()))
    try:
        return run(options_of(config_path, flags), manager)
    except EdgeqwenError as error:
        manager.notifier.status(error.message)
        turn_away(manager.inheritance.sockets, error)
        raise


def options_of(config_path: Path | None, flags: Mapping[str, Any]) -> DaemonOptions:
    """What the file, the environment and the flags of the command say. Raises `EdgeqwenError`."""
    from edgeqwen.config import ConfigSources

    given = {SETTINGS[flag]: value for flag, value in flags.items()}
    sources = ConfigSources(config_path, dict(os.environ), given)
    config = sources.read()
    checked_processor()
    if not os.environ.get(BLAS_VARIABLE):
        os.environ[BLAS_VARIABLE] = "1"
    threads = planned_threads(**dataclasses.asdict(config.cpu))
    state = state_folder(config.service.state_dir, os.environ, is_root=os.geteuid() == 0)
    from edgeqwen.core.package import resolve_model
    from edgeqwen.loading import DaemonOptions

    return DaemonOptions(
        config=config,
        sources=sources,
        package_path=resolve_model(config.model.package, models_folder()),
        socket_path=socket_to_listen_on(config.socket.path),
        threads=threads,
        state_dir=state,
        cache_dir=cache_folder(config.service.cache_dir, os.environ, state),
    )


def run(options: DaemonOptions, manager: Manager) -> int:
    """The event loop, from start to end."""
    import faulthandler

    import uvloop

    from edgeqwen.daemon import serve
    from edgeqwen.logs import set_up

    faulthandler.enable()  # a manager ends what hangs by SIGABRT, and the log is to show where it hung
    set_up(options.config.service.log_format)
    return uvloop.run(serve(options, manager))
