"""Processor and core counting, from descriptions of machines this one is not."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from edgeqwen.cpu import check_processor, cpu_quota, parse_cpuinfo, read_processor, usable_cores
from edgeqwen.errors import EXIT_CONFIG, ConfigInvalid

OLD = "fpu sse sse2 ssse3 sse4_1 sse4_2 popcnt"


def x86(flags: str) -> str:
    return f"processor\t: 0\nvendor_id\t: GenuineIntel\nmodel name\t: Some CPU\nflags\t\t: {flags}\n\nprocessor\t: 1\n"


def test_arm_is_a_target_of_its_own_and_lists_its_features() -> None:
    text = "processor\t: 0\nFeatures\t: fp asimd asimddp i8mm\nCPU implementer\t: 0x41\nCPU part\t: 0xd0b\n"
    processor = parse_cpuinfo(text, "aarch64")
    assert processor.target == "arm"
    assert processor.features == ("asimddp", "i8mm")
    assert processor.name == "0x41 0xd0b"


@pytest.mark.parametrize(
    ("flags", "target"),
    [
        (OLD, "any"),
        (f"{OLD} avx", "any"),
        (f"{OLD} avx avx2", "any"),
        (f"{OLD} avx avx2 avx512f avx512bw", "any"),
        (f"{OLD} avx avx2 avx_vnni", "vnni"),
        (f"{OLD} avx avx2 avx512f avx512_vnni", "vnni"),
        (f"{OLD} avx avx2 avx512f avx512_vnni amx_int8", "vnni"),
    ],
)
def test_target_avoids_the_saturating_kernel(flags: str, target: str) -> None:
    assert parse_cpuinfo(x86(flags), "x86_64").target == target


def test_too_old_processor_is_refused_by_what_it_lacks() -> None:
    with pytest.raises(ConfigInvalid, match=r"Some CPU.*sse4_1, sse4_2, popcnt") as caught:
        check_processor(parse_cpuinfo(x86("fpu sse sse2 ssse3"), "x86_64"))
    assert caught.value.exit_code == EXIT_CONFIG


@pytest.mark.parametrize(("text", "machine"), [(x86(OLD), "x86_64"), ("", "x86_64"), ("Features: fp", "aarch64")])
def test_processor_that_will_do_or_is_unknown_passes(text: str, machine: str) -> None:
    check_processor(parse_cpuinfo(text, machine))


def test_missing_cpuinfo_is_a_processor_without_flags(tmp_path: Path) -> None:
    processor = read_processor(tmp_path, "x86_64")
    assert (processor.machine, processor.flags) == ("x86_64", frozenset())


def put(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


@pytest.mark.parametrize(
    ("files", "quota"),
    [
        ({}, None),
        ({"proc/self/cgroup": "0::/a/b\n"}, None),
        ({"proc/self/cgroup": "0::/a/b\n", "sys/fs/cgroup/a/b/cpu.max": "max 100000\n"}, None),
        ({"proc/self/cgroup": "0::/a/b\n", "sys/fs/cgroup/a/b/cpu.max": "250000 100000\n"}, 2.5),
        ({"proc/self/cgroup": "0::/a/b\n", "sys/fs/cgroup/a/cpu.max": "150000 100000\n"}, 1.5),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "300000 100000\n"}, 3.0),
        ({"proc/self/cgroup": "0::/../other\n", "sys/fs/cgroup/cpu.max": "50000 100000\n"}, 0.5),
        ({"proc/self/cgroup": "0::/a\n", "sys/fs/cgroup/a/cpu.max": "rubbish\n"}, None),
        (
            {
                "proc/self/cgroup": "5:cpu,cpuacct:/host/path\n1:name=systemd:/x\n0::/\n",
                "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "400000\n",
                "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000\n",
            },
            4.0,
        ),
        (
            {
                "proc/self/cgroup": "5:cpu,cpuacct:/\n",
                "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "-1\n",
                "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000\n",
            },
            None,
        ),
    ],
)
def test_cpu_quota_is_the_least_of_the_groups(tmp_path: Path, files: dict[str, str], quota: float | None) -> None:
    assert cpu_quota(put(tmp_path, files)) == quota


@pytest.mark.parametrize(("max_line", "cores"), [("max 100000", 8), ("250000 100000", 2), ("10000 100000", 1)])
def test_usable_cores_are_capped_by_the_quota(tmp_path: Path, max_line: str, cores: int) -> None:
    root = put(tmp_path, {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": max_line})
    assert usable_cores(root, affinity_len=8) == cores


def test_usable_cores_never_exceed_the_affinity_mask() -> None:
    assert 1 <= usable_cores() <= len(os.sched_getaffinity(0))
