"""What clients do to a real daemon, by malice, mistake or bad luck, and what must be left of it."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import pty
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from edgeqwen.client import Client
from edgeqwen.errors import EdgeqwenError
from tests import daemons
from tests.daemons import HANG_GUARD_S, DaemonProcess, run_command, running_daemon, script_of, start_command
from tests.fronts import CHAT_PATH, WITHOUT_ASK, call, chat, post, write_qwen_model
from tests.processes import anonymous_bytes, status, work_of
from tests.qwen_files import qwen_builder
from tests.tiny_tokenizers import byte_level

LINE = 1 << 20
WORDS = "word " * 40


@pytest.fixture(scope="module")
def daemon() -> Iterator[DaemonProcess]:
    """Says what the whole prompt leads to. It must have survived every test that used it, without a traceback."""
    with running_daemon("fake:") as running:
        yield running
        assert is_well(running)
        assert "Traceback" not in running.log


@pytest.fixture(scope="module")
def slow() -> Iterator[DaemonProcess]:
    """Answers for ever, one step in 10 ms."""
    with running_daemon(script_of(WORDS, loop=True, step_s=0.01)) as running:
        yield running
        assert is_well(running)
        assert "Traceback" not in running.log


def is_well(daemon: DaemonProcess) -> bool:
    final = call(daemon, "chat", prompt="hi", max_tokens=4)
    return daemon.process.poll() is None and final["usage"]["completion"] > 0


def user(content: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": content}]


def until(condition: Callable[[], bool]) -> None:
    """Wait for `condition`; the time is a guard against hanging only."""
    give_up_at = time.monotonic() + HANG_GUARD_S
    while not condition():
        assert time.monotonic() < give_up_at
        time.sleep(0.005)


def num_descriptors(daemon: DaemonProcess) -> int:
    return len(os.listdir(f"/proc/{daemon.process.pid}/fd"))


def stats(daemon: DaemonProcess) -> dict[str, Any]:
    return call(daemon, "stats")


# Raw bytes, over either front.


def connect(daemon: DaemonProcess) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX)
    sock.connect(str(daemon.socket_path))  # before there is a timeout: it waits for its turn then
    sock.settimeout(HANG_GUARD_S)
    return sock


def read_all(sock: socket.socket) -> bytes:
    data = b""
    with contextlib.suppress(ConnectionResetError):
        while piece := sock.recv(1 << 16):
            data += piece
    return data


def http_head(path: str, length: int) -> bytes:
    return b"POST %s HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\nConnection: close\r\n\r\n" % (
        path.encode(),
        length,
    )


def send_raw(daemon: DaemonProcess, data: bytes, path: str | None = None) -> tuple[int | None, Any]:
    """Send a line, or the body of a POST, and the end of input: HTTP's status, and the last object answered."""
    with connect(daemon) as sock:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # it may have been refused before its end
            sock.sendall(data if path is None else http_head(path, len(data)) + data)
            sock.shutdown(socket.SHUT_WR)
        if path is None:
            return None, last_object(read_all(sock))
        response = http.client.HTTPResponse(sock)
        response.begin()
        return response.status, last_object(response.read())


def last_object(data: bytes) -> Any:
    return strict([line for line in data.split(b"\n") if line.strip()][-1])


def strict(data: bytes) -> Any:
    """JSON without the extras of Python's reader."""
    return json.loads(data, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))


PLACES = (None, "/eqp/chat", CHAT_PATH)
"""A line of the socket, the same operation over HTTP, and OpenAI's route."""


def refused(daemon: DaemonProcess, data: bytes, path: str | None) -> tuple[str, str | None]:
    """Code and field of the one error that `data` is answered with; HTTP's status must be that of a client's fault."""
    code, answer = send_raw(daemon, data, path)
    assert code is None or 400 <= code < 500, (code, answer)
    error = answer["error"]
    return error["code"], error["param" if path == CHAT_PATH else "field"] if len(error) > 2 else None


# Clients that go away.

CLIENT = """
import socket, sys
sock = socket.socket(socket.AF_UNIX)
sock.connect(sys.argv[1])
sock.sendall(sys.argv[2].encode())
while sock.recv(4096):
    pass
"""


