"""The lock file beside a socket: who holds it is the only one to touch the socket's path.

It is held with flock(2), so a killed daemon leaves a file and no lock. Whoever ends in order removes the file as well.
That is safe because a lock counts only if the path still names the file that was locked: one who opened the file just
before it was removed locks a file without a name, sees that, and begins again.
"""

from __future__ import annotations

import fcntl
import os
from dataclasses import dataclass
from typing import Final, Self

from edgeqwen.errors import ConfigInvalid

_FLAGS: Final = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


@dataclass(frozen=True, slots=True)
class LockFile:
    """A lock that is held. `path` is absolute."""

    path: str
    fd: int

    @classmethod
    def acquire(cls, path: str, *, folder_fd: int) -> Self | None:
        """Lock `path`, whose folder is open as `folder_fd`; None if somebody else has it.

        Raises `ConfigInvalid` that names the file.
        """
        name = os.path.basename(path)
        while True:
            try:
                fd = os.open(name, _FLAGS, 0o600, dir_fd=folder_fd)
            except OSError as exc:
                raise ConfigInvalid(f"{path}: cannot open the lock file: {exc.strerror}") from exc
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(fd)
                return None
            except OSError as exc:
                os.close(fd)
                raise ConfigInvalid(f"{path}: cannot lock the file: {exc.strerror}") from exc
            if _is_named(fd, name, folder_fd):
                return cls(path, fd)
            os.close(fd)

    def release(self) -> None:
        """Remove the file and let it go. One that holds anything is somebody's and stays."""
        if os.fstat(self.fd).st_size == 0 and _is_named(self.fd, self.path):
            os.unlink(self.path)
        os.close(self.fd)


def _is_named(fd: int, path: str, folder_fd: int | None = None) -> bool:
    """Whether `path` names the open file."""
    try:
        return os.path.samestat(os.fstat(fd), os.stat(path, dir_fd=folder_fd, follow_symlinks=False))
    except FileNotFoundError:
        return False
