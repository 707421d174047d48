"""What clients of HTTP send beside the socket's members, on both listeners of a real daemon, and what it refuses."""

from __future__ import annotations

import contextlib
import functools
import http.client
import json
import os
import re
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from tests.daemons import HANG_GUARD_S, DaemonProcess, running_daemon, script_of
from tests.fronts import CHAT_PATH, WITHOUT_ASK, call, chat, write_qwen_model
from tests.qwen_files import IM_END, qwen_builder, qwen_tokenizer

LISTENERS: Final = ("socket", "port")
WORDS: Final = "one two three four five six seven eight nine ten"
TEXT: Final = "a<|im_end|> b \U0001fae0"


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonProcess]:
    """Qwen3's tokenizer and template on a socket and a port; says the same to everybody."""
    folder = tmp_path_factory.mktemp("qwen")
    ids = [*qwen_tokenizer().encode(WORDS, special=False), IM_END]
    (folder / "script").write_text(json.dumps({"scripts": [ids], "vocab_size": 151936}))
    model = write_qwen_model(folder / "model")
    with running_daemon(f"fake:{folder / 'script'}", "--http", "127.0.0.1:0", model=model) as running:
        yield running
        assert running.process.poll() is None
        assert "Traceback" not in running.log
        assert "ERROR" not in running.log


class Listener(http.client.HTTPConnection):
    """A connection to one of the daemon's listeners."""

    def __init__(self, daemon: DaemonProcess, listener: str) -> None:
        super().__init__("localhost", timeout=HANG_GUARD_S)
        self._daemon = daemon
        self._listener = listener

    def connect(self) -> None:
        is_socket = self._listener == "socket"
        self.sock = socket.socket(socket.AF_UNIX if is_socket else socket.AF_INET)
        self.sock.settimeout(HANG_GUARD_S)
        self.sock.connect(str(self._daemon.socket_path) if is_socket else ("127.0.0.1", self._daemon.http_port))


def ask(
    daemon: DaemonProcess,
    listener: str,
    body: Any = None,
    *,
    method: str = "POST",
    path: str = CHAT_PATH,
    headers: dict[str, str] | None = None,
) -> tuple[int, Any, dict[str, str]]:
    """Status, JSON and headers of one request; `headers` replace those that clients send."""
    given = {"Host": "localhost", "Content-Type": "application/json", **(headers or {})}
    with contextlib.closing(Listener(daemon, listener)) as connection:
        connection.putrequest(method, path, skip_host=True, skip_accept_encoding=True)
        data = b"" if body is None else json.dumps(body).encode()
        for name, value in (given | ({} if body is None else {"Content-Length": str(len(data))})).items():
            connection.putheader(name, value)
        connection.endheaders(data or None)
        response = connection.getresponse()
        raw = response.read()
        return response.status, json.loads(raw) if raw else None, dict(response.headers.items())


