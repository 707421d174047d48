"""How many bytes of blocks may still be written today: flash wears out, and a cache is not worth a worn-out card.

The count stands in a small file, so that restarting does not refill it. It is raised before the bytes are written, in
place and in one write of fixed length: a process killed at any moment leaves it whole, it costs the device next to
nothing (the kernel joins these writes, where renaming would have it flush each one), and a full disk does not matter.

When in doubt the budget is spent. A count that cannot be read was probably lost in a power cut, and a machine that
loses power again and again is the very one whose card must not be written to without bound; the loss is that nothing
is written until tomorrow. A clock set back does not refill the budget, a clock set forward does.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Annotated, Final

import msgspec

FILE_NAME: Final = "written.json"
_LINE_BYTES: Final = 64
_MAX_COUNT: Final = (1 << 63) - 1


class _Count(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    day: Annotated[int, msgspec.Meta(ge=-_MAX_COUNT, le=_MAX_COUNT)]
    num_bytes: Annotated[int, msgspec.Meta(ge=0, le=_MAX_COUNT)]


class WriteBudget:
    """`daily_bytes` a day, counted in the file `written.json` of a folder. `today` gives a number that grows by one
    each day. Methods raise the `OSError` of the file system.
    """

    def __init__(self, folder_fd: int, daily_bytes: int, today: Callable[[], int]) -> None:
        assert daily_bytes >= 0
        self.daily_bytes = daily_bytes
        self._today = today
        self._fd, is_new = _opened(folder_fd)
        try:
            self._count = _Count(today(), 0) if is_new else self._read(self._fd)
            self._save(self._count)
            os.ftruncate(self._fd, _LINE_BYTES)
        except BaseException:
            os.close(self._fd)
            raise

    @property
    def written_bytes(self) -> int:
        """Bytes written today."""
        return self._current().num_bytes

    @property
    def left_bytes(self) -> int:
        """Bytes that may still be written today."""
        return max(0, self.daily_bytes - self.written_bytes)

    def spend(self, num_bytes: int) -> bool:
        """Count `num_bytes` as written; False, and nothing counted, if that is more than is left."""
        count = self._current()
        if count.num_bytes + num_bytes > self.daily_bytes:
            return False
        self._save(_Count(count.day, count.num_bytes + num_bytes))
        return True

    def take_over(self, folder_fd: int) -> None:
        """Count here too what was written today into another folder, which is about to be removed."""
        try:
            fd = os.open(FILE_NAME, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder_fd)
        except FileNotFoundError:
            return
        try:
            other = self._read(fd)
        finally:
            os.close(fd)
        count = self._current()
        if other.day >= count.day:
            self._save(_Count(count.day, min(count.num_bytes + other.num_bytes, _MAX_COUNT)))

    def close(self) -> None:
        os.close(self._fd)

    def _current(self) -> _Count:
        """The count of today. Its day goes back with the clock, so that a wrong date far ahead is not waited for."""
        today = self._today()
        return _Count(today, 0 if today > self._count.day else self._count.num_bytes)

    def _read(self, fd: int) -> _Count:
        try:
            return msgspec.json.decode(os.pread(fd, _LINE_BYTES * 2, 0), type=_Count)
        except (msgspec.MsgspecError, ValueError, OSError):
            return _Count(self._today(), self.daily_bytes)

    def _save(self, count: _Count) -> None:
        line = msgspec.json.encode(count).ljust(_LINE_BYTES - 1) + b"\n"
        if os.pwrite(self._fd, line, 0) != len(line):
            raise OSError("the count of written bytes was cut off")
        self._count = count


def _opened(folder_fd: int) -> tuple[int, bool]:
    """A descriptor of the file, and whether it is new; one that is there and empty has lost its count."""
    flags = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        return os.open(FILE_NAME, flags | os.O_CREAT | os.O_EXCL, 0o600, dir_fd=folder_fd), True
    except FileExistsError:
        return os.open(FILE_NAME, flags, dir_fd=folder_fd), False
