"""What the kernel knows of this process (proc(5)), under the names that Prometheus' own clients give it."""

from __future__ import annotations

import functools
import os
import resource
import time
from dataclasses import dataclass
from pathlib import Path

_SELF = Path("/proc/self")


@dataclass(frozen=True, slots=True)
class ProcessFacts:
    """A snapshot. Bytes of memory, `cpu_s` in user and kernel mode together since the start, `start_s` in seconds since
    1970, `max_fds` infinite if there is no limit.
    """

    resident_bytes: int
    virtual_bytes: int
    cpu_s: float
    start_s: float
    num_threads: int
    num_fds: int
    max_fds: float


def process_facts() -> ProcessFacts:
    """Of this process, now."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    virtual_bytes, resident = _memory()
    return ProcessFacts(
        resident_bytes=resident,
        virtual_bytes=virtual_bytes,
        cpu_s=used.ru_utime + used.ru_stime,
        start_s=_start_s(),
        num_threads=int(_stat()[17]),
        num_fds=len(os.listdir(_SELF / "fd")) - 1,  # one of them is the listing's
        max_fds=float("inf") if limit == resource.RLIM_INFINITY else limit,
    )


def resident_bytes() -> int:
    """Resident memory of this process."""
    return _memory()[1]


def _memory() -> tuple[int, int]:
    """Virtual and resident bytes (statm: the first two numbers, in pages)."""
    page = os.sysconf("SC_PAGE_SIZE")
    virtual, resident, *_ = (_SELF / "statm").read_bytes().split()
    return int(virtual) * page, int(resident) * page


def _stat() -> list[bytes]:
    """The fields of /proc/self/stat from the third on, what stands before being the process's name in brackets."""
    return (_SELF / "stat").read_bytes().rpartition(b") ")[2].split()


@functools.cache
def _start_s() -> float:
    """Reckoned once, so that it never seems to be another: the kernel tells it in ticks since it was booted itself."""
    since_boot_s = int(_stat()[19]) / os.sysconf("SC_CLK_TCK")
    return round(time.time() - time.clock_gettime(time.CLOCK_BOOTTIME) + since_boot_s, 2)
