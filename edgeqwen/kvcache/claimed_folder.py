"""A folder that one process holds for itself, by a lock file in it that ends with the process (flock(2)).

The lock file goes when the folder is removed, so holding a lock means something only while its file is the one that
others would find: `claim` looks again after it has locked.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from edgeqwen.errors import CannotWrite

LOCK_FILE: Final = "lock"
_FOLDER_FLAGS: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_ATTEMPTS: Final = 3


def claim(path: Path) -> tuple[int, int]:
    """Make the folder `path`, for this user only, and lock it: its descriptor and that of its lock.

    Raises `CannotWrite` if another process holds it or it is another user's, else the `OSError` of the file system.
    """
    for _ in range(_ATTEMPTS):
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        with contextlib.suppress(FileNotFoundError), contextlib.ExitStack() as undo:
            folder_fd = os.open(path, _FOLDER_FLAGS)
            undo.callback(os.close, folder_fd)
            _make_private(path, folder_fd)
            lock_fd = _lock(folder_fd, may_create=True)
            if lock_fd is None:
                break
            undo.callback(os.close, lock_fd)
            if os.path.samestat(os.stat(LOCK_FILE, dir_fd=folder_fd), os.fstat(lock_fd)):
                undo.pop_all()
                return folder_fd, lock_fd
    raise CannotWrite(f"{path}: in use by another daemon; give one of the two another cache directory")


@contextlib.contextmanager
def claimed(path: Path) -> Iterator[int | None]:
    """The descriptor of a folder that exists, locked meanwhile; None if another process holds it.

    Raises the `OSError` of the file system, also if there is no lock in it.
    """
    with contextlib.ExitStack() as stack:
        folder_fd = os.open(path, _FOLDER_FLAGS)
        stack.callback(os.close, folder_fd)
        lock_fd = _lock(folder_fd, may_create=False)
        if lock_fd is not None:
            stack.callback(os.close, lock_fd)
        yield None if lock_fd is None else folder_fd


def _make_private(path: Path, folder_fd: int) -> None:
    """What people said to a model is in there."""
    status = os.fstat(folder_fd)
    if status.st_uid != os.geteuid():
        raise CannotWrite(f"{path}: belongs to uid {status.st_uid}; choose another cache directory")
    if stat.S_IMODE(status.st_mode) != 0o700:
        os.fchmod(folder_fd, 0o700)


def _lock(folder_fd: int, *, may_create: bool) -> int | None:
    """A descriptor that holds the lock of a folder, None if another process does."""
    flags = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC | (os.O_CREAT if may_create else 0)
    fd = os.open(LOCK_FILE, flags, 0o600, dir_fd=folder_fd)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        return None
    except OSError:
        os.close(fd)
        raise
    return fd
