"""The files of one folder of blocks by their names, below a descriptor of the folder: opened, read, written, removed.

A name means a file of that folder and nothing else: a symbolic link there is not followed, and a pipe does not make
anybody wait.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from typing import Final

from edgeqwen.kvcache.block_file import BlockDamaged
from edgeqwen.kvcache.claimed_folder import LOCK_FILE
from edgeqwen.kvcache.write_budget import FILE_NAME as BUDGET_FILE

UNFINISHED: Final = "unfinished.tmp"
_BLOCK_FILE: Final = re.compile(r"([0-9a-f]{32})\.kv", re.ASCII)
_READ_FLAGS: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


def file_name(name: str) -> str:
    """Of the block `name`."""
    file_name = f"{name}.kv"
    assert _BLOCK_FILE.fullmatch(file_name), f"{name!r} is no block's name"
    return file_name


@contextlib.contextmanager
def opened(folder_fd: int, name: str) -> Iterator[int]:
    """A descriptor of the block's file, for reading. Raises `OSError`."""
    fd = os.open(file_name(name), _READ_FLAGS, dir_fd=folder_fd)
    try:
        yield fd
    finally:
        os.close(fd)


def read_into(fd: int, view: memoryview, offset: int) -> None:
    """Fill `view` from `offset` on. Raises `BlockDamaged` if the file is shorter, and `OSError`."""
    while view:
        num_read = os.preadv(fd, [view], offset)
        if num_read == 0:
            raise BlockDamaged("cut off while it was read")
        view = view[num_read:]
        offset += num_read


def write_whole(folder_fd: int, name: str, start: bytes, data: memoryview) -> None:
    """Write a block's file under a temporary name and give it its own; without a trace if that raises `OSError`."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        fd = os.open(UNFINISHED, flags, 0o600, dir_fd=folder_fd)
        try:
            for piece in (memoryview(start), data):
                view = piece
                while view:
                    view = view[os.write(fd, view) :]
        finally:
            os.close(fd)
        os.rename(UNFINISHED, file_name(name), src_dir_fd=folder_fd, dst_dir_fd=folder_fd)
    except BaseException:
        remove_unfinished(folder_fd)
        raise


def remove_unfinished(folder_fd: int) -> None:
    """Remove what a write that was cut off has left."""
    with contextlib.suppress(OSError):
        os.unlink(UNFINISHED, dir_fd=folder_fd)


def block_sizes(folder_fd: int) -> Iterator[tuple[str, int]]:
    """Names of blocks with the sizes of what stands there; folders are nobody's blocks."""
    with os.scandir(folder_fd) as entries:
        for entry in entries:
            match = _BLOCK_FILE.fullmatch(entry.name)
            if match and not entry.is_dir(follow_symlinks=False):
                with contextlib.suppress(FileNotFoundError):
                    yield match[1], entry.stat(follow_symlinks=False).st_size


def empty_folder(folder_fd: int) -> None:
    """Remove all that is ours from a folder, the lock last: until then nobody may believe it free."""
    remove_unfinished(folder_fd)
    for block, _ in list(block_sizes(folder_fd)):
        os.unlink(file_name(block), dir_fd=folder_fd)
    for name in (BUDGET_FILE, LOCK_FILE):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name, dir_fd=folder_fd)