@contextlib.contextmanager
def client_process(daemon: DaemonProcess, front: str, **members: Any) -> Iterator[subprocess.Popen[bytes]]:
    """A client of its own process, whose answer is under way."""
    members = {"messages": user("x"), "max_tokens": 4000, **members}
    line = json.dumps({"op": "chat", **members}) + "\n"
    body = json.dumps(members)
    text = line if front == "socket" else http_head(CHAT_PATH, len(body)).decode() + body
    command = [sys.executable, "-S", "-E", "-c", CLIENT, str(daemon.socket_path), text]
    with subprocess.Popen(command) as process:
        try:
            daemon.wait_for(running=1)
            yield process
        finally:
            process.kill()


@pytest.mark.parametrize("is_stream", [True, False])
@pytest.mark.parametrize(("front", "session"), [("socket", "session"), ("http", "conversation_id")])
def test_a_killed_client_costs_no_further_steps_and_its_session_is_free(
    slow: DaemonProcess, front: str, session: str, is_stream: bool
) -> None:
    name = f"killed {front} {is_stream}"
    before = stats(slow)["totals"]["tokens"]
    with client_process(slow, front, **{session: "@" * (front == "socket") + name}, stream=is_stream) as process:
        until(lambda: stats(slow)["totals"]["tokens"] > before + 3)
        process.kill()
        slow.wait_for(running=0, queued=0)
    assert stats(slow)["totals"]["tokens"] < before + 2000
    final = call(slow, "chat", session=f"@{name}", prompt="again", max_tokens=2)
    assert (final["rev"], final["usage"]["completion"]) == (1, 2)


def test_ten_killed_clients_leave_next_to_nothing_in_the_log() -> None:
    with running_daemon(script_of(WORDS, loop=True, step_s=0.005)) as daemon:
        daemon.wait_for(running=0)
        before = daemon.log.count("\n")
        clients = [daemon.client() for _ in range(10)]
        for client in clients:
            next(client.stream("chat", prompt="x", stream=True, max_tokens=4000))
        for client in clients:
            client.close()
        daemon.wait_for(running=0, queued=0)
        assert is_well(daemon)
        assert daemon.log.count("\n") - before <= 20
        assert not any(word in daemon.log for word in ("Traceback", "asyncio", "never retrieved", "exception"))


@pytest.mark.parametrize("way", ["cancel", "close", "deadline"])
def test_a_long_prompt_that_nobody_wants_any_more_is_left_after_one_piece(way: str) -> None:
    script = {"prefill_token_s": 0.001, "max_chunk": 256}
    with running_daemon("fake:" + json.dumps(script)) as daemon, daemon.client() as client:
        client.request("chat", prompt="hi", max_tokens=1)
        before = stats(daemon)["kv"]["computed"]
        options: dict[str, Any] = {"deadline_ms": 300} if way == "deadline" else {}
        frames = client.stream("generate", tokens=[7] * 8000, max_tokens=4, stream=True, **options)
        start = next(frames)
        if way == "cancel":
            call(daemon, "cancel", rid=start["rid"])
        elif way == "close":
            client.close()
        if way != "close":
            assert [frame.get("finish") for frame in frames] == ["cancelled" if way == "cancel" else "deadline"]
        daemon.wait_for(running=0, queued=0)
        computed = stats(daemon)["kv"]["computed"] - before
        assert computed < 4000
        assert is_well(daemon)
        assert stats(daemon)["kv"]["computed"] - before <= computed + 256 + 20


def test_queued_requests_of_dead_clients_cost_nothing() -> None:
    environ = {"EDGEQWEN_LIMITS_QUEUE": "21"}
    with (
        running_daemon(script_of(WORDS, loop=True, step_s=0.005, num_slots=1), environ=environ) as daemon,
        contextlib.ExitStack() as stack,
    ):
        clients = [stack.enter_context(daemon.client()) for _ in range(22)]
        long = clients[0].stream("chat", prompt="long", max_tokens=8000, stream=True, speculate=False)
        rid = next(long)["rid"]
        while "delta" not in next(long):
            pass
        queued = []
        for number, client in enumerate(clients[1:21]):
            queued.append(client.stream("chat", prompt=f"{number:02d}" * 50, max_tokens=2, stream=True))
            assert next(queued[-1])["event"] == "start"
        daemon.wait_for(running=1, queued=20)
        new = clients[21].stream("chat", prompt="new" * 30, max_tokens=2, stream=True)
        next(new)
        assert call(daemon, "chat", prompt="one too many")["error"] == "busy"
        for client in clients[1:19]:
            client.close()
        daemon.wait_for(running=1, queued=3)
        before = stats(daemon)["kv"]["computed"]
        call(daemon, "cancel", rid=rid)
        finals = [[*frames][-1] for frames in (queued[18], queued[19], new)]
        assert [final["finish"] for final in finals] == ["length"] * 3
        waits = [final["ms"]["queue"] for final in finals]
        assert waits[0] <= waits[1]
        daemon.wait_for(running=0, queued=0)
        computed = stats(daemon)["kv"]["computed"] - before
        assert computed <= sum(final["usage"]["prompt"] for final in finals)


