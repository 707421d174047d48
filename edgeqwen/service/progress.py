"""Telling a service manager that loading goes on, so that a slow disk is not taken for a hang, and a hang is.

A manager gives a daemon so long to become ready. Each time something has come of the loading (more of it is done, more
has been read, more is in memory) it is asked for another while; when nothing comes any more, nothing is asked for.
"""

from __future__ import annotations

import asyncio
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
    """What grows while a model loads: `progress` as the loader tells it, bytes read by the process, its memory."""

    progress: float
    read_bytes: int
    resident_bytes: int

    @classmethod
    def read(cls, progress: float, root: Path = Path("/")) -> LoadSigns:
        """Now. What cannot be found out is 0, and does not grow."""
        return cls(progress, _read_bytes(root), resident_bytes())

    def differs_from(self, before: LoadSigns) -> bool:
        """Whether something has come of the time between; memory that comes and goes in small pieces is no sign."""
        grown = self.resident_bytes - before.resident_bytes
        return self.progress != before.progress or self.read_bytes != before.read_bytes or grown >= LEAST_GROWTH_BYTES


def _read_bytes(root: Path) -> int:
    """Of all reading calls of this process so far (proc_pid_io(5)), less those that this costs."""
    try:
        text = (root / "proc/self/io").read_text(encoding="ascii")
    except OSError:
        return 0
    counts = dict(line.split(": ") for line in text.splitlines())
    return int(counts.get("read_bytes", 0))


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
