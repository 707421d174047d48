"""`edgeqwen top`: what is shown, on any terminal, and that the terminal is as before afterwards."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
import unicodedata
from collections.abc import Iterator
from fcntl import ioctl
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgeqwen.cli.top_view import cut, no_answer, screen, size_text, table, time_text
from tests.daemons import HANG_GUARD_S, DaemonProcess, run_command, running_daemon, script_of

STATS: dict[str, Any] = {
    "uptime_s": 3725,
    "rss_bytes": 250_000_000,
    "slots": 8,
    "waiting": 3,
    "tok_s": {"prefill": 812.4, "decode": 101.25},
    "scope": "all",
    "conns": 5,
    "running": 2,
    "queued": 1,
    "sessions": 4,
    "kv_bytes": 84_000_000,
    "totals": {"requests": 90, "errors": 1, "tokens": 4000},
    "kv": {"budget_bytes": 2_000_000_000, "disk_bytes": 50_000_000, "cached": 300, "computed": 100},
    "requests": [
        {
            "rid": f"r{n}",
            "owner": "1000",
            "kind": "generation",
            "state": "decode",
            "prompt": 10 * n,
            "cached": n,
            "tokens": 7,
            "tok_s": 12.5,
            "age_s": 3.1,
        }
        for n in range(30)
    ],
}
FACTS = {"model": "模型-model", "quant": "int8"}


def columns(text: str) -> int:
    return sum(0 if unicodedata.combining(c) else 2 if unicodedata.east_asian_width(c) in "WF" else 1 for c in text)


def test_what_is_shown() -> None:
    lines = screen({"state": "ready"}, STATS, FACTS, width=120, height=60)
    assert lines[:5] == [
        "edgeqwen  模型-model int8  ready  up 1:02:05",
        "requests  2 running, 1 queued, 8 slots  |  90 in all, 1 failed",
        "speed     prompts 812, answers 101.2 tokens/s  |  4000 tokens generated",
        "cache     84 MB of 2.00 GB in memory, 50 MB on disk  |  75% of prompt tokens were cached",
        "memory    250 MB  |  4 sessions, 5 connections",
    ]
    assert lines[6].split() == ["RID", "OWNER", "KIND", "STATE", "PROMPT", "CACHED", "TOKENS", "TOK/S", "AGE"]
    assert lines[8].split() == ["r1", "1000", "generation", "decode", "10", "1", "7", "12.5", "3.1"]
    assert len(lines) == 37


def test_others_than_admins_see_their_own_and_no_owners() -> None:
    requests = [{key: value for key, value in each.items() if key != "owner"} for each in STATS["requests"]]
    own = {key: value for key, value in STATS.items() if key != "conns"} | {"requests": requests, "scope": "own"}
    text = "\n".join(screen({"state": "loading", "progress": 0.42}, own | {"kv": {}}, {}, width=100, height=50))
    assert "OWNER" not in text
    assert "2 running, 1 queued (3 of everybody), 8 slots" in text
    assert "loading the model (42%)" in text


@given(st.integers(1, 200), st.integers(1, 60), st.text(max_size=30))
def test_nothing_stands_out_of_the_terminal(width: int, height: int, name: str) -> None:
    lines = screen({"state": "asleep"}, STATS, {"model": name}, width=width, height=height)
    assert len(lines) <= height
    assert all(columns(line) <= width for line in lines)
    assert not any(unicodedata.category(char).startswith("C") for line in lines for char in line)
    failure = no_answer(name, width=width, height=height)
    assert len(failure) <= height
    assert all(columns(line) <= width for line in failure)


@given(st.text(max_size=30))
def test_columns_stand_below_their_heads_whatever_is_in_them(owner: str) -> None:
    head, *lines = table([STATS["requests"][0] | {"owner": owner}])
    assert [columns(line) for line in lines] == [columns(head)]


def test_sizes_and_times() -> None:
    assert [size_text(n) for n in (0, 84_400_000, 1_234_000_000)] == ["0 MB", "84 MB", "1.23 GB"]
    assert [time_text(s) for s in (0, 3661, 90_061)] == ["0:00:00", "1:01:01", "1d 01:01"]
    assert cut("日本語", 5) == "日本"


def test_once_and_json_are_for_programs() -> None:
    with running_daemon(script_of("x")) as daemon:
        daemon.wait_until_ready()
        text = run_command("top", "--socket", str(daemon.socket_path)).stdout.decode()
        assert text.startswith("edgeqwen  fake fp32  ready")
        assert "\x1b" not in text
        found = json.loads(run_command("top", "--once", "--json", "--socket", str(daemon.socket_path)).stdout)
        assert (found["state"], found["requests"]) == ("ready", [])
    assert run_command("top", "--once", "--socket", str(daemon.socket_path)).returncode == 69


def test_a_request_is_shown_while_it_runs_and_not_what_it_says() -> None:
    with running_daemon(script_of("secret " * 20, step_s=0.05)) as daemon, daemon.client() as client:
        frames = client.stream("chat", prompt="private", stream=True)
        rid = next(frames)["rid"]
        give_up_at = time.monotonic() + HANG_GUARD_S
        with daemon.client() as other:
            while not (shown := other.stats()["requests"]) or shown[0]["state"] != "decode" or not shown[0]["tokens"]:
                assert time.monotonic() < give_up_at, shown
                time.sleep(0.01)
        assert shown[0]["rid"] == rid
        assert shown[0]["owner"] == str(os.getuid())
        assert shown[0]["prompt"] > 7
        assert "secret" not in json.dumps(shown)
        assert "private" not in json.dumps(shown)


class Terminal:
    """The other end of one."""

    def __init__(self, fd: int, process: subprocess.Popen[bytes]) -> None:
        self.fd = fd
        self.process = process
        self.text = ""

    def until(self, pattern: str) -> None:
        give_up_at = time.monotonic() + HANG_GUARD_S
        while not re.search(pattern, self.text):
            assert time.monotonic() < give_up_at, self.text[-2000:]
            if select.select([self.fd], [], [], 0.1)[0]:
                with contextlib.suppress(OSError):
                    self.text += os.read(self.fd, 65_536).decode("utf-8", "replace")

    def resize(self, width: int, height: int) -> None:
        ioctl(self.fd, termios.TIOCSWINSZ, struct.pack("HHHH", height, width, 0, 0))


@contextlib.contextmanager
def on_a_terminal(path: Path, *, interval_s: float = 0.1, width: int = 100, height: int = 30) -> Iterator[Terminal]:
    """`edgeqwen top` on one that is its controlling terminal, so that it hears of keys and of sizes."""
    ours, theirs = pty.openpty()
    before = termios.tcgetattr(theirs)
    top = [sys.executable, "-m", "edgeqwen", "top", "--interval", str(interval_s), "--socket", str(path)]
    take = "import fcntl, os, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); os.execv(sys.argv[1], sys.argv[1:])"
    command = [sys.executable, "-c", take, *top]
    ioctl(ours, termios.TIOCSWINSZ, struct.pack("HHHH", height, width, 0, 0))
    process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True)
    terminal = Terminal(ours, process)
    try:
        yield terminal
        assert process.wait(HANG_GUARD_S) is not None
        terminal.until(r"\x1b\[\?1049l")
        assert termios.tcgetattr(theirs) == before
    finally:
        process.kill()
        process.wait()
        os.close(ours)
        os.close(theirs)


@pytest.mark.parametrize("way", ["q", "ctrl-c", "term"])
def test_however_it_ends_the_terminal_is_as_before(way: str) -> None:
    with running_daemon(script_of("x")) as daemon, on_a_terminal(daemon.socket_path) as terminal:
        terminal.until("edgeqwen  fake fp32  ready")
        if way == "term":
            terminal.process.send_signal(signal.SIGTERM)
        elif way == "ctrl-c":
            os.write(terminal.fd, b"\x1a\x03")  # the first would suspend it
        else:
            os.write(terminal.fd, b"q")


def test_another_size_of_the_terminal_is_seen_at_once_and_none_is_no_mishap() -> None:
    with running_daemon(script_of("x")) as daemon:
        daemon.wait_until_ready()
        with on_a_terminal(daemon.socket_path, interval_s=10 * HANG_GUARD_S, width=0, height=0) as terminal:
            terminal.until("edgeqwen  fake fp32  ready")
            terminal.resize(20, 6)
            terminal.until(r"edgeqwen  fake fp32 \x1b\[K")
            os.write(terminal.fd, b"q")


def test_it_waits_for_a_daemon_that_has_gone_and_follows_the_size_of_the_terminal() -> None:
    def stop(daemon: DaemonProcess) -> None:
        daemon.process.terminate()
        daemon.wait()

    with running_daemon(script_of("x")) as daemon, on_a_terminal(daemon.socket_path) as terminal:
        terminal.until("ready")
        terminal.resize(20, 6)
        terminal.until(r"edgeqwen  fake fp32 \x1b\[K")
        stop(daemon)
        terminal.until("trying again")
        os.write(terminal.fd, b"q")
