"""Every client of docs/clients alike: text byte for byte as it comes, errors as exit codes, and hanging up."""

from __future__ import annotations

import os
import random
import select
import socket
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from edgeqwen.errors import CODES
from tests.client_programs import ENDLESS, PROGRAMS, Program
from tests.daemons import HANG_GUARD_S, DaemonProcess, running_daemon, script_of
from tests.scripted_socket import FINAL, START, line, said, scripted_socket

AWKWARD = 'He said "hi" \\ & ünïcode 😀, 漢字.\r\n\ttab \\n \x01\x1b[0m\x7f $HOME `id` %s "done":true {"delta":"no"}\n'
NOBODY = 65534

every_program = pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.name)
one_of_each = pytest.mark.parametrize(
    "program",
    [program for program in PROGRAMS if not program.is_shell or program.name in ("sh dash socat", "sh bash nc")],
    ids=lambda program: program.name,
)


@pytest.fixture(scope="module")
def daemon() -> Iterator[DaemonProcess]:
    with running_daemon(script_of(AWKWARD)) as running:
        yield running


# What a daemon says.


@every_program
def test_text_comes_byte_for_byte(program: Program, daemon: DaemonProcess) -> None:
    result = program.run(daemon.socket_path)
    assert (result.returncode, result.stderr) == (0, b"")
    assert result.stdout == AWKWARD.encode()


@every_program
def test_session_goes_on(program: Program, daemon: DaemonProcess) -> None:
    session = f'{program.name} "1"'
    for _ in range(2):
        assert program.run(daemon.socket_path, "hi", session).returncode == 0
    with daemon.client() as client:
        kept = client.request("session.get", session=f"@{session}", messages=True)
    assert kept["turns"] == 2
    assert [message["content"] for message in kept["messages"]] == ["hi", AWKWARD] * 2


@every_program
def test_error_of_the_daemon_is_told_and_is_the_exit_code(program: Program, daemon: DaemonProcess) -> None:
    result = program.run(daemon.socket_path, "x", "n" * 65)
    assert (result.returncode, result.stdout) == (64, b"")
    assert b"session" in result.stderr
    assert result.stderr.count(b"\n") == 1


@one_of_each
def test_prompt_that_is_too_long_says_so_though_the_daemon_closes(program: Program, daemon: DaemonProcess) -> None:
    # An argument has at most 128 KiB: every byte of it takes six in the request.
    result = program.run(daemon.socket_path, "\x01" * 50_000)
    assert (result.returncode, result.stdout) == (65, b"")
    assert b"too_long" in result.stderr or b"context" in result.stderr


@one_of_each
def test_closing_stdout_stops_the_daemon(program: Program) -> None:
    with (
        running_daemon(ENDLESS) as daemon,
        program.start(daemon.socket_path) as process,
    ):
        assert process.stdout is not None
        assert process.stdout.read(10)
        process.stdout.close()
        daemon.wait_for(running=0, queued=0)
        assert process.wait(HANG_GUARD_S) != 0


# What is sent.


@every_program
@pytest.mark.parametrize("prompt", [AWKWARD, " ", "\n\n", '"', "\\", "-n", "é" * 20_000], ids=range(7))
def test_prompt_arrives_as_it_is(program: Program, prompt: str) -> None:
    with scripted_socket(said("a")) as server:
        assert program.run(server.path, prompt).returncode == 0
        assert server.request()["prompt"] == prompt
        assert server.request()["stream"] is True


# How it comes.


class Halting:
    """Says the first part, and the rest once it is let go on."""

    def __init__(self, first: bytes, rest: bytes) -> None:
        self.first, self.rest = first, rest
        self.may_go_on = threading.Event()

    def __call__(self, connection: socket.socket) -> None:
        connection.sendall(self.first)
        assert self.may_go_on.wait(HANG_GUARD_S)
        connection.sendall(self.rest)


@every_program
def test_text_is_shown_before_the_next_comes(program: Program) -> None:
    reply = Halting(line(START, {"done": False, "delta": "first"}), line({"done": False, "delta": " last"}, FINAL))
    with scripted_socket(reply) as server, program.start(server.path) as process:
        assert process.stdout is not None
        assert read_available(process, len("first")) == b"first"
        reply.may_go_on.set()
        assert process.stdout.read() == b" last"
        assert process.wait(HANG_GUARD_S) == 0


def read_available(process: subprocess.Popen[bytes], num_bytes: int) -> bytes:
    """So many bytes of its stdout, without waiting for more."""
    assert process.stdout is not None
    data = b""
    while len(data) < num_bytes:
        assert select.select([process.stdout], [], [], HANG_GUARD_S)[0], data
        got = os.read(process.stdout.fileno(), num_bytes - len(data))
        assert got, data
        data += got
    return data


