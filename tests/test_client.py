"""The synchronous client: answers, errors with their codes, and what counts as cut off."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from edgeqwen.client import Client, CutOff, NoDaemon, error_of
from edgeqwen.client.failures import serve_command
from edgeqwen.errors import ConfigInvalid, EdgeqwenError
from edgeqwen.protocol.limits import WireLimits
from tests.wire import fake_inference, serve


def frames_of(path: Path, **members: Any) -> list[dict[str, Any]]:
    with Client.connect(path) as client:
        return list(client.stream("chat", **members))


async def test_request_gives_the_final_frame(tmp_path: Path) -> None:
    def ask() -> dict[str, Any]:
        with Client.connect(wire.path) as client:
            assert client.request("health")["ok"] is True
            return client.request("chat", prompt="x", temperature=None)

    async with serve(tmp_path) as wire:
        assert (await asyncio.to_thread(ask))["text"] == "Hello!"


async def test_stream_gives_every_frame_in_order(tmp_path: Path) -> None:
    async with serve(tmp_path, fake_inference("龘 own fox")) as wire:
        frames = await asyncio.to_thread(frames_of, wire.path, prompt="x", stream=True)
    assert frames[0]["event"] == "start"
    assert "".join(frame.get("delta", "") for frame in frames) == "龘 own fox"
    assert [frame["done"] for frame in frames][-2:] == [False, True]


async def test_errors_of_the_daemon_are_raised_with_code_and_field(tmp_path: Path) -> None:
    async with serve(tmp_path) as wire:
        with pytest.raises(EdgeqwenError) as caught:
            await asyncio.to_thread(frames_of, wire.path, prompt="x", temprature=1)
    assert (caught.value.code, caught.value.field, caught.value.exit_code) == ("bad_request", "temprature", 64)


async def test_cancel_ends_the_stream_with_its_final_frame(tmp_path: Path) -> None:
    def cancel_at_the_first_delta() -> list[dict[str, Any]]:
        frames = []
        with Client.connect(wire.path) as client:
            for frame in client.stream("chat", prompt="x", stream=True):
                frames.append(frame)
                if "delta" in frame and len(frames) == 2:
                    client.cancel()
            assert client.request("health")["ok"] is True
        return frames

    async with serve(tmp_path, fake_inference("x" * 2000, step_s=0.005)) as wire:
        frames = await asyncio.to_thread(cancel_at_the_first_delta)
    assert frames[-1]["finish"] == "cancelled"


async def test_a_refused_connection_tells_why(tmp_path: Path) -> None:
    async with serve(tmp_path, None, WireLimits(connections=1)) as wire:
        await (await wire.connect()).ask({"op": "health"})
        with pytest.raises(EdgeqwenError) as caught:
            await asyncio.to_thread(frames_of, wire.path, prompt="x")
    assert caught.value.code == "busy"


async def test_a_daemon_that_goes_away_cuts_the_answer_off(tmp_path: Path) -> None:
    async with serve(tmp_path, fake_inference("x" * 2000, step_s=0.01)) as wire:
        asking = asyncio.create_task(asyncio.to_thread(frames_of, wire.path, prompt="x", stream=True))
        while wire.inference.stats().running == 0:  # noqa: ASYNC110 - the engine has no event for it
            await asyncio.sleep(0.01)
        await wire.server.close(grace_s=0.01)
        with pytest.raises(CutOff) as caught:
            await asking
    assert caught.value.exit_code == 74


def test_no_daemon_is_one_line_and_exit_69(tmp_path: Path) -> None:
    stale = socket.socket(socket.AF_UNIX)
    stale.bind(str(tmp_path / "stale.sock"))
    stale.close()
    for name in ("missing.sock", "stale.sock"):
        with pytest.raises(NoDaemon) as caught:
            Client.connect(tmp_path / name)
        assert caught.value.exit_code == 69
        assert str(tmp_path / name) in caught.value.message
        assert "edgeqwen serve" in caught.value.message
        assert "\n" not in caught.value.message


def test_a_daemon_with_many_who_wait_to_be_accepted_is_waited_for(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with socket.socket(socket.AF_UNIX) as listener, contextlib.ExitStack() as stack:
        listener.bind(str(path))
        listener.listen(0)
        first = stack.enter_context(Client.connect(path))
        with pytest.raises(NoDaemon, match="does not answer"):
            Client.connect(path, timeout_s=0.05)
        accepting = threading.Timer(0.1, lambda: stack.enter_context(listener.accept()[0]))
        accepting.start()
        stack.enter_context(Client.connect(path, timeout_s=20))
        accepting.join()
        first.close()


def test_a_path_too_long_is_named_with_both_numbers(tmp_path: Path) -> None:
    path = "/tmp/" + "é" * 60
    with pytest.raises(ConfigInvalid, match=r"125 bytes.*107"):
        Client.connect(path)


@pytest.fixture
def scripted(tmp_path: Path) -> Iterator[Callable[[bytes], Client]]:
    """A client of a peer that answers every connection with given bytes and hangs up."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(tmp_path / "s.sock"))
    listener.listen()
    threads: list[threading.Thread] = []
    clients: list[Client] = []

    def answer(data: bytes) -> None:
        connection, _ = listener.accept()
        with connection:
            connection.recv(4096)
            connection.sendall(data)

    def connect(data: bytes) -> Client:
        threads.append(threading.Thread(target=answer, args=(data,)))
        threads[-1].start()
        clients.append(Client.connect(tmp_path / "s.sock"))
        return clients[-1]

    yield connect
    for client in clients:
        client.close()
    for thread in threads:
        thread.join(5)
    listener.close()


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\n\n",
        b'{"id":1,"done":false,"delta":"a"}\n',
        b'{"id":1,"done":tr',
        b"HTTP/1.1 200 OK\r\n\r\n",
        b"[]\n",
        b"{}\n",
    ],
)
def test_whatever_is_not_a_whole_answer_is_cut_off(scripted: Callable[[bytes], Client], data: bytes) -> None:
    with pytest.raises(CutOff):
        scripted(data).request("chat", prompt="x")


