"""The shell functions: what they find by themselves, raw requests, flags, and that nothing stays in the shell."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.client_programs import CLIENTS, run_tool, tool
from tests.daemons import DaemonProcess, running_daemon, script_of
from tests.scripted_socket import FINAL, START, line, said, scripted_socket

BASICS = ("awk", "cat", "grep", "id", "sed", "tr")
SHELLS = ("dash", "bash", "busybox")


def shell(
    script: str,
    *arguments: str,
    name: str = "dash",
    stdin: bytes = b"",
    environ: dict[str, str] | None = None,
    **settings: Any,
) -> subprocess.CompletedProcess[bytes]:
    """Run a script that has the functions."""
    interpreter = [tool("busybox"), "sh"] if name == "busybox" else [tool(name)]
    clean = {key: value for key, value in os.environ.items() if not key.startswith(("EDGEQWEN_", "EQ_"))}
    command = (*interpreter, "-c", f". {CLIENTS}/edgeqwen.sh; {script}", "sh", *arguments)
    return run_tool(*command, input=stdin, env=clean | (environ or {}), **settings)


def at(path: Path, transport: str = "socat") -> dict[str, str]:
    tool(transport)
    return {"EDGEQWEN_SOCKET_PATH": str(path), "EQ_TRANSPORT": transport}


@pytest.fixture(scope="module")
def daemon() -> Iterator[DaemonProcess]:
    with running_daemon(script_of("Hello!")) as running:
        yield running


@pytest.mark.parametrize("transport", ["socat", "nc", "curl"])
def test_raw_requests_give_their_frames_and_exit_codes(daemon: DaemonProcess, transport: str) -> None:
    environ = at(daemon.socket_path, transport)
    result = shell('eq_json "$1"', '{"op":"tokenize","text":"\\"op\\":\\"x\\""}', environ=environ)
    assert (result.returncode, result.stderr) == (0, b"")
    assert json.loads(result.stdout)["n"] > 0
    pretty = json.dumps({"op": "chat", "id": "a", "prompt": "x", "stream": True}, indent=2)
    result = shell("eq_json", stdin=pretty.encode(), environ=environ)
    frames = [json.loads(frame) for frame in result.stdout.splitlines()]
    assert (result.returncode, frames[-1]["finish"]) == (0, "stop")
    assert {frame["id"] for frame in frames} == {"a"}
    assert "".join(frame.get("delta", "") for frame in frames) == "Hello!"
    result = shell('eq_json "$1"', '{"op":"chat","prompt":"x","temprature":1}', environ=environ)
    assert (result.returncode, json.loads(result.stdout)["error"]["field"]) == (64, "temprature")
    assert b"temprature" in result.stderr


@pytest.mark.parametrize("name", SHELLS)
def test_raw_answer_in_one_piece_of_the_greatest_length(name: str) -> None:
    final = FINAL | {"text": "x" * (250 << 10) + "\n"}
    with scripted_socket(line(final)) as server:
        result = shell('eq_json \'{"op":"chat"}\'', name=name, environ=at(server.path))
    assert (result.returncode, json.loads(result.stdout)) == (0, final)


@pytest.mark.parametrize("name", SHELLS)
def test_long_prompt_on_stdin_arrives_whole(name: str) -> None:
    prompt = 'line "x" \\\t' * 20 + "é\n"
    with scripted_socket(said("ok")) as server:
        result = shell("eq_ask", name=name, stdin=prompt.encode() * 2000, environ=at(server.path))
        assert (result.returncode, result.stdout) == (0, b"ok")
        assert server.request()["prompt"] == (prompt * 2000).rstrip("\n")


def test_flags_become_members_and_words_are_joined() -> None:
    with scripted_socket(said("ok")) as server:
        sent: dict[str, dict[str, Any]] = {}
        session_id = "s_" + "a1" * 8
        for flags in ("", "-t", "-s notes", "-s @notes", f"-s {session_id}", f"-s {session_id}x", "-ts 'my \"home\"'"):
            assert shell(f"eq_ask {flags} two words", environ=at(server.path)).returncode == 0
            sent[flags] = server.request()
    assert {request["prompt"] for request in sent.values()} == {"two words"}
    assert [request.get("think") for request in sent.values()] == [None, True, None, None, None, None, True]
    names = [None, None, "@notes", "@notes", session_id, f"@{session_id}x", '@my "home"']
    assert [request.get("session") for request in sent.values()] == names


@pytest.mark.parametrize("script", ["eq_ask ''", "eq_ask", "eq_ask -x a", "eq_ask -s"])
def test_nothing_to_ask_and_unknown_flags_are_usage_errors(script: str, tmp_path: Path) -> None:
    result = shell(script, environ={"EDGEQWEN_SOCKET_PATH": str(tmp_path)})
    assert (result.returncode, result.stdout) == (64, b"")
    assert result.stderr


@pytest.mark.parametrize("name", SHELLS)
def test_usage_is_printed_when_asked_for_and_after_a_mistake(name: str) -> None:
    asked = shell("eq_ask -h", name=name)
    assert (asked.returncode, asked.stdout.count(b"\n"), asked.stderr) == (0, 1, b"")
    assert asked.stdout.startswith(b"usage: eq_ask ")
    for flags in ("-x a", "-s", "-n many a", "-n -1 a"):
        mistaken = shell(f"eq_ask {flags}", name=name)
        assert (mistaken.returncode, mistaken.stdout) == (64, b"")
        assert asked.stdout in mistaken.stderr


@pytest.mark.parametrize("name", SHELLS)
def test_answer_that_was_cut_at_its_limit_is_told(name: str) -> None:
    frames = line(START, {"done": False, "delta": "so"}, FINAL | {"finish": "length"})
    with scripted_socket(frames) as server:
        result = shell("eq_ask -n 7 hi", name=name, environ=at(server.path))
        assert server.request()["max_tokens"] == 7
        assert (result.returncode, result.stdout, result.stderr.count(b"\n")) == (0, b"so", 1)
        assert b"cut at its limit" in result.stderr
        raw = shell('eq_json \'{"op":"chat"}\'', name=name, environ=at(server.path))
        assert (raw.returncode, raw.stderr) == (0, b"")


def test_transport_that_is_none_is_told_with_those_that_are(daemon: DaemonProcess, tmp_path: Path) -> None:
    environ = {"EDGEQWEN_SOCKET_PATH": str(daemon.socket_path)}
    unknown = shell("eq_ask hi", environ=environ | {"EQ_TRANSPORT": "bogus"})
    assert (unknown.returncode, unknown.stdout) == (64, b"")
    assert all(word in unknown.stderr for word in (b"bogus", b"socat", b"nc", b"curl"))
    environ |= folder_of_tools(tmp_path / "bin", *BASICS)
    missing = shell("eq_ask hi", environ=environ | {"EQ_TRANSPORT": "curl"})
    assert (missing.returncode, b"curl is not installed" in missing.stderr) == (69, True)


@pytest.mark.parametrize("name", SHELLS)
def test_nothing_stays_in_the_shell_and_its_options_are_borne(name: str, daemon: DaemonProcess) -> None:
    script = (
        "set -eu; prompt=mine session=mine LC_ALL=C.UTF-8 OPTIND=1; set -- a b c; "
        'text=$(eq_ask -s @s "é"); eq_ask -s "" x >/dev/null; eq_ask bad -s "$3" >/dev/null || exit 3; '
        'printf "%s|" "$text" "$prompt" "$session" "$LC_ALL" "$OPTIND" "$*"'
    )
    result = shell(script, name=name, environ=at(daemon.socket_path))
    assert (result.returncode, result.stderr) == (0, b"")
    assert result.stdout == b"Hello!|mine|mine|C.UTF-8|1|a b c|"


def folder_of_tools(folder: Path, *names: str, busybox: bool = False) -> dict[str, str]:
    """A PATH with nothing else."""
    folder.mkdir()
    for name in names:
        (folder / name).symlink_to(tool("busybox") if busybox and name in BASICS else tool(name))
    return {"PATH": str(folder)}


@pytest.mark.parametrize("tools", [("socat",), ("nc",), ("curl",), ("socat", "nc", "curl")], ids="-".join)
@pytest.mark.parametrize("busybox", [False, True], ids=["own tools", "busybox"])
def test_whatever_is_installed_does(daemon: DaemonProcess, tools: Sequence[str], busybox: bool, tmp_path: Path) -> None:
    if busybox:
        tool("busybox")
    environ = folder_of_tools(tmp_path / "bin", *BASICS, *tools, busybox=busybox)
    result = shell("eq_ask hi", environ=environ | {"EDGEQWEN_SOCKET_PATH": str(daemon.socket_path)})
    assert (result.returncode, result.stdout, result.stderr) == (0, b"Hello!", b"")


def test_a_netcat_without_sockets_is_passed_over(daemon: DaemonProcess, tmp_path: Path) -> None:
    environ = folder_of_tools(tmp_path / "bin", *BASICS, "curl")
    other = tmp_path / "bin" / "nc"
    other.write_text(f"#!{shutil.which('dash')}\necho 'usage: nc [-u] host port' >&2\nexit 1\n")
    other.chmod(0o755)
    result = shell("eq_ask hi", environ=environ | {"EDGEQWEN_SOCKET_PATH": str(daemon.socket_path)})
    assert (result.returncode, result.stdout) == (0, b"Hello!")


def test_without_any_of_them_it_says_so(daemon: DaemonProcess, tmp_path: Path) -> None:
    environ = folder_of_tools(tmp_path / "bin", *BASICS)
    result = shell("eq_ask hi", environ=environ | {"EDGEQWEN_SOCKET_PATH": str(daemon.socket_path)})
    assert (result.returncode, result.stdout) == (69, b"")
    assert b"socat" in result.stderr


def test_the_usual_socket_is_found_as_the_command_line_finds_it(tmp_path: Path) -> None:
    own = tmp_path / "edgeqwen.sock"
    own.touch()
    fake_id = tmp_path / "id"
    fake_id.write_text("#!/bin/sh\necho 1000\n")
    fake_id.chmod(0o755)
    user = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    root = {"PATH": f"{tmp_path / 'root'}:{os.environ['PATH']}"}
    (tmp_path / "root").mkdir()
    (tmp_path / "root" / "id").write_text("#!/bin/sh\necho 0\n")
    (tmp_path / "root" / "id").chmod(0o755)
    system = b"/run/edgeqwen/edgeqwen.sock\n"

    def found(**environ: str) -> bytes:
        result = shell("eq_socket", environ=environ)
        assert result.returncode == 0
        return result.stdout

    assert found(**user, EDGEQWEN_SOCKET_PATH="/a b", XDG_RUNTIME_DIR=str(tmp_path)) == b"/a b\n"
    assert found(**user, XDG_RUNTIME_DIR=str(tmp_path)) == f"{own}\n".encode()
    assert found(**root, XDG_RUNTIME_DIR=str(tmp_path)) == system
    assert found(**user, XDG_RUNTIME_DIR=".") == system
    assert found(**user, XDG_RUNTIME_DIR="") == system
    own.unlink()
    assert found(**user, XDG_RUNTIME_DIR=str(tmp_path)) == system
