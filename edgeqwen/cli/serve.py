"""`edgeqwen serve`: the daemon in the foreground."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from edgeqwen.cli.places import cache_folder, models_folder, socket_to_listen_on, state_folder
from edgeqwen.cli.serving_flags import serving_options, sources_of
from edgeqwen.cli.threads import checked_processor, planned_threads

if TYPE_CHECKING:
    from edgeqwen.loading import DaemonOptions
    from edgeqwen.service import Manager

BLAS_VARIABLE: Final = "OPENBLAS_NUM_THREADS"
"""numpy's library for matrices starts a thread for each CPU when it is loaded, and the daemon has no use for them."""


@click.command("serve", short_help="Load a model and serve it on a Unix socket.")
@serving_options
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
    sources = sources_of(config_path, flags)
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
