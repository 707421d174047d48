"""The pages that a loaded model stands on: those that nothing needs are given back, those it computes with made large.

**Giving back.** Pages of a mapped file count as the process's memory while they are mapped in, though the system can
take them back at any time. Loading walks through all weights once, to pack most of them anew; what stays mapped and is
rarely read (a row of the embedding for each token) is let go, and comes back from the page cache when it is read.

**Huge pages.** Every step reads all packed weights, hundreds of megabytes in a row. Prefetching ends at each page of
4 KB, and each needs its address looked up; in pages of 2 MB a decode step takes a tenth less time. The allocator has
asked for small ones, so what it got is collapsed in place (madvise(2), Linux 6.1), region by region, which takes a
second and stops nobody. It needs free memory in pieces of 2 MB: where there is none, or huge pages are switched off, all
stays as it was.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

SMAPS: Final = Path("/proc/self/smaps")
PATH_FIELD: Final = 5
HUGE_PAGES: Final = Path("/sys/kernel/mm/transparent_hugepage/enabled")
HUGE_BYTES: Final = 2 << 20
MADV_COLLAPSE: Final = 25
LEAST_SHARE: Final = 0.9
"""Of a region that is in use: the rest of it becomes memory as well."""


@dataclass(frozen=True, slots=True)
class Mapping:
    """Memory `[start, stop)`: `resident_bytes` of it are in use, `anonymous_bytes` are not (or not any more) a file's.

    `path` is empty where no file is mapped. `flags` are those of proc(5), `VmFlags`.
    """

    start: int
    stop: int
    path: str
    resident_bytes: int
    anonymous_bytes: int
    flags: frozenset[str]


def trim_heap() -> None:
    """Give freed memory back to the system: glibc keeps it, and reading a large tokenizer frees 90 MB in pieces."""
    with contextlib.suppress(OSError, AttributeError):  # other C libraries have no such call
        ctypes.CDLL(None).malloc_trim(0)


def forget_pages(path: Path) -> None:
    """Let go of the pages of a file that this process has mapped and not written to; they can be read as before."""
    wanted = os.path.realpath(path)
    for mapping in _own_mappings():
        if mapping.path == wanted and not mapping.anonymous_bytes:
            _advise(mapping.start, mapping.stop, mmap.MADV_DONTNEED)


def use_huge_pages() -> None:
    """Collapse large regions of memory that is in use into huge pages, where the system allows them at all."""
    try:
        is_off = "[never]" in HUGE_PAGES.read_text(encoding="ascii")
    except OSError:
        is_off = True
    for mapping in () if is_off else _own_mappings():
        start = -(-mapping.start // HUGE_BYTES) * HUGE_BYTES
        stop = mapping.stop // HUGE_BYTES * HUGE_BYTES
        if stop > start and is_collapsible(mapping):
            _advise(start, stop, mmap.MADV_HUGEPAGE)  # for what comes back after being swapped out
            _advise(start, stop, MADV_COLLAPSE)


def is_collapsible(mapping: Mapping) -> bool:
    """Memory of the allocator, writable (`wr`), nearly all in use; no stack (`gd`), nothing that declined (`nh`)."""
    is_used = mapping.resident_bytes >= LEAST_SHARE * (mapping.stop - mapping.start)
    is_of_allocator = mapping.path in {"", "[heap]"}
    return is_of_allocator and is_used and "wr" in mapping.flags and not mapping.flags & {"nh", "gd"}


def read_mappings(smaps: str) -> Iterator[Mapping]:
    """What stands in the text of `/proc/PID/smaps` (proc(5)): a line of addresses, then `Name: value` lines."""
    head: list[str] = []
    values: dict[str, list[str]] = {}
    for line in [*smaps.splitlines(), "end of mappings"]:
        name, _, value = line.partition(":")
        if " " not in name:
            values[name] = value.split()
            continue
        if head:  # a line of addresses: `start-stop permissions offset device inode path`
            start, stop = (int(address, 16) for address in head[0].split("-"))
            path = head[PATH_FIELD] if len(head) > PATH_FIELD else ""
            resident, anonymous = (1024 * int(values[key][0]) for key in ("Rss", "Anonymous"))
            yield Mapping(start, stop, path, resident, anonymous, frozenset(values.get("VmFlags", ())))
        head, values = line.split(maxsplit=PATH_FIELD), {}


def _own_mappings() -> tuple[Mapping, ...]:
    try:
        return tuple(read_mappings(SMAPS.read_text(encoding="utf-8", errors="replace")))
    except OSError:
        return ()  # nothing is lost but memory and speed


def _advise(start: int, stop: int, advice: int) -> None:
    """madvise(2); advice that the kernel does not take changes nothing."""
    with contextlib.suppress(OSError, AttributeError):
        function = ctypes.CDLL(None).madvise
        function.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
        function(start, stop - start, advice)
