"""Memory, swap and what the kernel's settings do to them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from edgeqwen.cpu import Memory, MemoryLimits
from edgeqwen.cpu.sysfiles import read_text
from edgeqwen.doctor.finding import Finding, size_text

SWAP_BYTES: Final = 64 << 20
"""Less in swap is what every machine puts there that has some."""

STRICT_OVERCOMMIT: Final = "2"


def memory_findings(memory: Memory, root: Path) -> Iterator[Finding]:
    """What there is to say of memory whatever the model."""
    if memory.swap_used >= SWAP_BYTES:
        yield Finding(
            "warning",
            "swap-in-use",
            f"{size_text(memory.swap_used)} are in swap: weights that go there are read back at every token",
            "if `vmstat 1` shows si and so above 0, stop what takes the memory or take a smaller quant; "
            "keep the daemon out of swap with MemorySwapMax=0",
        )
    yield from _huge_page_findings(root)
    if read_text(root / "proc/sys/vm/overcommit_memory") == STRICT_OVERCOMMIT:
        yield Finding(
            "warning",
            "overcommit",
            "vm.overcommit_memory is 2: address space for the cache of all slots counts as memory in use",
            "lower --slots or --context, or set vm.overcommit_memory to 0 or 1",
        )
    yield from _limit_findings(memory.limits)


def _huge_page_findings(root: Path) -> Iterator[Finding]:
    chosen = re.search(r"\[(\w+)\]", read_text(root / "sys/kernel/mm/transparent_hugepage/enabled"))
    if chosen and chosen.group(1) == "always":
        yield Finding(
            "warning",
            "huge-pages",
            "transparent huge pages are set to always: memory is given out 2 MB at a time, also where little is used "
            "(the cache of conversations declines them)",
            "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled",
        )


def _limit_findings(limits: MemoryLimits) -> Iterator[Finding]:
    if limits.limit is not None:
        text = f"a control group limits memory to {size_text(limits.limit)}, {size_text(limits.used)} of it in use"
        yield Finding("note", "memory-limit", text, "raise MemoryMax (or the container's limit) if that is too little")
