"""A daemon that has nothing to compute leaves the processor alone, whoever is connected."""

from __future__ import annotations

import contextlib
import socket
import statistics
import time
from collections.abc import Iterator

import pytest

from edgeqwen.core.model import Quant
from tests.daemons import HANG_GUARD_S, DaemonProcess, running_daemon, script_of
from tests.models import tiny_package
from tests.processes import Work, needs_thread_accounting, work_of

WATCHED_S = 2.0
MOST_CPU = 0.01
"""Of one core."""

MOST_SLEEPS_A_S = 10
"""Of all threads together: a peer that is not read from is looked after four times a second."""

OTHERS = (b'{"op":"health"}\n', b'{"op":', b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
UNREAD = b'{"op":"chat","id":1,"prompt":"hi","max_tokens":1500,"ignore_eos":true,"stream":true}\n'


@pytest.fixture(autouse=True)
def _accounting() -> None:
    needs_thread_accounting()


def watch(daemon: DaemonProcess) -> Work:
    """What the daemon does in `WATCHED_S`."""
    before = work_of(daemon.process.pid)
    time.sleep(WATCHED_S)
    return work_of(daemon.process.pid) - before


def assert_quiet(work: Work) -> None:
    assert work.cpu_ns < MOST_CPU * WATCHED_S * 1e9, work
    assert work.num_sleeps < MOST_SLEEPS_A_S * WATCHED_S, work


@contextlib.contextmanager
def connected(daemon: DaemonProcess, *requests: bytes) -> Iterator[None]:
    """A connection for each of `requests`, which has had the beginning of its answer if one is due, and stays open."""
    with contextlib.ExitStack() as stack:
        for request in requests:
            sock = stack.enter_context(socket.socket(socket.AF_UNIX))
            sock.settimeout(HANG_GUARD_S)
            sock.connect(str(daemon.socket_path))
            sock.sendall(request)
            if request.endswith(b"\n"):
                assert sock.recv(1)
        yield


@pytest.mark.parametrize("quant", ["int8", "hybrid"])
def test_daemon_with_four_open_connections_is_quiet_as_soon_as_its_last_answer_is_over(quant: Quant) -> None:
    with running_daemon("onnx", "--threads", "3", model=tiny_package(quant=quant)) as daemon:
        with daemon.client() as client:
            client.request("chat", prompt="hi", max_tokens=1, ignore_eos=True)  # the model is loaded
        with connected(daemon, *OTHERS, UNREAD), daemon.client() as client:
            client.request("chat", prompt="hi", max_tokens=20, ignore_eos=True)
            daemon.wait_for(running=0, conns=6)
            assert_quiet(watch(daemon))


def pauses(daemon: DaemonProcess) -> list[int]:
    """The nanoseconds of work in each of ten pauses, shortly after a short answer has come."""
    worked: list[int] = []
    with daemon.client() as client:
        for _ in range(10):
            client.request("chat", prompt="hi", max_tokens=4, ignore_eos=True)
            time.sleep(0.005)
            before = work_of(daemon.process.pid)
            time.sleep(0.2)
            worked.append((work_of(daemon.process.pid) - before).cpu_ns)
    return worked


def test_threads_that_compute_do_not_keep_themselves_awake_between_answers() -> None:
    with running_daemon("onnx", "--threads", "2", model=tiny_package(quant="int8")) as daemon:
        pauses(daemon)
        assert statistics.median(pauses(daemon)) < 5e6  # left to themselves they spin for 20 to 50 milliseconds


def test_slow_stream_costs_by_its_steps_and_nothing_in_between() -> None:
    no_guesses = {"EDGEQWEN_ENGINE_SPECULATION": "false"}
    with (
        running_daemon(script_of("a" * 2000, step_s=0.05), environ=no_guesses) as daemon,
        connected(daemon, UNREAD, *OTHERS),
    ):
        first = daemon.wait_for(running=1)["totals"]["tokens"]
        work = watch(daemon)
        num_steps = daemon.wait_for(running=1)["totals"]["tokens"] - first
    assert 1 < num_steps <= WATCHED_S / 0.05 + 10
    assert work.cpu_ns < 15e6 * num_steps, work
    assert work.num_sleeps < 10 * num_steps + MOST_SLEEPS_A_S * WATCHED_S, work
