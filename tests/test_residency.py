"""Giving back memory after loading: only what can be read again from its file."""

from __future__ import annotations

import mmap
import os
import re
from pathlib import Path

import pytest

from edgeqwen.cpu.residency import SMAPS, Mapping, forget_pages, read_mappings, trim_heap
from tests.processes import anonymous_bytes

NUM_BYTES = 1 << 20

SAMPLE = """\
560f33a32000-560f33a35000 r--p 00000000 fe:00 260850                     /models/a name/weights.bin
Rss:                  12 kB
Anonymous:             0 kB
VmFlags: rd mr mw me
7f0000000000-7f0000001000 rw-p 00000000 00:00 0
Rss:                   4 kB
Anonymous:             4 kB
7f0000001000-7f0000002000 rw-p 00001000 fe:00 260850                     /models/untouched
Anonymous:             0 kB
7f0000004000-7f0000005000 r--p 00001000 fe:00 260850                     /models/swapped
Anonymous:             0 kB
Swap:                  4 kB
7f0000002000-7f0000004000 rw-p 00001000 fe:00 260850                     /models/other
Anonymous:             4 kB
"""


def resident_bytes(path: Path) -> int:
    """Bytes of a file that are mapped in."""
    total, is_inside = 0, False
    for line in SMAPS.read_text().splitlines():
        if re.match(r"^[0-9a-f]+-[0-9a-f]+ ", line):
            is_inside = line.endswith(str(path))
        elif is_inside and line.startswith("Rss:"):
            total += 1024 * int(line.split()[1])
    return total


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "weights.bin"
    path.write_bytes(os.urandom(NUM_BYTES))
    return path


def test_mapped_files_are_told_from_other_memory_and_from_what_may_be_written_to() -> None:
    assert list(read_mappings(SAMPLE)) == [
        Mapping(0x560F33A32000, 0x560F33A35000, "/models/a name/weights.bin", is_clean=True),
        Mapping(0x7F0000001000, 0x7F0000002000, "/models/untouched", is_clean=False),
        Mapping(0x7F0000004000, 0x7F0000005000, "/models/swapped", is_clean=False),
        Mapping(0x7F0000002000, 0x7F0000004000, "/models/other", is_clean=False),
    ]


def test_pages_that_were_read_are_let_go_and_can_be_read_again(file: Path) -> None:
    with file.open("rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        content = bytes(mapped)
        assert resident_bytes(file) == NUM_BYTES
        forget_pages(file)
        assert resident_bytes(file) == 0
        assert bytes(mapped) == content == file.read_bytes()


def test_pages_of_all_files_can_be_let_go_at_once(file: Path) -> None:
    with file.open("rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        content = bytes(mapped)
        forget_pages()
        assert resident_bytes(file) == 0
        assert bytes(mapped) == content


def test_a_mapping_that_was_written_to_keeps_what_was_written(file: Path) -> None:
    with file.open("rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_COPY) as mapped:
        mapped[:5] = b"hello"
        forget_pages(file)
        assert mapped[:5] == b"hello"
        assert file.read_bytes()[:5] != b"hello"


def test_other_files_stay_where_they_are(file: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.bin"
    other.write_bytes(file.read_bytes())
    with other.open("rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        assert len(bytes(mapped)) == NUM_BYTES
        forget_pages(file)
        forget_pages(tmp_path / "missing.bin")
        assert resident_bytes(other) == NUM_BYTES


def test_trimming_the_heap_gives_freed_memory_back() -> None:
    kept = [bytes(1000) for _ in range(100_000)]
    kept = kept[::1000]  # what is freed lies between what is not
    before = anonymous_bytes(os.getpid())
    trim_heap()
    assert len(kept) == 100
    assert anonymous_bytes(os.getpid()) < before - 50_000_000