def test_curl_gets_its_answer_and_a_line_without_an_end_too(daemon: DaemonProcess) -> None:
    command = ["curl", "-s", "--unix-socket", str(daemon.socket_path), "http://x/eqp/chat", "-d"]
    with contextlib.suppress(FileNotFoundError):
        result = subprocess.run([*command, '{"prompt":"x","max_tokens":3}'], capture_output=True, check=True)
        assert json.loads(result.stdout)["usage"]["completion"] == 3
    _, final = send_raw(daemon, b'{"op":"chat","prompt":"x","max_tokens":3}')
    assert final["usage"]["completion"] == 3


def test_a_hundred_cancelled_requests_leave_no_thread_and_no_memory() -> None:
    with running_daemon('fake:{"prefill_token_s":0.0001}') as daemon:
        assert is_well(daemon)
        pid = daemon.process.pid

        def churn(first: int) -> None:
            for number in range(first, first + 50):
                with daemon.client() as client:
                    tokens = [1 + number % 200] * 2000
                    deadline = {"deadline_ms": 20} if number % 3 == 0 else {}
                    frames = client.stream(
                        "generate", tokens=tokens, max_tokens=50, stream=True, cache=False, **deadline
                    )
                    next(frames)
                    if number % 3 == 1:
                        call(daemon, "cancel", rid="r0")  # nobody's
            daemon.wait_for(running=0, queued=0)

        churn(0)
        threads, memory = status(Path(f"/proc/{pid}"))["Threads"], anonymous_bytes(pid)
        churn(50)
        assert is_well(daemon)
        assert status(Path(f"/proc/{pid}"))["Threads"] == threads
        assert anonymous_bytes(pid) - memory < 8 << 20


# Clients that do not read.


NUM_UNREAD = 3000
"""Tokens whose frames are more than the kernel and the daemon hold for one connection."""


def test_clients_that_read_nothing_are_held_in_little_memory_and_lose_nothing() -> None:
    request = {"op": "generate", "prompt": "x", "max_tokens": NUM_UNREAD, "stream": True, "cache": False}
    with running_daemon(script_of(WORDS, loop=True)) as daemon, contextlib.ExitStack() as stack:
        assert is_well(daemon)
        begun = anonymous_bytes(daemon.process.pid)
        lazy = [stack.enter_context(connect(daemon)) for _ in range(8)]
        for number, sock in enumerate(lazy):
            sock.sendall(json.dumps({**request, "id": f"{number:064d}"}).encode() + b"\n")
        assert call(daemon, "generate", prompt="x", max_tokens=50)["usage"]["completion"] == 50
        until(lambda: stats(daemon)["totals"]["tokens"] >= 8 * NUM_UNREAD)
        held = (
            anonymous_bytes(daemon.process.pid) - begun
        )  # the record that the scripted runtime keeps of its batches too
        assert held < 24 << 20
        for sock in lazy[4:]:
            sock.close()
        daemon.wait_for(running=0, conns=5)  # the four, and the one that asks
        for number, sock in enumerate(lazy[:4]):
            frames = read_frames(sock)
            assert {frame["id"] for frame in frames} == {f"{number:064d}"}
            text = "".join(frame.get("delta", "") for frame in frames)
            assert text == (WORDS * NUM_UNREAD)[: len(text)]
            assert frames[-1]["usage"]["completion"] == NUM_UNREAD == len(byte_level().encode(text, special=True))


def read_frames(sock: socket.socket) -> list[dict[str, Any]]:
    """Up to the final frame."""
    frames: list[dict[str, Any]] = []
    with sock.makefile("rb") as file:
        while not frames or not frames[-1]["done"]:
            frames.append(json.loads(file.readline()))
    return frames


# Lines and bodies of every size and shape.


@pytest.mark.parametrize("size", [65_535, 65_536, 65_537, LINE - 1, LINE])
def test_requests_up_to_the_limit_are_read_and_beyond_it_refused(daemon: DaemonProcess, size: int) -> None:
    head, tail = b'{"op":"health","x_fill":"', b'"}'
    data = head + b"a" * (size - len(head) - len(tail)) + tail
    assert send_raw(daemon, data + b"\n")[1]["ok"] is True
    assert send_raw(daemon, data, "/eqp/health")[1]["ok"] is True
    if size == LINE:
        for path in (None, "/eqp/health"):
            assert refused(daemon, data[:-2] + b'a"}\n', path)[0] == "too_large"


