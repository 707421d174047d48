"""The memory of the cache: taken where it is written to, and no more of it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from edgeqwen.metrics import resident_bytes
from edgeqwen.runtime.arena import Arena, ArenaShape

SHAPE = ArenaShape(num_slots=2, num_heads=8, capacity=8192, head_dim=128)  # 4 MiB a head and slot


def mapping_flags(address: int) -> set[str]:
    """What the kernel keeps in mind about the mapping at an address (proc_pid_smaps(5), VmFlags)."""
    text = Path("/proc/self/smaps").read_text()
    for block in re.split(r"\n(?=[0-9a-f]+-[0-9a-f]+ )", text):
        start, stop = (int(part, 16) for part in block.split(" ", 1)[0].split("-"))
        if start <= address < stop:
            found = re.search(r"VmFlags: (.*)", block)
            return set(found.group(1).split()) if found else set()
    raise AssertionError(hex(address))


def test_first_token_takes_pages_not_megabytes_of_each_head() -> None:
    arena = Arena(SHAPE)
    before = resident_bytes()
    arena.view[0, :, 0] = 1
    assert resident_bytes() - before < 1 << 20
    arena.close()


def test_huge_pages_are_declined_whatever_the_machine_prefers() -> None:
    if not Path("/sys/kernel/mm/transparent_hugepage").exists():
        pytest.skip("this kernel has no transparent huge pages")
    arena = Arena(SHAPE)
    assert "nh" in mapping_flags(arena.address(0))
    arena.close()


def test_released_slot_gives_its_memory_back_and_leaves_its_neighbour_alone() -> None:
    arena = Arena(SHAPE)
    arena.view[:] = 1
    full = resident_bytes()
    arena.release(0)
    assert full - resident_bytes() > 0.9 * SHAPE.slot_bytes
    assert not arena.view[0].any()
    assert arena.view[1].all()
    arena.close()
