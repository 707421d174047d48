"""Sessions at the command line, and what is left of them when the daemon is gone."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from edgeqwen.cli.sessions import duration
from edgeqwen.client import Client
from tests.daemons import DaemonProcess, run_command, running_daemon, script_of

NOBODY = 65534


@pytest.fixture
def state(tmp_path: Path) -> dict[str, str]:
    """The environment of daemons that keep sessions in one place, one after the other."""
    return {"STATE_DIRECTORY": str(tmp_path / "state")}


@pytest.fixture
def daemon(state: dict[str, str]) -> Iterator[DaemonProcess]:
    with running_daemon(script_of("yes"), environ=state) as running:
        yield running


def run(daemon: DaemonProcess, *arguments: str, stdin: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    """A command, whose options come last."""
    return run_command(*arguments, "--socket", str(daemon.socket_path), stdin=stdin)


def out(daemon: DaemonProcess, *arguments: str, stdin: bytes = b"") -> str:
    """What a command that must work prints."""
    result = run(daemon, *arguments, stdin=stdin)
    assert (result.returncode, result.stderr) == (0, b""), result.stderr
    return result.stdout.decode()


def rows(daemon: DaemonProcess) -> list[dict[str, Any]]:
    return [json.loads(line) for line in out(daemon, "sessions", "list", "--json").splitlines()]


def contents(daemon: DaemonProcess, name: str) -> list[str]:
    frame = json.loads(out(daemon, "sessions", "show", name, "--json"))
    return [message["content"] for message in frame["messages"]]


def test_ask_begins_a_session_and_goes_on_with_it(daemon: DaemonProcess) -> None:
    assert out(daemon, "ask", "one", "--session", "notes", "--system", "Be brief.") == "yes\n"
    assert out(daemon, "ask", "two", "--session", "notes") == "yes\n"
    frame = json.loads(out(daemon, "ask", "three", "--session", "notes", "--system", "Be brief.", "--json"))
    assert frame["rev"] == 3
    assert (
        contents(daemon, "notes") == contents(daemon, frame["session"]) == ["one", "yes", "two", "yes", "three", "yes"]
    )
    refused = run(daemon, "ask", "x", "--session", "notes", "--system", "Be long.")
    assert (refused.returncode, refused.stderr.count(b"\n")) == (64, 1)
    assert b"--system" in refused.stderr
    assert b"edgeqwen sessions rm notes" in refused.stderr


def test_name_may_have_the_sign_of_the_protocol_before_it(daemon: DaemonProcess) -> None:
    out(daemon, "ask", "one", "--session", "@home")
    out(daemon, "ask", "two", "--session", "home")
    out(daemon, "chat", "--session", "@home", stdin=b"three\n")
    assert [row["name"] for row in rows(daemon)] == ["home"]
    assert contents(daemon, "@home") == contents(daemon, "home") == ["one", "yes", "two", "yes", "three", "yes"]
    out(daemon, "sessions", "fork", "@home", "@away")
    out(daemon, "sessions", "rm", "@home")
    assert [row["name"] for row in rows(daemon)] == ["away"]


def test_error_about_a_session_says_which(daemon: DaemonProcess) -> None:
    out(daemon, "ask", "x", "--session", "a")
    out(daemon, "ask", "x", "--session", "b")
    assert b"none: no such session" in run(daemon, "sessions", "show", "none").stderr
    assert b"none: no such session" in run(daemon, "sessions", "fork", "none", "c").stderr
    taken = run(daemon, "sessions", "fork", "a", "b").stderr
    assert b"b: there is a session of this name, s_" in taken
    assert b"choose another name" in taken
    assert b"@x: a session's name" in run(daemon, "ask", "x", "--session", "@@x").stderr


def test_ask_verbose_says_how_much_of_the_session_was_known(daemon: DaemonProcess) -> None:
    out(daemon, "ask", "x" * 500, "--session", "a")
    result = run(daemon, "ask", "y", "--session", "a", "-v")
    assert b" known)" in result.stderr


def test_sessions_are_listed_shown_forked_and_removed(daemon: DaemonProcess) -> None:
    assert out(daemon, "sessions", "list") == ""
    out(daemon, "ask", "one", "--session", "kitchen @home", "--system", "Be brief.")
    out(daemon, "ask", "two", "--session", "kitchen @home")
    fork = out(daemon, "sessions", "fork", "kitchen @home", "other", "--at", "1").strip()
    assert {row["name"]: (row["rev"], row["turns"]) for row in rows(daemon)} == {
        "kitchen @home": (2, 2),
        "other": (1, 1),
    }
    table = out(daemon, "sessions", "list").splitlines()
    assert (len(table), table[1].startswith("other "), table[2].startswith("kitchen @home ")) == (3, True, True)
    shown = out(daemon, "sessions", "show", fork)
    assert "revision 1, 1 turn" in shown
    assert shown.endswith("\n[system]\nBe brief.\n\n[user]\none\n\n[assistant]\nyes\n")
    result = run(daemon, "sessions", "rm", "none", "other", "kitchen @home")
    assert (result.returncode, result.stdout, result.stderr) == (66, b"", b"edgeqwen: none: no such session\n")
    assert rows(daemon) == []


@pytest.mark.parametrize(
    ("arguments", "exit_code"),
    [
        (("show", "none"), 66),
        (("fork", "none", "new"), 66),
        (("fork", "a", "a"), 75),
        (("fork", "a", "b", "--at", "9"), 64),
        (("rm",), 64),
        (("show", "\x1b[31m"), 66),
    ],
)
def test_what_cannot_be_is_one_line_and_an_exit_code(
    daemon: DaemonProcess, arguments: tuple[str, ...], exit_code: int
) -> None:
    out(daemon, "ask", "x", "--session", "a")
    result = run(daemon, "sessions", *arguments)
    assert (result.returncode, result.stdout, result.stderr.count(b"\n")) == (exit_code, b"", 1)


def test_chat_goes_on_with_a_session_and_resets_it(daemon: DaemonProcess) -> None:
    out(daemon, "ask", "one", "--session", "a")
    assert out(daemon, "chat", "--session", "a", stdin=b"two\nthree\n") == "yes\nyes\n"
    assert contents(daemon, "a") == ["one", "yes", "two", "yes", "three", "yes"]
    out(daemon, "chat", "--session", "a", stdin=b"/reset\nfour\n")
    assert contents(daemon, "a") == ["four", "yes"]
    assert out(daemon, "chat", "--session", "new", "--system", "S", stdin=b"/reset\nfive\nsix\n") == "yes\nyes\n"
    assert contents(daemon, "new") == ["five", "yes", "six", "yes"]


def test_chat_with_a_session_goes_on_after_an_error(daemon: DaemonProcess) -> None:
    out(daemon, "ask", "one", "--session", "a")
    result = run(daemon, "chat", "--session", "a", "--system", "other", stdin=b"two\n/reset\nthree\n")
    assert (result.returncode, result.stdout, result.stderr.count(b"edgeqwen: ")) == (0, b"yes\n", 1)
    assert contents(daemon, "a") == ["three", "yes"]


@pytest.mark.parametrize(
    ("seconds", "words"), [(0, "0 s"), (59, "59 s"), (60, "1 min"), (7199, "1 h"), (86_400 * 40, "40 d")]
)
def test_duration_is_in_the_largest_unit_that_fits(seconds: int, words: str) -> None:
    assert duration(seconds) == words


# The daemon's end.


def test_turn_is_there_after_a_kill_right_behind_its_last_frame(state: dict[str, str]) -> None:
    for rev in range(3):
        with running_daemon(script_of("yes"), environ=state) as daemon, daemon.client() as client:
            final = client.request("chat", session="@a", prompt=f"q{rev}", if_rev=rev)
            daemon.process.kill()
            assert final["rev"] == rev + 1
            daemon.wait()
    with running_daemon(script_of("yes"), environ=state) as daemon:
        assert contents(daemon, "a") == ["q0", "yes", "q1", "yes", "q2", "yes"]
        assert daemon.wait_for(sessions=1)["session_files"]["damaged"] == 0


def test_turn_under_way_is_lost_with_the_daemon_and_those_before_are_not(state: dict[str, str]) -> None:
    slow = script_of("yes", "x" * 3000, step_s=0.002)
    with running_daemon(slow, environ=state) as daemon, daemon.client() as client:
        client.request("chat", session="@a", prompt="one")
        frames = client.stream("chat", session="@a", prompt="two", stream=True)
        assert next(frames)["event"] == "start"
        daemon.process.kill()
        daemon.wait()
    with running_daemon(script_of("yes"), environ=state) as daemon, daemon.client() as client:
        assert contents(daemon, "a") == ["one", "yes"]
        assert client.request("chat", session="@a", prompt="three", if_rev=1)["rev"] == 2


def test_turn_that_ends_while_the_daemon_drains_is_kept(state: dict[str, str]) -> None:
    with running_daemon(script_of("x" * 200, step_s=0.002), environ=state) as daemon, daemon.client() as client:
        frames = client.stream("chat", session="@a", prompt="one", stream=True)
        assert next(frames)["event"] == "start"
        daemon.process.terminate()
        *_, final = frames
        assert (final["finish"], final["rev"], "saved" in final) == ("stop", 1, False)
        assert daemon.wait() == 0
    with running_daemon(script_of("yes"), environ=state) as daemon:
        assert contents(daemon, "a") == ["one", "x" * 200]


def test_second_daemon_of_a_state_folder_keeps_its_sessions_in_memory_and_says_so(state: dict[str, str]) -> None:
    with running_daemon(script_of("yes"), environ=state) as first, first.client() as client:
        client.request("chat", session="@a", prompt="one")
        with running_daemon(script_of("yes"), environ=state) as second:
            assert rows(second) == []
            assert "another daemon" in second.log
            result = run(second, "ask", "x", "--session", "b")
            assert (result.returncode, result.stdout) == (0, b"yes\n")
            assert b"could not save" in result.stderr
            assert second.wait_for(sessions=1)["session_files"]["on_disk"] is False
        assert [row["name"] for row in rows(first)] == ["a"]


def test_state_folder_that_cannot_be_made_is_done_without(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with running_daemon(script_of("yes"), environ={"STATE_DIRECTORY": str(tmp_path / "file" / "state")}) as daemon:
        result = run(daemon, "ask", "x", "--session", "b")
        assert (result.returncode, result.stdout) == (0, b"yes\n")
        assert contents(daemon, "b") == ["x", "yes"]
        assert "kept in memory only" in daemon.log


def test_nothing_that_was_said_is_in_the_log_or_readable_by_others(daemon: DaemonProcess, tmp_path: Path) -> None:
    out(daemon, "ask", "canary question", "--session", "canary name", "--system", "canary system")
    run(daemon, "sessions", "show", "canary ghost")
    assert "canary" not in daemon.log
    files = [path for path in (tmp_path / "state" / "sessions").rglob("*") if path.is_file()]
    assert len(files) == 2
    assert all(path.stat().st_mode & 0o077 == 0 for path in (*files, *(path.parent for path in files)))


@pytest.mark.skipif(os.geteuid() != 0, reason="another user can be had by root only")
def test_another_users_sessions_are_not_there(daemon: DaemonProcess) -> None:
    session = json.loads(out(daemon, "ask", "x", "--session", "a", "--json"))["session"]
    for path in (daemon.socket_path, daemon.socket_path.parent):
        path.chmod(0o777)
    child = os.fork()
    if child == 0:  # one uid of its own, and nothing but the socket
        exit_code = 1
        try:
            os.setgroups([])
            os.setresgid(NOBODY - 1, NOBODY - 1, NOBODY - 1)
            os.setresuid(NOBODY - 1, NOBODY - 1, NOBODY - 1)
            exit_code = _look_for(daemon.socket_path, session)
        finally:
            os._exit(exit_code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert [row["rev"] for row in rows(daemon)] == [1]


def _look_for(path: Path, session: str) -> int:
    """0 if the session is nowhere to be found."""
    from edgeqwen.errors import EdgeqwenError

    with Client.connect(path) as client:
        num_missed = 0
        for op in ("session.get", "session.fork", "session.reset", "session.delete"):
            try:
                client.request(op, session=session)
            except EdgeqwenError as error:
                num_missed += error.code == "not_found"
        is_empty = client.request("session.list")["sessions"] == []
        return 0 if num_missed == 4 and is_empty else 1