def test_a_line_without_an_end_takes_no_more_memory_than_the_limit(daemon: DaemonProcess) -> None:
    assert is_well(daemon)
    begun = anonymous_bytes(daemon.process.pid)
    piece = b'{"x_' + b"a" * (1 << 20)
    with connect(daemon) as sock:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            for _ in range(256):
                sock.sendall(piece)
        answer = read_all(sock)
    assert json.loads(answer.splitlines()[0])["error"]["code"] == "too_large" if answer else True
    assert anonymous_bytes(daemon.process.pid) - begun < 16 << 20


def test_long_answers_are_read_whole_by_the_client(tmp_path: Path) -> None:
    text = "Hello" * 14_000
    (tmp_path / "script").write_text(script_of(text, capacity=20_000).removeprefix("fake:"))
    with running_daemon(f"fake:{tmp_path / 'script'}") as daemon:
        for front in ("socket", "http"):
            assert chat(daemon, front, messages=user("x"), max_tokens=15_000).content == text, front


def nested(shape: str, depth: int) -> bytes:
    """A request with something of that depth, the request itself not counted."""
    open_, close = ("[", "]") if shape == "bare" else ('{"a":', "}")
    inner = open_ * depth + ("" if shape == "bare" else "1") + close * depth
    if shape in ("bare", "ignored"):
        return b'{"op":"chat","prompt":"x","max_tokens":1,"x_deep":%s}' % inner.encode()
    tool = b'{"type":"function","function":{"name":"f","parameters":%s}}' % inner.encode()
    messages = json.dumps(user("x")).encode()
    return b'{"op":"chat","messages":%s,"max_tokens":1,"tools":[%s]}' % (messages, tool)


@pytest.mark.parametrize("shape", ["bare", "ignored", "tools"])
def test_nesting_has_a_limit_of_ours_wherever_it_is(daemon: DaemonProcess, shape: str) -> None:
    own = {"bare": 1, "ignored": 1, "tools": 4}[shape]
    for path in (None, "/eqp/chat"):
        code, answer = send_raw(daemon, nested(shape, 32 - own), path)
        assert (code or 200, "error" in answer) == (200, False), answer
        for depth in (33 - own, 100, 900, 1000, 20_000, 100_000):
            assert refused(daemon, nested(shape, depth), path)[0] == "bad_json", depth


def test_nesting_over_openais_route_is_limited_in_what_is_ignored_too(daemon: DaemonProcess) -> None:
    def body(depth: int) -> bytes:
        metadata = b'{"a":' * depth + b"1" + b"}" * depth
        return b'{"model":"m","max_tokens":1,"messages":%s,"metadata":%s}' % (json.dumps(user("x")).encode(), metadata)

    assert send_raw(daemon, body(31), CHAT_PATH)[0] == 200
    for depth in (32, 1000, 100_000):
        assert refused(daemon, body(depth), CHAT_PATH)[0] == "bad_json"


NUMBERS = (
    "temperature",
    "top_p",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "deadline_ms",
)


def with_raw(name: str, value: str) -> bytes:
    return b'{"messages":%s,"max_tokens":2,"%s":%s}' % (json.dumps(user("x")).encode(), name.encode(), value.encode())


@pytest.mark.parametrize("name", NUMBERS)
@pytest.mark.parametrize("path", ["/eqp/chat", CHAT_PATH])
def test_what_is_no_number_in_range_is_refused_by_name(daemon: DaemonProcess, name: str, path: str) -> None:
    for value in ("NaN", "Infinity", "-Infinity", "1e400"):
        assert refused(daemon, with_raw(name, value), path)[0] == "bad_json", value
        assert refused(daemon, b'{"op":"chat",' + with_raw(name, value)[1:], None)[0] == "bad_json", value
    for value in ("-3", '"0.7"', "[1]", "{}", "true", "1e300"):
        assert refused(daemon, with_raw(name, value), path) == ("bad_request", name), value
        assert refused(daemon, b'{"op":"chat",' + with_raw(name, value)[1:], None) == ("bad_request", name), value


