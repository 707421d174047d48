"""What the kernel says of a process: memory, processor time, switches and page faults (proc(5))."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest


def needs_thread_accounting() -> None:
    """Skips the test where the kernel does not count nanoseconds for each thread."""
    if not Path("/proc/self/schedstat").exists():
        pytest.skip("this kernel does not account for threads")


def status(path: Path) -> dict[str, str]:
    """The fields of a `status` file."""
    lines = (path / "status").read_text(encoding="ascii").splitlines()
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}


def anonymous_bytes(pid: int) -> int:
    """Resident memory that is no page of a file: nobody else shares it, and the system cannot take it back."""
    return int(status(Path(f"/proc/{pid}"))["RssAnon"].split()[0]) << 10


@dataclass(frozen=True, slots=True)
class Work:
    """What a process has done, in all: nanoseconds of processor time, times that its threads went to sleep or were
    woken, and pages it found missing (`num_minor_faults`), those that had to be read from a disk apart.
    """

    cpu_ns: int
    num_sleeps: int
    num_minor_faults: int
    num_major_faults: int

    def __sub__(self, before: Work) -> Work:
        return Work(
            self.cpu_ns - before.cpu_ns,
            self.num_sleeps - before.num_sleeps,
            self.num_minor_faults - before.num_minor_faults,
            self.num_major_faults - before.num_major_faults,
        )


def work_of(pid: int) -> Work:
    """The work of a process whose threads all still live."""
    cpu_ns = num_sleeps = 0
    for task in _tasks(pid):
        with contextlib.suppress(OSError):  # ended just now
            cpu_ns += int((task / "schedstat").read_text(encoding="ascii").split()[0])
            num_sleeps += int(status(task)["voluntary_ctxt_switches"])
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    return Work(cpu_ns, num_sleeps, int(fields[7]), int(fields[9]))  # stat counts its fields from the third on here


def _tasks(pid: int) -> Iterator[Path]:
    return (Path(f"/proc/{pid}/task") / name for name in os.listdir(f"/proc/{pid}/task"))
