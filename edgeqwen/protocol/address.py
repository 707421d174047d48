"""Where the socket is by default, and what server and clients must both hold its path against."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from edgeqwen.errors import ConfigInvalid

SOCKET_VARIABLE: Final = "EDGEQWEN_SOCKET_PATH"
"""The daemon's own variable for `socket.path`; the clients read it too, so one setting does for both."""

SYSTEM_SOCKET: Final = Path("/run/edgeqwen/edgeqwen.sock")
MAX_PATH_BYTES: Final = 107  # sun_path is 108 bytes, one of them for the final NUL (unix(7))


def check_length(path: str) -> None:
    """Raise `ConfigInvalid` if no socket can have this path. The limit is in bytes, not characters."""
    num_bytes = len(os.fsencode(path))
    if num_bytes > MAX_PATH_BYTES:
        raise ConfigInvalid(f"{path}: socket path has {num_bytes} bytes, the limit is {MAX_PATH_BYTES}; shorten it")


def user_socket(environ: Mapping[str, str], *, is_root: bool) -> Path | None:
    """The socket of the user's own daemon; None if the user has no runtime directory."""
    if is_root:
        return SYSTEM_SOCKET
    folder = environ.get("XDG_RUNTIME_DIR", "")
    return Path(folder) / "edgeqwen.sock" if folder.startswith("/") else None


def default_socket(environ: Mapping[str, str], *, is_root: bool) -> Path:
    """The socket of a client that is told none: as the environment says, else the user's own daemon's if it is there,
    else the system's.
    """
    if chosen := environ.get(SOCKET_VARIABLE):
        return Path(chosen)
    own = user_socket(environ, is_root=is_root)
    return own if own is not None and own.exists() else SYSTEM_SOCKET
