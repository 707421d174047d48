"""The folder in which a daemon keeps what it need not find out again; it works without one, only slower."""

from __future__ import annotations

import contextlib
import logging
import os
from pathlib import Path

logger = logging.getLogger(__name__)


def writable_folder(path: Path) -> Path | None:
    """`path`, made for this user alone if it is not there; None, and a warning, if nothing can be kept in it."""
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        reason = error.strerror
    else:
        if os.access(path, os.R_OK | os.W_OK | os.X_OK):
            return path
        reason = "not writable"
    logger.warning("%s: %s: nothing is kept there, so this machine is measured anew at each start", path, reason)
    return None


def could_write(path: Path) -> bool:
    """Whether `writable_folder` would succeed, as far as can be told without making anything."""
    path = existing_part(path)
    return os.path.isdir(path) and os.access(path, os.R_OK | os.W_OK | os.X_OK)


def existing_part(path: Path) -> Path:
    """`path`, or the nearest folder above it that there is, in which it would be made."""
    while not os.path.lexists(path) and path != path.parent:
        path = path.parent
    return path


def write_whole(path: Path, content: bytes) -> None:
    """Write a file, whole or not at all; raises OSError."""
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        beside.write_bytes(content)
        beside.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            beside.unlink()
        raise
