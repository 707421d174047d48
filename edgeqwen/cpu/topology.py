"""Which logical CPUs share a core, which cores are the strong ones, and which share their memory.

Read from `/sys/devices/system` (sysfs-devices-system-cpu in the kernel's ABI documentation). All of it may be absent or
wrong: virtual machines hide siblings, or present each CPU as a socket of its own; containers mount no /sys. What is not
told, or cannot be, counts as the plain case: each CPU a core, all alike, one memory.

**Strength.** `cpu_capacity` (ARM, and x86 hybrids on newer kernels) is the kernel's own measure. Else Intel's hybrids
list their two kinds as devices of their own (`cpu_core`, `cpu_atom`). Else there is the maximal clock, which tells less
than the truth: an efficiency core does less in a cycle, too. Last comes the firmware's ranking (`highest_perf`). Cores
of one kind differ, too, so a core counts as an efficiency core only well below the strongest.

**Memory.** CPUs of one package or of one NUMA node belong together. A package may have several nodes (they are close),
and where all CPUs are in one node the number of packages means nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from edgeqwen.cpu.sysfiles import read_cpu_list, read_number

MAX_SIBLINGS: Final = 4
"""No core of a supported processor has more threads; a longer list is a machine that hides what it is."""

ATOM_CAPACITY: Final = 0.5
"""Of an efficiency core beside a performance core, in the kernels used here, where only the kind is known."""

RANKED_SHARE: Final = 0.68
CLOCKED_SHARE: Final = 0.8
"""Below this share of the strongest a core is an efficiency core: by capacity or rank, and by clock alone. (Ranks of
like cores were seen down to 0.72, clocks of efficiency cores up to 0.79.)
"""


@dataclass(frozen=True, slots=True)
class Core:
    """A physical core: its logical CPUs, lowest first. `capacity` is relative to the strongest core (1.0)."""

    cpus: tuple[int, ...]
    capacity: float = 1.0
    is_performance: bool = True
    domain: int = 0


@dataclass(frozen=True, slots=True)
class Topology:
    """The cores of the CPUs that were asked for, by their lowest CPU. Cores of one `domain` share their memory."""

    cores: tuple[Core, ...]

    @property
    def cpus(self) -> tuple[int, ...]:
        """All logical CPUs, ascending."""
        return tuple(sorted(cpu for core in self.cores for cpu in core.cpus))

    @property
    def has_siblings(self) -> bool:
        return any(len(core.cpus) > 1 for core in self.cores)


def read_topology(root: Path, cpus: Iterable[int]) -> Topology:
    """The cores that `cpus` belong to, with those of their logical CPUs that are among `cpus`."""
    folder = root / "sys/devices/system/cpu"
    wanted = sorted(set(cpus))
    groups = _siblings(folder, wanted)
    capacities, least = _capacities(root, wanted)
    domains = _domains(root, wanted)
    strongest = {group: max(capacities[cpu] for cpu in group) for group in groups}
    return Topology(
        tuple(
            Core(group, strongest[group], is_performance=strongest[group] >= least, domain=domains[group[0]])
            for group in groups
        )
    )


def online_cpus(root: Path) -> frozenset[int]:
    """CPUs that are switched on; empty where the kernel does not say."""
    return frozenset(read_cpu_list(root / "sys/devices/system/cpu/online"))


def _siblings(folder: Path, cpus: list[int]) -> list[tuple[int, ...]]:
    """The logical CPUs of each core. A CPU that two cores claim stays with the first."""
    taken: set[int] = set()
    groups: list[tuple[int, ...]] = []
    for cpu in cpus:
        if cpu in taken:
            continue
        topology = folder / f"cpu{cpu}" / "topology"
        listed = read_cpu_list(topology / "core_cpus_list") or read_cpu_list(topology / "thread_siblings_list")
        trusted = set(listed) if cpu in listed and len(listed) <= MAX_SIBLINGS else {cpu}
        group = tuple(sorted((trusted & set(cpus)) - taken))
        taken.update(group)
        groups.append(group)
    return groups


def _capacities(root: Path, cpus: list[int]) -> tuple[dict[int, float], float]:
    """Capacity of each CPU relative to the strongest, and the least that a performance core has."""
    folder = root / "sys/devices/system/cpu"
    if (capacities := _numbers(folder, cpus, "cpu_capacity")) and len(set(capacities.values())) > 1:
        return _relative(capacities), RANKED_SHARE
    performance = set(read_cpu_list(root / "sys/devices/cpu_core/cpus"))
    if performance & set(cpus):  # atoms alone are all alike
        return {cpu: 1.0 if cpu in performance else ATOM_CAPACITY for cpu in cpus}, RANKED_SHARE
    for name, share in (("cpufreq/cpuinfo_max_freq", CLOCKED_SHARE), ("acpi_cppc/highest_perf", RANKED_SHARE)):
        if numbers := _numbers(folder, cpus, name):
            return _relative(numbers), share
    return dict.fromkeys(cpus, 1.0), RANKED_SHARE


def _numbers(folder: Path, cpus: list[int], name: str) -> dict[int, int]:
    """The number that each CPU has under this name; nothing unless all have one."""
    numbers = {cpu: number for cpu in cpus if (number := read_number(folder / f"cpu{cpu}" / name))}
    return numbers if len(numbers) == len(cpus) and min(numbers.values(), default=0) > 0 else {}


def _relative(numbers: Mapping[int, int]) -> dict[int, float]:
    most = max(numbers.values())
    return {cpu: number / most for cpu, number in numbers.items()}


def _domains(root: Path, cpus: list[int]) -> dict[int, int]:
    """A number for each CPU, the same for CPUs of one package or of one NUMA node: the lowest CPU among them."""
    nodes = {
        cpu: int(path.parent.name.removeprefix("node"))
        for path in sorted((root / "sys/devices/system/node").glob("node[0-9]*/cpulist"))
        for cpu in read_cpu_list(path)
    }
    if len({nodes.get(cpu) for cpu in cpus}) <= 1 or any(cpu not in nodes for cpu in cpus):
        return dict.fromkeys(cpus, 0)
    folder = root / "sys/devices/system/cpu"
    groups: dict[tuple[str, int], set[int]] = {}
    for cpu in cpus:
        groups.setdefault(("node", nodes[cpu]), set()).add(cpu)
        package = read_number(folder / f"cpu{cpu}/topology/physical_package_id")
        if package is not None and package >= 0:
            groups.setdefault(("package", package), set()).add(cpu)
    return {cpu: min(merged) for merged in _merged(groups.values()) for cpu in merged}


def _merged(groups: Iterable[set[int]]) -> list[set[int]]:
    """Groups joined as long as two have a member in common."""
    merged: list[set[int]] = []
    for group in groups:
        touching = [other for other in merged if other & group]
        merged = [other for other in merged if not other & group] + [group.union(*touching)]
    return merged
