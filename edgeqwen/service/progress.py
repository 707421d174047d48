"""Telling a service manager that loading goes on, so that a slow disk is not taken for a hang, and a hang is.

A manager gives a daemon so long to become ready. Each time something has come of the loading (more of it is done, more
has been read, more is in memory) it is asked for another while; when nothing comes any more, nothing is asked for.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from edgeqwen.metrics import resident_bytes
from edgeqwen.service.notifier import Notifier

EXTEND_S: Final = 30.0
REPORT_S: Final = 5.0
"""Several in the time that each asks for, so that one may be late."""

LEAST_GROWTH_BYTES: Final = 64 << 10


@dataclass(frozen=True, slots=True)
class LoadSigns:
    """What grows while a model loads: `progress` as the loader tells it, bytes that the process and its children (one
    that remakes a package, say) have read and written, its memory.
    """

    progress: float
    moved_bytes: int
    resident_bytes: int

    @classmethod
    def read(cls, progress: float, root: Path = Path("/")) -> LoadSigns:
        """Now. What cannot be found out is 0, and does not grow."""
        pids = ["self", *_children(root)]
        return cls(progress, sum(_moved_bytes(root / "proc" / pid) for pid in pids), resident_bytes())

    def differs_from(self, before: LoadSigns) -> bool:
        """Whether something has come of the time between; memory that comes and goes in small pieces is no sign."""
        grown = self.resident_bytes - before.resident_bytes
        return self.progress != before.progress or self.moved_bytes != before.moved_bytes or grown >= LEAST_GROWTH_BYTES


def _children(root: Path) -> list[str]:
    """Processes that any thread of this one has started and that are still there (proc_pid_task_tid_children(5))."""
    found: list[str] = []
    for path in (root / "proc/self/task").glob("*/children"):
        with contextlib.suppress(OSError):  # the thread has just ended
            found += path.read_text(encoding="ascii").split()
    return found


def _moved_bytes(process: Path) -> int:
    """What had to be fetched from a disk, mapped pages too, or will be written to one (proc_pid_io(5))."""
    try:
        text = (process / "io").read_text(encoding="ascii")
    except OSError:
        return 0
    counts = dict(line.split(": ") for line in text.splitlines())
    return int(counts.get("read_bytes", 0)) + int(counts.get("write_bytes", 0))


class LoadReport:
    """Reports to `notifier` every `REPORT_S`, if `read` says that something has come of the time since."""

    def __init__(self, notifier: Notifier, read: Callable[[], LoadSigns]) -> None:
        self._notifier = notifier
        self._read = read

    async def run(self) -> None:
        """Until cancelled."""
        before = self._read()
        while True:
            await asyncio.sleep(REPORT_S)
            signs = self._read()
            if signs.differs_from(before):
                self._notifier.extend(EXTEND_S, f"loading the model, {signs.progress:.0%}")
            before = signs
