"""The daemon under a service manager, which a stand-in plays: real processes, real sockets, scripted answers."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from edgeqwen.client import Client
from tests.daemons import HANG_GUARD_S, run_command, running_daemon, script_of
from tests.service_manager import ServiceManager, flags_of, service_manager

ASK = b'{"op":"chat","prompt":"hi"}\n'


def answer(path: Path, request: bytes = ASK) -> dict[str, object]:
    """The last frame that comes for a request."""
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(HANG_GUARD_S)
        sock.connect(str(path))
        sock.sendall(request)
        sock.shutdown(socket.SHUT_WR)
        lines = [line for line in sock.makefile("rb") if line.strip()]
    frame: dict[str, object] = json.loads(lines[-1])
    return frame


def short(manager: ServiceManager) -> list[str]:
    """What the notifications were about, in order."""
    return [message.text.replace("\n", " ") for message in manager.messages]


# Sockets that are handed over.


def test_the_first_request_is_served_by_the_daemon_that_it_starts(tmp_path: Path) -> None:
    with service_manager(tmp_path) as manager:
        inode = manager.path.stat().st_ino
        for _ in range(2):
            with socket.socket(socket.AF_UNIX) as early:
                early.connect(str(manager.path))
                early.sendall(ASK)
                process = manager.start(*flags_of(tmp_path))
                early.settimeout(HANG_GUARD_S)
                assert json.loads(early.makefile("rb").readline())["text"] == "yes"
            process.terminate()
            assert process.wait(HANG_GUARD_S) == 0
            assert manager.path.stat().st_ino == inode, "the path is the manager's"
        assert "whose=manager" in manager.log


def test_the_socket_is_served_whatever_the_configuration_says_of_its_path(tmp_path: Path) -> None:
    with service_manager(tmp_path) as manager:
        manager.start(*flags_of(tmp_path), "--socket", str(tmp_path / "other"))
        assert answer(manager.path)["text"] == "yes"
        assert not (tmp_path / "other").exists()


def test_a_socket_whose_path_is_not_to_be_seen_is_served(tmp_path: Path) -> None:
    with service_manager(tmp_path) as manager, socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(HANG_GUARD_S)
        sock.connect(str(manager.path))
        manager.path.unlink()
        manager.start(*flags_of(tmp_path))
        sock.sendall(ASK)
        assert json.loads(sock.makefile("rb").readline())["text"] == "yes"


def test_sockets_that_are_meant_for_another_process_are_left_alone(tmp_path: Path) -> None:
    with service_manager(tmp_path, {"LISTEN_PID": "1"}) as manager:
        process = manager.start(*flags_of(tmp_path), "--socket", str(tmp_path / "own"))
        manager.wait_for("READY=1", process=process)
        assert answer(tmp_path / "own")["text"] == "yes"
        with socket.socket(socket.AF_UNIX) as sock:
            sock.settimeout(0.2)
            sock.connect(str(manager.path))
            sock.sendall(ASK)
            with pytest.raises(TimeoutError):
                sock.recv(1)


def test_several_sockets_are_served_and_one_of_tcp_speaks_http(tmp_path: Path) -> None:
    with (
        socket.socket(socket.AF_UNIX) as one,
        socket.socket(socket.AF_UNIX) as two,
        socket.create_server(("127.0.0.1", 0)) as port,
    ):
        for sock, name in ((one, "one"), (two, "two")):
            sock.bind(str(tmp_path / name))
            sock.listen()
        with service_manager(tmp_path, {"LISTEN_FDNAMES": "a:http:b"}, sockets=[one, port, two]) as manager:
            manager.start(*flags_of(tmp_path))
            assert answer(tmp_path / "one")["text"] == answer(tmp_path / "two")["text"] == "yes"
            with socket.create_connection(port.getsockname(), HANG_GUARD_S) as client:
                client.sendall(b"GET /ready HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
                assert client.makefile("rb").readline().startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize("kind", ["datagram", "file", "silent"])
def test_what_is_no_listening_stream_socket_is_refused_by_its_name(kind: str, tmp_path: Path) -> None:
    with (
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as datagram,
        socket.socket(socket.AF_UNIX) as silent,
        (tmp_path / "file").open("w") as file,
    ):
        fd = {"datagram": datagram.fileno(), "silent": silent.fileno(), "file": file.fileno()}[kind]
        env = {**os.environ, "LISTEN_FDS": "1", "LISTEN_FDNAMES": "ndjson"}
        launch = 'import os,sys; os.dup2(int(sys.argv[1]),3); os.environ["LISTEN_PID"]=str(os.getpid()); '
        launch += 'os.set_inheritable(3,True); os.execv(sys.executable,[sys.executable,"-m","edgeqwen","serve"])'
        command = [sys.executable, "-c", launch, str(fd)]
        done = subprocess.run(command, env=env, pass_fds=[fd], capture_output=True, timeout=HANG_GUARD_S, check=False)
        assert done.returncode == 78
        assert b"socket 3 of the service manager (ndjson): is not a" in done.stderr


def test_who_waits_on_the_socket_of_a_daemon_that_cannot_start_is_told_why(tmp_path: Path) -> None:
    with service_manager(tmp_path) as manager, contextlib.ExitStack() as stack:
        clients = [stack.enter_context(socket.socket(socket.AF_UNIX)) for _ in range(3)]
        for sock, sent in zip(clients, (ASK, b"", b"POST /v1/chat/completions HTTP/1.1\r\n"), strict=True):
            sock.settimeout(HANG_GUARD_S)
            sock.connect(str(manager.path))
            sock.sendall(sent)
        process = manager.start("--model", str(tmp_path / "nowhere"))
        got = [sock.makefile("rb").read() for sock in clients]
        assert process.wait(HANG_GUARD_S) == 66
        for data in got[:2]:
            frame = json.loads(data)
            assert frame["done"]
            assert "neither a path nor a model" in frame["error"]["message"]
        head, _, body = got[2].partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 503 ")
        assert "neither a path nor a model" in json.loads(body)["error"]["message"]
        assert "neither a path nor a model" in "".join(short(manager))
        assert "READY" not in "".join(short(manager))
        manager.sockets[0].setblocking(False)
        with pytest.raises(BlockingIOError):
            manager.sockets[0].accept()  # nobody is left who would start it again


@pytest.mark.skipif(shutil.which("systemd-socket-activate") is None, reason="systemd-socket-activate is not there")
def test_systemds_own_tool_hands_its_socket_over(tmp_path: Path) -> None:
    path = tmp_path / "s"
    command = ["systemd-socket-activate", "-l", str(path), *("-E", f"STATE_DIRECTORY={tmp_path}/state")]
    command += ["-E", f"PYTHONPATH={os.pathsep.join(sys.path)}", sys.executable, "-m", "edgeqwen", "serve"]
    process = subprocess.Popen([*command, *flags_of(tmp_path)], stderr=subprocess.DEVNULL)
    try:
        give_up_at = time.monotonic() + HANG_GUARD_S
        while not path.exists():
            assert time.monotonic() < give_up_at
            time.sleep(0.01)
        assert answer(path)["text"] == "yes"
    finally:
        process.terminate()
        assert process.wait(HANG_GUARD_S) == 0
    assert path.exists()


def test_it_works_without_any_manager(tmp_path: Path) -> None:
    done = run_command("serve", "--runtime", "fake:", "--model", str(tmp_path / "nowhere"))
    assert done.returncode == 66


# What the manager is told.


@pytest.mark.parametrize("is_abstract", [False, True])
def test_notifications_come_in_order(is_abstract: bool, tmp_path: Path) -> None:
    config = tmp_path / "c.toml"
    config.write_text("")
    with service_manager(tmp_path, is_abstract=is_abstract) as manager:
        process = manager.start(*flags_of(tmp_path), "--config", str(config))
        manager.wait_for("READY=1", process=process)
        process.send_signal(signal.SIGHUP)
        manager.wait_for("READY=1", times=2, process=process)
        process.terminate()
        assert process.wait(HANG_GUARD_S) == 0
        manager.wait_for("STOPPING=1")
        keys = [key for message in manager.messages for key in message.keys if key != "STATUS"]
        assert keys == ["READY", "RELOADING", "MONOTONIC_USEC", "READY", "STOPPING"]


def test_it_is_ready_when_it_answers_and_not_before(tmp_path: Path) -> None:
    with service_manager(tmp_path) as manager:
        process = manager.start(*flags_of(tmp_path, script_of("yes", load_s=0.5)))
        with Client.connect(manager.path) as client:
            assert client.health()["state"] == "loading"
            assert not any("READY" in text for text in short(manager))
            assert client.chat("hi").text == "yes"
        manager.wait_for("READY=1", process=process)


def test_loading_that_fails_is_told_and_never_called_ready(tmp_path: Path) -> None:
    with service_manager(tmp_path) as manager:
        process = manager.start(*flags_of(tmp_path, script_of("x", fail_load="the disk is broken", load_s=0.3)))
        frame = answer(manager.path)
        assert process.wait(HANG_GUARD_S) == 70
        assert "error" in frame
        manager.wait_for("the disk is broken")
        assert not any("READY" in text for text in short(manager))


# The watchdog.


def pings(manager: ServiceManager, since: float = 0.0) -> list[float]:
    return [message.at for message in manager.messages if message.text == "WATCHDOG=1" and message.at >= since]


def test_it_is_heard_of_twice_an_interval_while_it_is_idle_and_while_it_works(tmp_path: Path) -> None:
    interval_s = 2.0
    with service_manager(tmp_path, {"WATCHDOG_USEC": "2000000"}) as manager:
        script = json.loads(script_of("x" * 40).removeprefix("fake:")) | {"prefill_token_s": 0.001, "step_s": 0.01}
        process = manager.start(*flags_of(tmp_path, "fake:" + json.dumps(script | {"capacity": 4096})))
        manager.wait_for("READY=1", process=process)
        manager.wait_for("WATCHDOG=1", times=4, process=process)
        began_at = time.monotonic()
        prompt = {"op": "generate", "tokens": [5] * 3000, "max_tokens": 40, "cache": False}
        assert answer(manager.path, json.dumps(prompt).encode() + b"\n")["finish"] in {"stop", "length"}
        assert time.monotonic() - began_at >= 3.0, "it has had something to do for longer than an interval"
        manager.wait_for("WATCHDOG=1", times=len(pings(manager)) + 1, process=process)
        times = pings(manager)
        assert max(b - a for a, b in itertools.pairwise(times)) < interval_s
        assert "hang" not in manager.log


def test_it_is_heard_of_in_time_for_a_short_interval(tmp_path: Path) -> None:
    with service_manager(tmp_path, {"WATCHDOG_USEC": "500000"}) as manager:
        process = manager.start(*flags_of(tmp_path))
        manager.wait_for("WATCHDOG=1", times=12, process=process)


def test_a_watchdog_for_another_process_is_not_ours(tmp_path: Path) -> None:
    with service_manager(tmp_path, {"WATCHDOG_USEC": "100000", "WATCHDOG_PID": "1"}) as manager:
        process = manager.start(*flags_of(tmp_path))
        manager.wait_for("READY=1", process=process)
        time.sleep(0.5)
        assert not pings(manager)


def test_an_engine_that_hangs_is_not_heard_of_any_more_and_the_log_shows_where(tmp_path: Path) -> None:
    script = script_of("x" * 40, hang_at_step=3)
    with service_manager(tmp_path, {"WATCHDOG_USEC": "800000"}) as manager:
        process = manager.start(*flags_of(tmp_path, script))
        manager.wait_for("WATCHDOG=1", times=2, process=process)
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(manager.path))
            client.sendall(ASK)
            manager.wait_for("WATCHDOG=trigger", process=process)
            hung_at = manager.messages[-1].at
            time.sleep(1.0)
            assert not pings(manager, since=hung_at)
        manager.wait_for("the engine has not answered")
        assert "in step" in manager.log
        assert manager.log.count("hang silent_s=") == 1
        process.send_signal(signal.SIGABRT)  # what the manager does to it
        assert process.wait(HANG_GUARD_S) == -signal.SIGABRT
        assert "Fatal Python error: Aborted" in manager.log


# Leaving.


IDLE = {"EDGEQWEN_SERVICE_IDLE_EXIT_S": "0.2", "EDGEQWEN_KV_DISK_MB": "0"}


def test_a_daemon_that_nobody_needs_leaves_and_the_next_client_starts_another(tmp_path: Path) -> None:
    with service_manager(tmp_path, IDLE) as manager:
        for number in range(2):
            process = manager.start(*flags_of(tmp_path))
            assert answer(manager.path)["text"] == "yes"
            assert process.wait(HANG_GUARD_S) == 0
            manager.wait_for("STOPPING=1", times=number + 1)
        assert manager.path.exists()
        assert manager.log.count(" leaving ") == 2


def test_it_stays_while_somebody_is_connected(tmp_path: Path) -> None:
    with service_manager(tmp_path, IDLE) as manager, Client.connect(manager.path) as client:
        process = manager.start(*flags_of(tmp_path))
        assert client.chat("hi").text == "yes"
        time.sleep(0.8)
        assert process.poll() is None
        assert client.chat("hi").text == "yes"
        client.close()
        assert process.wait(HANG_GUARD_S) == 0


def test_sessions_are_there_for_the_next_daemon(tmp_path: Path) -> None:
    with service_manager(tmp_path, IDLE) as manager:
        process = manager.start(*flags_of(tmp_path))
        with Client.connect(manager.path) as client:
            session = client.session_create()
            client.chat("hi", session=session)
        assert process.wait(HANG_GUARD_S) == 0
        manager.start(*flags_of(tmp_path))
        with Client.connect(manager.path) as client:
            assert client.session_get(session)["turns"] == 1


def test_without_a_manager_it_does_not_leave_and_says_so(tmp_path: Path) -> None:
    with running_daemon(script_of("yes"), environ=IDLE) as daemon:
        daemon.wait_until_ready()
        time.sleep(0.6)
        assert daemon.process.poll() is None
        assert "service.idle_exit_s: not without a socket of a service manager" in daemon.log


def test_no_request_is_lost_however_close_to_the_end_it_comes(tmp_path: Path) -> None:
    rounds = int(os.environ.get("IDLE_EXIT_ROUNDS", "12"))
    chance = random.Random(7)
    environ = IDLE | {"EDGEQWEN_SERVICE_IDLE_EXIT_S": "0.05"}
    over = threading.Event()
    with service_manager(tmp_path, environ) as manager:
        keeper = threading.Thread(target=manager.serve_on_demand, args=flags_of(tmp_path), kwargs={"until": over})
        keeper.start()
        try:
            for _ in range(rounds):
                assert answer(manager.path)["text"] == "yes"
                time.sleep(chance.uniform(0.03, 0.12))
        finally:
            over.set()
            keeper.join()
        assert all(process.poll() in {None, 0} for process in manager.daemons)
        assert len(manager.daemons) > 1, "no daemon has left: the race was not run"
