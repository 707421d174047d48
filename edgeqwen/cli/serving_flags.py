"""The flags of `serve`, and of the commands that say what it would make of them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from edgeqwen.cli.places import SYSTEM_STATE
from edgeqwen.cli.threads import CPUS_HELP, THREADS_HELP
from edgeqwen.protocol.address import SYSTEM_SOCKET

if TYPE_CHECKING:
    from edgeqwen.config import ConfigSources

SETTINGS: Final = {
    "package": "model.package",
    "socket_path": "socket.path",
    "http_listen": "http.listen",
    "runtime": "engine.runtime",
    "torch_mode": "torch.mode",
    "torch_weights": "torch.weights",
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


_OPTIONS: Final = (
    click.option("--model", "package", metavar="PACKAGE|NAME", help="Default: the only installed model."),
    click.option(
        "--socket",
        "socket_path",
        metavar="PATH",
        help=f"Default: $XDG_RUNTIME_DIR/edgeqwen.sock; root: {SYSTEM_SOCKET}.",
    ),
    click.option("--http", "http_listen", metavar="HOST:PORT", help="Speak HTTP on this TCP address too."),
    click.option(
        "--runtime",
        metavar="R",
        help="onnx (default), torch, ipex, auto, or fake:SCRIPT, scripted answers for tests.",
    ),
    click.option("--torch-mode", metavar="MODE", help="eager (default) or compile."),
    click.option(
        "--torch-weights", metavar="TYPE", help="fp32, bf16, int8, woq8 (8-bit weights alone) or auto (default)."
    ),
    click.option(
        "--context", type=int, metavar="N", help="Tokens of one conversation. Default: the model's, up to 8192."
    ),
    click.option("--slots", type=int, metavar="N", help="Conversations computed at once. Default: 8."),
    click.option("--kv", "kv_type", metavar="TYPE", help="Cache: fp32, int8 (a quarter of the memory) or auto."),
    click.option("--threads", type=int, metavar="N", help=THREADS_HELP),
    click.option("--cpus", metavar="LIST", help=CPUS_HELP),
    click.option(
        "--state-dir",
        metavar="DIR",
        help=f"Default: $STATE_DIRECTORY, else $XDG_STATE_HOME/edgeqwen; root: {SYSTEM_STATE}.",
    ),
    click.option("--cache-dir", metavar="DIR", help="Default: $CACHE_DIRECTORY, else `cache` in the state directory."),
    click.option(
        "--idle-exit", "idle_exit_s", type=float, metavar="S", help="End after S idle seconds; for socket activation."
    ),
    click.option(
        "--config",
        "config_path",
        type=click.Path(path_type=Path),
        metavar="FILE",
        help="Settings in TOML; EDGEQWEN_* and flags come before them.",
    ),
)


def serving_options(function: Any) -> Any:
    """Decorates a command with the flags of `serve`; `sources_of` takes what it is given."""
    for option in reversed(_OPTIONS):
        function = option(function)
    return function


def sources_of(config_path: Path | None, flags: Mapping[str, Any]) -> ConfigSources:
    """Where the configuration comes from: the file, the environment of this process, and the flags."""
    from edgeqwen.config import ConfigSources

    return ConfigSources(config_path, dict(os.environ), {SETTINGS[flag]: value for flag, value in flags.items()})
