"""Notifying a service manager: a stand-in for it listens."""

from __future__ import annotations

import asyncio
import contextlib
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgeqwen.errors import ConfigInvalid
from edgeqwen.runtime.fake import FakeScript
from edgeqwen.service import Inheritance, Manager, Notifier, progress
from edgeqwen.service.progress import LEAST_GROWTH_BYTES, LoadReport, LoadSigns
from edgeqwen.service.watchdog import Watchdog, watchdog_interval_s
from tests.engines import eos, ids, running


@pytest.fixture
def manager() -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.settimeout(5)
        yield sock


def test_states_arrive_in_order(manager: socket.socket, tmp_path: Path) -> None:
    manager.bind(str(tmp_path / "notify"))
    notifier = Notifier({"NOTIFY_SOCKET": str(tmp_path / "notify")})
    notifier.status("loading")
    notifier.ready("serving")
    notifier.stopping()
    assert [manager.recv(200) for _ in range(3)] == [b"STATUS=loading", b"READY=1\nSTATUS=serving", b"STOPPING=1"]


def test_a_reload_is_told_from_its_begin_to_its_end_whatever_comes_of_it(
    manager: socket.socket, tmp_path: Path
) -> None:
    manager.bind(str(tmp_path / "notify"))
    notifier = Notifier({"NOTIFY_SOCKET": str(tmp_path / "notify")})
    with notifier.reloading(5):
        pass  # not ready yet, and nobody is to believe so
    notifier.ready("serving")
    with notifier.reloading(7):
        assert manager.recv(200) == b"READY=1\nSTATUS=serving"
        assert manager.recv(200) == b"RELOADING=1\nMONOTONIC_USEC=7"
    assert manager.recv(200) == b"READY=1\nSTATUS=serving"
    with pytest.raises(ValueError, match="wrong"), notifier.reloading(8):
        raise ValueError("wrong")
    notifier.stopping()
    expected = [b"RELOADING=1\nMONOTONIC_USEC=8", b"READY=1\nSTATUS=serving", b"STOPPING=1"]
    assert [manager.recv(200) for _ in range(3)] == expected


def test_abstract_address(manager: socket.socket, tmp_path: Path) -> None:
    name = f"edgeqwen-{tmp_path.name}-{id(manager)}"
    manager.bind(f"\0{name}")
    Notifier({"NOTIFY_SOCKET": f"@{name}"}).stopping()
    assert manager.recv(100) == b"STOPPING=1"


@pytest.mark.parametrize("environ", [{}, {"NOTIFY_SOCKET": ""}, {"NOTIFY_SOCKET": "/nowhere/at/all"}])
def test_no_manager_is_no_error(environ: dict[str, str]) -> None:
    notifier = Notifier(environ)
    notifier.ready("serving")
    notifier.stopping()


def test_a_status_is_one_line(manager: socket.socket, tmp_path: Path) -> None:
    manager.bind(str(tmp_path / "notify"))
    Notifier({"NOTIFY_SOCKET": str(tmp_path / "notify")}).status("it broke:\nREADY=1")
    assert manager.recv(200) == b"STATUS=it broke: READY=1"


# What stands in the environment.


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, None),
        ({"WATCHDOG_USEC": "500000"}, 0.5),
        ({"WATCHDOG_USEC": "500000", "WATCHDOG_PID": "7"}, 0.5),
        ({"WATCHDOG_USEC": "500000", "WATCHDOG_PID": "8"}, None),
        ({"WATCHDOG_USEC": "0"}, None),
        ({"WATCHDOG_USEC": "-5"}, None),
        ({"WATCHDOG_USEC": "soon"}, None),
    ],
)
def test_who_is_to_be_heard_of_and_how_often(environ: dict[str, str], expected: float | None) -> None:
    assert watchdog_interval_s(environ, 7) == expected


