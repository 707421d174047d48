"""Keeping no more memory than is needed, and giving back what loading a model has touched and nothing needs any more.

Pages of a mapped file count as the process's memory while they are mapped in, though the system can take them back at
any time. Loading walks through all weights once, to pack most of them anew; what stays mapped and is rarely read (a row
of the embedding for each token) is let go, and comes back from the page cache, page by page, when it is read.
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
M_TRIM_THRESHOLD: Final = -1  # malloc.h
M_MMAP_THRESHOLD: Final = -3
M_ARENA_MAX: Final = -8
LARGE_BYTES: Final = 2 << 20
MOST_HEAPS: Final = 2


@dataclass(frozen=True, slots=True)
class Mapping:
    """Memory `[start, stop)` that a file is mapped to; `is_clean` if nothing in it differs from the file, and nothing
    can be written to it. (What was written may be swapped out, and what is not yet may be in a moment.)
    """

    start: int
    stop: int
    path: str
    is_clean: bool


def share_heaps() -> None:
    """Have all threads take their memory from two heaps; to be called before there are any.

    Left to itself glibc has one for each thread, up to eight a processor, and what is free in one is of no use to the
    others: 5 MB in a daemon that has just loaded, twice that once it has compiled many grammars, each on a thread of
    its own. One heap for all would make steps of several sequences 7 % slower: threads would wait for each other.
    """
    _set_allocator(M_ARENA_MAX, MOST_HEAPS)


def keep_large_blocks_apart() -> None:
    """Have what is large in memory go back to the system as soon as it is freed, whatever has been before.

    Left to itself glibc learns: once a block of 32 MB has been freed, smaller ones come out of heaps, of which it keeps
    up to 64 MB, and the end of a heap that is a thread's is not even let go when it is told to trim. So the thresholds
    are set, above all that drawing a token needs for a moment.
    """
    _set_allocator(M_MMAP_THRESHOLD, LARGE_BYTES)
    _set_allocator(M_TRIM_THRESHOLD, 2 * LARGE_BYTES)


def _set_allocator(option: int, value: int) -> None:
    with contextlib.suppress(OSError, AttributeError):  # other C libraries have no such call
        ctypes.CDLL(None).mallopt(option, value)


def trim_heap() -> None:
    """Give freed memory back to the system: glibc keeps it, and reading a large tokenizer frees 90 MB in pieces."""
    with contextlib.suppress(OSError, AttributeError):  # other C libraries have no such call
        ctypes.CDLL(None).malloc_trim(0)


def forget_pages(path: Path | None = None) -> None:
    """Let go of the pages of a file (None: of all files) that this process has mapped and not written to; they can be
    read as before.
    """
    try:
        text = SMAPS.read_text(encoding="utf-8", errors="replace")
        advise = ctypes.CDLL(None).madvise
    except (OSError, AttributeError):
        return  # nothing is lost but the memory
    advise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    wanted = None if path is None else os.path.realpath(path)
    for mapping in read_mappings(text):
        if mapping.is_clean and wanted in (None, mapping.path):
            advise(mapping.start, mapping.stop - mapping.start, mmap.MADV_DONTNEED)


def read_mappings(smaps: str) -> Iterator[Mapping]:
    """The mapped files in the text of `/proc/PID/smaps` (proc(5)): a line of addresses, then `Name: value` lines."""
    head: list[str] = []
    is_clean = True
    for line in [*smaps.splitlines(), "end of mappings"]:
        name, _, value = line.partition(":")
        if " " in name:  # the first line of a mapping: `start-stop permissions offset device inode path`
            if len(head) > PATH_FIELD:
                start, stop = (int(address, 16) for address in head[0].split("-"))
                yield Mapping(start, stop, head[PATH_FIELD], is_clean and "w" not in head[1])
            head, is_clean = line.split(maxsplit=PATH_FIELD), True
        elif name in {"Anonymous", "Swap"}:
            is_clean &= value.split()[0] == "0"
