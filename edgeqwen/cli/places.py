"""Where things are by default: the socket, the installed models. Flags and environment come first."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import click

from edgeqwen.errors import ConfigInvalid
from edgeqwen.protocol.address import SOCKET_VARIABLE, SYSTEM_SOCKET, default_socket, user_socket

CODE_FOLDER = "torch-code"
"""What torch compiled, in the cache folder."""

SYSTEM_STATE = Path("/var/lib/edgeqwen")

socket_option = click.option(
    "--socket",
    "socket_path",
    metavar="PATH",
    help=f"Default: ${SOCKET_VARIABLE}, else $XDG_RUNTIME_DIR/edgeqwen.sock, else {SYSTEM_SOCKET}.",
)
"""Of the clients; `socket_to_connect_to` says what it means."""


def models_folder() -> Path:
    """The folder of installed models of the user who runs."""
    from edgeqwen.core.package import models_dir

    return models_dir(os.environ, is_root=os.geteuid() == 0)


def state_folder(configured: str, environ: Mapping[str, str], *, is_root: bool) -> Path:
    """Where the daemon keeps what should outlast it: as configured, else what systemd made for the service
    ($STATE_DIRECTORY), else the user's state directory (XDG); root: /var/lib/edgeqwen.
    """
    if chosen := configured or first_directory(environ.get("STATE_DIRECTORY", "")):
        return Path(chosen)
    if is_root:
        return SYSTEM_STATE
    folder = environ.get("XDG_STATE_HOME", "")
    if not folder.startswith("/"):  # the XDG specification: a relative path is to be ignored
        folder = f"{environ.get('HOME', '')}/.local/state"
    return Path(folder) / "edgeqwen"


def cache_folder(configured: str, environ: Mapping[str, str], state: Path) -> Path:
    """Where the daemon keeps what may be lost: as configured, else $CACHE_DIRECTORY, else below `state`."""
    chosen = configured or first_directory(environ.get("CACHE_DIRECTORY", ""))
    return Path(chosen) if chosen else state / "cache"


def first_directory(listed: str) -> str:
    """The first of the directories that systemd made, which it lists with colons in between (systemd.exec(5))."""
    return listed.split(":", maxsplit=1)[0]


def socket_to_listen_on(configured: str) -> Path:
    """The socket of `serve`: as configured, else the user's own. Raises `ConfigInvalid` if there is no such place."""
    path = Path(configured) if configured else user_socket(os.environ, is_root=os.geteuid() == 0)
    if path is None:
        raise ConfigInvalid("XDG_RUNTIME_DIR is not set, so there is no default socket; give one with --socket PATH")
    return path


def socket_to_connect_to(given: str | None) -> Path:
    """The socket of a client: as given, else the user's own daemon's if it is there, else the system's."""
    return Path(given) if given else default_socket(os.environ, is_root=os.geteuid() == 0)