@every_program
def test_frames_in_single_bytes_with_blank_lines_and_carriage_returns(program: Program) -> None:
    reply = b"\n\r\n" + said('a"done":true\n', "é😀").replace(b"\n", b"\r\n\n")
    with scripted_socket(reply, chunk_bytes=1) as server:
        result = program.run(server.path)
    assert (result.returncode, result.stdout) == (0, 'a"done":true\né😀'.encode())


@every_program
def test_frame_of_the_greatest_length(program: Program) -> None:
    room = (32 << 10) - len(line({"done": False, "delta": ""}))
    texts = ["x" * room, "\n" * (room // 2), "é" * (room // 2)]
    reply = said(*texts)
    assert max(map(len, reply.splitlines(keepends=True))) == 32 << 10
    with scripted_socket(reply) as server:
        result = program.run(server.path)
    assert (result.returncode, result.stdout.decode()) == (0, "".join(texts))


@every_program
def test_members_and_frames_that_it_does_not_know_are_ignored(program: Program) -> None:
    strange: dict[str, Any] = {"x": [{"delta": 1, "done": 5}, "\\", '"', None], "y": -1.5e9, "é": {}, "z": True}
    reply = line(
        {"id": 7, "done": False, "delta": "not mine"},
        START,
        {"id": "other", "done": True, "error": {"code": "busy", "message": "not mine"}},
        {"done": False, "event": "news"},
        {"done": False, **strange, "delta": "mine", "more": strange},
        {"done": False, "item": 0, "error": {"code": "busy", "message": "of an item"}},
        FINAL | strange,
    )
    with scripted_socket(reply) as server:
        result = program.run(server.path)
    assert (result.returncode, result.stdout, result.stderr) == (0, b"mine", b"")


@every_program
def test_every_escape_of_json_is_undone(program: Program) -> None:
    """Seeded: characters of every length, as themselves or escaped in any way that JSON has."""
    choice = random.Random(5)
    texts, frames = [], []
    for _ in range(60):
        chars = [choice.choice(ALPHABET) for _ in range(choice.randrange(1, 12))]
        texts.append("".join(chars))
        written = "".join(escaped(char, choice) for char in chars)
        frames.append(b'{"done":false,"delta":"%b"}\n' % written.encode())
    with scripted_socket(line(START) + b"".join(frames) + line(FINAL)) as server:
        result = program.run(server.path)
    assert (result.returncode, result.stdout.decode()) == (0, "".join(texts))


ALPHABET = 'a"\\/\b\f\n\r\t\x01\x1f\x7f\x80é߿ࠀ漢\ud7ff\ue000\uffff\U00010000😀\U0010ffff{}[]:,'
SHORT = {'"': '\\"', "\\": "\\\\", "/": "\\/", "\b": "\\b", "\f": "\\f", "\n": "\\n", "\r": "\\r", "\t": "\\t"}


def escaped(char: str, choice: random.Random) -> str:
    must_be = char in '"\\' or char < " "
    way = choice.choice(("short", "code") if must_be else ("short", "code", "raw"))
    if way == "short" and char in SHORT:
        return SHORT[char]
    if way == "raw":
        return char
    units = char.encode("utf-16-be")
    code = "".join(f"\\u{int.from_bytes(units[at : at + 2]):04x}" for at in range(0, len(units), 2))
    return code.replace("\\u", "\\\0").upper().replace("\0", "u") if choice.random() < 0.5 else code


@every_program
def test_half_a_surrogate_pair_is_a_replacement_character(program: Program) -> None:
    deltas = (rb"a\ud83db", rb"\ude00", rb"\ud83d\ud83d\ude00", rb"\ud83d")
    frames = b"".join(b'{"done":false,"delta":"%b"}\n' % delta for delta in deltas)
    with scripted_socket(line(START) + frames + line(FINAL)) as server:
        result = program.run(server.path)
    assert result.returncode == 0
    assert result.stdout.decode() == "a�b" + "�" + "�😀" + "�"


@every_program
def test_thought_goes_to_stderr(program: Program) -> None:
    reply = line(START, {"done": False, "reasoning": "Hm.\n"}, {"done": False, "delta": "Yes."}, FINAL)
    with scripted_socket(reply) as server:
        result = program.run(server.path)
    assert (result.returncode, result.stdout, result.stderr.strip()) == (0, b"Yes.", b"Hm.")


# What goes wrong.


@one_of_each
def test_exit_codes_are_those_of_the_command_line(program: Program) -> None:
    codes = {code: meaning.exit_code for code, meaning in CODES.items()} | {"of_tomorrow": 70}
    errors = [{"code": code, "message": f'it is "{code}"', "field": "f", "retry_ms": 5} for code in codes]
    replies = [line({"done": True, "error": error}) for error in errors]
    with scripted_socket(*replies) as server:
        for code, exit_code in codes.items():
            result = program.run(server.path)
            assert (result.returncode, result.stdout) == (exit_code, b""), code
            assert f'it is "{code}"' in result.stderr.decode()
            assert result.stderr.count(b"\n") == 1


@every_program
def test_error_after_some_text_is_the_exit_code(program: Program) -> None:
    error = {"done": True, "rid": "r1", "error": {"code": "engine", "message": "a step failed"}}
    with scripted_socket(line(START, {"done": False, "delta": "half"}, error)) as server:
        result = program.run(server.path)
    assert (result.returncode, result.stdout) == (70, b"half")
    assert b"a step failed" in result.stderr


# socat, nc and curl may give up when they cannot send all of a request.
@pytest.mark.parametrize("program", [p for p in PROGRAMS if not p.is_shell], ids=lambda program: program.name)
def test_reason_of_a_daemon_that_turns_away_without_reading_is_told(program: Program) -> None:
    reply = line({"done": True, "error": {"code": "busy", "message": "too many connections", "retry_ms": 900}})
    with scripted_socket(reply, reads_request=False) as server:
        result = program.run(server.path, "x" * 100_000)
    assert (result.returncode, result.stdout) == (75, b"")
    assert b"too many connections" in result.stderr


WHOLE = said("half", "whole")
CUT_OFF: dict[str, bytes] = {
    "nothing": b"",
    "blank lines": b"\n\n",
    "after a frame": line(START, {"done": False, "delta": "half"}),
    "inside a frame": WHOLE[:-40],
    "inside the final frame's first members": WHOLE[: WHOLE.rindex(b'"done":true') + 11],
    "before the last brace": WHOLE[:-2],
    "garbage": b"\x00\xff\xfe garbage\n",
    "garbage later": line(START) + b"[1,2\n" + WHOLE,
    "an array": b'["done",true]\n',
    "a scalar": b"true\n",
    "no done": b'{"delta":"half"}\n',
    "done is a word": b'{"done":"true","delta":"half"}\n',
    "a page": b"<html>\n",
    "too long": b'{"done":false,"delta":"' + b"x" * (1 << 20) + b"\n",
    "not text": b'{"done":false,"delta":"half"\n',
}


@pytest.mark.parametrize("reply", CUT_OFF.values(), ids=CUT_OFF)
@one_of_each
def test_answer_that_is_cut_off_or_no_frame_is_an_error(program: Program, reply: bytes) -> None:
    with scripted_socket(reply) as server:
        result = program.run(server.path)
    assert result.returncode == 74
    assert result.stdout in (b"", b"half", b"halfwhole")
    assert result.stderr.count(b"\n") == 1


@every_program
def test_no_daemon_is_told(program: Program, tmp_path: Path) -> None:
    stale = tmp_path / "stale"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(stale))
    for path in (tmp_path / "missing", stale):
        result = program.run(path)
        assert (result.returncode, result.stdout) == (69, b""), path
        assert b"no daemon" in result.stderr
        assert result.stderr.count(b"\n") == 1


@one_of_each
def test_path_that_no_socket_can_have_is_told(program: Program) -> None:
    result = program.run(Path("/tmp/" + "é" * 60))
    assert (result.returncode, result.stdout) == (78, b"")
    assert b"107" in result.stderr


@one_of_each
def test_path_with_strange_characters(program: Program, tmp_path: Path) -> None:
    path = tmp_path / "a,b:c !\"'(d)[e]{f}\\g,h=$i;é"
    with scripted_socket(said("found")) as server:
        path.symlink_to(server.path)
        result = program.run(path)
    assert (result.returncode, result.stdout) == (0, b"found")


# A Python in a virtual environment may be out of reach for other users.
@pytest.mark.parametrize("program", [p for p in PROGRAMS if "python" not in p.name], ids=lambda program: program.name)
def test_socket_of_others_is_forbidden(program: Program) -> None:
    with scripted_socket(said("no")) as server:
        server.path.chmod(0)
        user: dict[str, Any] = {"user": NOBODY, "group": NOBODY} if os.geteuid() == 0 else {}
        result = copied(program, server.path.parent).run(server.path, **user)
    assert (result.returncode, result.stdout) == (77, b"")
    assert b"may not connect" in result.stderr


def copied(program: Program, folder: Path) -> Program:
    """The same program where everybody may read it."""

    class Copied(Program):
        def command(self, *arguments: Any) -> list[str]:
            command = program.command(*arguments)
            for index, part in enumerate(command):
                if "/docs/clients/" in part:
                    copy = folder / Path(part).name
                    copy.write_bytes(Path(part).read_bytes())
                    command[index] = str(copy)
            return command

    return Copied(program.name)


@pytest.mark.parametrize("program", [p for p in PROGRAMS if not p.is_shell], ids=lambda program: program.name)
def test_wrong_number_of_arguments_is_a_usage_error(program: Program, tmp_path: Path) -> None:
    command = program.command(tmp_path, "x")[:-1]
    result = subprocess.run(command, capture_output=True, check=False, timeout=HANG_GUARD_S)
    assert (result.returncode, result.stdout) == (64, b"")
    assert b"usage" in result.stderr