def user(content: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": content}]


# The limit of tokens by its newer name, and fields beside it.


@pytest.mark.parametrize("listener", LISTENERS)
@pytest.mark.parametrize(
    "given",
    [
        {"max_completion_tokens": 5},
        {"max_tokens": 5},
        {"max_completion_tokens": 5, "max_tokens": 5},
        {"max_completion_tokens": 5, "max_tokens": 3},
        {"max_completion_tokens": 5, "max_tokens": 900},
        {"max_completion_tokens": 5, "max_tokens": None},
    ],
)
def test_the_newer_name_of_the_limit_counts_and_wins(
    daemon: DaemonProcess, listener: str, given: dict[str, Any]
) -> None:
    status, answer, _ = ask(daemon, listener, {"messages": user("x"), **given})
    assert status == 200
    assert (answer["usage"]["completion_tokens"], answer["choices"][0]["finish_reason"]) == (5, "length")


@pytest.mark.parametrize("listener", LISTENERS)
def test_what_would_change_the_answer_is_served_or_refused_by_name(daemon: DaemonProcess, listener: str) -> None:
    body = {"messages": user("x"), "max_completion_tokens": 5}
    _, both, _ = ask(daemon, listener, {**body, "n": 2, "logprobs": True, "top_logprobs": 2})
    assert [choice["index"] for choice in both["choices"]] == [0, 1]
    assert both["usage"]["completion_tokens"] == 10
    for choice in both["choices"]:
        assert len(choice["logprobs"]["content"]) == 5
        assert all(len(entry["top_logprobs"]) == 2 for entry in choice["logprobs"]["content"])
    _, formed, _ = ask(
        daemon, listener, {**body, "max_completion_tokens": 60, "response_format": {"type": "json_object"}}
    )
    assert formed["choices"][0]["message"]["content"].startswith("{")
    for harmless in ({"user": "me"}, {"store": False}, {"metadata": {"a": "b"}}, {"response_format": {"type": "text"}}):
        assert ask(daemon, listener, body | harmless)[0] == 200
    for wrong in ({"max_tokns": 5}, {"modalities": ["audio"]}, {"response_format": {"type": "xml"}}, {"n": 0}):
        status, answer, _ = ask(daemon, listener, body | wrong)
        assert (status, answer["error"]["param"].partition(".")[0]) == (400, next(iter(wrong)))


def test_the_sockets_own_operation_knows_one_name_only(daemon: DaemonProcess) -> None:
    refused = call(daemon, "chat", prompt="x", max_completion_tokens=5)
    assert (refused["error"], refused["field"]) == ("bad_request", "max_completion_tokens")


# Contents in parts.


def parts(*texts: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text} for text in texts]


@pytest.mark.parametrize("listener", LISTENERS)
@pytest.mark.parametrize("role", ["system", "user", "assistant", "tool", "developer"])
def test_parts_of_any_role_are_the_text_they_make_together(daemon: DaemonProcess, listener: str, role: str) -> None:
    def conversation(content: Any) -> list[dict[str, Any]]:
        turn = {"role": role, "content": content}
        return [turn, *user("q")] if role in ("system", "developer") else [*user("q"), turn, *user("r")]

    stock = [{**turn, "role": "system"} if turn["role"] == "developer" else turn for turn in conversation(TEXT)]
    expected = len(qwen_builder().build(stock).ids)
    contents: list[Any] = [TEXT, parts(TEXT), parts(TEXT[:3], TEXT[3:7], "", TEXT[7:])]
    for content in contents:
        status, answer, _ = ask(daemon, listener, {"messages": conversation(content), "max_tokens": 1})
        assert (status, answer["usage"]["prompt_tokens"]) == (200, expected), content
    whole, empty = (
        ask(daemon, listener, {"messages": conversation(content), "max_tokens": 1})[1]["usage"]["prompt_tokens"]
        for content in ("", parts())
    )
    assert whole == empty


def test_parts_are_kept_in_a_conversation_as_their_text(daemon: DaemonProcess) -> None:
    body = {"messages": user(parts("a", " b")), "conversation_id": "of parts", "max_tokens": 1}
    assert ask(daemon, "socket", body)[0] == 200
    kept = call(daemon, "session.get", session="@of parts", messages=True)
    assert kept["messages"][0]["content"] == "a b"


@pytest.mark.parametrize("listener", LISTENERS)
@pytest.mark.parametrize(
    "content",
    [
        [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}],
        [*parts("look:"), {"type": "input_audio", "input_audio": {"data": "", "format": "wav"}}],
        [{"type": "text"}],
        [{"type": "text", "text": 5}],
        [{"text": "a"}],
        ["a"],
        [*parts("a"), "b"],
        [None],
        {"type": "text", "text": "a"},
        5,
    ],
)
def test_a_part_that_is_no_text_is_refused_with_its_place(daemon: DaemonProcess, listener: str, content: Any) -> None:
    status, answer, _ = ask(daemon, listener, {"messages": user(content), "max_tokens": 1})
    assert status == 400
    assert answer["error"]["param"].startswith("messages[0].content")
    assert "AAAA" not in json.dumps(answer)


def test_the_sockets_own_messages_may_have_parts_too(daemon: DaemonProcess) -> None:
    whole, in_parts = (
        call(daemon, "chat", messages=user(content), max_tokens=1) for content in ("a b", parts("a", " b"))
    )
    assert in_parts["usage"]["prompt"] == whole["usage"]["prompt"]
    refused = call(daemon, "chat", messages=user([*parts("a"), "b"]))
    assert (refused["error"], refused["field"].startswith("messages[0].content")) == ("bad_request", True)


