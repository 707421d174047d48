"""Where the socket is: what server and clients must both hold its path against."""

from __future__ import annotations

import os
from typing import Final

from edgeqwen.errors import ConfigInvalid

MAX_PATH_BYTES: Final = 107  # sun_path is 108 bytes, one of them for the final NUL (unix(7))


def check_length(path: str) -> None:
    """Raise `ConfigInvalid` if no socket can have this path. The limit is in bytes, not characters."""
    num_bytes = len(os.fsencode(path))
    if num_bytes > MAX_PATH_BYTES:
        raise ConfigInvalid(f"{path}: socket path has {num_bytes} bytes, the limit is {MAX_PATH_BYTES}; shorten it")