@given(st.dictionaries(st.sampled_from(["LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES"]), st.text(max_size=9)))
def test_a_child_finds_nothing_of_the_manager_and_nonsense_means_nothing(given_environ: dict[str, str]) -> None:
    environ = given_environ | {"NOTIFY_SOCKET": "/x", "WATCHDOG_USEC": "5", "WATCHDOG_PID": "", "PATH": "/bin"}
    inheritance = Inheritance.take(environ, 7) if environ.get("LISTEN_PID") != "7" else Inheritance()
    assert not inheritance
    Manager.take(environ, 7, inheritance)
    assert {"NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID"}.isdisjoint(environ)
    assert environ["PATH"] == "/bin"


def test_more_sockets_than_any_unit_has_are_a_mistake() -> None:
    with pytest.raises(ConfigInvalid, match="LISTEN_FDS"):
        Inheritance.take({"LISTEN_PID": "7", "LISTEN_FDS": "100000"}, 7)


# Progress.


def test_what_counts_as_progress() -> None:
    signs = LoadSigns(0.5, 1000, 1 << 30)
    assert not signs.differs_from(signs)
    assert not LoadSigns(0.5, 1000, (1 << 30) + LEAST_GROWTH_BYTES - 1).differs_from(signs)
    assert not LoadSigns(0.5, 1000, 1 << 29).differs_from(signs), "what is freed is no progress"
    assert LoadSigns(0.6, 1000, 1 << 30).differs_from(signs)
    assert LoadSigns(0.5, 1001, 1 << 30).differs_from(signs)
    assert LoadSigns(0.5, 1000, (1 << 30) + LEAST_GROWTH_BYTES).differs_from(signs)


def test_signs_are_read_of_this_process() -> None:
    signs = LoadSigns.read(0.25)
    assert signs.progress == 0.25
    assert signs.resident_bytes > 1 << 20
    ballast = bytearray(8 << 20)
    assert LoadSigns.read(0.25).differs_from(signs)
    assert ballast


