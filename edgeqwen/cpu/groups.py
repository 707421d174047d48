"""Control groups: the CPU time, the CPUs and the memory that this process and those above it are allowed.

A process is in one group of each hierarchy (`/proc/self/cgroup`): version 2 is a single one with a limit in one file;
version 1 has a hierarchy for each controller; both may be there. Where a hierarchy is mounted, and from which group on
it can be seen, stands in `/proc/self/mountinfo` (cgroups(7), proc_pid_mountinfo(5)). In a container the path of the
group may be the host's and not exist, then what is mounted is the group itself. A limit holds for all groups below, so
the least one counts.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Final

from edgeqwen.cpu.sysfiles import read_cpu_list, read_number, read_text

NO_LIMIT_BYTES: Final = 1 << 60
"""Version 1 writes "no memory limit" as a number near 2^63."""

USUAL_MOUNTS: Final = ("sys/fs/cgroup", "sys/fs/cgroup/unified")


@dataclass(frozen=True, slots=True)
class MemoryLimits:
    """Bytes: the limit at which a process is killed, the one from which it is slowed down, and what is in use now of
    the group with the least limit (files that can be dropped not counted). None where there is no limit.
    """

    limit: int | None = None
    high: int | None = None
    used: int = 0


@dataclass(frozen=True, slots=True)
class _Mount:
    """A mounted hierarchy: the folder `point` shows the group `group` and those below it. No controllers: version 2."""

    controllers: frozenset[str]
    group: PurePosixPath
    point: Path


def cpu_quota(root: Path = Path("/")) -> float | None:
    """Least CPU quota, in cores, of this process's control group and of those above it; None if there is none."""
    quotas = (_group_quota(folder) for chain in _chains(root, "cpu") for folder in chain)
    return min((quota for quota in quotas if quota is not None), default=None)


def cpuset(root: Path = Path("/")) -> frozenset[int]:
    """CPUs that the control groups allow; empty where none says. The nearest group that lists some decides: what a
    group may effectively use is within what those above it may.
    """
    names = ("cpuset.cpus.effective", "cpuset.effective_cpus", "cpuset.cpus")
    allowed: list[frozenset[int]] = []
    for chain in _chains(root, "cpuset"):
        listed = (read_cpu_list(folder / name) for folder in chain for name in names)
        if nearest := next(filter(None, listed), ()):
            allowed.append(frozenset(nearest))
    return frozenset.intersection(*allowed) if allowed else frozenset()


def memory_limits(root: Path = Path("/")) -> MemoryLimits:
    """Least memory limits of this process's control groups and of those above them."""
    folders = [folder for chain in _chains(root, "memory") for folder in chain]
    limited = [(limit, folder) for folder in folders if (limit := _group_limit(folder)) is not None]
    highs = [high for folder in folders if (high := read_number(folder / "memory.high")) is not None]
    limit, folder = min(limited, default=(None, None), key=lambda pair: pair[0])
    return MemoryLimits(limit, min(highs, default=None), _used(folder) if folder is not None else 0)


def _chains(root: Path, controller: str) -> Iterator[list[Path]]:
    """For each hierarchy that may have `controller`: the folders of this process's group and of those above it."""
    mounts = [*_mounts(root)]
    for line in read_text(root / "proc/self/cgroup").splitlines():
        hierarchy, _, rest = line.partition(":")
        listed, _, group = rest.partition(":")
        controllers = frozenset(filter(None, listed.split(",")))
        if controller in controllers:
            usual = [root / "sys/fs/cgroup" / listed, root / "sys/fs/cgroup" / controller]
        elif hierarchy == "0" and not listed:
            usual = [root / mount for mount in USUAL_MOUNTS]
        else:
            continue
        found = [
            mount for mount in mounts if mount.controllers >= controllers and bool(mount.controllers) == bool(listed)
        ]
        for mount in found or [_Mount(controllers, PurePosixPath("/"), point) for point in usual]:
            yield _upwards(mount, PurePosixPath(group))


def _mounts(root: Path) -> Iterator[_Mount]:
    """The hierarchies that are mounted; none where mountinfo cannot be read."""
    for line in read_text(root / "proc/self/mountinfo").splitlines():
        before, _, after = line.partition(" - ")
        fields, kind = before.split(), after.split()
        if len(fields) < 5 or len(kind) < 3 or kind[0] not in {"cgroup", "cgroup2"}:
            continue
        controllers = frozenset(kind[2].split(",")) - {"rw", "ro"} if kind[0] == "cgroup" else frozenset[str]()
        yield _Mount(controllers, PurePosixPath(fields[3]), root / fields[4].lstrip("/"))


def _upwards(mount: _Mount, group: PurePosixPath) -> list[Path]:
    """Folders from `group` up to the mount's own. A group that the mount does not show is the mount's own."""
    inside = group.relative_to(mount.group) if group.is_relative_to(mount.group) else group
    parts = [part for part in inside.parts if part not in {"/", ".."}]
    return [mount.point.joinpath(*parts[:depth]) for depth in range(len(parts), -1, -1)]


def _group_quota(folder: Path) -> float | None:
    """Version 2 has `cpu.max` ("max 100000" or "150000 100000"), version 1 two files; -1 is no limit."""
    words = read_text(folder / "cpu.max").split()
    words = words or [read_text(folder / "cpu.cfs_quota_us"), read_text(folder / "cpu.cfs_period_us")]
    try:
        quota_us, period_us = (int(word) for word in words)
    except ValueError:  # "max", an absent file, or something unknown
        return None
    return quota_us / period_us if quota_us > 0 and period_us > 0 else None


def _group_limit(folder: Path) -> int | None:
    limit = _first_number(folder, "memory.max", "memory.limit_in_bytes")
    return None if limit is None or limit >= NO_LIMIT_BYTES else limit


def _used(folder: Path) -> int:
    """Memory that cannot be had back by dropping files that were read."""
    used = _first_number(folder, "memory.current", "memory.usage_in_bytes") or 0
    stat = dict(line.split(None, 1) for line in read_text(folder / "memory.stat").splitlines() if " " in line)
    word = stat.get("total_inactive_file") or stat.get("inactive_file") or ""
    return max(0, used - (int(word) if word.isdigit() else 0))


def _first_number(folder: Path, *names: str) -> int | None:
    """The first of the files that holds a number; "max" is none."""
    return next((number for name in names if (number := read_number(folder / name)) is not None), None)
