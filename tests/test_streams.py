"""The standard streams of the commands, from outside: closed, full, or with text that is none."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.daemons import HANG_GUARD_S, DaemonProcess, running_daemon, script_of, start_command, write_text_model

ANSWER = "to be said"
STREAMS = {"<&-": 0, ">&-": 1, "2>&-": 2}


@pytest.fixture(scope="module")
def daemon() -> Iterator[DaemonProcess]:
    """Says the same to everybody."""
    with running_daemon(script_of(ANSWER)) as running:
        yield running


def in_shell(
    redirections: str, daemon: DaemonProcess, *flags: str, stdin: bytes = b""
) -> subprocess.CompletedProcess[bytes]:
    """`edgeqwen FLAGS` with the shell's redirections, and the buffers that most users' Python has."""
    command = ["sh", "-c", f'exec "$0" "$@" {redirections}', sys.executable, "-m", "edgeqwen", *flags]
    env = dict(os.environ) | {"EDGEQWEN_SOCKET_PATH": str(daemon.socket_path)}
    env.pop("PYTHONUNBUFFERED", None)
    return subprocess.run(command, input=stdin, capture_output=True, env=env, timeout=HANG_GUARD_S, check=False)


COMMANDS = [("ask", "hello"), ("ask", "--json", "hello"), ("chat",), ("stats",), ("--help",)]


@pytest.mark.parametrize("flags", COMMANDS)
def test_full_disk_is_one_line_and_exit_73(daemon: DaemonProcess, flags: tuple[str, ...]) -> None:
    result = in_shell(">/dev/full", daemon, *flags, stdin=b"hello\n")
    assert (result.returncode, result.stderr.count(b"\n")) == (73, 1), result.stderr
    assert b"No space left" in result.stderr


@pytest.mark.parametrize("flags", COMMANDS)
def test_reader_that_has_gone_is_exit_141_and_silence(daemon: DaemonProcess, flags: tuple[str, ...]) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    env = {"EDGEQWEN_SOCKET_PATH": str(daemon.socket_path)}
    process = start_command(*flags, environ=env, stdin=subprocess.PIPE, stdout=writer, stderr=subprocess.PIPE)
    os.close(writer)
    with process:
        _, err = process.communicate(b"hello\n", timeout=HANG_GUARD_S)
    assert (process.returncode, err) == (141, b"")


@pytest.mark.parametrize("closed", [*STREAMS, " ".join(STREAMS)])
@pytest.mark.parametrize("flags", COMMANDS)
def test_closed_streams_are_no_fault(daemon: DaemonProcess, flags: tuple[str, ...], closed: str) -> None:
    result = in_shell(closed, daemon, *flags, stdin=b"hello\n")
    assert (result.returncode, result.stderr) == (0, b"")


def test_error_is_told_by_the_exit_code_where_stderr_is_full(daemon: DaemonProcess) -> None:
    assert in_shell("2>/dev/full", daemon, "ask", "--max-tokens", "0", "hello").returncode == 64


@pytest.mark.parametrize(
    ("flags", "stdin", "named"),
    [
        (("chat",), b"a\xff\xfe\n", "standard input"),
        (("ask",), b"a\xff\xfe\n", "standard input is not UTF-8 text: byte 2"),
        (("ask", "\udcff"), b"", "the prompt"),
        (("ask", "--system", "\udcff"), b"a", "--system"),
        (("chat", "--system", "\udcff"), b"a", "--system"),
        (("ask", "--session", "\udcff"), b"a", "the session"),
        (("embed",), b"a\xff\xfe\n", "standard input"),
        (("embed", "\udcff"), b"", "a text"),
        (("sessions", "show", "\udcff"), b"", "the session"),
    ],
)
def test_bytes_that_are_no_text_are_refused_by_the_name_of_their_place(
    daemon: DaemonProcess, flags: tuple[str, ...], stdin: bytes, named: str
) -> None:
    result = in_shell("", daemon, *flags, stdin=stdin)
    assert (result.returncode, result.stdout, result.stderr.count(b"\n")) == (65, b"", 1)
    assert named in result.stderr.decode()


def test_lines_before_one_that_is_no_text_are_answered(daemon: DaemonProcess) -> None:
    result = in_shell("", daemon, "chat", stdin=b"a\r\n\xff\nb\n")
    assert (result.returncode, result.stdout) == (65, ANSWER.encode() + b"\n")


@pytest.mark.parametrize("value", ["nan", "inf", "-inf"])
def test_number_that_is_not_finite_is_refused(daemon: DaemonProcess, value: str) -> None:
    result = in_shell("", daemon, "ask", "--temperature", value, "hello")
    assert (result.returncode, result.stdout, result.stderr.count(b"\n")) == (64, b"", 1)


def test_daemon_leaves_no_socket_in_the_place_of_a_closed_stream(tmp_path: Path) -> None:
    flags = ["serve", "--runtime", "fake:", "--model", str(write_text_model(tmp_path / "m"))]
    command = ["sh", "-c", 'exec "$0" "$@" <&- >&- 2>&-', sys.executable, "-m", "edgeqwen", *flags]
    with subprocess.Popen([*command, "--socket", str(tmp_path / "s")]) as process:
        try:
            give_up_at = time.monotonic() + HANG_GUARD_S
            while not (tmp_path / "s").exists():
                assert process.poll() is None
                assert time.monotonic() < give_up_at
                time.sleep(0.01)
            assert {os.readlink(f"/proc/{process.pid}/fd/{fd}") for fd in STREAMS.values()} == {os.devnull}
            process.send_signal(signal.SIGTERM)
            assert process.wait(HANG_GUARD_S) == 0
        finally:
            process.kill()


def test_ctrl_c_while_the_command_is_imported_is_exit_130_in_silence() -> None:
    script = (
        "import builtins\n"
        "real = builtins.__import__\n"
        "def interrupted(name, *args, **kwargs):\n"
        "    if name == 'click': raise KeyboardInterrupt\n"
        "    return real(name, *args, **kwargs)\n"
        "builtins.__import__ = interrupted\n"
        "from edgeqwen.__main__ import main; main()\n"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, timeout=HANG_GUARD_S, check=False)
    assert (result.returncode, result.stderr) == (130, b"")
