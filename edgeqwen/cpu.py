"""What the processor offers: usable cores, instruction sets, and the target whose int8 weights it multiplies rightly.

Cores: the affinity mask (which follows taskset and cpusets) capped by the CPU quota of the control group, version 1 or
2, or of any group above it. `os.cpu_count()` knows neither.

Target: on x86 the integer kernel for signed weights multiplies unsigned activations by signed weights. With VNNI or AMX
that is one instruction, exact. With AVX2 or AVX-512 alone it adds pairs of products in saturating 16-bit arithmetic
(`vpmaddubsw`) and is silently wrong for large values; unsigned weights take another kernel that widens first, and is
exact everywhere. 64-bit ARM has no such instruction and is exact with signed weights.
"""

from __future__ import annotations

import math
import os
import platform
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from edgeqwen.errors import ConfigInvalid

Target = Literal["any", "vnni", "arm"]

NEEDED_X86_FLAGS = ("ssse3", "sse4_1", "sse4_2", "popcnt")
"""What the x86-64-v2 builds of the native libraries execute without asking."""


@dataclass(frozen=True, slots=True)
class Processor:
    """`machine` as `uname -m` says, `flags` as the kernel lists them; both empty of meaning where it lists nothing."""

    machine: str
    name: str
    flags: frozenset[str]

    @property
    def has_vnni(self) -> bool:
        """8-bit dot products that do not saturate (AVX-512 VNNI, AVX-VNNI or AMX)."""
        return bool(self.flags & {"avx512_vnni", "avx_vnni", "amx_int8"})

    @property
    def target(self) -> Target:
        """What a package made for this processor is made for: `vnni` and `arm` have signed weights, `any` unsigned
        ones.
        """
        if self.machine in {"aarch64", "arm64"}:
            return "arm"
        return "vnni" if self.has_vnni else "any"

    @property
    def features(self) -> tuple[str, ...]:
        """The flags that decide which kernels run, for reports."""
        telling = ("avx", "avx2", "avx512f", "avx512_vnni", "avx_vnni", "amx_int8", "asimddp", "i8mm", "sve")
        return tuple(flag for flag in telling if flag in self.flags)


def read_processor(root: Path = Path("/"), machine: str | None = None) -> Processor:
    """The processor described by `root`/proc/cpuinfo; without flags where that cannot be read."""
    try:
        text = (root / "proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        text = ""
    return parse_cpuinfo(text, machine or platform.machine())


def parse_cpuinfo(text: str, machine: str) -> Processor:
    """The first processor of /proc/cpuinfo: `flags` and `model name` on x86, `Features` and `CPU part` on ARM."""
    fields: dict[str, str] = {}
    for line in text.splitlines():
        key, separator, value = line.partition(":")
        if separator:
            fields.setdefault(key.strip().lower(), value.strip())
    flags = fields.get("flags") or fields.get("features") or ""
    identity = ("vendor_id", "model name", "stepping", "cpu implementer", "cpu part")
    return Processor(machine, " ".join(fields[key] for key in identity if key in fields), frozenset(flags.split()))


def check_processor(processor: Processor) -> None:
    """Raise `ConfigInvalid` if the native libraries would die of an illegal instruction here."""
    if processor.machine != "x86_64" or not processor.flags:
        return
    missing = [flag for flag in NEEDED_X86_FLAGS if flag not in processor.flags]
    if missing:
        raise ConfigInvalid(f"this processor ({processor.name or 'unnamed'}) is too old: it lacks {', '.join(missing)}")


def usable_cores(root: Path = Path("/"), affinity_len: int | None = None) -> int:
    """Cores this process may keep busy, at least 1. `affinity_len` None: ask the kernel."""
    num_cores = len(os.sched_getaffinity(0)) if affinity_len is None else affinity_len
    quota = cpu_quota(root)
    return max(1, num_cores if quota is None else min(num_cores, math.floor(quota)))


def cpu_quota(root: Path = Path("/")) -> float | None:
    """Least CPU quota, in cores, of this process's control group and of those above it; None if there is none."""
    try:
        membership = (root / "proc/self/cgroup").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    quotas: list[float] = []
    for line in membership.splitlines():
        hierarchy, _, rest = line.partition(":")
        controllers, _, group = rest.partition(":")
        if hierarchy == "0" and not controllers:
            quotas += _quotas_upwards(root / "sys/fs/cgroup", group)
        elif "cpu" in controllers.split(","):
            quotas += _quotas_upwards(root / "sys/fs/cgroup" / controllers, group)
    return min(quotas, default=None)


def _quotas_upwards(mount: Path, group: str) -> list[float]:
    """Quotas of `group` and of each group above it. Inside a container the path may be the host's and not exist."""
    parts = [part for part in group.split("/") if part not in {"", ".."}]
    folders = [mount.joinpath(*parts[:depth]) for depth in range(len(parts), -1, -1)]
    return [quota for folder in folders if (quota := _group_quota(folder)) is not None]


def _group_quota(folder: Path) -> float | None:
    """Version 2 has `cpu.max` ("max 100000" or "150000 100000"), version 1 two files; -1 is no limit."""
    words = _words(folder / "cpu.max") or _words(folder / "cpu.cfs_quota_us") + _words(folder / "cpu.cfs_period_us")
    try:
        quota_us, period_us = (int(word) for word in words)
    except ValueError:  # "max", an absent file, or something unknown
        return None
    return quota_us / period_us if quota_us > 0 and period_us > 0 else None


def _words(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="ascii", errors="replace").split()
    except OSError:
        return []