def test_blank_lines_foreign_ids_and_unknown_members_are_ignored(scripted: Callable[[bytes], Client]) -> None:
    data = b'\n\r\n{"id":9,"done":true}\n\n{"id":1,"done":true,"text":"a","new":[1]}\r\n'
    assert scripted(data).request("chat", prompt="x")["text"] == "a"


def test_an_error_without_id_ends_the_request(scripted: Callable[[bytes], Client]) -> None:
    with pytest.raises(EdgeqwenError) as caught:
        scripted(b'{"done":true,"error":{"code":"too_large","message":"m"}}\n').request("chat", prompt="x")
    assert caught.value.code == "too_large"


def test_where_no_daemon_is_the_command_that_starts_one_there_is_told(tmp_path: Path) -> None:
    with pytest.raises(NoDaemon, match=f"serve --socket '{tmp_path}/a b'"):
        Client.connect(tmp_path / "a b")


def test_usual_places_need_no_socket_in_the_command() -> None:
    environ = {"XDG_RUNTIME_DIR": "/run/user/5", "EDGEQWEN_SOCKET_PATH": "/mine/s"}
    for path in ("/run/user/5/edgeqwen.sock", "/mine/s", "/run/edgeqwen/edgeqwen.sock"):
        assert serve_command(path, environ) == "edgeqwen serve"
    assert serve_command("/mine/t", environ) == serve_command("/mine/t", {}) == "edgeqwen serve --socket /mine/t"


def test_an_unknown_code_is_an_error_of_the_daemon() -> None:
    error = error_of({"done": True, "error": {"code": "new_code", "message": "m", "retry_ms": 5}})
    assert (error.code, error.message, error.retry_ms) == ("engine", "m", 5)


def test_client_imports_little() -> None:
    script = "import edgeqwen.client, sys; print(*sorted(name.split('.')[0] for name in sys.modules))"
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=20)
    assert not {"asyncio", "numpy", "tokenizers", "aiohttp", "uvloop", "jinja2", "onnxruntime"} & set(
        result.stdout.split()
    )
