"""Requests of all kinds, good and bad, thousands of them: nothing is left of them in the daemon afterwards.

    scripts/soak mixed [--requests 2000] [--package PACKAGE]

A few clients send what comes up: chats, turns, forks, resets, deletes, cancels, hang-ups half-way, prompts that are too
long, lines that are no JSON, HTTP good and bad. Each answer must be the right one of its kind. What the daemon takes in
memory and descriptors after the first of them and at the end, when all its slots must be free, tells of leaks.
"""

from __future__ import annotations

import contextlib
import json
import random
import socket
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from tests.soak.command import run_with_models
from tests.soak.reference import GREEDY, user
from tests.soak.service import Model, Service
from tests.soak.words import some_words

CONTEXT: Final = 2048
NUM_SLOTS: Final = 4
NUM_NAMES: Final = 6
"""Sessions of a client: few, so that they soon are as many as they ever will be."""

NUM_LOOKS: Final = 10
POLL_S: Final = 0.05
MOST_GROWTH: Final = 0.03
TURN_ERRORS: Final = frozenset({"too_long", "session_busy", "not_found", "conflict"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """Memory is compared with what it was after `num_before` requests; `most_growth` is a share of it. After `quiet_s`
    what is to be written is on disk, and what was settled is known.
    """

    num_requests: int = 2000
    num_before: int = 200
    num_clients: int = 6
    num_words: int = 40
    max_tokens: int = 16
    most_growth: float = MOST_GROWTH
    quiet_s: float = 8.0
    seed: int = 1


@dataclass(eq=False)
class Client:
    """One that sends anything. `line` is replaced when it breaks off."""

    number: int
    service: Service
    size: Size
    rng: random.Random
    counts: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.line = self.service.line()
        self.kinds: list[Callable[[], None]] = [
            *[self.chat, self.stream, self.turn] * 3,
            *[self.choices, self.fork, self.delete, self.reset, self.cancel, self.hang_up],
            *[self.too_long, self.too_large, self.no_json, self.unknown_field],
            *[self.http, self.http_hang_up, self.http_bad],
        ]

    def run(self, num_requests: int) -> None:
        for _ in range(num_requests):
            kind = self.rng.choice(self.kinds)
            kind()
            self.counts[kind.__name__] += 1
        self.line.check_silence()

    def words(self) -> str:
        return some_words(self.rng, self.rng.randint(1, self.size.num_words))

    def name(self) -> str:
        return f"@{self.number}-{self.rng.randrange(NUM_NAMES)}"

    def options(self) -> dict[str, Any]:
        return {"max_tokens": self.size.max_tokens, **(GREEDY if self.rng.random() < 0.5 else {"temperature": 1.0})}

    def hang_up_for_good(self) -> None:
        self.line.close()

    def reconnect(self) -> None:
        self.line.close()
        self.line = self.service.line()

    def expect(self, frame: dict[str, Any], *codes: str) -> None:
        assert frame["error"]["code"] in codes, frame

    # What is answered.

    def chat(self) -> None:
        final = self.line.must("chat", prompt=self.words(), **self.options())
        assert final["usage"]["completion"] > 0

    def stream(self) -> None:
        kinds: list[str] = []
        request_id = self.line.send("chat", prompt=self.words(), stream=True, **self.options())
        final = self.line.final(request_id, lambda frame: kinds.append(frame.get("event", "text")))
        assert "error" not in final, final
        assert kinds[0] == "start"
        assert "start" not in kinds[1:]

    def choices(self) -> None:
        assert len(self.line.must("chat", prompt=self.words(), n=3, **self.options())["choices"]) == 3

    def turn(self) -> None:
        name = self.name()
        final = self.line.ask("chat", session=name, prompt=self.words(), **self.options())
        if "error" in final:
            self.expect(final, "too_long")
            self.line.must("session.reset", session=name)

    def fork(self) -> None:
        source, copy = self.name(), self.name()
        if source != copy:
            self._forget(copy)
            self._may_miss(self.line.ask("session.fork", session=source, name=copy[1:]))

    def delete(self) -> None:
        self._forget(self.name())

    def reset(self) -> None:
        self._may_miss(self.line.ask("session.reset", session=self.name()))

    def _forget(self, name: str) -> None:
        self._may_miss(self.line.ask("session.delete", session=name))

    def _may_miss(self, frame: dict[str, Any]) -> None:
        if "error" in frame:
            self.expect(frame, "not_found", "session_busy")  # busy: one that hung up may not be over yet

    # What is given up.

    def cancel(self) -> None:
        request_id = self.line.send("chat", prompt=self.words(), stream=True, max_tokens=400)
        if self.rng.random() < 0.7:
            assert self.line.read().get("event") == "start"
        cancel_id = self.line.send("cancel", target=request_id)
        open_ids = {request_id, cancel_id}
        while open_ids:
            frame = self.line.read()
            assert frame["id"] in open_ids, frame
            if frame["done"]:
                assert "error" not in frame, frame
                open_ids.remove(frame["id"])

    def hang_up(self) -> None:
        session = {"session": self.name()} if self.rng.random() < 0.5 else {}
        self.line.send("chat", prompt=self.words(), stream=True, max_tokens=400, **session)
        for _ in range(self.rng.randrange(6)):
            if self.line.read()["done"]:
                break
        self.reconnect()

    # What is refused.

    def too_long(self) -> None:
        self.expect(self.line.ask("generate", tokens=[5] * (CONTEXT + 10), max_tokens=4), "too_long")

    def too_large(self) -> None:
        self.line.write(b'{"op":"chat","prompt":"' + b"x" * (2 << 20) + b'"}\n')
        self._refused("too_large")

    def no_json(self) -> None:
        self.line.write(self.rng.choice([b"[1]\n", b"{\n", b'{"op":"chat",}\n', b"\xff\n"]))
        self._refused("bad_json", "bad_utf8")

    def _refused(self, *codes: str) -> None:
        lines = [line for line in self.line.rest().splitlines() if line.strip()]
        assert len(lines) <= 1, lines
        if lines:  # a peer that is cut off while it still sends may lose what it was told
            self.expect(json.loads(lines[0]), *codes)
        self.reconnect()

    def unknown_field(self) -> None:
        self.expect(self.line.ask("chat", prompt="Hi", colour="red"), "bad_request")

    # The same socket with HTTP.

    def http(self) -> None:
        conversation = {"conversation_id": self.name()[1:]} if self.rng.random() < 0.5 else {}
        body = {"messages": [user(self.words())], "max_tokens": self.size.max_tokens, **conversation}
        answer = self._post(body)
        assert answer.startswith((b"HTTP/1.1 200", b"HTTP/1.1 413", b"HTTP/1.1 409")), answer

    def http_bad(self) -> None:
        answer = self._post({"messages": "none"})
        assert answer.startswith(b"HTTP/1.1 400"), answer

    def http_hang_up(self) -> None:
        self._post({"messages": [user(self.words())], "max_tokens": 400, "stream": True}, most_bytes=200)

    def _post(self, body: dict[str, Any], most_bytes: int = 1 << 20) -> bytes:
        data = json.dumps({"model": "any"} | body).encode()
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n"
        answer = b""
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock, contextlib.suppress(ConnectionResetError):
            sock.connect(str(self.service.socket_path))
            sock.sendall(head.encode() + b"Connection: close\r\n\r\n" + data)
            while len(answer) < most_bytes and (piece := sock.recv(most_bytes)):
                answer += piece
        return answer


def run(folder: Path, model: Model, size: Size) -> dict[str, Any]:
    """Raises AssertionError if anything is wrong; else what there was to see."""
    settings = {"kv_slots": NUM_SLOTS, "kv_context": CONTEXT, "kv_memory_mb": model.memory_mb(3 * CONTEXT)}
    disk_mb, rng = model.memory_mb(16 * CONTEXT), random.Random(size.seed)
    with Service(folder, model, kv_disk_mb=disk_mb, **settings) as service, contextlib.ExitStack() as at_end:
        clients = [Client(number, service, size, random.Random(rng.random())) for number in range(size.num_clients)]
        for client in clients:
            at_end.callback(client.hang_up_for_good)
        run_all(clients, size.num_before)
        resident_before, descriptors_before = _look(service, clients, size)
        run_all(clients, size.num_requests - size.num_before)
        resident, descriptors = _look(service, clients, size)
        _check_slots(service, clients[0])
        growth = resident / resident_before - 1
        kv_mb = service.stats()["kv_bytes"] >> 20
        found = {
            "model": model.name,
            "resident_mb": [resident_before >> 20, resident >> 20],
            "kv_mb": kv_mb,
            "growth": round(growth, 4),
            "descriptors": descriptors.total(),
            "requests": dict(sum((client.counts for client in clients), Counter())),
        }
        assert growth <= size.most_growth, found
        assert descriptors == descriptors_before, f"descriptors now {descriptors}, before {descriptors_before}"
        assert service.stats()["totals"]["errors"] == 0
    return found


def run_all(clients: Sequence[Client], num_requests: int) -> None:
    """All of them at once, so many requests together."""
    share = -(-num_requests // len(clients))
    with ThreadPoolExecutor(len(clients)) as pool:
        for result in [pool.submit(client.run, share) for client in clients]:
            result.result()


def _look(service: Service, clients: list[Client], size: Size) -> tuple[int, Counter[str]]:
    """Resident bytes less keys and values, of which there may be any number up to their budget, and descriptors by what
    they are, when all is quiet.
    """
    time.sleep(size.quiet_s)
    stats = service.wait_until_idle()
    assert stats["conns"] == len(clients) + 1, stats  # the one that asks
    looks = []
    for _ in range(NUM_LOOKS):  # the daemon may not have closed yet what asked last
        time.sleep(POLL_S)
        looks.append(service.descriptors())
    return service.resident_bytes - stats["kv_bytes"], min(looks, key=Counter.total)


def _check_slots(service: Service, client: Client) -> None:
    """As many requests run at once as there are slots."""
    lines = [service.line() for _ in range(NUM_SLOTS)]
    for line in lines:
        line.send("generate", tokens=[5], stream=True, max_tokens=CONTEXT // 4, ignore_eos=True, speculate=False)
    for line in lines:
        while line.read().get("event") == "start":
            pass
    assert service.stats()["running"] == NUM_SLOTS
    for line in lines:
        line.close()
    service.wait_until_idle()
    client.line.check_silence()


if __name__ == "__main__":
    run_with_models("mixed", __doc__, Size(), run)
