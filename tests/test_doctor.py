"""What `doctor` finds, on machines and packages made for it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import msgspec
import pytest

from edgeqwen.config import KvTable
from edgeqwen.core.fit import RUNTIME_BYTES, weights_bytes
from edgeqwen.core.model import Manifest
from edgeqwen.core.package import open_package
from edgeqwen.cpu import Processor, ThreadWishes, parse_cpuinfo, plan_threads, read_memory, read_thread_plan
from edgeqwen.cpu.topology import read_topology
from edgeqwen.doctor import Examination, Finding, examine
from edgeqwen.doctor.examination import Subject
from edgeqwen.doctor.finding import size_text
from edgeqwen.doctor.package import Needs, examine_package, fit_findings, needs_of, room_findings
from edgeqwen.doctor.processor import quant_notes
from edgeqwen.errors import EXIT_BAD_MODEL, EXIT_CONFIG, EXIT_NO_INPUT
from tests.daemons import run_command
from tests.machines import CPU_FOLDER, FakeMachine, put, singles, x86_cpuinfo
from tests.models import tiny_package

SSE4 = "fpu sse sse2 ssse3 sse4_1 sse4_2 popcnt"
AVX2 = f"{SSE4} avx fma f16c avx2"
VNNI = f"{AVX2} avx512f avx512_vnni"
MEMINFO = "MemTotal: {total} kB\nMemFree: 1 kB\nMemAvailable: {free} kB\nSwapTotal: {swap} kB\nSwapFree: {unused} kB\n"


def processor(flags: str, machine: str = "x86_64") -> Processor:
    text = x86_cpuinfo(flags) if machine == "x86_64" else f"Features\t: {flags}\nCPU part\t: 0xd0b\n"
    return parse_cpuinfo(text, machine)


def meminfo(total_mb: int = 8000, free_mb: int = 6000, swap_mb: int = 0, unused_mb: int = 0) -> dict[str, str]:
    kilobytes = {"total": total_mb, "free": free_mb, "swap": swap_mb, "unused": unused_mb}
    return {"proc/meminfo": MEMINFO.format(**{key: 1000 * value for key, value in kilobytes.items()})}


def examined(root: Path, files: dict[str, str] | None = None, *, flags: str = VNNI, **subject: Any) -> Examination:
    """A machine of two cores that is well but for `files`."""
    FakeMachine(cores=singles((0, 1))).write(root)
    put(root, meminfo() | (files or {}))
    wishes = subject.pop("wishes", ThreadWishes())
    threads = read_thread_plan(wishes, root, affinity=(0, 1), can_place=True)
    fields: dict[str, Any] = {
        "processor": processor(flags),
        "threads": threads,
        "runtime_version": "1",
        "state_dir": root / "state",
    }
    return examine(Subject(**(fields | subject)), root)


def topics(examination: Examination, level: str = "warning") -> list[str]:
    return [finding.topic for finding in examination.findings if finding.level == level]


def test_machine_that_is_well_has_no_findings(tmp_path: Path) -> None:
    examination = examined(tmp_path)
    assert examination.findings == ()
    assert examination.exit_code == 0
    assert examination.to_text().splitlines()[-1] == "nothing is in the way"


@pytest.mark.parametrize(
    ("flags", "machine", "level", "topic"),
    [
        ("fpu sse sse2 ssse3", "x86_64", "error", "processor-too-old"),
        (SSE4, "x86_64", "warning", "no-avx2"),
        (AVX2, "x86_64", "warning", "no-vnni"),
        ("fp asimd", "aarch64", "warning", "no-dotprod"),
        ("", "x86_64", "warning", "cpuinfo"),
    ],
)
def test_what_the_processor_lacks_is_named(tmp_path: Path, flags: str, machine: str, level: str, topic: str) -> None:
    examination = examined(tmp_path, processor=processor(flags, machine))
    assert topics(examination, level) == [topic]
    assert examination.exit_code == (EXIT_CONFIG if level == "error" else 0)


def test_virtual_machine_is_told_to_pass_its_host_through(tmp_path: Path) -> None:
    (finding,) = examined(tmp_path, flags=f"{AVX2} hypervisor").findings
    assert "host-passthrough" in finding.advice
    (finding,) = examined(tmp_path, flags=AVX2).findings
    assert "host-passthrough" not in finding.advice


@pytest.mark.parametrize(
    ("flags", "machine", "quant", "words"),
    [
        (f"{VNNI} amx_int8", "x86_64", "int8", "signed weights, exact 8-bit products by amx_int8"),
        (f"{AVX2} avx_vnni", "x86_64", "int8", "avx_vnni"),
        (AVX2, "x86_64", "int8", "unsigned weights"),
        (SSE4, "x86_64", "fp32", "SSE4"),
        ("asimd asimddp i8mm", "aarch64", "int8", "i8mm"),
        ("asimd asimddp", "aarch64", "int4", "asimddp"),
    ],
)
def test_notes_say_how_each_quant_is_computed(flags: str, machine: str, quant: str, words: str) -> None:
    notes = quant_notes(processor(flags, machine))
    assert words in notes[quant]
    assert set(notes) == {"int8", "int4", "hybrid", "fp32"}


CPUFREQ = f"{CPU_FOLDER}/cpu1/cpufreq"
ENABLED = "sys/kernel/mm/transparent_hugepage/enabled"


@pytest.mark.parametrize(
    ("files", "found"),
    [
        (meminfo(swap_mb=2000, unused_mb=1500), ["swap-in-use"]),
        (meminfo(swap_mb=2000, unused_mb=1990), []),
        ({ENABLED: "[always] madvise never\n"}, ["huge-pages"]),
        ({ENABLED: "always [madvise] never\n"}, []),
        ({"proc/sys/vm/overcommit_memory": "2\n"}, ["overcommit"]),
        ({"proc/sys/vm/overcommit_memory": "1\n"}, []),
        ({f"{CPUFREQ}/scaling_governor": "powersave\n", f"{CPUFREQ}/scaling_driver": "acpi-cpufreq\n"}, ["powersave"]),
        ({f"{CPUFREQ}/scaling_governor": "powersave\n", f"{CPUFREQ}/scaling_driver": "intel_pstate\n"}, []),
        (
            {
                f"{CPUFREQ}/scaling_governor": "powersave\n",
                f"{CPUFREQ}/scaling_driver": "intel_pstate\n",
                f"{CPUFREQ}/energy_performance_preference": "power\n",
            },
            ["powersave"],
        ),
        ({f"{CPUFREQ}/scaling_governor": "schedutil\n"}, []),
        ({f"{CPUFREQ}/scaling_max_freq": "1200000\n", f"{CPUFREQ}/cpuinfo_max_freq": "3600000\n"}, ["clock-capped"]),
        ({f"{CPUFREQ}/scaling_max_freq": "3500000\n", f"{CPUFREQ}/cpuinfo_max_freq": "3600000\n"}, []),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "50000 100000\n"}, ["threads"]),
    ],
)
def test_settings_that_cost_speed_are_warned_of(tmp_path: Path, files: dict[str, str], found: list[str]) -> None:
    examination = examined(tmp_path, files)
    assert topics(examination) == found
    assert examination.exit_code == 0
    assert all(finding.advice for finding in examination.findings)


def test_clock_of_cpus_that_do_not_compute_does_not_matter(tmp_path: Path) -> None:
    files = {f"{CPUFREQ}/scaling_governor": "powersave\n"}
    assert not topics(examined(tmp_path, files, wishes=ThreadWishes(cpus="0")))


def test_limits_of_control_groups_are_noted(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "0::/\n",
        "sys/fs/cgroup/cpu.max": "150000 100000\n",
        "sys/fs/cgroup/memory.max": "4000000000\n",
        "sys/fs/cgroup/memory.current": "1000000000\n",
    }
    examination = examined(tmp_path, files)
    assert topics(examination, "note") == ["cpu-quota", "memory-limit"]
    assert (examination.memory.most, examination.memory.free) == (4_000_000_000, 3_000_000_000)


def test_nothing_readable_is_no_error(tmp_path: Path) -> None:
    threads = plan_threads(read_topology(tmp_path, (0,)), ThreadWishes())
    subject = Subject(
        processor=parse_cpuinfo("", "x86_64"),
        threads=threads,
        runtime_version="1",
        state_dir=tmp_path / "none",
        kv=KvTable(),
    )
    examination = examine(subject, tmp_path)
    assert (examination.exit_code, examination.clock_mhz, examination.memory.most) == (0, None, 0)
    assert "unnamed" in examination.to_text()


def test_state_folder_that_cannot_be_written_is_warned_of(tmp_path: Path) -> None:
    put(tmp_path, {"file": ""})
    assert topics(examined(tmp_path, state_dir=tmp_path / "file" / "state")) == ["state-dir"]


def test_profile_of_this_machine_is_shown_and_no_other(tmp_path: Path) -> None:
    digest = examined(tmp_path).fingerprint
    files = {f"state/machine-{digest}.json": '{"rows": 8}', "state/machine-0123456789ab.json": "{}"}
    examination = examined(tmp_path, files)
    assert examination.profile == {f"machine-{digest}.json": {"rows": 8}}
    assert '{"rows": 8}' in examination.to_text()
    assert "a file that you remove is measured again" in examination.to_text()
    assert "measured again" not in examined(tmp_path / "elsewhere").to_text()
    put(tmp_path, {f"state/machine-{digest}.json": "rubbish"})
    assert examined(tmp_path).profile == {f"machine-{digest}.json": None}


def manifest_of(**changed: Any) -> Manifest:
    return msgspec.structs.replace(open_package(tiny_package()).manifest, **changed)


@pytest.mark.parametrize(
    ("quant", "form", "flags", "machine", "found"),
    [
        ("int8", "signed", VNNI, "x86_64", []),
        ("int8", "unsigned", VNNI, "x86_64", ["weight-form"]),
        ("int8", "signed", AVX2, "x86_64", ["weight-form"]),
        ("int8", "unsigned", AVX2, "x86_64", []),
        ("int8", "signed", "asimd asimddp", "aarch64", []),
        ("int8", "unsigned", "asimd asimddp", "aarch64", []),
        ("int4", "unsigned", VNNI, "x86_64", []),
        ("fp32", "signed", AVX2, "x86_64", []),
    ],
)
def test_weights_of_another_kind_of_processor_are_warned_of(
    quant: Any, form: Any, flags: str, machine: str, found: list[str]
) -> None:
    path = Path("/models/tiny")
    findings = [*fit_findings(path, manifest_of(quant=quant, weight_form=form), processor(flags, machine))]
    assert [finding.topic for finding in findings] == found
    assert all(f"edgeqwen import {path} --target " in finding.advice for finding in findings)


def test_package_of_another_version_is_noted() -> None:
    (finding,) = fit_findings(Path("/m"), manifest_of(builder_version="0.0.0"), processor(VNNI))
    assert (finding.level, finding.topic) == ("note", "builder-version")


def test_needs_are_weights_libraries_and_cache() -> None:
    manifest = manifest_of()
    numbers = 100 * manifest.spec.kv_floats_per_token
    weights = RUNTIME_BYTES + weights_bytes(manifest.spec, "fp32")
    assert needs_of(manifest, context=100) == Needs(weights, 4 * numbers)
    small = msgspec.structs.replace(manifest, kv_types=("int8", "fp32"))
    assert needs_of(small, context=100).conversation == numbers


@pytest.mark.parametrize(
    ("needs_mb", "conversation_mb", "level", "topic"),
    [
        (9000, 10, "error", "memory-too-small"),
        (6000, 200, "warning", "memory-scarce"),
        (1000, 2000, "note", "slots"),
        (1000, 10, "", ""),
    ],
    ids=["too small", "scarce", "enough for one", "enough"],
)
def test_memory_that_is_too_small_is_told_in_numbers(
    tmp_path: Path, needs_mb: int, conversation_mb: int, level: str, topic: str
) -> None:
    memory = read_memory(put(tmp_path, meminfo(total_mb=8000, free_mb=6000)))
    needs = Needs(needs_mb * 10**6, conversation_mb * 10**6)
    findings = [*room_findings(manifest_of(), needs, memory, num_slots=4)]
    assert [(finding.level, finding.topic) for finding in findings] == ([(level, topic)] if level else [])
    assert all(" GB" in finding.text for finding in findings)


def test_limit_from_which_the_process_is_slowed_down_is_compared_too(tmp_path: Path) -> None:
    files = {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/memory.high": "500000000\n"}
    memory = read_memory(put(tmp_path, meminfo() | files))
    (finding,) = room_findings(manifest_of(), Needs(10**9, 10), memory, num_slots=1)
    assert finding.topic == "memory-high"


def test_memory_that_is_not_known_says_nothing(tmp_path: Path) -> None:
    assert not [*room_findings(manifest_of(), Needs(10**15, 10), read_memory(tmp_path), num_slots=8)]


def changed_copy(folder: Path, name: str) -> Path:
    """The tiny package with one byte of a file another."""
    shutil.copytree(tiny_package(), folder)
    data = bytearray((folder / name).read_bytes())
    data[len(data) // 2] ^= 1
    (folder / name).write_bytes(data)
    return folder


@pytest.mark.parametrize(
    ("total_mb", "free_mb", "level", "words"),
    [
        (400, 300, "warning", "even int4"),
        (1000, 700, "note", "Qwen3-0.6B as int8 ("),
        (8000, 6000, "", ""),
    ],
)
def test_quants_without_room_are_told_before_a_package_is_made(
    tmp_path: Path, total_mb: int, free_mb: int, level: str, words: str
) -> None:
    findings = examined(tmp_path, meminfo(total_mb=total_mb, free_mb=free_mb)).findings
    assert [finding.level for finding in findings] == ([level] if level else [])
    assert all(words in finding.text for finding in findings)


@pytest.mark.parametrize("name", ["weights.bin", "tokenizer.json", "decode.onnx"])
def test_package_whose_content_changed_is_an_error_that_names_the_file(tmp_path: Path, name: str) -> None:
    package = changed_copy(tmp_path / "package", name)
    examination = examined(tmp_path / "machine", package_path=package)
    assert topics(examination, "error") == ["package"]
    assert examination.exit_code == EXIT_BAD_MODEL
    (finding,) = examination.findings
    assert name in finding.text
    assert "import" in finding.advice


def test_package_that_is_not_there_has_the_exit_code_of_serve(tmp_path: Path) -> None:
    report = examine_package(tmp_path / "none", processor(VNNI), read_memory(tmp_path), KvTable())
    assert [finding.exit_code for finding in report.findings] == [EXIT_NO_INPUT]


def test_whole_package_is_described(tmp_path: Path) -> None:
    examination = examined(tmp_path, flags=AVX2, package_path=tiny_package(), kv=KvTable(context=64))
    facts = examination.to_dict()["package"]
    assert (facts["quant"], facts["target"], facts["context"]) == ("fp32", "any", 64)
    assert "all files whole" in examination.to_text()
    assert not topics(examination, "error")


def test_gravest_findings_come_first(tmp_path: Path) -> None:
    examination = examined(tmp_path, meminfo(swap_mb=2000), flags="sse", package_path=tmp_path / "none")
    levels = [line.split(":")[0] for line in examination.to_text().splitlines() if not line.startswith(" ")]
    assert levels[-3:] == ["error", "error", "warning"]


def test_finding_that_is_an_error_needs_an_exit_code() -> None:
    with pytest.raises(AssertionError):
        Finding("error", "x", "text", "advice")


@pytest.mark.parametrize(("size", "text"), [(640e6, "640 MB"), (1.94e9, "1.9 GB"), (999.9e6, "1.0 GB"), (0, "0 MB")])
def test_sizes_are_written_for_people(size: float, text: str) -> None:
    assert size_text(size) == text


def test_command_prints_words_or_json_and_exits_as_serve_would(tmp_path: Path) -> None:
    package, state = str(tiny_package()), str(tmp_path)
    result = run_command("doctor", package, "--state-dir", state, "--json", "--quick")
    report = json.loads(result.stdout)
    assert (result.returncode, report["ok"], report["package"]["name"]) == (
        0,
        True,
        open_package(tiny_package()).manifest.name,
    )
    assert report["threads"]["decode"] >= 1
    words = run_command("doctor", package, "--state-dir", state, "--quick")
    assert words.returncode == 0
    assert report["fingerprint"] in words.stdout.decode()
    assert run_command("doctor", str(tmp_path / "none")).returncode == EXIT_NO_INPUT
    assert run_command("doctor", "--cpus", "0,x").returncode == EXIT_CONFIG


def test_command_shows_the_plan_that_was_asked_for() -> None:
    report = json.loads(run_command("doctor", str(tiny_package()), "--threads", "1", "--json", "--quick").stdout)
    assert (report["threads"]["decode"], report["threads"]["prefill"]) == (1, 1)
