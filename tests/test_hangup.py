"""SIGHUP ends a daemon whose terminal has closed, and asks any other for a reload; one told to ignore it does."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from edgeqwen import hangup
from edgeqwen.client import Client
from tests.daemons import (
    HANG_GUARD_S,
    DaemonProcess,
    running_daemon,
    script_of,
    wait_until_listening,
    write_text_model,
)

WITH_TERMINAL: Final = """
import fcntl, os, sys, termios
os.setsid()
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
os.execv(sys.executable, [sys.executable, "-m", "edgeqwen", *sys.argv[1:]])
"""


def wait_for_log(daemon: DaemonProcess, text: str, *, times: int = 1) -> None:
    give_up_at = time.monotonic() + HANG_GUARD_S
    while daemon.log.count(text) < times:
        assert daemon.process.poll() is None, daemon.log
        assert time.monotonic() < give_up_at, daemon.log
        time.sleep(0.01)


@contextlib.contextmanager
def daemon_of_a_terminal(folder: Path, script: str) -> Iterator[tuple[DaemonProcess, int]]:
    """A daemon, and the other end of the terminal that it belongs to."""
    ours, theirs = os.openpty()
    flags = [
        "serve",
        "--runtime",
        script,
        "--model",
        str(write_text_model(folder / "m")),
        "--socket",
        str(folder / "s"),
    ]
    env = {**os.environ, "STATE_DIRECTORY": str(folder / "state")}
    with (folder / "log").open("wb") as log:
        command = [sys.executable, "-c", WITH_TERMINAL, *flags]
        process = subprocess.Popen(command, stdin=theirs, stdout=log, stderr=log, env=env)
    os.close(theirs)
    daemon = DaemonProcess(process, folder / "s", folder / "log")
    try:
        wait_until_listening(daemon)
        yield daemon, ours
    finally:
        process.kill()
        process.wait()
        with contextlib.suppress(OSError):
            os.close(ours)


def test_a_daemon_whose_terminal_closes_lets_the_running_answer_end(tmp_path: Path) -> None:
    with daemon_of_a_terminal(tmp_path, script_of("to the end", step_s=0.05)) as (daemon, terminal):
        with daemon.client() as client:
            frames = client.stream("chat", prompt="x", stream=True)
            next(frames)
            os.close(terminal)
            assert [*frames][-1]["finish"] == "stop"
        assert daemon.wait() == 0
        assert not daemon.socket_path.exists()
        assert "stopping signal=SIGHUP" in daemon.log


def test_sighup_is_no_end_while_the_terminal_is_there(tmp_path: Path) -> None:
    with daemon_of_a_terminal(tmp_path, "fake:") as (daemon, _):
        daemon.process.send_signal(signal.SIGHUP)
        wait_for_log(daemon, "reload_failed by=SIGHUP")
        with daemon.client() as client:
            assert client.request("health")["ok"]
        daemon.process.send_signal(signal.SIGTERM)
        assert daemon.wait() == 0


def test_ctrl_c_in_a_terminal_is_exit_130(tmp_path: Path) -> None:
    with daemon_of_a_terminal(tmp_path, script_of("x")) as (daemon, terminal):
        daemon.wait_until_ready()
        os.write(terminal, b"\x03")
        assert daemon.wait() == 130
        wait_for_log(daemon, "stopped")


def noting(asked: list[str]) -> Callable[[str], dict[str, Any]]:
    """A reload that notes who asked for it."""

    def reload(who: str) -> dict[str, Any]:
        asked.append(who)
        return {}

    return reload


async def test_a_terminal_that_closes_soon_after_the_signal_ends_the_daemon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some shells send it to what runs in their background before they end."""
    there = iter([True, True, False])
    monkeypatch.setattr(hangup, "has_terminal", lambda: next(there))
    monkeypatch.setattr(hangup, "LOOK_AGAIN_S", 0.0)
    has_ended = asyncio.Event()
    asked: list[str] = []
    watch = hangup.Hangup(has_ended.set)
    watch.begin(noting(asked))
    watch.on_signal()
    assert asked == ["SIGHUP"]
    assert not has_ended.is_set()
    await asyncio.wait_for(has_ended.wait(), HANG_GUARD_S)


async def test_a_signal_that_comes_too_early_is_made_up_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hangup, "has_terminal", lambda: False)
    asked: list[str] = []
    watch = hangup.Hangup(lambda: None)
    watch.on_signal()
    watch.on_signal()
    watch.begin(noting(asked))
    assert asked == ["SIGHUP"]


def test_without_a_configuration_there_is_none_to_read_again() -> None:
    with running_daemon("fake:") as daemon:
        daemon.process.send_signal(signal.SIGHUP)
        wait_for_log(daemon, 'WARNING reload_failed by=SIGHUP error="there is no configuration to read again')
        with daemon.client() as client:
            assert client.request("health")["ok"]


def test_sighup_that_was_ignored_at_the_start_stays_ignored(tmp_path: Path) -> None:
    flags = ["serve", "--runtime", "fake:", "--model", str(write_text_model(tmp_path / "m"))]
    command = ["sh", "-c", 'trap "" HUP; exec "$0" "$@"', sys.executable, "-m", "edgeqwen", *flags]
    command += ["--socket", str(tmp_path / "s")]
    with subprocess.Popen(command, stderr=subprocess.PIPE) as process:
        try:
            assert process.stderr is not None
            while b"ready" not in process.stderr.readline():
                assert process.poll() is None
            process.send_signal(signal.SIGHUP)
            with Client.connect(tmp_path / "s") as client:
                assert client.request("ready")["ok"]
            process.send_signal(signal.SIGTERM)
            assert process.wait(HANG_GUARD_S) == 0
            assert b"reload" not in process.stderr.read()
        finally:
            process.kill()
