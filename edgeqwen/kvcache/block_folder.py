"""The folder of the blocks of one model on disk: one file each, of a bounded size together and of a bounded rate.

    root/0f3c.../                16 digits of the digest of the fingerprint
        lock                     see `claimed_folder`
        written.json             what was written today, see `write_budget`
        unfinished.tmp           the one block being written; renamed when it is whole
        5d41402a....kv           a block, see `block_file`

Nothing is synced: the files are a cache, and what a power cut leaves of them is told by their checksums. Reading
goes by read(2), not by a mapping: an error of the card is then an error of one call and not a SIGBUS.

Only names of these patterns are ever touched. What stands at one of them and cannot be believed is removed and is a
miss; what else there may be in the folder was put there by somebody and stays.

Single-threaded: `open` may run in another thread than the rest, but nothing at the same time.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import re
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Final

from edgeqwen.errors import CannotWrite
from edgeqwen.kvcache.block_file import (
    MAX_START_BYTES,
    BlockDamaged,
    BlockHead,
    BlockStart,
    Buffer,
    check_data,
    decode_start,
    encode,
    file_bytes,
)
from edgeqwen.kvcache.claimed_folder import claim, claimed
from edgeqwen.kvcache.folder_files import (
    block_sizes,
    empty_folder,
    file_name,
    opened,
    read_into,
    remove_unfinished,
    write_whole,
)
from edgeqwen.kvcache.write_budget import WriteBudget

_FOLDER: Final = re.compile(r"[0-9a-f]{16}", re.ASCII)
_DAMAGE: Final = {errno.EIO, errno.ELOOP, errno.ENXIO, errno.EISDIR, errno.EUCLEAN, errno.ENODATA}
"""Errors of the file itself; others (too many open files, no memory) say nothing about it."""


@dataclass(frozen=True, slots=True)
class Found:
    """A block found on disk: `num_file_bytes` is the size of its file, `modified_ns` when it was last of use, in
    nanoseconds since the epoch.
    """

    head: BlockHead
    num_file_bytes: int
    modified_ns: int


class BlockFolder:
    """Reads, writes and counts the blocks of one model. Only one of all daemons has the folder of a model open."""

    def __init__(self, path: Path, fingerprint: str, max_bytes: int, budget: WriteBudget, fds: tuple[int, int]) -> None:
        """For `open` alone; `fds` are the folder and its lock."""
        self.path = path
        self.fingerprint = fingerprint
        self.max_bytes = max_bytes
        self.num_damaged = 0
        self._budget = budget
        self._fds = fds
        self._folder_fd = fds[0]
        self._sizes = dict(block_sizes(self._folder_fd))
        self._num_bytes = sum(self._sizes.values())

    @classmethod
    def open(
        cls, root: Path, *, fingerprint: str, max_bytes: int, daily_bytes: int, today: Callable[[], int]
    ) -> BlockFolder:
        """Open the folder of `fingerprint` below `root`, or make it; blocks of other models that no daemon has open are
        removed. `max_bytes` bounds the files together, `daily_bytes` what is written in a day (all of `root`'s
        models that follow each other count as one); `today` numbers the days.

        Raises `CannotWrite` if the folder cannot be made, written or locked, or is in use.
        """
        path = root / blake2b(fingerprint.encode(), digest_size=8).hexdigest()
        with contextlib.ExitStack() as undo, _errors_of(path):
            fds = claim(path)
            for fd in fds:
                undo.callback(os.close, fd)
            budget = WriteBudget(fds[0], daily_bytes, today)
            undo.callback(budget.close)
            remove_unfinished(fds[0])
            _remove_others(path, budget)
            folder = cls(path, fingerprint, max_bytes, budget, fds)
            undo.pop_all()
        return folder

    def close(self) -> None:
        """Give the folder back; nothing else may be called afterwards."""
        self._budget.close()
        for fd in self._fds:
            os.close(fd)

    def set_budget(self, *, max_bytes: int, daily_bytes: int) -> None:
        """Write no more than this from now on. What is too much already is for the caller to remove (`num_bytes`)."""
        self.max_bytes = max_bytes
        self._budget.daily_bytes = daily_bytes

    @property
    def num_bytes(self) -> int:
        """Bytes that the files of all blocks have together."""
        return self._num_bytes

    @property
    def num_files(self) -> int:
        return len(self._sizes)

    @property
    def written_today_bytes(self) -> int:
        return self._budget.written_bytes

    @property
    def left_today_bytes(self) -> int:
        """Bytes that may still be written today."""
        return self._budget.left_bytes

    def excess_bytes(self, head: BlockHead) -> int:
        """Bytes of other blocks that have to be removed before this one fits; 0 if it does."""
        return max(0, self._num_bytes + file_bytes(head) - self.max_bytes)

    def scan(self) -> list[Found]:
        """All blocks, the longest unused first. Only heads are read; files whose head is damaged or another model's are
        removed.
        """
        found = [block for name in list(self._sizes) if (block := self._examine(name)) is not None]
        return sorted(found, key=lambda block: (block.modified_ns, block.head.start, block.head.name))

    def read(self, name: str) -> Buffer | None:
        """The data of the block `name`; None if it is not there or not to be believed, and then it is removed.

        It lies in a mapping of its own, which is gone with the last reference: megabytes that come and go would leave
        holes in the heap.
        """
        with self._believing(name), opened(self._folder_fd, name) as fd:
            start, _ = self._read_start(fd, name)
            data = memoryview(mmap.mmap(-1, start.head.num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
            read_into(fd, data, start.data_offset)
            check_data(start, data)
            return data
        return None

    def write(self, head: BlockHead, data: Buffer) -> bool:
        """Keep a block; one that is there already is touched only. False if today's budget or `max_bytes` does not
        allow it: see `left_today_bytes` and `excess_bytes`.

        Raises `CannotWrite` if the disk is full, read-only or broken. Nothing half-written stays then; but the budget
        is charged, because part of it may have reached the device.
        """
        assert head.fingerprint == self.fingerprint, "a block of another model"
        if head.name in self._sizes and self.touch(head.name):
            return True
        start, view = encode(head, data)
        num_file_bytes = len(start) + len(view)
        if self._num_bytes + num_file_bytes > self.max_bytes:
            return False
        with _errors_of(self.path):
            if not self._budget.spend(num_file_bytes):
                return False
            write_whole(self._folder_fd, head.name, start, view)
        self._sizes[head.name] = num_file_bytes
        self._num_bytes += num_file_bytes
        return True

    def remove(self, name: str) -> None:
        """Remove the block `name` if it is there. Raises `CannotWrite` if it cannot be removed."""
        with _errors_of(self.path), contextlib.suppress(FileNotFoundError):
            os.unlink(file_name(name), dir_fd=self._folder_fd)
        self._forget(name)

    def touch(self, name: str) -> bool:
        """Note that the block `name` was of use just now, as far as that can be written; False if it is gone."""
        try:
            os.utime(file_name(name), dir_fd=self._folder_fd, follow_symlinks=False)
        except FileNotFoundError:
            self._forget(name)
            return False
        except OSError:
            pass
        return True

    def check(self) -> None:
        """Assert that the accounts agree with each other and with the disk."""
        assert self._num_bytes == sum(self._sizes.values()), f"{self._num_bytes} bytes of {sum(self._sizes.values())}"
        assert self._sizes == dict(block_sizes(self._folder_fd)), "the folder holds other files than it should"

    def _examine(self, name: str) -> Found | None:
        with self._believing(name), opened(self._folder_fd, name) as fd:
            start, status = self._read_start(fd, name)
            return Found(start.head, status.st_size, status.st_mtime_ns)
        return None

    def _read_start(self, fd: int, name: str) -> tuple[BlockStart, os.stat_result]:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise BlockDamaged("not a file")
        start = decode_start(os.pread(fd, MAX_START_BYTES, 0), status.st_size)
        if start.head.name != name or start.head.fingerprint != self.fingerprint:
            raise BlockDamaged("another block")
        return start, status

    @contextlib.contextmanager
    def _believing(self, name: str) -> Iterator[None]:
        """Make a miss of whatever goes wrong with the file of a block; remove it if that is its own fault."""
        try:
            yield
        except FileNotFoundError:
            self._forget(name)
        except BlockDamaged:
            self._remove_damaged(name)
        except OSError as error:
            if error.errno in _DAMAGE:
                self._remove_damaged(name)

    def _remove_damaged(self, name: str) -> None:
        self.num_damaged += 1
        with contextlib.suppress(CannotWrite):
            self.remove(name)

    def _forget(self, name: str) -> None:
        self._num_bytes -= self._sizes.pop(name, 0)


@contextlib.contextmanager
def _errors_of(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise CannotWrite(f"{path}: cannot keep the KV cache there: {error.strerror or error}") from error


def _remove_others(path: Path, budget: WriteBudget) -> None:
    """Remove the folders of other models beside `path`, as far as no daemon has them and they can be removed."""
    with os.scandir(path.parent) as entries:
        others = [entry.name for entry in entries if _FOLDER.fullmatch(entry.name) and entry.name != path.name]
    for name in others:
        with contextlib.suppress(OSError), claimed(path.parent / name) as folder_fd:
            if folder_fd is not None:
                budget.take_over(folder_fd)
                empty_folder(folder_fd)
                (path.parent / name).rmdir()
