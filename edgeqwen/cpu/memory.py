"""How much memory there is to be had: the machine's (/proc/meminfo), within the limits of the control groups."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from edgeqwen.cpu.groups import MemoryLimits, memory_limits
from edgeqwen.cpu.sysfiles import read_text


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes. `available` is what the kernel thinks can be had without swapping; 0 where nothing is known."""

    total: int = 0
    available: int = 0
    swap_total: int = 0
    swap_used: int = 0
    limits: MemoryLimits = field(default_factory=MemoryLimits)

    @property
    def most(self) -> int:
        """What this process could have if nobody else wanted any; 0 if that is not known."""
        return min(filter(None, (self.total, self.limits.limit)), default=0)

    @property
    def free(self) -> int:
        """What can be had right now; 0 if that is not known."""
        limit = self.limits.limit
        left = None if limit is None else max(1, limit - self.limits.used)
        return min(filter(None, (self.available, left)), default=0)


def read_memory(root: Path = Path("/")) -> Memory:
    """Memory of the machine below `root`, and what its control groups allow."""
    kilobytes: dict[str, int] = {}
    for line in read_text(root / "proc/meminfo").splitlines():
        key, _, rest = line.partition(":")
        number = rest.split()[:1]
        if number and number[0].isdigit():
            kilobytes[key] = int(number[0])

    def size(key: str) -> int:
        return 1024 * kilobytes.get(key, 0)

    return Memory(
        total=size("MemTotal"),
        available=size("MemAvailable"),
        swap_total=size("SwapTotal"),
        swap_used=max(0, size("SwapTotal") - size("SwapFree")),
        limits=memory_limits(root),
    )