def test_a_temperature_next_to_zero_is_greedy(daemon: DaemonProcess) -> None:
    for front in WITHOUT_ASK:
        greedy = chat(daemon, front, messages=user("x"), max_tokens=20, temperature=0)
        for temperature in (1e-8, 1e-300):
            assert (
                chat(daemon, front, messages=user("x"), max_tokens=20, temperature=temperature).content
                == greedy.content
            )


BROKEN = {
    "another encoding": '{"op":"chat","prompt":"漢字"}'.encode("gbk"),
    "not a character": b'{"op":"chat","prompt":"\xff\xfe"}',
    "overlong": b'{"op":"chat","prompt":"\xc0\x80"}',
    "half a surrogate pair": b'{"op":"chat","prompt":"\xed\xa0\x80"}',
    "cut in a character": '{"op":"chat","prompt":"canary 龘'.encode()[:-1],
    "a byte order mark": b'\xef\xbb\xbf{"op":"chat","prompt":"canary"}',
}


@pytest.mark.parametrize("name", BROKEN)
def test_bytes_that_are_no_text_are_refused_without_an_echo(daemon: DaemonProcess, name: str) -> None:
    for path in PLACES:
        for data in (BROKEN[name], BROKEN[name] + b"\n"):
            _, answer = send_raw(daemon, data, path)
            assert answer["error"]["code"] in {"bad_utf8", "bad_json"}, (path, answer)
            assert "canary" not in json.dumps(answer)
            assert len(json.dumps(answer)) < 400
    with connect(daemon) as sock:  # the connection ends; what comes behind the line is not run
        sock.sendall(BROKEN[name] + b'\n{"op":"shutdown"}\n')
        assert read_all(sock).count(b"\n") == 1
    assert is_well(daemon)


def test_blank_lines_and_carriage_returns_are_ignored(daemon: DaemonProcess) -> None:
    with connect(daemon) as sock:
        sock.sendall(b'\r\n\n   \n{"op":"health","id":1}\r\n\r\n \t \n{"op":"health","id":2}')
        sock.shutdown(socket.SHUT_WR)
        assert [json.loads(line)["id"] for line in read_all(sock).splitlines() if line.strip()] == [1, 2]


def test_control_characters_are_text_and_stay_out_of_the_log(daemon: DaemonProcess) -> None:
    text = "a\0b\x1b[31mc\x07\x7f\x9b"
    for front in ("socket", "socket stream"):
        answer = chat(daemon, front, messages=user(text), max_tokens=1, verbose=True)
        shown = call(daemon, "detokenize", tokens=list(answer.prompt_ids))["text"]
        assert text in shown
    assert chat(daemon, "http", messages=user(text), max_tokens=1).prompt == answer.prompt
    for name in ("\n", "a\x1b[31m", "\0", "../x", "..", "n" * 10_000):
        asked = {"messages": user("x"), "max_tokens": 1}
        for refusal in (
            chat(daemon, "socket", session=f"@{name}", **asked),
            chat(daemon, "http", conversation_id=name, **asked),
        ):
            if "." not in name:
                assert refusal.refused is not None
                assert name[:10] not in refusal.raw["message"]
    assert call(daemon, "session.get", session="\x1b[31m\n")["error"] == "not_found"
    send_raw(daemon, b'{"op":"canary\\u001b[31m\\n"}')
    log = daemon.log.replace("\n", "")
    assert log.isprintable()
    assert "canary" not in log
    assert json.dumps(stats(daemon)).isprintable()


# What takes long must not stand in anybody's way.


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonProcess]:
    """Over Qwen3's own tokenizer, whose work on a long text can be seen."""
    model = write_qwen_model(tmp_path_factory.mktemp("qwen") / "model")
    with running_daemon('fake:{"tokens":[19,151645],"vocab_size":151936,"num_tokens":151669}', model=model) as running:
        yield running
        assert is_well(running)
        assert "Traceback" not in running.log


@pytest.mark.parametrize(
    ("text", "count"), [("a", 200_000), ("^", 200_000), (" ", 200_000), ("漢", 200_000), ("x", 1_000_000)]
)
def test_one_endless_word_is_refused_while_others_are_answered(qwen: DaemonProcess, text: str, count: int) -> None:
    with connect(qwen) as slow, qwen.client() as other:
        slow.sendall(json.dumps({"op": "chat", "prompt": text * count}, ensure_ascii=False).encode() + b"\n")
        num_answered, early = 0, select_nothing(slow)
        while early:
            assert other.request("health")["ok"]
            num_answered += 1
            early = select_nothing(slow)
        final = read_frames(slow)[-1]
    assert final["text"] == "4" if text == " " else final["error"]["code"] == "too_long"
    assert num_answered > 0


