"""What the process measures of itself."""

from __future__ import annotations

import os


def resident_bytes() -> int:
    """Resident memory of this process (proc(5), statm: the second number, in pages)."""
    with open("/proc/self/statm", "rb") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
