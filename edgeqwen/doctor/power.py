"""Clocks that are held down: governors, and limits set by hand."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from edgeqwen.cpu import format_cpu_list
from edgeqwen.cpu.sysfiles import read_number, read_text
from edgeqwen.doctor.finding import Finding

SELF_GOVERNED: Final = ("intel_pstate", "amd-pstate-epp", "amd_pstate_epp")
"""Drivers that scale the clock themselves; to them `powersave` is the usual setting and says nothing."""

CAPPED_SHARE: Final = 0.9


def power_findings(root: Path, cpus: Sequence[int]) -> Iterator[Finding]:
    """Of the CPUs that compute: those whose clock is kept low."""
    folders = {cpu: root / f"sys/devices/system/cpu/cpu{cpu}/cpufreq" for cpu in cpus}
    if slow := [cpu for cpu, folder in folders.items() if _saves_power(folder)]:
        yield Finding(
            "warning",
            "powersave",
            f"CPUs {format_cpu_list(slow)} are set to save power (governor powersave): their clock stays low",
            "`cpupower frequency-set -g schedutil` (or performance), or `powerprofilesctl set balanced`",
        )
    if capped := [cpu for cpu, folder in folders.items() if _is_capped(folder)]:
        most = read_number(folders[capped[0]] / "scaling_max_freq") or 0
        yield Finding(
            "warning",
            "clock-capped",
            f"the clock of CPUs {format_cpu_list(capped)} is held below what they can do, at {most // 1000} MHz",
            "`cpupower frequency-set -u` with the highest clock, unless that is on purpose (heat, battery)",
        )


def _saves_power(folder: Path) -> bool:
    """By the governor; by the preference where the driver governs itself."""
    if read_text(folder / "scaling_driver") in SELF_GOVERNED:
        return read_text(folder / "energy_performance_preference") == "power"
    return read_text(folder / "scaling_governor") == "powersave"


def _is_capped(folder: Path) -> bool:
    limit, most = read_number(folder / "scaling_max_freq"), read_number(folder / "cpuinfo_max_freq")
    return limit is not None and most is not None and limit < CAPPED_SHARE * most
