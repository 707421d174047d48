"""The MicroPython client as a module, under MicroPython and CPython alike; boards reach the daemon over a bridge."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.client_programs import CLIENTS, ENDLESS, run_tool, tool
from tests.daemons import HANG_GUARD_S, DaemonProcess, running_daemon, script_of
from tests.scripted_socket import FINAL, START, line, scripted_socket

INTERPRETERS = ("cpython", "micropython")
PREAMBLE = f"""
import sys
sys.path.insert(0, {str(CLIENTS)!r})
import json
from edgeqwen_micropython import EdgeqwenError, ask, frames
"""


@pytest.fixture(params=INTERPRETERS)
def interpreter(request: pytest.FixtureRequest) -> str:
    return sys.executable if request.param == "cpython" else tool(request.param)


@pytest.fixture(scope="module")
def daemon() -> Iterator[DaemonProcess]:
    with running_daemon(script_of("Hello!")) as running:
        yield running


def run_script(interpreter: str, folder: Path, body: str) -> Any:
    """What the script prints, as JSON."""
    path = folder / "script.py"
    path.write_text(PREAMBLE + body)
    result = run_tool(interpreter, str(path))
    assert (result.returncode, result.stderr) == (0, b""), result.stderr
    return json.loads(result.stdout)


def test_pieces_go_to_the_callback_and_the_final_frame_is_returned(
    interpreter: str, daemon: DaemonProcess, tmp_path: Path
) -> None:
    body = f"""
pieces = []
final = ask({str(daemon.socket_path)!r}, "hi", on_text=pieces.append, max_tokens=2, seed=7)
print(json.dumps([pieces, final]))
"""
    pieces, final = run_script(interpreter, tmp_path, body)
    assert pieces
    assert "Hello!".startswith("".join(pieces))
    assert (final["done"], final["finish"], final["usage"]["completion"]) == (True, "length", 2)


def test_any_operation_can_be_asked_for(interpreter: str, daemon: DaemonProcess, tmp_path: Path) -> None:
    body = f"""
print(json.dumps([list(frames({str(daemon.socket_path)!r}, request)) for request in (
    {{"op": "health", "close": True}},
    {{"op": "tokenize", "text": "a", "id": 5, "close": True}},
)]))
"""
    (health,), (tokens,) = run_script(interpreter, tmp_path, body)
    assert health["ok"] is True
    assert (tokens["id"], tokens["n"]) == (5, 1)


def test_error_has_all_that_the_daemon_said(interpreter: str, tmp_path: Path) -> None:
    error = {"code": "quota", "message": "é", "field": "f", "retry_ms": 9}
    with scripted_socket(line({"done": True, "error": error})) as server:
        body = f"""
try:
    ask({str(server.path)!r}, "hi")
except EdgeqwenError as e:
    print(json.dumps([e.code, e.message, e.field, e.retry_ms, e.exit_code, str(e)]))
"""
        assert run_script(interpreter, tmp_path, body) == ["quota", "é", "f", 9, 75, "é"]


def test_callback_that_raises_hangs_up(interpreter: str, tmp_path: Path) -> None:
    with running_daemon(ENDLESS) as daemon:
        body = f"""
def stop(text):
    raise ValueError("enough")
try:
    ask({str(daemon.socket_path)!r}, "hi", on_text=stop)
except ValueError as e:
    with open({str(tmp_path / "stopped")!r}, "w"):
        pass
    sys.stdin.read()
print("true")
"""
        path = tmp_path / "script.py"
        path.write_text(PREAMBLE + body)
        with subprocess.Popen([interpreter, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
            while not (tmp_path / "stopped").exists():
                assert process.poll() is None
            daemon.wait_for(running=0, queued=0)
            assert process.communicate(b"", HANG_GUARD_S)[0] == b"true\n"


def test_silence_ends_the_wait(interpreter: str, tmp_path: Path) -> None:
    may_end = threading.Event()

    def silent(connection: socket.socket) -> None:
        connection.sendall(line(START))
        may_end.wait(HANG_GUARD_S)

    with scripted_socket(silent) as server:
        body = f"""
try:
    ask({str(server.path)!r}, "hi", timeout_s=0.2)
except EdgeqwenError as e:
    print(json.dumps([e.code, e.exit_code]))
"""
        assert run_script(interpreter, tmp_path, body) == ["cut_off", 74]
        may_end.set()


def test_thought_and_calls_of_tools_are_at_hand(interpreter: str, tmp_path: Path) -> None:
    call = {"id": "c", "name": "f", "arguments": '{"done":true}'}
    final = FINAL | {"finish": "tool_calls", "tool_calls": [call]}
    with scripted_socket(line(START, {"done": False, "reasoning": "Hm."}, final)) as server:
        body = f"""
thought = []
final = ask({str(server.path)!r}, "hi", on_reasoning=thought.append, session="@notes")
print(json.dumps([thought, final["tool_calls"]]))
"""
        assert run_script(interpreter, tmp_path, body) == [["Hm."], [call]]
        assert server.request()["session"] == "@notes"
        assert server.request()["close"] is True


def test_a_board_reaches_the_daemon_over_a_bridge(interpreter: str, daemon: DaemonProcess, tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    listen = f"TCP-LISTEN:{port},bind=127.0.0.1,reuseaddr,fork"
    command = [tool("socat"), "-d", "-d", "-t", "60", listen, f"UNIX-CONNECT:{daemon.socket_path}"]
    with subprocess.Popen(command, stderr=subprocess.PIPE) as bridge:
        assert bridge.stderr is not None
        while b"listening on" not in (said := bridge.stderr.readline()):
            assert said
        body = f"""
pieces = []
ask(("127.0.0.1", {port}), "hi", on_text=pieces.append)
print(json.dumps("".join(pieces)))
"""
        assert run_script(interpreter, tmp_path, body) == "Hello!"
        bridge.terminate()
