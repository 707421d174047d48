"""Processors and control groups, from descriptions of machines this one is not."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgeqwen.cpu import (
    MemoryLimits,
    check_processor,
    clock_mhz,
    cpu_quota,
    cpuset,
    fingerprint,
    format_cpu_list,
    memory_limits,
    parse_cpu_list,
    parse_cpuinfo,
    read_processor,
)
from edgeqwen.errors import EXIT_CONFIG, ConfigInvalid
from tests.machines import CPU_FOLDER, put, x86_cpuinfo

OLD = "fpu sse sse2 ssse3 sse4_1 sse4_2 popcnt"


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
    assert parse_cpuinfo(x86_cpuinfo(flags), "x86_64").target == target


def test_too_old_processor_is_refused_by_what_it_lacks() -> None:
    with pytest.raises(ConfigInvalid, match=r"Some CPU.*sse4_1, sse4_2, popcnt") as caught:
        check_processor(parse_cpuinfo(x86_cpuinfo("fpu sse sse2 ssse3"), "x86_64"))
    assert caught.value.exit_code == EXIT_CONFIG


@pytest.mark.parametrize(
    ("text", "machine"), [(x86_cpuinfo(OLD), "x86_64"), ("", "x86_64"), ("Features: fp", "aarch64")]
)
def test_processor_that_will_do_or_is_unknown_passes(text: str, machine: str) -> None:
    check_processor(parse_cpuinfo(text, machine))


def test_missing_cpuinfo_is_a_processor_without_flags(tmp_path: Path) -> None:
    processor = read_processor(tmp_path, "x86_64")
    assert (processor.machine, processor.flags) == ("x86_64", frozenset())


def digest(flags: str = OLD, counts: tuple[int, int] = (4, 4), version: str = "1.0", **fields: str) -> str:
    processor = parse_cpuinfo(x86_cpuinfo(flags, **fields), "x86_64")
    return fingerprint(processor, thread_counts=counts, runtime_version=version)


def test_fingerprint_changes_with_what_the_measurements_depend_on() -> None:
    others = [
        digest(f"{OLD} avx2"),
        digest(counts=(4, 6)),
        digest(counts=(2, 2)),
        digest(version="1.1"),
        digest(name="Other CPU"),
        digest(stepping="2"),
    ]
    assert len({digest(), *others}) == len(others) + 1
    assert digest() == digest()
    assert digest().isalnum()


def test_fingerprint_survives_a_microcode_update() -> None:
    assert digest(f"{OLD} md_clear ibrs flush_l1d", microcode="0x22") == digest(microcode="0x21")


@pytest.mark.parametrize(
    ("files", "mhz"),
    [
        ({}, None),
        ({"proc/cpuinfo": "cpu MHz\t\t: 2600.000\n\ncpu MHz\t\t: 3100.500\n"}, 3100),
        ({"proc/cpuinfo": "cpu MHz\t\t: fast\n"}, None),
        (
            {
                "proc/cpuinfo": "cpu MHz : 1.0\n",
                f"{CPU_FOLDER}/cpu0/cpufreq/scaling_cur_freq": "1800000\n",
                f"{CPU_FOLDER}/cpu1/cpufreq/scaling_cur_freq": "2400000\n",
            },
            2400,
        ),
    ],
)
def test_clock_is_the_highest_that_the_kernel_reports(tmp_path: Path, files: dict[str, str], mhz: int | None) -> None:
    assert clock_mhz(put(tmp_path, files)) == mhz


@given(st.sets(st.integers(0, 5000)))
def test_cpu_list_reads_back_what_it_wrote(cpus: set[int]) -> None:
    assert parse_cpu_list(format_cpu_list(cpus)) == tuple(sorted(cpus))


@pytest.mark.parametrize("text", ["x", "0-", "-3", "3-1", "0-99999", "1-2-3", "0x1", "²", "0 1", "9" * 40])
def test_cpu_list_quotes_the_item_that_is_none(text: str) -> None:
    with pytest.raises(ValueError, match=r"neither|range") as caught:
        parse_cpu_list(f"0,{text},5")
    assert repr(text) in str(caught.value)


V2_MOUNT = "30 23 0:26 {root} /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate\n"
V1_MOUNT = "33 31 0:30 {root} /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct\n"


@pytest.mark.parametrize(
    ("files", "quota"),
    [
        ({}, None),
        ({"proc/self/cgroup": "0::/a/b\n"}, None),
        ({"proc/self/cgroup": "0::/a/b\n", "sys/fs/cgroup/a/b/cpu.max": "max 100000\n"}, None),
        ({"proc/self/cgroup": "0::/a/b\n", "sys/fs/cgroup/a/b/cpu.max": "250000 100000\n"}, 2.5),
        ({"proc/self/cgroup": "0::/a/b\n", "sys/fs/cgroup/a/cpu.max": "150000 100000\n"}, 1.5),
        (
            {
                "proc/self/cgroup": "0::/a/b\n",
                "sys/fs/cgroup/a/b/cpu.max": "400000 100000\n",
                "sys/fs/cgroup/a/cpu.max": "300000 200000\n",
            },
            1.5,
        ),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "300000 100000\n"}, 3.0),
        ({"proc/self/cgroup": "0::/../other\n", "sys/fs/cgroup/cpu.max": "50000 100000\n"}, 0.5),
        ({"proc/self/cgroup": "0::/a\n", "sys/fs/cgroup/a/cpu.max": "rubbish\n"}, None),
        ({"proc/self/cgroup": "rubbish\n\n::\n7\n"}, None),
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
        (  # a container: the group is named as the host knows it, and mounted as the root
            {
                "proc/self/cgroup": "0::/docker/abc\n",
                "proc/self/mountinfo": V2_MOUNT.format(root="/docker/abc"),
                "sys/fs/cgroup/cpu.max": "250000 100000\n",
            },
            2.5,
        ),
        (  # both versions at once, version 2 in a place of its own
            {
                "proc/self/cgroup": "5:cpu,cpuacct:/a\n0::/a\n",
                "proc/self/mountinfo": V1_MOUNT.format(root="/") + V2_MOUNT.format(root="/").replace("cgroup ", "two "),
                "sys/fs/cgroup/cpu,cpuacct/a/cpu.cfs_quota_us": "350000\n",
                "sys/fs/cgroup/cpu,cpuacct/a/cpu.cfs_period_us": "100000\n",
                "sys/fs/two/a/cpu.max": "900000 100000\n",
            },
            3.5,
        ),
    ],
)
def test_cpu_quota_is_the_least_of_the_groups(tmp_path: Path, files: dict[str, str], quota: float | None) -> None:
    assert cpu_quota(put(tmp_path, files)) == quota


@pytest.mark.parametrize(
    ("files", "cpus"),
    [
        ({}, set()),
        ({"proc/self/cgroup": "0::/a\n", "sys/fs/cgroup/a/cpuset.cpus.effective": "2,4-5\n"}, {2, 4, 5}),
        (  # the group has no cpuset of its own: that of the one above holds
            {"proc/self/cgroup": "0::/a/b\n", "sys/fs/cgroup/a/cpuset.cpus.effective": "1\n"},
            {1},
        ),
        ({"proc/self/cgroup": "3:cpuset:/x\n0::/\n", "sys/fs/cgroup/cpuset/x/cpuset.cpus": "0-1\n"}, {0, 1}),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpuset.cpus.effective": "rubbish\n"}, set()),
    ],
)
def test_cpuset_is_what_the_nearest_group_lists(tmp_path: Path, files: dict[str, str], cpus: set[int]) -> None:
    assert cpuset(put(tmp_path, files)) == cpus


@pytest.mark.parametrize(
    ("files", "limits"),
    [
        ({}, MemoryLimits()),
        ({"proc/self/cgroup": "0::/a\n", "sys/fs/cgroup/a/memory.max": "max\n"}, MemoryLimits()),
        (
            {
                "proc/self/cgroup": "0::/a/b\n",
                "sys/fs/cgroup/a/b/memory.max": "3000\n",
                "sys/fs/cgroup/a/memory.max": "2000\n",
                "sys/fs/cgroup/a/b/memory.high": "1500\n",
                "sys/fs/cgroup/a/memory.current": "900\n",
                "sys/fs/cgroup/a/memory.stat": "anon 100\ninactive_file 300\n",
            },
            MemoryLimits(2000, 1500, 600),
        ),
        (
            {
                "proc/self/cgroup": "4:memory:/x\n",
                "sys/fs/cgroup/memory/x/memory.limit_in_bytes": "5000\n",
                "sys/fs/cgroup/memory/x/memory.usage_in_bytes": "1000\n",
                "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
            },
            MemoryLimits(5000, None, 1000),
        ),
    ],
)
def test_memory_limit_is_the_least_of_the_groups(tmp_path: Path, files: dict[str, str], limits: MemoryLimits) -> None:
    assert memory_limits(put(tmp_path, files)) == limits
