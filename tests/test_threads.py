"""How many threads compute and where, on machines of many kinds."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgeqwen.cpu import (
    Core,
    ThreadPlan,
    ThreadWishes,
    Topology,
    may_place_threads,
    place_calling_thread,
    placed,
    plan_threads,
    read_thread_plan,
)
from edgeqwen.errors import EXIT_CONFIG, ConfigInvalid
from tests.machines import CPU_FOLDER, FakeMachine, desktop_hybrid, pairs, put, singles, two_sockets


def planned(
    root: Path,
    machine: FakeMachine,
    *,
    affinity: Sequence[int] | None = None,
    quota: str = "",
    can_place: bool = True,
    **wishes: int | str,
) -> ThreadPlan:
    """The plan on a machine, for a process that may use all of it unless `affinity` says otherwise."""
    machine.write(root)
    if quota:
        put(root, {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": quota})
    cpus = machine.cpus if affinity is None else affinity
    return read_thread_plan(ThreadWishes(**wishes), root, affinity=cpus, can_place=can_place)  # type: ignore[arg-type]  # mixed values, each of its field's type


EIGHT = FakeMachine(cores=singles(range(8)), packages=[range(8)], nodes=[range(8)])


def test_every_core_computes_where_all_are_alike(tmp_path: Path) -> None:
    plan = planned(tmp_path, EIGHT)
    assert plan.counts == (8, 8)
    assert plan.decode.masks == tuple((cpu,) for cpu in range(8))
    assert plan.decode.is_pinned


def test_siblings_share_one_thread(tmp_path: Path) -> None:
    plan = planned(tmp_path, FakeMachine(cores=pairs(4)))
    assert plan.counts == (4, 4)
    assert plan.decode.masks == ((0, 1), (2, 3), (4, 5), (6, 7))


def test_newer_name_of_the_siblings_file_is_read(tmp_path: Path) -> None:
    files = {f"{CPU_FOLDER}/cpu{cpu}/topology/core_cpus_list": "0-1\n" for cpu in (0, 1)}
    plan = read_thread_plan(ThreadWishes(), put(tmp_path, files), affinity=(0, 1), can_place=True)
    assert plan.counts == (1, 1)


def test_efficiency_cores_stay_out(tmp_path: Path) -> None:
    plan = planned(tmp_path, desktop_hybrid())
    assert plan.counts == (6, 6)
    assert plan.decode.cpus == tuple(range(12))
    assert any("6 performance and 8 weaker cores" in reason for reason in plan.reasons)


def test_efficiency_cores_join_for_prompts_where_equal_shares_gain_enough(tmp_path: Path) -> None:
    machine = FakeMachine(cores=[*pairs(2), *singles(range(4, 12))], performance="0-3", efficient="4-11")
    plan = planned(tmp_path, machine)
    assert plan.counts == (2, 10)
    assert plan.prefill.calling_cpus == plan.decode.calling_cpus == (0, 1)


def test_single_strong_core_does_not_decode_alone(tmp_path: Path) -> None:
    capacities = {0: 1024, **dict.fromkeys((1, 2, 3), 650), **dict.fromkeys((4, 5, 6, 7), 250)}
    plan = planned(tmp_path, FakeMachine(cores=singles(range(8)), capacities=capacities))
    assert plan.counts == (4, 4)
    assert plan.decode.cpus == (0, 1, 2, 3)


def test_big_cores_compute_on_a_board_with_little_ones(tmp_path: Path) -> None:
    capacities = {**dict.fromkeys(range(4), 381), **dict.fromkeys(range(4, 8), 1024)}
    clusters = [range(4), range(4, 8)]
    plan = planned(tmp_path, FakeMachine(cores=singles(range(8)), capacities=capacities, packages=clusters))
    assert plan.counts == (4, 4)
    assert plan.decode.cpus == (4, 5, 6, 7)


def test_weak_cores_alone_are_all_alike(tmp_path: Path) -> None:
    assert planned(tmp_path, desktop_hybrid(), affinity=range(12, 20)).counts == (8, 8)


@pytest.mark.parametrize(
    ("values", "kind", "count"),
    [
        ({0: 5_000_000, 1: 5_000_000, 2: 3_900_000, 3: 3_900_000}, "clocks_khz", 2),
        ({0: 5_700_000, 1: 5_500_000, 2: 5_400_000, 3: 5_300_000}, "clocks_khz", 4),  # favoured cores of one kind
        ({0: 200, 1: 196, 2: 120, 3: 120}, "ranks", 2),
        ({0: 231, 1: 211, 2: 181, 3: 166}, "ranks", 4),
        ({0: 5_000_000, 1: 3_000_000}, "clocks_khz", 4),  # not of all CPUs: says nothing
        ({0: 0, 1: 0, 2: 0, 3: 0}, "clocks_khz", 4),
    ],
)
def test_clock_or_rank_tells_the_kinds_apart_where_nothing_better_does(
    tmp_path: Path, values: dict[int, int], kind: str, count: int
) -> None:
    machine = FakeMachine(cores=singles(range(4)), **{kind: values})  # type: ignore[arg-type]  # `kind` names a mapping
    assert planned(tmp_path, machine).decode.num_threads == count


def test_threads_stay_on_one_of_two_sockets(tmp_path: Path) -> None:
    plan = planned(tmp_path, two_sockets())
    assert plan.counts == (8, 8)
    assert plan.decode.masks[0] == (0, 16)
    assert plan.decode.cpus == (*range(8), *range(16, 24))
    assert any("2 sockets" in reason for reason in plan.reasons)


def test_socket_with_more_usable_cores_is_taken(tmp_path: Path) -> None:
    plan = planned(tmp_path, two_sockets(), affinity=[0, 1, *range(8, 14)])
    assert plan.decode.cpus == tuple(range(8, 14))


def test_nodes_of_one_socket_belong_together(tmp_path: Path) -> None:
    machine = FakeMachine(cores=singles(range(8)), packages=[range(8)], nodes=[range(4), range(4, 8)])
    assert planned(tmp_path, machine).counts == (8, 8)


def test_virtual_machine_that_shows_each_cpu_as_a_socket_uses_all(tmp_path: Path) -> None:
    machine = FakeMachine(cores=singles(range(4)), packages=singles(range(4)), nodes=[range(4)])
    assert planned(tmp_path, machine).counts == (4, 4)


def test_virtual_machine_that_calls_all_cpus_siblings_is_not_believed(tmp_path: Path) -> None:
    assert planned(tmp_path, FakeMachine(cores=[range(8)])).counts == (8, 8)


def test_core_that_is_switched_off_does_not_count(tmp_path: Path) -> None:
    machine = FakeMachine(cores=pairs(4), offline=(5, 6, 7))
    plan = planned(tmp_path, machine)
    assert plan.decode.masks == ((0, 1), (2, 3), (4,))


def test_affinity_with_gaps_is_all_used_and_nothing_else(tmp_path: Path) -> None:
    plan = planned(tmp_path, EIGHT, affinity=(1, 4, 6))
    assert plan.decode.masks == ((1,), (4,), (6,))
    assert plan.decode.ort_affinities == "5;7"


def test_cpuset_narrows_the_affinity(tmp_path: Path) -> None:
    put(tmp_path, {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpuset.cpus.effective": "2-3\n"})
    assert planned(tmp_path, EIGHT).decode.cpus == (2, 3)


def test_description_of_other_cpus_is_not_believed(tmp_path: Path) -> None:
    assert planned(tmp_path, EIGHT, affinity=(40, 41)).counts == (2, 2)


def test_no_description_at_all_is_one_thread_a_cpu(tmp_path: Path) -> None:
    plan = read_thread_plan(ThreadWishes(), tmp_path, affinity=(0, 1, 2), can_place=True)
    assert plan.counts == (3, 3)


@pytest.mark.parametrize("rubbish", ["", "x", "-1", "0-", "7-2", "99999999999", "\x00", "0,0,0", "1024"])
def test_broken_descriptions_fall_back(tmp_path: Path, rubbish: str) -> None:
    names = ["topology/thread_siblings_list", "topology/core_cpus_list", "topology/physical_package_id"]
    names += ["cpu_capacity", "cpufreq/cpuinfo_max_freq", "acpi_cppc/highest_perf"]
    files = {f"{CPU_FOLDER}/cpu{cpu}/{name}": rubbish for cpu in range(4) for name in names}
    files |= {f"{CPU_FOLDER}/online": rubbish, "sys/devices/cpu_core/cpus": rubbish, "proc/self/cgroup": rubbish}
    files |= {"sys/devices/system/node/node0/cpulist": rubbish, "proc/self/mountinfo": rubbish}
    plan = read_thread_plan(ThreadWishes(), put(tmp_path, files), affinity=range(4), can_place=True)
    assert 1 <= plan.decode.num_threads <= 4
    assert set(plan.decode.cpus) <= set(range(4))


@pytest.mark.parametrize(
    ("quota", "count"),
    [("max 100000", 8), ("250000 100000", 2), ("199000 100000", 1), ("50000 100000", 1), ("1600000 100000", 8)],
)
def test_quota_is_never_exceeded_by_whole_threads(tmp_path: Path, quota: str, count: int) -> None:
    plan = planned(tmp_path, EIGHT, quota=quota)
    assert plan.counts == (count, count)
    assert plan.decode.is_pinned == (count == 8)  # where only some compute, the kernel picks which


def test_less_than_a_core_is_warned_of(tmp_path: Path) -> None:
    assert "CPUQuota=100%" in planned(tmp_path, EIGHT, quota="50000 100000").warnings[0]
    assert not planned(tmp_path / "more", EIGHT, quota="250000 100000").warnings


def test_number_of_threads_asked_for_is_taken_as_it_is(tmp_path: Path) -> None:
    plan = planned(tmp_path, two_sockets(), threads=3, quota="200000 100000")
    assert plan.counts == (3, 3)
    assert "quota" in plan.warnings[0]


def test_each_kind_of_step_may_have_a_number_of_its_own(tmp_path: Path) -> None:
    assert planned(tmp_path, EIGHT, threads=4, prefill_threads=6).counts == (4, 6)
    assert planned(tmp_path, EIGHT, decode_threads=2).counts == (2, 8)


def test_fewer_threads_than_cores_are_held_to_the_kind_of_core_not_to_single_ones(tmp_path: Path) -> None:
    plan = planned(tmp_path, desktop_hybrid(), threads=2)
    assert plan.decode.masks == (tuple(range(12)),) * 2
    assert not plan.decode.is_pinned


def test_fewer_threads_than_cores_that_are_all_alike_run_anywhere(tmp_path: Path) -> None:
    plan = planned(tmp_path, EIGHT, threads=2)
    assert (plan.decode.masks, plan.decode.ort_affinities, plan.decode.calling_cpus) == ((), None, ())


def test_more_threads_than_cpus_are_warned_of_and_run_anywhere(tmp_path: Path) -> None:
    plan = planned(tmp_path, EIGHT, threads=16)
    assert (plan.counts, plan.decode.masks) == ((16, 16), ())
    assert "8 at most" in plan.warnings[0]


def test_list_of_cpus_is_computed_on_whatever_they_are(tmp_path: Path) -> None:
    plan = planned(tmp_path, desktop_hybrid(), cpus="10-13")
    assert plan.decode.masks == ((10, 11), (12,), (13,))
    assert planned(tmp_path / "sockets", two_sockets(), cpus="0,8").counts == (2, 2)


def test_threads_stay_on_the_listed_cpus_whatever_their_number(tmp_path: Path) -> None:
    for threads in (1, 2, 4):
        plan = planned(tmp_path / str(threads), EIGHT, cpus="2,5", threads=threads)
        assert plan.decode.num_threads == threads
        assert plan.decode.cpus == (2, 5)


@pytest.mark.parametrize(
    ("text", "named"),
    [("0-2,x", "'x'"), ("3-1", "'3-1'"), (",", "','"), ("0-9", "CPU 8-9"), ("4", "CPU 4 is not one")],
)
def test_list_of_cpus_that_cannot_be_is_named(tmp_path: Path, text: str, named: str) -> None:
    affinity = (0, 1, 2, 3) if text == "4" else None
    with pytest.raises(ConfigInvalid) as caught:
        planned(tmp_path, EIGHT, affinity=affinity, cpus=text)
    assert named in caught.value.message
    assert "--cpus" in caught.value.message
    assert caught.value.exit_code == EXIT_CONFIG


@pytest.mark.parametrize(
    ("text", "count"), [("3", 3), ("2,4", 2), ("64", 8), ("0", 8), ("-1", 8), ("many", 8), ("", 8), ("²", 8)]
)
def test_omp_num_threads_counts_where_nothing_else_is_said(tmp_path: Path, text: str, count: int) -> None:
    assert planned(tmp_path, EIGHT, omp_num_threads=text).counts == (count, count)
    assert planned(tmp_path, EIGHT, omp_num_threads=text, threads=5).counts == (5, 5)


def test_omp_num_threads_stays_within_the_quota(tmp_path: Path) -> None:
    assert planned(tmp_path, EIGHT, omp_num_threads="6", quota="250000 100000").counts == (2, 2)


def test_nothing_is_placed_where_the_kernel_refuses(tmp_path: Path) -> None:
    plan = planned(tmp_path, desktop_hybrid(), can_place=False)
    assert (plan.counts, plan.decode.masks, plan.prefill.masks) == ((6, 6), (), ())
    assert any("does not let" in reason for reason in plan.reasons)


def test_cores_of_their_own_can_be_declined(tmp_path: Path) -> None:
    assert planned(tmp_path, EIGHT, pin=False).decode.masks == ()
    plan = planned(tmp_path / "hybrid", desktop_hybrid(), pin=False)
    assert plan.decode.masks == (tuple(range(12)),) * 6
    assert not plan.decode.is_pinned
    assert planned(tmp_path / "listed", EIGHT, pin=False, cpus="2,5").decode.masks == ((2, 5), (2, 5))


def test_single_thread_needs_no_affinities() -> None:
    plan = plan_threads(Topology((Core((3,)),)), ThreadWishes(cpus="3"))
    assert (plan.decode.num_threads, plan.decode.calling_cpus, plan.decode.ort_affinities) == (1, (3,), None)


def test_affinities_name_every_thread_but_the_calling_one(tmp_path: Path) -> None:
    assert planned(tmp_path, FakeMachine(cores=pairs(3))).decode.ort_affinities == "3,4;5,6"


CORES = st.lists(
    st.builds(
        lambda size, capacity, domain: (size, capacity, domain),
        st.integers(1, 2),
        st.sampled_from([0.25, 0.5, 0.65, 0.9, 1.0]),
        st.integers(0, 1),
    ),
    min_size=1,
    max_size=12,
)


@given(CORES, st.none() | st.floats(0.05, 20), st.integers(0, 30), st.booleans())
def test_plan_keeps_its_promises_on_any_machine(
    kinds: list[tuple[int, float, int]], quota: float | None, threads: int, can_place: bool
) -> None:
    cores, cpu = [], 0
    for size, capacity, domain in kinds:
        cores.append(Core(tuple(range(cpu, cpu + size)), capacity, is_performance=capacity >= 0.68, domain=domain))
        cpu += size
    cores[0] = Core(cores[0].cpus, domain=cores[0].domain)  # the strongest, of which there always is one
    topology = Topology(tuple(cores))
    plan = plan_threads(topology, ThreadWishes(threads=threads), quota=quota, can_place=can_place)
    for group in (plan.decode, plan.prefill):
        assert group.num_threads >= 1
        assert set(group.cpus) <= set(topology.cpus)
        assert len(group.masks) in {0, group.num_threads}
        assert not group.masks or can_place
        if threads:
            assert group.num_threads == threads
        else:
            assert group.num_threads <= len(cores)
            assert quota is None or group.num_threads <= max(1.0, quota)
    assert plan.decode.num_threads <= plan.prefill.num_threads


def test_plan_of_this_process_fits_it() -> None:
    plan = read_thread_plan(ThreadWishes())
    assert 1 <= plan.decode.num_threads <= len(os.sched_getaffinity(0))
    assert set(plan.decode.cpus) <= os.sched_getaffinity(0)


def on_a_thread(cpus: Sequence[int]) -> tuple[bool, set[int]]:
    """What placing a fresh thread gave, and the CPUs it may use afterwards."""
    results: list[tuple[bool, set[int]]] = []
    thread = threading.Thread(
        target=lambda: results.append((place_calling_thread(cpus), os.sched_getaffinity(0)))  # one, then the other
    )
    thread.start()
    thread.join()
    return results[0]


def test_placing_holds_the_calling_thread_alone() -> None:
    before = os.sched_getaffinity(0)
    last = max(before)
    assert on_a_thread((last,)) == (True, {last})
    assert os.sched_getaffinity(0) == before


def test_sandbox_that_forbids_placing_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert may_place_threads()

    def refuse(pid: int, cpus: Sequence[int]) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "sched_setaffinity", refuse)
    assert not may_place_threads()
    assert read_thread_plan(ThreadWishes()).decode.masks == ()


@pytest.mark.parametrize("cpus", [(), (60_000,), (max(os.sched_getaffinity(0)),)])
def test_placing_for_a_while_is_undone(cpus: tuple[int, ...]) -> None:
    before = os.sched_getaffinity(0)
    with placed(cpus):
        assert os.sched_getaffinity(0) == (set(cpus) & before or before)
    assert os.sched_getaffinity(0) == before


@pytest.mark.parametrize("cpus", [(), (60_000,)])
def test_placing_on_cpus_that_are_not_there_changes_nothing(cpus: tuple[int, ...]) -> None:
    assert on_a_thread(cpus) == (False, os.sched_getaffinity(0))
