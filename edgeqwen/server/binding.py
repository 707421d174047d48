"""Binding a Unix socket so that nobody else can stand in its place, and two daemons cannot share it.

The folder is opened component by component, so that it cannot be swapped while it is checked; all further names are
relative to it. What is in the place is looked at before anything is made there, and once more by the holder of the lock
file beside it (`lock_file`), who alone touches the path and holds it for life. The socket is bound under a temporary
name, gets its mode and group there, listens, and is then renamed over the path: at no moment is there a socket that is
too open or that refuses connections.

On Linux a bound socket's mode is the mode of the descriptor's inode before bind, less the umask: fchmod comes first.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import shlex
import socket
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from edgeqwen.errors import ConfigInvalid
from edgeqwen.protocol.address import SYSTEM_SOCKET, check_length
from edgeqwen.server.lock_file import LockFile

BACKLOG: Final = 128
DIRECTORY_MODE: Final = 0o750
MADE_FOLDER: Final = str(SYSTEM_SOCKET.parent)
"""The only folder that is made if it is missing: /run is empty after each boot. Any other may be a slip of the hand."""

USER_MODE: Final = 0o600
GROUP_MODE: Final = 0o660


@dataclass(frozen=True, slots=True)
class BoundSocket:
    """A listening socket. `lock` and `inode` are set for one that we bound ourselves and hence remove at the end."""

    sock: socket.socket
    path: str
    lock: LockFile | None = None
    inode: int | None = None

    def close(self) -> None:
        """Stop listening and remove the path if it is still ours, then the lock file."""
        self.sock.close()
        if self.lock is None:
            return
        with contextlib.suppress(FileNotFoundError):
            if os.lstat(self.path).st_ino == self.inode:
                os.unlink(self.path)
        self.lock.release()


def check_socket_place(path: str | Path) -> None:
    """Raise what `bind_socket` would raise of the folder and of what is in the place, without making anything. A daemon
    that runs there is nothing wrong.
    """
    full = os.path.abspath(path)
    check_length(full)
    folder, name = os.path.split(full)
    with _opened_folder(folder, may_create=False) as folder_fd:
        _check_place(folder_fd, name, full, may_run=True)


def bind_socket(path: str | Path, *, group: int | None = None, mode: int | None = None) -> BoundSocket:
    """Bind and listen on `path`: mode 0600, or 0660 and of group `group` (gid), or `mode`.

    Raises `ConfigInvalid` in one line that says what to do, and leaves nothing behind: path too long, folder missing or
    not safe, something else in the place, a daemon that is already running.
    """
    full = os.path.abspath(path)
    check_length(full)
    folder, name = os.path.split(full)
    with _opened_folder(folder) as folder_fd:
        _check_place(folder_fd, name, full)
        lock = LockFile.acquire(f"{full}.lock", folder_fd=folder_fd)
        if lock is None:
            raise _already_running(full)
        try:
            _check_place(folder_fd, name, full)
            sock, inode = _bind(folder_fd, name, group, mode or (USER_MODE if group is None else GROUP_MODE))
        except OSError as exc:
            lock.release()
            raise ConfigInvalid(f"{full}: cannot bind the socket: {exc.strerror}") from exc
        except BaseException:
            lock.release()
            raise
    return BoundSocket(sock, full, lock, inode)


@contextlib.contextmanager
def _opened_folder(folder: str, *, may_create: bool = True) -> Iterator[int]:
    """A descriptor of `folder`, checked. Symbolic links on the way are followed only if they are root's."""
    names = [name for name in folder.split("/") if name]
    fd = os.open("/", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for depth, name in enumerate(names, 1):
            here = "/" + "/".join(names[:depth])
            try:
                inner = _open_inside(fd, name, here, may_create=may_create and here == MADE_FOLDER)
            except FileNotFoundError as exc:
                raise _no_folder(folder, is_deep=here != folder) from exc
            os.close(fd)
            fd = inner
        _check_folder(fd, folder)
        yield fd
    finally:
        os.close(fd)


def _open_inside(fd: int, name: str, here: str, *, may_create: bool) -> int:
    flags = os.O_DIRECTORY | os.O_CLOEXEC | os.O_PATH
    try:
        if may_create:
            with contextlib.suppress(FileExistsError):
                os.mkdir(name, DIRECTORY_MODE, dir_fd=fd)
        status = os.stat(name, dir_fd=fd, follow_symlinks=False)
        if not stat.S_ISLNK(status.st_mode):
            return os.open(name, flags | os.O_NOFOLLOW, dir_fd=fd)
        if status.st_uid != 0:
            raise ConfigInvalid(f"{here} is a symbolic link that is not root's; give the socket's real path")
        return os.open(name, flags, dir_fd=fd)
    except FileNotFoundError:
        raise
    except OSError as exc:
        raise ConfigInvalid(f"{here}: cannot use the folder of the socket: {exc.strerror}") from exc


def _no_folder(folder: str, *, is_deep: bool) -> ConfigInvalid:
    command = f"mkdir {'-p ' if is_deep else ''}-m 700 {shlex.quote(folder)}"
    return ConfigInvalid(f"{folder}: no such folder; make it with `{command}`, or choose another socket path")


def _check_folder(fd: int, folder: str) -> None:
    status = os.fstat(fd)
    if status.st_uid not in {0, os.geteuid()}:
        raise ConfigInvalid(f"{folder} belongs to uid {status.st_uid}; put the socket into a folder of your own")
    if status.st_mode & 0o022:
        raise ConfigInvalid(f"{folder} can be written by others; use a private folder (mode 0700) in it")


def _already_running(full: str) -> ConfigInvalid:
    return ConfigInvalid(f"{full}: already running; stop the other daemon or choose another socket path")


def _check_place(folder_fd: int, name: str, full: str, *, may_run: bool = False) -> None:
    """What stands at the path may only be a socket of ours that nobody listens on, unless somebody `may_run` there."""
    try:
        status = os.stat(name, dir_fd=folder_fd, follow_symlinks=False)
    except FileNotFoundError:
        return
    if stat.S_ISDIR(status.st_mode):
        raise ConfigInvalid(f"{full} is a folder and not a socket; choose a path in it, or another one")
    if not stat.S_ISSOCK(status.st_mode):
        raise ConfigInvalid(f"{full} exists and is not a socket; choose another path, or move it away")
    if status.st_uid != os.geteuid():
        raise ConfigInvalid(f"{full} is a socket of uid {status.st_uid}; remove it or choose another path")
    if may_run:
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        result = probe.connect_ex(full)
    if result in {errno.EACCES, errno.EPERM}:
        raise ConfigInvalid(f"{full}: this user may not connect, so it cannot be told whether a daemon runs there")
    if result not in {errno.ECONNREFUSED, errno.ENOENT}:
        raise _already_running(full)


def _bind(folder_fd: int, name: str, group: int | None, mode: int) -> tuple[socket.socket, int]:
    temporary = f".edgeqwen-{secrets.token_hex(4)}"
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        os.fchmod(sock.fileno(), USER_MODE)
        sock.bind(f"/proc/self/fd/{folder_fd}/{temporary}")
        try:
            if group is not None:
                os.chown(temporary, -1, group, dir_fd=folder_fd, follow_symlinks=False)
            os.chmod(temporary, mode, dir_fd=folder_fd)
            sock.listen(BACKLOG)
            inode = os.stat(temporary, dir_fd=folder_fd, follow_symlinks=False).st_ino
            os.rename(temporary, name, src_dir_fd=folder_fd, dst_dir_fd=folder_fd)
        except BaseException:
            os.unlink(temporary, dir_fd=folder_fd)
            raise
    except BaseException:
        sock.close()
        raise
    sock.setblocking(False)
    return sock, inode