def select_nothing(sock: socket.socket) -> bool:
    """Whether nothing has come yet."""
    sock.setblocking(False)
    try:
        return not sock.recv(1, socket.MSG_PEEK)
    except BlockingIOError:
        return True
    finally:
        sock.settimeout(HANG_GUARD_S)


def test_health_is_answered_among_cancels_and_refusals_and_long_prompts() -> None:
    with running_daemon('fake:{"prefill_token_s":0.0005}') as daemon, daemon.client() as other, daemon.client() as busy:
        is_over = threading.Event()
        seen: list[bool] = []

        def look() -> None:
            with daemon.client() as watcher:
                while not is_over.is_set():
                    seen.append(watcher.request("health")["ok"])

        thread = threading.Thread(target=look)
        thread.start()
        frames = busy.stream("generate", tokens=[3] * 4000, max_tokens=1, stream=True)
        next(frames)
        before = len(seen)
        with pytest.raises(EdgeqwenError) as caught:
            other.request("chat", prompt="y" * 400_000)
        assert caught.value.code == "too_long"
        for _ in range(200):
            with pytest.raises(EdgeqwenError) as caught:
                other.request("cancel", rid="r0")
            assert caught.value.code == "not_found"
        assert len(seen) > before + 5
        [*_, final] = frames
        is_over.set()
        thread.join()
        assert (final["finish"], set(seen)) == ("length", {True})


def test_a_running_stream_goes_on_between_the_pieces_of_long_prompts_and_short_ones_get_in() -> None:
    with running_daemon(script_of(WORDS, loop=True, step_s=0.002, prefill_token_s=0.0004)) as daemon:
        with daemon.client() as victim, daemon.client() as attacker:
            stream = victim.stream("chat", prompt="v", max_tokens=8000, stream=True, speculate=False)
            while "delta" not in next(stream):
                pass
            order: list[str] = []

            def attack() -> None:
                frames = attacker.stream("generate", tokens=[9] * 6000, max_tokens=2, stream=True)
                order.extend("attacker" for frame in frames if "delta" in frame)

            def look_in() -> None:
                call(daemon, "chat", prompt="short", max_tokens=1)
                order.append("short")

            threads = [threading.Thread(target=attack)]
            threads[0].start()
            daemon.wait_for(running=2)
            for _ in range(5):
                threads.append(threading.Thread(target=look_in))
                threads[-1].start()
            num_between = 0
            while "attacker" not in order:
                num_between += "delta" in next(stream)
            for thread in threads:
                thread.join()
        assert num_between > 5
        assert order.index("attacker") >= 4, order


# When the daemon itself fails, or is short of something.

BREAK_THE_LOOP = """
import sys
from edgeqwen.scheduler import Scheduler
plan, calls = Scheduler.plan, iter(range(1000))
def broken(self, now):
    if self.num_held_tokens and next(calls) > 3:
        raise ValueError("a fault of ours")
    return plan(self, now)
Scheduler.plan = broken
from edgeqwen.cli.main import main
sys.argv[0] = "edgeqwen"
main()
"""


def test_a_daemon_whose_engine_breaks_fails_what_waits_and_ends(tmp_path: Path) -> None:
    model = daemons.write_text_model(tmp_path / "m")
    flags = ["serve", "--socket", str(tmp_path / "s"), "--model", str(model), "--runtime", script_of(WORDS, loop=True)]
    environ = os.environ | {"STATE_DIRECTORY": str(tmp_path / "state")}
    command = [sys.executable, "-c", BREAK_THE_LOOP, *flags]
    with subprocess.Popen(command, stderr=subprocess.PIPE, env=environ) as process:
        try:
            assert process.stderr is not None
            while b"ready" not in process.stderr.readline():
                assert process.poll() is None
            with Client.connect(tmp_path / "s") as client, pytest.raises(EdgeqwenError) as caught:
                client.request("chat", prompt="x", max_tokens=4000)
            assert caught.value.code == "engine"
            assert process.wait(HANG_GUARD_S) == 70
            assert b"the engine broke down" in process.stderr.read()
        finally:
            process.kill()


def limited(num_files: int) -> Callable[..., subprocess.Popen[bytes]]:
    def start(*flags: str, **options: Any) -> subprocess.Popen[bytes]:
        limits = (num_files, num_files)
        return start_command(*flags, preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, limits), **options)

    return start