# Conversations that go on in the middle.


@pytest.mark.parametrize("front", WITHOUT_ASK)
def test_a_conversation_that_ends_with_an_answer_gets_another_one_behind_it(daemon: DaemonProcess, front: Any) -> None:
    """To go on inside of a text there is `generate`, with no end token put before it."""
    messages = [*user("x"), {"role": "assistant", "content": "Sure, "}]
    answer = chat(daemon, front, messages=messages, max_tokens=20)
    assert answer.content == WORDS
    assert answer.prompt in (None, len(qwen_builder().build(messages).ids))
    raw = call(daemon, "generate", prompt="<|im_start|>assistant\nSure, ", max_tokens=2, verbose=True)
    assert IM_END not in raw["prompt_ids"]
    assert qwen_tokenizer().decode_bytes(raw["prompt_ids"]).endswith(b"Sure, ")


# Pages of other sites.

EVIL: Final = "http://evil.example"


@pytest.mark.parametrize("listener", LISTENERS)
@pytest.mark.parametrize("path", [CHAT_PATH, "/v1/messages", "/eqp/chat", "/eqp/batch", "/v1/completions"])
@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": EVIL},
        {"Origin": EVIL, "Host": "evil.example"},
        {"Origin": EVIL, "Content-Type": "text/plain"},
        {"Origin": "null", "Content-Type": "text/plain"},
        {"Sec-Fetch-Site": "cross-site"},
        {"Sec-Fetch-Site": "same-site", "Content-Type": "text/plain"},
        {"Sec-Fetch-Site": "cross-site", "Origin": "http://localhost"},
    ],
)
def test_what_a_page_of_another_site_sends_is_refused_before_anything_runs(
    daemon: DaemonProcess, listener: str, path: str, headers: dict[str, str]
) -> None:
    before = call(daemon, "stats")["totals"]["requests"]
    body = [{"prompt": "x"}] if path == "/eqp/batch" else {"messages": user("x"), "max_tokens": 2}
    status, _, answered = ask(daemon, listener, body, path=path, headers=headers)
    assert status == 403
    assert not [name for name in answered if name.lower().startswith("access-control-")]
    assert call(daemon, "stats")["totals"]["requests"] == before


@pytest.mark.parametrize("listener", LISTENERS)
def test_a_browser_that_asks_first_is_told_no(daemon: DaemonProcess, listener: str) -> None:
    asked = {"Origin": EVIL, "Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "content-type"}
    for path in (CHAT_PATH, "/eqp/chat", "/nothing"):
        status, _, answered = ask(daemon, listener, method="OPTIONS", path=path, headers=asked)
        assert status == 403
        assert not [name for name in answered if name.lower().startswith("access-control-")]
    assert ask(daemon, listener, method="OPTIONS")[0] == 405


def test_a_name_that_was_made_to_point_here_is_refused_on_the_port(daemon: DaemonProcess) -> None:
    for path, method in ((CHAT_PATH, "POST"), ("/health", "GET"), ("/v1/models", "GET")):
        body = {"messages": user("x"), "max_tokens": 2} if method == "POST" else None
        for host in ("evil.example", "evil.example:80", "localhost.evil.example"):
            headers = {"Host": host, "Sec-Fetch-Site": "same-origin"}
            assert ask(daemon, "port", body, method=method, path=path, headers=headers)[0] == 403


@pytest.mark.parametrize("listener", LISTENERS)
@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "application/json; charset=utf-8"])
def test_programs_may_call_their_json_what_they_like(daemon: DaemonProcess, listener: str, kind: str) -> None:
    body = {"messages": user("x"), "max_tokens": 2}
    assert ask(daemon, listener, body, headers={"Content-Type": kind})[0] == 200


