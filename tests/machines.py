"""Machines that this one is not: trees of the files by which the kernel describes one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from edgeqwen.cpu import format_cpu_list

CPU_FOLDER = "sys/devices/system/cpu"


def put(root: Path, files: Mapping[str, str]) -> Path:
    """Write files below `root`; returns it."""
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


@dataclass(frozen=True, slots=True, kw_only=True)
class FakeMachine:
    """`cores` lists the logical CPUs of each core, `nodes` and `packages` the CPUs of each. What is left out is a file
    that is not there. `capacities`, `clocks_khz` and `ranks` go by CPU.
    """

    cores: Sequence[Sequence[int]]
    packages: Sequence[Sequence[int]] = ()
    nodes: Sequence[Sequence[int]] = ()
    capacities: Mapping[int, int] = field(default_factory=dict)
    clocks_khz: Mapping[int, int] = field(default_factory=dict)
    ranks: Mapping[int, int] = field(default_factory=dict)
    performance: str = ""
    efficient: str = ""
    offline: Sequence[int] = ()

    @property
    def cpus(self) -> tuple[int, ...]:
        return tuple(sorted(cpu for core in self.cores for cpu in core))

    def write(self, root: Path) -> Path:
        files = {f"{CPU_FOLDER}/online": format_cpu_list(set(self.cpus) - set(self.offline)) + "\n"}
        for core in self.cores:
            for cpu in core:
                files[f"{CPU_FOLDER}/cpu{cpu}/topology/thread_siblings_list"] = format_cpu_list(core) + "\n"
        for number, package in enumerate(self.packages):
            files |= {f"{CPU_FOLDER}/cpu{cpu}/topology/physical_package_id": f"{number}\n" for cpu in package}
        for number, node in enumerate(self.nodes):
            files[f"sys/devices/system/node/node{number}/cpulist"] = format_cpu_list(node) + "\n"
        by_cpu = {
            "cpu_capacity": self.capacities,
            "cpufreq/cpuinfo_max_freq": self.clocks_khz,
            "acpi_cppc/highest_perf": self.ranks,
        }
        for name, numbers in by_cpu.items():
            files |= {f"{CPU_FOLDER}/cpu{cpu}/{name}": f"{number}\n" for cpu, number in numbers.items()}
        if self.performance:
            files["sys/devices/cpu_core/cpus"] = self.performance + "\n"
        if self.efficient:
            files["sys/devices/cpu_atom/cpus"] = self.efficient + "\n"
        return put(root, files)


def pairs(count: int) -> list[tuple[int, int]]:
    """Cores of two threads whose CPUs follow each other: (0, 1), (2, 3), ..."""
    return [(2 * core, 2 * core + 1) for core in range(count)]


def singles(cpus: Sequence[int]) -> list[tuple[int]]:
    """Cores of one thread."""
    return [(cpu,) for cpu in cpus]


def desktop_hybrid() -> FakeMachine:
    """6 performance cores with two threads each (CPUs 0-11), 8 efficiency cores (12-19)."""
    cores = [*pairs(6), *singles(range(12, 20))]
    return FakeMachine(cores=cores, nodes=[range(20)], performance="0-11", efficient="12-19")


def two_sockets() -> FakeMachine:
    """Two packages of 8 cores with two threads each, numbered as servers do: siblings are 16 apart."""
    halves = [[*range(8), *range(16, 24)], [*range(8, 16), *range(24, 32)]]
    return FakeMachine(cores=[(core, core + 16) for core in range(16)], packages=halves, nodes=halves)


def x86_cpuinfo(flags: str, name: str = "Some CPU", **fields: str) -> str:
    """/proc/cpuinfo of two processors."""
    lines = {"processor": "0", "vendor_id": "GenuineIntel", "model name": name, **fields, "flags": flags}
    return "".join(f"{key}\t: {value}\n" for key, value in lines.items()) + "\nprocessor\t: 1\n"
