"""Two paths change places in one step of the kernel: Linux's `renameat2` with `RENAME_EXCHANGE`."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path
from typing import Final

AT_FDCWD: Final = -100  # fcntl.h: paths are relative to the working directory
RENAME_EXCHANGE: Final = 1 << 1  # linux/fs.h


def exchange(first: Path, second: Path) -> bool:
    """Swap two existing paths of one file system. False if nothing was done, as some kernels and file systems do."""
    rename = getattr(ctypes.CDLL(None), "renameat2", None)
    if rename is None:
        return False
    done: int = rename(AT_FDCWD, os.fsencode(first), AT_FDCWD, os.fsencode(second), RENAME_EXCHANGE)
    return done == 0
