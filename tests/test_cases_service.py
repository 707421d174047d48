"""Faults of other servers that have to do with sockets, signals and service managers, as inputs for this one."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import signal
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from edgeqwen.errors import ConfigInvalid
from edgeqwen.server import bind_socket
from tests.daemons import HANG_GUARD_S, DaemonProcess, run_command, running_daemon, script_of
from tests.wire import fake_inference, serve

DRAIN_S = 1.0


def connect(daemon: DaemonProcess) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX)
    sock.settimeout(HANG_GUARD_S)
    sock.connect(str(daemon.socket_path))
    return sock


def frames_of(sock: socket.socket) -> list[dict[str, Any]]:
    """All that comes until the connection ends."""
    with sock.makefile("rb") as file, contextlib.suppress(ConnectionResetError):
        return [json.loads(line) for line in file if line.strip()]
    return []


@contextlib.contextmanager
def draining_daemon(runtime: str, drain_s: float = DRAIN_S) -> Iterator[DaemonProcess]:
    with running_daemon(runtime, environ={"EDGEQWEN_SERVICE_DRAIN_S": str(drain_s)}) as daemon:
        daemon.wait_until_ready()
        yield daemon


def ended_well(daemon: DaemonProcess) -> None:
    assert daemon.wait() == 0
    assert not daemon.socket_path.exists()
    for word in ("destroyed", "never retrieved", "Traceback", "never awaited"):
        assert word not in daemon.log


def test_idle_half_sent_and_slow_clients_do_not_keep_it_from_stopping() -> None:
    with draining_daemon(script_of("word " * 3000, capacity=100_000)) as daemon, contextlib.ExitStack() as stack:
        idle = [stack.enter_context(connect(daemon)) for _ in range(3)]
        idle[0].sendall(b'{"op":"health"}\n')
        assert idle[0].recv(100)
        half = stack.enter_context(connect(daemon))
        half.sendall(b'{"op":"chat","pro')
        slow = stack.enter_context(connect(daemon))
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        slow.sendall(b'{"op":"chat","prompt":"x","stream":true,"max_tokens":14000}\n')
        assert slow.recv(10)
        http = stack.enter_context(connect(daemon))
        http.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\n")
        daemon.process.terminate()
        ended_well(daemon)


@pytest.mark.parametrize("num_streams", [1, 12])
def test_every_stream_ends_with_its_own_last_frame(num_streams: int) -> None:
    """Some end by themselves within the drain time, the others with it."""
    long, short = "word " * 100, "a few words of text"
    with draining_daemon(script_of(long, short, step_s=0.02)) as daemon, contextlib.ExitStack() as stack:
        socks = [stack.enter_context(connect(daemon)) for _ in range(num_streams)]
        for sock in socks:
            sock.sendall(b'{"op":"chat","id":7,"prompt":"x","stream":true,"max_tokens":2000}\n')
        daemon.wait_for(running=min(num_streams, 8))
        daemon.process.terminate()
        for sock in socks:
            frames = frames_of(sock)
            assert [frame["done"] for frame in frames].count(True) == 1
            assert frames[-1]["done"]
            assert frames[-1]["id"] == 7
            assert frames[-1].get("finish") in {"stop", "cancelled"} or frames[-1]["error"]["code"] == "draining"
        ended_well(daemon)


def test_sigterm_in_a_long_prefill_ends_it_at_the_next_step() -> None:
    script = json.loads(script_of("x").removeprefix("fake:")) | {"prefill_token_s": 0.002, "capacity": 9000}
    with draining_daemon("fake:" + json.dumps(script), 0.2) as daemon, connect(daemon) as sock:
        request = {"op": "generate", "tokens": [5] * 8000, "max_tokens": 2}
        sock.sendall(json.dumps(request).encode() + b"\n")
        daemon.wait_for(running=1)
        daemon.process.terminate()
        assert frames_of(sock)[-1]["finish"] == "cancelled"
        ended_well(daemon)


def test_sigterm_twice_does_not_wait_for_the_drain_and_sigpipe_means_nothing() -> None:
    with draining_daemon(script_of("word " * 40, step_s=0.05), 600.0) as daemon, connect(daemon) as sock:
        daemon.process.send_signal(signal.SIGPIPE)
        sock.sendall(b'{"op":"chat","prompt":"x","stream":true}\n')
        daemon.wait_for(running=1)
        daemon.process.terminate()
        with daemon_log(daemon, "stopping"):
            daemon.process.terminate()
        assert frames_of(sock)[-1]["finish"] == "cancelled"
        ended_well(daemon)


@contextlib.contextmanager
def daemon_log(daemon: DaemonProcess, text: str) -> Iterator[None]:
    """Once `text` stands in the log."""
    over = threading.Event()
    timer = threading.Timer(HANG_GUARD_S, over.set)
    timer.start()
    while text not in daemon.log:
        assert not over.wait(0.01), daemon.log
    timer.cancel()
    yield


@pytest.mark.parametrize("knows", [False, True])
async def test_a_loop_that_would_remove_the_path_is_told_not_to(
    knows: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From Python 3.13 on loops remove the path of a Unix socket that they were given, unless told otherwise."""
    loop = asyncio.get_running_loop()
    make, given = loop.create_unix_server, []

    async def newer(*args: Any, cleanup_socket: bool = True, **others: Any) -> Any:
        given.append(cleanup_socket)
        return await make(*args, **others)

    async def older(factory: Any, path: Any = None, *, sock: Any, backlog: int) -> Any:
        return await make(factory, path, sock=sock, backlog=backlog)

    monkeypatch.setattr(loop, "create_unix_server", newer if knows else older)
    async with serve(tmp_path, fake_inference()) as wire:
        assert wire.path.exists()
    assert set(given) == ({False} if knows else set())


