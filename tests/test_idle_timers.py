"""When a model is put to sleep, and a daemon whose model sleeps."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest

from edgeqwen.idle import LONGEST_LOOK_S, LOOKS, IdleClock, IdleTimer, Sight, sleep_timer
from tests.daemons import HANG_GUARD_S, DaemonProcess, running_daemon, script_of
from tests.engines import running
from tests.models import smollm2_package
from tests.processes import status, work_of


def test_idle_time_counts_from_the_first_look_that_finds_nothing_to_do() -> None:
    idle = IdleClock()
    looks = [(1.0, False), (2.0, True), (5.0, True), (6.0, False), (7.0, True), (9.5, True)]
    assert [idle.look(now, Sight(is_idle, 3)) for now, is_idle in looks] == [0, 0, 3.0, 0, 0, 2.5]


def test_what_comes_between_two_looks_begins_the_time_anew() -> None:
    idle = IdleClock()
    looks = [(1.0, 1), (3.0, 1), (5.0, 2), (6.0, 2)]
    assert [idle.look(now, Sight(True, num_events)) for now, num_events in looks] == [0, 2.0, 0, 1.0]


@pytest.mark.parametrize(("after_s", "look_s"), [(100.0, 100.0 / LOOKS), (3600.0, LONGEST_LOOK_S)])
async def test_it_is_acted_after_the_time_that_is_set_and_looked_seldom(
    after_s: float, look_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0.0
    acts: list[float] = []
    acted = asyncio.Event()

    async def act(idle_s: float) -> None:
        acts.append(idle_s)
        acted.set()
        await asyncio.Event().wait()

    async def wait_for(_: float | None) -> None:
        nonlocal now
        now += look_s
        await asyncio.sleep(0)

    timer = IdleTimer(after_s, look=lambda: Sight(True, 0), act=act, clock=lambda: now)
    monkeypatch.setattr(timer, "_pause", lambda: wait_for(None))
    task = asyncio.create_task(timer.run())
    async with asyncio.timeout(20):
        await acted.wait()
    task.cancel()
    assert acts == [pytest.approx(after_s)]
    assert now == pytest.approx(after_s + look_s)


async def test_another_setting_counts_at_once() -> None:
    async with running() as rig:
        timer = sleep_timer(rig.inference, 0.0, clock=asyncio.get_running_loop().time)
        task = asyncio.create_task(timer.run())
        await asyncio.sleep(0.05)
        timer.set_after(0.05)
        async with asyncio.timeout(20):
            while rig.inference.state != "asleep":  # noqa: ASYNC110 -- there is no event for it
                await asyncio.sleep(0.005)
        task.cancel()


# The daemon.


def until_asleep(daemon: DaemonProcess) -> None:
    give_up_at = time.monotonic() + HANG_GUARD_S
    with daemon.client() as client:
        while (health := client.health())["state"] != "asleep":
            assert time.monotonic() < give_up_at, health
            time.sleep(0.01)


def test_a_daemon_falls_asleep_says_so_and_answers_again() -> None:
    environ = {"EDGEQWEN_SERVICE_IDLE_UNLOAD_S": "0.3", "EDGEQWEN_KV_DISK_MB": "0"}
    with (
        running_daemon(runtime=script_of("one", "two"), environ=environ) as daemon,
        daemon.client() as client,
    ):
        session = client.session_create()
        assert client.chat("hi", session=session).text == "one"
        until_asleep(daemon)
        assert client.ready()
        assert client.chat("hi again", session=session).text == "one", "the script begins anew with the model"
        assert client.session_get(session)["turns"] == 2
        until_asleep(daemon)
        assert daemon.log.count(" asleep ") == 2


def test_a_daemon_that_sleeps_ends_when_it_is_told_to() -> None:
    environ = {"EDGEQWEN_SERVICE_IDLE_UNLOAD_S": "0.2"}
    with running_daemon(runtime=script_of("one"), environ=environ) as daemon:
        daemon.wait_until_ready()
        until_asleep(daemon)
        daemon.process.terminate()
        assert daemon.wait() == 0


MOST_ASLEEP_BYTES = 120 << 20
MOST_ASLEEP_CPU = 0.02
"""Of one core; a daemon that has nothing to do looks twice a minute."""


def test_a_real_model_that_sleeps_takes_little_memory_and_no_time_and_knows_its_conversations() -> None:
    environ = {"EDGEQWEN_SERVICE_IDLE_UNLOAD_S": "1", "EDGEQWEN_ENGINE_RUNTIME": "onnx"}
    with running_daemon("onnx", model=smollm2_package("int8"), environ=environ) as daemon, daemon.client() as client:
        session = client.session_create()
        client.chat("Write one sentence on rivers.", session=session, max_tokens=40, temperature=0)
        form = {"type": "regex", "regex": "(yes|no)"}
        assert client.chat("Is water wet?", response_format=form, max_tokens=5).text in {"yes", "no"}
        until_asleep(daemon)
        pid = daemon.process.pid
        time.sleep(0.5)  # what is given back is given back on the engine thread
        before = work_of(pid)
        time.sleep(3.0)
        assert (work_of(pid) - before).cpu_ns <= 3e9 * MOST_ASLEEP_CPU
        assert int(status(Path(f"/proc/{pid}"))["VmRSS"].split()[0]) << 10 <= MOST_ASLEEP_BYTES
        answer = client.chat("And one on seas.", session=session, max_tokens=1)
        assert answer.usage.cached > 40