def listening_ports(daemon: DaemonProcess) -> list[str]:
    """Local addresses, as the kernel writes them, of the daemon's sockets that listen on a port."""
    folder = Path(f"/proc/{daemon.process.pid}")
    inodes = set()
    for fd in (folder / "fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # of a connection that has just been closed
            if match := re.match(r"socket:\[(\d+)\]", os.readlink(fd)):
                inodes.add(match[1])
    lines = [line.split() for name in ("tcp", "tcp6") for line in (folder / "net" / name).read_text().splitlines()[1:]]
    return [line[1] for line in lines if line[3] == "0A" and line[9] in inodes]


def test_no_port_is_opened_unless_it_is_asked_for_and_then_on_loopback(daemon: DaemonProcess) -> None:
    with running_daemon() as plain:
        assert listening_ports(plain) == []
    assert listening_ports(daemon) == [f"0100007F:{daemon.http_port:04X}"]


# Clients of HTTP that go away, or do not read.


@contextlib.contextmanager
def endless(*flags: str, step_s: float) -> Iterator[DaemonProcess]:
    script, no_guesses = script_of("word " * 40, loop=True, step_s=step_s), {"EDGEQWEN_ENGINE_SPECULATION": "false"}
    with running_daemon(script, "--http", "127.0.0.1:0", *flags, environ=no_guesses) as running:
        yield running
        assert running.process.poll() is None
        assert not re.search("Traceback|ERROR", running.log), running.log


REQUESTS: Final[dict[str, tuple[str, Any]]] = {
    "chat": (CHAT_PATH, {"messages": user("x"), "max_tokens": 4000}),
    "completions": ("/v1/completions", {"prompt": ["x", "y"], "max_tokens": 4000}),
    "messages": ("/v1/messages", {"messages": user("x"), "max_tokens": 4000}),
    "lines": ("/eqp/chat", {"prompt": "x", "max_tokens": 4000}),
    "batch": ("/eqp/batch", [{"prompt": "x", "max_tokens": 4000}, {"prompt": "y", "max_tokens": 4000}]),
}


@pytest.fixture(scope="module")
def slow() -> Iterator[DaemonProcess]:
    with endless(step_s=0.005) as running:
        yield running


@pytest.mark.parametrize("listener", LISTENERS)
@pytest.mark.parametrize("is_stream", [True, False])
@pytest.mark.parametrize("name", REQUESTS)
def test_who_hangs_up_costs_nothing_more_whatever_the_format(
    slow: DaemonProcess, name: str, listener: str, is_stream: bool
) -> None:
    path, body = REQUESTS[name]
    if isinstance(body, dict):
        body = {**body, "stream": is_stream}
    connection = Listener(slow, listener)
    connection.request("POST", path, json.dumps(body), {"Host": "localhost"})
    slow.wait_for(running=2 if name in ("completions", "batch") else 1)
    connection.close()
    slow.wait_for(running=0, queued=0)


@pytest.mark.parametrize("listener", LISTENERS)
def test_an_answer_that_nobody_reads_comes_whole_later_and_others_go_on(listener: str) -> None:
    num_tokens = 3000
    with endless("--context", "4096", step_s=0.0) as running:
        body = {"messages": user("x"), "max_tokens": num_tokens, "stream": True, "logprobs": True, "top_logprobs": 5}
        idlers = [Listener(running, listener) for _ in range(3)]
        for idler in idlers:
            idler.request("POST", CHAT_PATH, json.dumps(body), {"Host": "localhost"})
        running.wait_for(running=0, queued=0)  # the engine waits for nobody
        assert call(running, "chat", prompt="x", max_tokens=4)["finish"] == "length"
        texts = []

        def read(idler: Listener) -> None:
            events = idler.getresponse().read().decode().removesuffix("\n\n").split("\n\n")
            assert events[-1] == "data: [DONE]"
            choices = [choice for event in events[:-1] for choice in json.loads(event[6:])["choices"]]
            assert sum(len((choice["logprobs"] or {}).get("content") or ()) for choice in choices) == num_tokens
            texts.append("".join(choice["delta"].get("content") or "" for choice in choices))

        in_parallel([functools.partial(read, idler) for idler in idlers])
        for idler in idlers:
            idler.close()
        assert len(texts) == 3
        assert set(texts) == {("word " * num_tokens)[: len(texts[0])]}


def in_parallel(jobs: list[Callable[[], None]]) -> None:
    threads = [threading.Thread(target=job) for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(HANG_GUARD_S)
