"""Reading what the kernel tells in small text files, and its notation for sets of CPUs (`0-3,8`)."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Final

MAX_CPU: Final = 65_535
"""Beyond what any kernel is built for; a list that goes further is a mistake, and would only take memory."""


def read_text(path: Path) -> str:
    """The file's text without white space around it; empty where it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def read_number(path: Path) -> int | None:
    """The whole number that the file holds; None where there is none."""
    try:
        return int(read_text(path))
    except ValueError:
        return None


def parse_cpu_list(text: str) -> tuple[int, ...]:
    """`0-2,8` -> `(0, 1, 2, 8)`, ascending. Raises `ValueError` that quotes the item which is none."""
    cpus: set[int] = set()
    for item in filter(None, (part.strip() for part in text.split(","))):
        first, dash, last = item.partition("-")
        if not (_is_number(first) and (_is_number(last) if dash else True)):
            raise ValueError(f"{item!r} is neither a CPU nor a range such as 0-3")
        start, stop = int(first), int(last or first)
        if not start <= stop <= MAX_CPU:
            raise ValueError(f"{item!r} is not a range that goes upwards, to {MAX_CPU} at most")
        cpus.update(range(start, stop + 1))
    return tuple(sorted(cpus))


def format_cpu_list(cpus: Iterable[int]) -> str:
    """`(0, 1, 2, 8)` -> `0-2,8`."""
    runs: list[list[int]] = []
    for cpu in sorted(set(cpus)):
        if runs and runs[-1][1] == cpu - 1:
            runs[-1][1] = cpu
        else:
            runs.append([cpu, cpu])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def read_cpu_list(path: Path) -> tuple[int, ...]:
    """The CPUs that a file lists; none where it cannot be read or is not such a list."""
    try:
        return parse_cpu_list(read_text(path))
    except ValueError:
        return ()


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= 9
