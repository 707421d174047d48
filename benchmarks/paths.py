"""What a request costs on each way to the engine: lines, HTTP on the socket and on TCP, and clients that people have.

    scripts/benchmark paths [--requests 200]

A daemon with a scripted runtime answers one token at once. Every way asks the same, in turns, each over a connection
that stays open; so does the engine itself, in process. Medians of the whole request; `added_ms` is the median less the
engine's. What the clients spend in their own process counts, which for the two packages is most of it.
"""

from __future__ import annotations

import argparse
import http.client
import json
import socket
import statistics
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import uvloop
from langchain_openai import ChatOpenAI
from openai import OpenAI

from edgeqwen.client import Client
from edgeqwen.engine.generation import GenerationInput
from edgeqwen.runtime.fake import FakeScript
from tests.daemons import running_daemon
from tests.engines import Listener, running

MESSAGES = [{"role": "user", "content": "hi"}]
TOKENS = (40,)
NUM_WARM = 20


class UnixHttp(http.client.HTTPConnection):
    """HTTP over a Unix socket."""

    def __init__(self, path: Path) -> None:
        super().__init__("localhost")
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.connect(str(self._path))


def lines(path: Path) -> Callable[[], Any]:
    """The socket without any client: a line out, a line in."""
    sock = socket.socket(socket.AF_UNIX)
    sock.connect(str(path))
    file = sock.makefile("rb")
    line = json.dumps({"op": "chat", "messages": MESSAGES, "max_tokens": 1, "temperature": 0}).encode() + b"\n"

    def ask() -> Any:
        sock.sendall(line)
        return json.loads(file.readline())["finish"]

    return ask


def over_http(connection: http.client.HTTPConnection) -> Callable[[], Any]:
    body = json.dumps({"model": "any", "messages": MESSAGES, "max_tokens": 1, "temperature": 0})

    def ask() -> Any:
        connection.request("POST", "/v1/chat/completions", body, {"Content-Type": "application/json"})
        return json.loads(connection.getresponse().read())["choices"][0]["finish_reason"]

    return ask


def own_client(path: Path, stack: ExitStack) -> Callable[[], Any]:
    client = stack.enter_context(Client.connect(path))
    return lambda: client.chat(messages=MESSAGES, max_tokens=1, temperature=0).finish


def openai_package(port: int) -> Callable[[], Any]:
    client = OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none")
    create: Any = client.chat.completions.create
    return lambda: create(model="any", messages=MESSAGES, max_tokens=1, temperature=0).choices[0].finish_reason


def langchain_package(port: int) -> Callable[[], Any]:
    given: dict[str, Any] = {
        "base_url": f"http://127.0.0.1:{port}/v1",
        "api_key": "none",
        "model": "any",
        "max_tokens": 1,
    }
    model = ChatOpenAI(**given, temperature=0)
    return lambda: model.invoke("hi").response_metadata["finish_reason"]


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port


def timed(ask: Callable[[], Any]) -> float:
    began = time.perf_counter()
    assert ask() == "length"
    return (time.perf_counter() - began) * 1e3


async def engine_ms(num_requests: int) -> float:
    """The median request to the engine itself."""
    times: list[float] = []
    async with running(FakeScript(tokens=TOKENS)) as rig:
        given = GenerationInput(messages=tuple(MESSAGES), max_tokens=1, temperature=0.0)
        for _ in range(NUM_WARM + num_requests):
            listener = Listener()
            began = time.perf_counter()
            await rig.inference.submit(given, owner="0", sink=listener)
            await listener.done()
            times.append((time.perf_counter() - began) * 1e3)
    return statistics.median(times[NUM_WARM:])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--requests", type=int, default=200)
    num_requests: int = parser.parse_args().requests
    port = free_port()
    with (
        running_daemon("fake:" + json.dumps({"tokens": TOKENS}), "--http", f"127.0.0.1:{port}") as daemon,
        ExitStack() as stack,
    ):
        daemon.wait_for(running=0)
        ways = {
            "socket": lines(daemon.socket_path),
            "edgeqwen.client": own_client(daemon.socket_path, stack),
            "http on the socket": over_http(UnixHttp(daemon.socket_path)),
            "http on tcp": over_http(http.client.HTTPConnection("127.0.0.1", port)),
            "openai": openai_package(port),
            "langchain": langchain_package(port),
        }
        times: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(NUM_WARM + num_requests):
            for name, ask in ways.items():
                times[name].append(timed(ask))
    engine = uvloop.run(engine_ms(num_requests))
    medians = {name: statistics.median(each[NUM_WARM:]) for name, each in times.items()}
    report = {
        "benchmark": "paths",
        "engine_ms": round(engine, 3),
        "ms": {name: round(value, 3) for name, value in medians.items()},
        "added_ms": {name: round(value - engine, 3) for name, value in medians.items()},
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main()