def test_connections_beyond_the_open_files_are_refused_in_words(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(daemons, "start_command", limited(64))
    with running_daemon(script_of("hey"), environ={"STATE_DIRECTORY": str(tmp_path)}) as daemon:
        assert is_well(daemon)
        allowed = call(daemon, "hello")["limits"]["connections"]
        with daemon.client() as only:
            until(lambda: only.request("stats")["conns"] == 1)
            begun = num_descriptors(daemon) - 1
        until(lambda: num_descriptors(daemon) <= begun)
        assert 8 < allowed <= 64 - begun
        held = [connect(daemon) for _ in range(100)]
        until(lambda: num_descriptors(daemon) <= begun + allowed)
        refusals = Counter(json.loads(read_all(sock))["error"]["code"] for sock in held[allowed:])
        assert refusals == {"busy": 100 - allowed}
        with held[0] as admitted:
            admitted.sendall(b'{"op":"chat","prompt":"x","session":"@a"}\n')
            (final,) = read_frames(admitted)
            assert (final["text"], "saved" in final) == ("hey", False), "files can still be written"
        before = work_of(daemon.process.pid)
        time.sleep(0.5)
        assert (work_of(daemon.process.pid) - before).cpu_ns < 0.1e9
        for sock in held:
            sock.close()
        until(lambda: num_descriptors(daemon) <= begun)
        for _ in range(300):
            connect(daemon).close()
        assert is_well(daemon)
        until(lambda: num_descriptors(daemon) <= begun)
        assert daemon.log.count("\n") < 20


def test_many_requests_and_sessions_leave_memory_on_a_plateau() -> None:
    environ = {"EDGEQWEN_KV_MEMORY_MB": "8", "EDGEQWEN_KV_DISK_MB": "0"}
    with running_daemon("fake:", environ=environ) as daemon, daemon.client() as client:
        pid = daemon.process.pid

        def run(first: int, count: int) -> None:
            for number in range(first, first + count):
                prompt = f"{number} " * (10 + number % 120)
                if number % 10 == 0:
                    with daemon.client() as quitter:
                        next(quitter.stream("chat", prompt=prompt, max_tokens=50, stream=True))
                    continue
                client.request("chat", session=f"@s{number}", prompt=prompt, max_tokens=4)
                client.request("session.delete", session=f"@s{number}")
            daemon.wait_for(running=0, queued=0)

        run(0, 150)
        plateau = anonymous_bytes(pid)
        run(150, 250)
        assert anonymous_bytes(pid) - plateau < 250 * 10_000
        kv = stats(daemon)
        assert kv["kv_bytes"] <= 8 << 20
        assert kv["sessions"] == 0


# Conversations as nobody should write them.


def test_odd_conversations_are_rendered_as_the_template_does_or_refused(qwen: DaemonProcess) -> None:
    sound: list[list[dict[str, Any]]] = [
        [{"role": "system", "content": "only"}],
        [*user("a"), {"role": "assistant", "content": ""}, *user("b")],
        [*user("a"), *user("b")],
        [*user("a"), {"role": "assistant", "content": "Sure, "}],
    ]
    for messages in sound:
        expected = qwen_builder().build(messages).ids
        for front in ("socket", "socket stream"):
            answer = chat(qwen, front, messages=messages, verbose=True)
            assert answer.prompt_ids == expected, messages
        assert chat(qwen, "http", messages=messages).prompt == len(expected)
    developer = [{"role": "developer", "content": "Be brief."}, *user("a")]
    expected = qwen_builder().build([{"role": "system", "content": "Be brief."}, *user("a")]).ids
    assert chat(qwen, "http", messages=developer).prompt == len(expected)
    wrong: list[tuple[Any, str]] = [
        ([], "messages"),
        ([{"role": "wizard", "content": "x"}], "messages[0].role"),
        ([{"content": "x"}], "messages[0]"),
        ([*user("a"), {"role": "user"}], "messages[1]"),
    ]
    for messages, field in wrong:
        for front in WITHOUT_ASK:
            answer = chat(qwen, front, messages=messages)
            assert answer.refused is not None, (front, messages)
            assert answer.refused[0] == (400 if front.startswith("http") else "bad_request")
            assert str(answer.refused[1]).startswith(field), (front, answer.refused)


# What was said stays between client and daemon.


def test_nothing_that_was_said_is_in_log_or_stats_whatever_happens() -> None:
    marker = "QZX-17"
    messages = [{"role": "system", "content": f"{marker} s" * 50}, {"role": "user", "content": f"{marker} u"}]
    call_ = {"type": "function", "function": {"name": "f", "arguments": json.dumps({"a": marker})}}
    tools = [*messages, {"role": "assistant", "tool_calls": [call_]}, {"role": "tool", "content": f"{marker} t"}]
    script = script_of("said " + marker, fail_at_step=9)
    with running_daemon(script) as daemon:
        for front in WITHOUT_ASK:
            for conversation in (
                messages,
                messages,
                tools,
                [messages[0], {"role": "user", "content": f"{marker} edited"}],
            ):
                chat(daemon, front, messages=conversation)
            for refusal in ({"temperature": -1}, {"stop": [marker] * 99}, {marker: 1}, {"logit_bias": {marker: 1}}):
                assert chat(daemon, front, messages=messages, **refusal).refused is not None
        with daemon.client() as client:
            next(client.stream("chat", messages=messages, stream=True))
        call(daemon, "chat", session=f"@{marker}", prompt=marker)
        call(daemon, "session.get", session=f"@{marker}{marker}")
        for path in PLACES:
            send_raw(daemon, b'{"op":"chat","prompt":"%s' % marker.encode(), path)
        post(daemon, f"/{marker}", {"x": marker})
        daemon.wait_for(running=0)
        assert marker not in json.dumps(stats(daemon))
        daemon.process.send_signal(signal.SIGTERM)
        assert daemon.wait() == 0
        assert stats_errors(daemon.log, marker) == []


def stats_errors(log: str, marker: str) -> list[str]:
    return [line for line in log.splitlines() if marker in line or "Traceback" in line]


# The shell client.

ODD = """it's "x" \\n $HOME $(id) %s -n"""


def prompt_tokens(daemon: DaemonProcess, *arguments: str, stdin: bytes = b"") -> int:
    result = run_command(
        "ask", "--socket", str(daemon.socket_path), "--json", "--max-tokens", "1", *arguments, stdin=stdin
    )
    assert result.returncode == 0, result.stderr
    count: int = json.loads(result.stdout)["usage"]["prompt"]
    return count


def test_the_shell_client_sends_a_prompt_byte_for_byte(daemon: DaemonProcess) -> None:
    def count(text: str) -> int:
        return int(call(daemon, "chat", prompt=text, max_tokens=1)["usage"]["prompt"])

    assert prompt_tokens(daemon, ODD) == prompt_tokens(daemon, stdin=ODD.encode()) == count(ODD)
    assert prompt_tokens(daemon, stdin=ODD.encode() + b"\n") == count(ODD + "\n") == count(ODD) + 1
    assert prompt_tokens(daemon, "--", "-n -e %s") == count("-n -e %s")


def test_the_shell_client_sends_a_prompt_longer_than_any_argument(daemon: DaemonProcess) -> None:
    """The refusal, which counts the tokens, shows that all of it has arrived."""
    text = "ab\n" * 100_000
    result = run_command("ask", "--socket", str(daemon.socket_path), stdin=text.encode())
    message = call(daemon, "chat", prompt=text)["message"]
    assert (result.returncode, message in result.stderr.decode()) == (65, True)
    assert str(len(text)) not in message
    assert "300" in message


ESCAPES = "\x1b]52;c;aGk=\x07red \x1b[31m\r\x7f\x9b ok\n\ttab"


def on_terminal(*flags: str) -> str:
    """What a command writes to a terminal."""
    own, terminal = pty.openpty()
    try:
        with start_command(*flags, stdin=subprocess.DEVNULL, stdout=terminal, stderr=subprocess.DEVNULL) as process:
            assert process.wait(HANG_GUARD_S) == 0
        return os.read(own, 1 << 16).decode()
    finally:
        os.close(own)
        os.close(terminal)


def test_control_characters_of_an_answer_reach_a_pipe_and_no_terminal() -> None:
    with running_daemon(script_of(ESCAPES)) as daemon:
        at = ("--socket", str(daemon.socket_path))
        assert run_command("ask", *at, "--session", "a", "x").stdout == ESCAPES.encode() + b"\n"
        assert ESCAPES.encode() in run_command("sessions", "show", *at, "a").stdout
        for seen in (on_terminal("ask", *at, "x"), on_terminal("sessions", "show", *at, "a")):
            text = seen.replace("\r\n", "\n")
            assert "\u241b]52;c;aGk=\u2407red \u241b[31m\u240d\u2421\ufffd ok\n\ttab\n" in text
            assert set("\x1b\x07\r\x7f\x9b").isdisjoint(text)
