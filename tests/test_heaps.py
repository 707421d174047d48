"""The heaps of glibc: threads of a daemon share two, so that what is free in one is not lost to the others."""

from __future__ import annotations

import ctypes
import re
import struct
from pathlib import Path

import pytest

from edgeqwen.cpu.residency import MOST_HEAPS
from tests.daemons import running_daemon
from tests.models import tiny_package

HEAP_SPAN = 64 << 20
"""What glibc sets aside for the heap of a thread, at an address that is a multiple of it (malloc/arena.c)."""

MAPPING = re.compile(r"^([0-9a-f]+)-([0-9a-f]+) (\S{4}) \S+ \S+ 0\s*$", re.MULTILINE)


@pytest.fixture(autouse=True)
def needs_glibc() -> None:
    if struct.calcsize("P") != 8 or not hasattr(ctypes.CDLL(None), "gnu_get_libc_version"):
        pytest.skip("only 64-bit glibc keeps a heap for each thread like this")


def num_thread_heaps(maps: str) -> int:
    """Heaps of threads in the text of `/proc/PID/maps`: the part in use, then what is set aside, anonymous both."""
    found = [(int(start, 16), int(stop, 16), access) for start, stop, access in MAPPING.findall(maps)]
    used = {start: stop for start, stop, access in found if access == "rw-p" and start % HEAP_SPAN == 0}
    free = {start: stop for start, stop, access in found if access == "---p"}
    return sum(free.get(stop, 0) >= start + HEAP_SPAN for start, stop in used.items())


def test_heaps_are_told_from_other_mappings() -> None:
    maps = (
        "7f0000000000-7f0000200000 rw-p 00000000 00:00 0 \n"
        "7f0000200000-7f0004000000 ---p 00000000 00:00 0 \n"
        "7f0008000000-7f0008200000 rw-p 00000000 00:00 0 \n"
        "7f0010000000-7f0010200000 rw-p 00000000 fe:00 260850    /models/weights.bin\n"
    )
    assert num_thread_heaps(maps) == 1


def test_threads_of_a_daemon_share_heaps_and_grammars_bring_no_new_ones() -> None:
    with running_daemon("onnx", "--threads", "1", model=tiny_package(quant="int8")) as daemon:
        daemon.wait_until_ready()
        with daemon.client() as client:
            for number in range(4):
                form = {"type": "regex", "regex": f"[ab]{{1,4}}{number}"}
                client.request("chat", prompt="Hi", max_tokens=4, response_format=form)
        maps = Path(f"/proc/{daemon.process.pid}/maps").read_text(encoding="utf-8")
    assert 0 < num_thread_heaps(maps) < MOST_HEAPS, "the first heap is no thread's"
