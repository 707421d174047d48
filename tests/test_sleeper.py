"""When a model is put to sleep, and a daemon whose model sleeps."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest

from edgeqwen.sleeper import LONGEST_LOOK_S, LOOKS, IdleClock, Sleeper
from tests.daemons import HANG_GUARD_S, DaemonProcess, running_daemon, script_of
from tests.engines import running


def test_idle_time_counts_from_the_first_look_that_finds_nothing_to_do() -> None:
    idle = IdleClock()
    looks = [(1.0, False), (2.0, True), (5.0, True), (6.0, False), (7.0, True), (9.5, True)]
    assert [idle.look(now, is_idle=is_idle, num_arrivals=3) for now, is_idle in looks] == [0, 0, 3.0, 0, 0, 2.5]


def test_a_request_between_two_looks_begins_the_time_anew() -> None:
    idle = IdleClock()
    assert idle.look(1.0, is_idle=True, num_arrivals=1) == 0
    assert idle.look(3.0, is_idle=True, num_arrivals=1) == 2.0
    assert idle.look(5.0, is_idle=True, num_arrivals=2) == 0
    assert idle.look(6.0, is_idle=True, num_arrivals=2) == 1.0


class Watched:
    """Stands for an engine: what the sleeper asks it, on a clock that its looks move on."""

    def __init__(self) -> None:
        self.now = 0.0
        self.is_idle = True
        self.num_arrivals = 0
        self.asleep_at: list[float] = []
        self.looks: list[float | None] = []

    def fall_asleep(self) -> bool:
        self.asleep_at.append(self.now)
        return True


@pytest.mark.parametrize(("after_s", "look_s"), [(100.0, 100.0 / LOOKS), (3600.0, LONGEST_LOOK_S)])
async def test_it_falls_asleep_after_the_time_that_is_set_and_looks_seldom(
    after_s: float, look_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    watched = Watched()
    inference: Any = watched
    sleeper = Sleeper(inference, after_s, clock=lambda: watched.now)

    async def pause() -> None:
        watched.now += look_s
        if watched.asleep_at:
            await asyncio.Event().wait()
        await asyncio.sleep(0)

    monkeypatch.setattr(sleeper, "_pause", pause)
    task = asyncio.create_task(sleeper.run())
    async with asyncio.timeout(20):
        while not watched.asleep_at:  # noqa: ASYNC110 -- there is no event for it
            await asyncio.sleep(0)
    task.cancel()
    assert watched.asleep_at == [pytest.approx(look_s + after_s)]


async def test_another_setting_counts_at_once() -> None:
    async with running() as rig:
        sleeper = Sleeper(rig.inference, 0.0, clock=asyncio.get_running_loop().time)
        task = asyncio.create_task(sleeper.run())
        await asyncio.sleep(0.05)
        sleeper.set_after(0.05)
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


def test_a_daemon_falls_asleep_says_so_and_answers_again(tmp_path: Path) -> None:
    environ = {"EDGEQWEN_SERVICE_IDLE_UNLOAD_S": "0.3"}
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