async def test_more_time_is_asked_for_only_when_something_has_come_of_the_last(
    manager: socket.socket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager.bind(str(tmp_path / "notify"))
    manager.setblocking(False)
    monkeypatch.setattr(progress, "REPORT_S", 0.0)
    signs = iter([(0.0, 0), (0.1, 0), (0.1, 0), (0.1, 7), *[(0.1, 7)] * 3, (0.42, 7)])
    over = asyncio.Event()

    def read() -> LoadSigns:
        found = next(signs, None)
        if found is None:
            over.set()
            found = (0.42, 7)
        return LoadSigns(*found, 0)

    task = asyncio.create_task(LoadReport(Notifier({"NOTIFY_SOCKET": str(tmp_path / "notify")}), read).run())
    async with asyncio.timeout(20):
        await over.wait()
    task.cancel()
    told = []
    with contextlib.suppress(BlockingIOError):
        while True:
            told.append(manager.recv(200).decode())
    assert told == [f"EXTEND_TIMEOUT_USEC=30000000\nSTATUS=loading the model, {at}%" for at in (10, 10, 42)]


# The watchdog.


class Told(Notifier):
    """Notes what it is told."""

    def __init__(self) -> None:
        super().__init__({})
        self.texts: list[str] = []

    def _send(self, text: str) -> None:
        self.texts.append(re.sub(r"\d+ s", "N s", text))


class Watched:
    """A watchdog whose engine answers while `answers` is set, on a clock that stands still between looks."""

    def __init__(self, interval_s: float = 60.0) -> None:
        self.now = 0.0
        self.answers = True
        self.signs: LoadSigns | None = None
        self.num_dumps = 0
        self.told = Told()
        self.dog = Watchdog(
            self.told,
            interval_s,
            ask=self._ask,
            read_signs=lambda: self.signs,
            clock=lambda: self.now,
            dump=self._dump,
        )

    async def _ask(self) -> None:
        while not self.answers:  # noqa: ASYNC110 -- stands for a thread
            await asyncio.sleep(0)

    def _dump(self) -> None:
        self.num_dumps += 1

    async def look(self, lag_s: float = 0.0) -> list[str]:
        """A quarter of an interval goes by; what is told at its end."""
        del self.told.texts[:]
        self.dog._put_question()
        for _ in range(3):
            await asyncio.sleep(0)
        self.now += self.dog.look_s + lag_s
        self.dog._look(lag_s=lag_s)
        return list(self.told.texts)


async def test_each_answer_is_passed_on() -> None:
    watched = Watched()
    assert [await watched.look() for _ in range(8)] == [["WATCHDOG=1"]] * 8
    assert not watched.num_dumps


async def test_an_engine_that_does_not_answer_is_shown_once_and_given_up_after_an_interval() -> None:
    watched = Watched()
    await watched.look()
    watched.answers = False
    status = "STATUS=the engine has not answered for N s"
    assert [await watched.look() for _ in range(5)] == [
        [],
        [status],
        [],
        ["WATCHDOG=trigger"],
        ["WATCHDOG=trigger"],
    ]
    assert watched.num_dumps == 1
    watched.answers = True
    assert await watched.look() == ["WATCHDOG=1"], "it was slow only"
    watched.answers = False
    assert [await watched.look() for _ in range(2)] == [[], [status]]
    assert watched.num_dumps == 2


async def test_a_loop_that_was_blocked_is_not_called_well() -> None:
    watched = Watched()
    assert await watched.look(lag_s=30.0) == []
    assert await watched.look(lag_s=0.5) == ["WATCHDOG=1"]
    short = Watched(0.4)
    assert await short.look(lag_s=0.2) == [], "behind by more than the time between two looks"


async def test_loading_answers_by_what_it_reads_and_a_stalled_load_does_not() -> None:
    watched = Watched()
    await watched.look()
    watched.answers = False
    for done in (0.1, 0.2, 0.3):
        watched.signs = LoadSigns(done, 0, 0)
        assert await watched.look() == ["WATCHDOG=1"]
    assert await watched.look() == []
    assert (await watched.look())[0].startswith("STATUS=")
    watched.answers, watched.signs = True, None
    assert await watched.look() == ["WATCHDOG=1"]


async def test_the_engine_thread_answers_between_two_steps() -> None:
    async with running(FakeScript(tokens=(*ids("a" * 30), eos()), step_s=0.02)) as rig:
        _, listener = await rig.submit(max_tokens=30)
        num_answers = 0
        while not listener.over.is_set():
            await rig.inference.answer()
            num_answers += 1
        assert num_answers >= 5


@pytest.mark.parametrize(("longest_step_s", "is_cut"), [(None, False), (0.02, True)])
async def test_a_short_interval_cuts_the_steps_of_prompts(longest_step_s: float | None, is_cut: bool) -> None:
    script = FakeScript(tokens=(eos(),), prefill_token_s=0.001)
    async with running(script, longest_step_s=longest_step_s) as rig:
        for letter in "ab":  # the first prompt shows how long a token takes
            await rig.run(prompt=letter * 150, max_tokens=1)
        sizes = [len(chunk.ids) for batch in rig.runtime.batches[2:] for chunk in batch.chunks]
        assert (max(sizes) < 60) == is_cut


def test_a_watchdog_wants_an_answer_several_times_in_its_interval() -> None:
    assert Manager(Notifier({}), watchdog_s=0.2).longest_step_s == pytest.approx(0.05)
    assert Manager(Notifier({})).longest_step_s is None


def test_what_a_child_writes_is_progress(tmp_path: Path) -> None:
    """A package may have to be remade first, by another process."""
    before = LoadSigns.read(0.0)
    program = "import os,sys,time; f=open(sys.argv[1],'wb'); f.write(b'x'*(1<<20)); f.flush(); os.fsync(f); "
    program += "print(flush=True); time.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", program, str(tmp_path / "f")], stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        during = LoadSigns.read(0.0)
        child.kill()
    assert during.moved_bytes - before.moved_bytes >= 1 << 20


def test_signs_are_nothing_where_proc_does_not_tell(tmp_path: Path) -> None:
    assert LoadSigns.read(0.5, tmp_path).moved_bytes == 0