def test_descriptors_that_are_sent_along_are_not_kept() -> None:
    with running_daemon(script_of("x")) as daemon, connect(daemon) as sock, open("/dev/null", "rb") as file:
        daemon.wait_until_ready()
        sock.sendall(b'{"op":"health"}\n')
        assert sock.recv(1000)
        before = len(list(Path(f"/proc/{daemon.process.pid}/fd").iterdir()))
        for _ in range(50):
            socket.send_fds(sock, [b'{"op":"health"}\n'], [file.fileno()] * 8)
        with sock.makefile("rb") as answers:
            for _ in range(50):
                assert json.loads(answers.readline())["ok"]
        assert len(list(Path(f"/proc/{daemon.process.pid}/fd").iterdir())) <= before


def test_there_is_one_winner_of_each_race_for_a_socket(tmp_path: Path) -> None:
    """Two that bind at the same instant, again and again."""
    tmp_path.chmod(0o700)
    for number in range(50):
        path = tmp_path / str(number)
        barrier = threading.Barrier(2)
        results: list[Any] = []

        def bind(path: Path = path, barrier: threading.Barrier = barrier, results: list[Any] = results) -> None:
            barrier.wait()
            try:
                results.append(bind_socket(path))
            except Exception as error:
                results.append(error)

        threads = [threading.Thread(target=bind) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        bound = [each for each in results if not isinstance(each, Exception)]
        assert len(bound) == 1, results
        bound[0].close()


def test_a_second_start_beside_a_daemon_that_is_stopped_in_its_tracks_is_refused_and_harms_nothing() -> None:
    with running_daemon(script_of("x")) as daemon:
        daemon.wait_until_ready()
        inode = daemon.socket_path.stat().st_ino
        daemon.process.send_signal(signal.SIGSTOP)
        try:
            flags = ("--socket", str(daemon.socket_path), "--model", str(daemon.socket_path.parent / "model"))
            done = run_command("serve", "--runtime", "fake:", *flags)
        finally:
            daemon.process.send_signal(signal.SIGCONT)
        assert done.returncode == 78
        assert b"already running" in done.stderr
        assert daemon.socket_path.stat().st_ino == inode
        with daemon.client() as client:
            assert client.chat("hi").text == "x"


def test_a_socket_that_may_not_be_asked_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tmp_path.chmod(0o700)
    with socket.socket(socket.AF_UNIX) as theirs:
        theirs.bind(str(tmp_path / "s"))
        monkeypatch.setattr(socket.socket, "connect_ex", lambda *_: errno.EACCES)
        with pytest.raises(ConfigInvalid, match="cannot be told whether a daemon runs"):
            bind_socket(tmp_path / "s")
    assert (tmp_path / "s").exists()


@pytest.mark.parametrize("command", [("ask", "hi"), ("stats",), ("top", "--once"), ("metrics",)])
def test_clients_say_that_a_path_is_too_long(command: tuple[str, ...]) -> None:
    path = "/tmp/" + "x" * 200
    done = run_command(*command, "--socket", path)
    assert done.returncode == 78
    assert b"205 bytes" in done.stderr
    assert b"107" in done.stderr
