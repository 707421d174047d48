"""Threads of a real daemon and of real sessions: how many there are, where they run, and that idle ones stay idle."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from edgeqwen.core.model import Quant
from edgeqwen.core.package import open_package
from edgeqwen.cpu import ThreadWishes, parse_cpu_list, read_thread_plan
from edgeqwen.runtime.onnx import OnnxOptions, OnnxRuntime
from tests.daemons import DaemonProcess, running_daemon
from tests.models import all_logits, tiny_package
from tests.processes import status

OWN_THREADS = 5  # event loop, engine, text, files of sessions, files of the cache
UNSET = {"OMP_NUM_THREADS": "", "OPENBLAS_NUM_THREADS": "", "RAYON_NUM_THREADS": "", "TOKENIZERS_PARALLELISM": ""}


@contextlib.contextmanager
def held_to(*cpus: int) -> Iterator[None]:
    """What this thread starts inside is held to these CPUs, as under taskset."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cpus)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def thread_cpus(pid: int) -> dict[str, set[int]]:
    """The CPUs that each thread of a process may run on, by thread id."""
    found = {}
    for folder in Path(f"/proc/{pid}/task").iterdir():
        found[folder.name] = set(parse_cpu_list(status(folder)["Cpus_allowed_list"]))
    return found


def ready(daemon: DaemonProcess) -> DaemonProcess:
    """The daemon, once it has answered."""
    with daemon.client() as client:
        assert client.request("chat", prompt="hi", max_tokens=3, ignore_eos=True)["usage"]["completion"] == 3
    return daemon


def test_daemon_held_to_one_cpu_computes_there_with_one_thread_and_does_not_complain() -> None:
    last = max(os.sched_getaffinity(0))
    with held_to(last), running_daemon("onnx", model=tiny_package(quant="int8")) as daemon:
        threads = thread_cpus(ready(daemon).process.pid)
        stats = daemon.wait_for(running=0)["threads"]
        log = daemon.log
    assert set().union(*threads.values()) == {last}
    assert (stats["decode"], stats["prefill"]) == (1, 1)
    assert len(threads) == OWN_THREADS
    assert "affinity" not in log
    assert log.isascii()  # onnxruntime's own complaints are coloured


def test_daemon_has_no_threads_but_its_own_and_those_of_the_plan() -> None:
    plan = read_thread_plan(ThreadWishes())
    with running_daemon("onnx", model=tiny_package(quant="int8"), environ=UNSET) as daemon:
        threads = thread_cpus(ready(daemon).process.pid)
        assert daemon.wait_for(running=0)["threads"] == plan.to_dict()
        assert "affinity" not in daemon.log
        assert "fork" not in daemon.log
    assert len(threads) == OWN_THREADS + plan.decode.num_threads - 1


def test_event_loop_and_text_are_not_held_to_the_engines_core() -> None:
    with running_daemon("onnx", model=tiny_package(quant="int8")) as daemon:
        threads = thread_cpus(ready(daemon).process.pid)
    usable = os.sched_getaffinity(0)
    assert threads[str(daemon.process.pid)] == usable
    assert sum(cpus == usable for cpus in threads.values()) >= OWN_THREADS - 1


def test_threads_of_a_listed_cpu_stay_on_it_and_the_others_do_not_follow() -> None:
    usable = os.sched_getaffinity(0)
    last = max(usable)
    flags = ("--cpus", str(last), "--threads", "2")
    with running_daemon("onnx", *flags, model=tiny_package(quant="int8")) as daemon:
        threads = thread_cpus(ready(daemon).process.pid)
        log = daemon.log
    held = [cpus for cpus in threads.values() if cpus == {last}]
    assert len(held) == (2 if len(usable) > 1 else len(threads))
    assert "2 threads on 1 CPU wait for each other" in log


@pytest.mark.parametrize(("quant", "num_pools"), [("int8", 1), ("hybrid", 2)])
def test_each_thread_that_computes_has_its_place(quant: Quant, num_pools: int) -> None:
    plan = read_thread_plan(ThreadWishes())
    with running_daemon("onnx", model=tiny_package(quant=quant)) as daemon:
        threads = thread_cpus(ready(daemon).process.pid)
    pools = [plan.decode, plan.prefill][:num_pools]
    expected = [plan.decode.calling_cpus, *(mask for pool in pools for mask in pool.masks[1:])]
    held = [tuple(sorted(cpus)) for cpus in threads.values() if cpus != os.sched_getaffinity(0)]
    assert sorted(held) == sorted(filter(None, expected))
    assert len(threads) == OWN_THREADS + sum(pool.num_threads - 1 for pool in pools)


def own_threads() -> set[str]:
    return set(os.listdir("/proc/self/task"))


def busy_ns(threads: set[str]) -> int:
    """Time that threads have run (schedstat: the first number)."""
    return sum(int(Path(f"/proc/self/task/{thread}/schedstat").read_text().split()[0]) for thread in threads)


def test_idle_session_takes_no_time_from_the_one_that_works() -> None:
    if not Path("/proc/self/schedstat").exists():
        pytest.skip("this kernel does not account for threads")
    before = own_threads()
    int8 = OnnxRuntime.load(open_package(tiny_package(quant="int8")), OnnxOptions(num_threads=3))
    first = own_threads() - before
    int4 = OnnxRuntime.load(open_package(tiny_package(quant="int4")), OnnxOptions(num_threads=3))
    second = own_threads() - before - first
    try:
        assert (len(first), len(second)) == (2, 2)
        idle, working = busy_ns(first), busy_ns(second)
        for _ in range(10):
            all_logits(int4, range(200), chunk=1)
        idle, working = busy_ns(first) - idle, busy_ns(second) - working
        assert working > 0
        assert idle < 0.02 * working + 1_000_000, (idle, working)
    finally:
        int8.close()
        int4.close()


PROGRAM = """
import sys
import edgeqwen.cpu.processor as processor
old = "flags\\t\\t: fpu sse sse2 ssse3\\nmodel name\\t: Some CPU\\n"
processor.read_text = lambda path: old
processor.platform.machine = lambda: "x86_64"
from edgeqwen.cli.main import run
code = run(sys.argv[1:])
print(*sorted({"numpy", "onnxruntime", "onnx", "tokenizers"} & set(sys.modules)))
sys.exit(code)
"""


@pytest.mark.parametrize("command", [("serve", "--model"), ("bench",), ("eval",)])
def test_processor_that_is_too_old_is_told_before_a_native_library_is_loaded(command: tuple[str, ...]) -> None:
    arguments = [sys.executable, "-c", PROGRAM, *command, str(tiny_package())]
    result = subprocess.run(arguments, capture_output=True, text=True, timeout=60, check=False)
    assert (result.returncode, result.stdout) == (78, "\n")
    assert result.stderr.count("\n") == 1
    assert "Some CPU" in result.stderr
    assert "sse4_2" in result.stderr
