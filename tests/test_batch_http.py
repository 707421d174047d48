"""`POST /eqp/batch`: read as it comes, answered as items end, each side held back by the other."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from edgeqwen.protocol.limits import WireLimits
from tests.http_client import Answer, HttpClient, connect
from tests.wire import GUARD_S, Gate, Wire, fake_inference, serve, until

PATH = "/eqp/batch"
LINES = {"Content-Type": "application/x-ndjson"}
LONG = "x" * 2000


@pytest.fixture
async def wire(tmp_path: Path) -> AsyncIterator[Wire]:
    async with serve(tmp_path) as wire:
        yield wire


async def ask(wire: Wire, body: Any, path: str = PATH, headers: Mapping[str, str] | None = None) -> Answer:
    return await (await connect(wire)).ask("POST", path, body, headers=headers)


def texts(answer: Answer) -> dict[Any, str]:
    """Of each item its text or the code of its error."""
    return {line["item"]: line["text"] if "text" in line else line["error"]["code"] for line in answer.lines[:-1]}


class Sender:
    """A body in chunks, sent as the test says; lines of the response as they come."""

    def __init__(self, client: HttpClient) -> None:
        self.client = client
        self._chunks = client.read_chunks()
        self._data = b""

    @classmethod
    async def open(cls, wire: Wire, **options: Any) -> Sender:
        sender = cls(await connect(wire) if not options else HttpClient(*_streams(await wire.connect(**options))))
        sender.client.writer.write(b"POST /eqp/batch HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n")
        return sender

    def send(self, data: bytes) -> None:
        self.client.writer.write(b"%x\r\n%b\r\n" % (len(data), data) if data else b"0\r\n\r\n")

    async def status(self) -> int:
        async with asyncio.timeout(GUARD_S):
            return (await self.client.read_head())[0]

    async def line(self) -> dict[str, Any]:
        async with asyncio.timeout(GUARD_S):
            while b"\n" not in self._data:
                self._data += await anext(self._chunks)
        line, _, self._data = self._data.partition(b"\n")
        found = json.loads(line)
        assert isinstance(found, dict)
        return found

    async def rest(self) -> list[dict[str, Any]]:
        lines = [await self.line()]
        while not lines[-1]["done"]:
            lines.append(await self.line())
        return lines


def _streams(client: Any) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return client.reader, client.writer


@pytest.mark.parametrize(
    ("body", "headers"),
    [
        (b'[{"prompt":"a","id":"one"},{"prompt":"b","id":7}]', None),
        (b' \n [ {"prompt":"a","id":"one"} , {"prompt":"b","id":7} ] \n', {"Content-Type": "application/json"}),
        (b'{"each":"chat","common":{"seed":1},"items":[{"prompt":"a","id":"one"},{"prompt":"b","id":7}]}', None),
        (b'{"prompt":"a","id":"one"}\n{"prompt":"b","id":7}\n', None),
        (b'{"prompt":"a","id":"one"}\r\n\r\n{"prompt":"b","id":7}', LINES),
    ],
)
async def test_items_come_as_an_array_an_object_or_lines(
    wire: Wire, body: bytes, headers: Mapping[str, str] | None
) -> None:
    answer = await ask(wire, body, headers=headers)
    assert (answer.status, answer.headers["content-type"]) == (200, "application/x-ndjson")
    assert texts(answer) == {0: "Hello!", 1: "Hello!"}
    assert {line["item"]: line["id"] for line in answer.lines[:-1]} == {0: "one", 1: 7}
    assert answer.lines[-1] == {"done": True, "n": 2, "failed": 0}


async def test_the_line_of_the_socket_is_a_body_too(wire: Wire) -> None:
    body = {"op": "batch", "id": 9, "each": "generate", "common": {"max_tokens": 1}, "items": [{"prompt": "a"}]}
    answer = await ask(wire, body)
    assert [(line["id"], line["done"]) for line in answer.lines] == [(9, False), (9, True)]


async def test_the_query_may_say_what_each_item_is(wire: Wire) -> None:
    answer = await ask(wire, b'[{"prompt":"a","echo":true}]', PATH + "?each=generate")
    assert texts(answer) == {0: "aHello!"}


@pytest.mark.parametrize("body", [b"[]", b'{"items":[]}'])
async def test_a_batch_of_nothing_is_over_at_once(wire: Wire, body: bytes) -> None:
    answer = await ask(wire, body)
    assert (answer.status, answer.lines) == (200, [{"done": True, "n": 0, "failed": 0}])


@pytest.mark.parametrize(
    ("body", "status", "code", "field"),
    [
        (b"", 400, "bad_json", None),
        (b"nonsense", 400, "bad_json", None),
        (b"[nonsense]", 400, "bad_json", None),
        (b'["\xff"]', 400, "bad_utf8", None),
        (b'{"each":"stats","items":[{}]}', 400, "bad_request", "each"),
        (b'{"common":{"temprature":1},"items":[{}]}', 400, "bad_request", "common.temprature"),
        (b'{"commons":{},"items":[{}]}', 400, "bad_request", "commons"),
        (b'{"common":5,"items":[{}]}', 400, "bad_request", "common"),
        (b'{"op":"chat","items":[{}]}', 400, "bad_request", "op"),
        (b'{"id":"","items":[{}]}', 400, "bad_request", "id"),
        (b"[" * 2000, 400, "bad_json", None),
    ],
)
async def test_what_is_wrong_before_any_item_is_the_status(
    wire: Wire, body: bytes, status: int, code: str, field: str | None
) -> None:
    answer = await ask(wire, body)
    (frame,) = answer.lines
    assert (answer.status, frame["done"], frame["error"]["code"]) == (status, True, code)
    assert frame["error"].get("field") == field


async def test_an_item_that_is_wrong_is_alone_in_that(wire: Wire) -> None:
    items: list[Any] = [{"prompt": "a"}, 5, {"prompt": "a", "id": ""}, {"prompt": "a", "stream": True}, {"id": "x"}]
    answer = await ask(wire, items)
    assert texts(answer) == {0: "Hello!", 1: "bad_request", 2: "bad_request", 3: "bad_request", 4: "bad_request"}
    assert [line.get("id") for line in answer.lines if line.get("item") == 4] == ["x"]
    assert answer.lines[-1] == {"done": True, "n": 5, "failed": 4}


@pytest.mark.parametrize("end", [b',{"prompt":}]', b'] "more"', b',{"prompt":"a","common":[' + b"[" * 40])
async def test_what_is_wrong_in_the_middle_stands_in_the_last_line(wire: Wire, end: bytes) -> None:
    answer = await ask(wire, b'[{"prompt":"a"},{"prompt":"b"}' + end)
    assert (answer.status, texts(answer)) == (200, {0: "Hello!", 1: "Hello!"})
    last = answer.lines[-1]
    assert (last["done"], last["n"], last["failed"], last["error"]["code"]) == (True, 2, 0, "bad_json")


async def test_an_item_without_end_is_refused(wire: Wire) -> None:
    sender = await Sender.open(wire)
    sender.send(b'[{"prompt":"a"},{"prompt":"')
    assert (await sender.status(), (await sender.line())["text"]) == (200, "Hello!")
    for _ in range(20):
        sender.send(b"x" * (64 << 10))
    last = await sender.line()
    assert (last["done"], last["n"], last["error"]["code"]) == (True, 1, "too_large")


async def test_a_body_that_is_cut_off_says_so(wire: Wire) -> None:
    client = await connect(wire)
    client.send("POST", PATH, b'[{"prompt":"a"},', headers={"Content-Length": "100"})
    client.writer.write_eof()
    answer = await client.read()
    assert texts(answer) == {0: "Hello!"}
    assert answer.lines[-1]["error"]["code"] == "bad_request"


async def test_chunks_that_are_none_are_refused(wire: Wire) -> None:
    sender = await Sender.open(wire)
    sender.send(b'[{"prompt":"a"},')
    assert (await sender.status(), (await sender.line())["text"]) == (200, "Hello!")
    sender.client.writer.write(b"nonsense\r\n")
    last = await sender.line()
    assert (last["done"], last["n"], last["error"]["code"]) == (True, 1, "bad_request")
    async with asyncio.timeout(GUARD_S):
        await sender.client.reader.read()  # ends with the connection


async def test_an_item_is_answered_before_the_next_is_sent(wire: Wire) -> None:
    sender = await Sender.open(wire)
    sender.send(b"[")
    for number in range(3):
        sender.send(b'{"prompt":"a"}')
        if number == 0:
            assert await sender.status() == 200
        line = await sender.line()
        assert (line["item"], line["text"]) == (number, "Hello!")
        sender.send(b",")
    sender.send(b'{"prompt":"a"}]')
    sender.send(b"")
    assert (await sender.rest())[-1] == {"done": True, "n": 4, "failed": 0}


async def test_the_connection_serves_on_after_a_batch(wire: Wire) -> None:
    client = await connect(wire)
    for _ in range(2):
        assert (await client.ask("POST", PATH, [{"prompt": "a"}])).lines[-1]["n"] == 1
    assert (await client.ask("GET", "/health")).status == 200


async def test_no_more_than_eight_items_are_in_flight_and_the_body_waits(tmp_path: Path) -> None:
    gate = Gate()
    items = [{"prompt": "a", "x_pad": "x" * 20_000} for _ in range(200)]
    async with serve(tmp_path, fake_inference("Hi", gate=gate, num_slots=16)) as wire:
        client = await connect(wire)
        client.send("POST", PATH, items)
        stats = wire.inference.stats
        await until(lambda: stats().running + stats().queued == 8)
        await asyncio.sleep(0.1)
        assert stats().running + stats().queued == 8
        assert client.writer.transport.get_write_buffer_size() > 2 << 20  # of 4 MB
        gate.opened.set()
        answer = await client.read()
    assert sorted(texts(answer)) == list(range(200))
    assert answer.lines[-1]["n"] == 200


async def test_a_client_that_reads_nothing_is_not_read_from(tmp_path: Path) -> None:
    limits = WireLimits(high_water_bytes=4 << 10)
    body = {"each": "generate", "common": {"prompt": "x" * 3500, "echo": True, "max_tokens": 1}, "items": [{}] * 400}
    async with serve(tmp_path, fake_inference(), limits) as wire:
        client = HttpClient(*_streams(await wire.connect(limit=8 << 10)))
        client.send("POST", PATH, body)
        stats = wire.inference.stats
        await until(lambda: stats().totals["requests"] > 8)
        await until(lambda: stats().running + stats().queued == 0)
        assert stats().totals["requests"] < 400
        answer = await client.read()
    assert sorted(texts(answer)) == list(range(400))


async def test_errors_that_nobody_reads_do_not_pile_up(tmp_path: Path) -> None:
    """Items that are wrong take no time, but their lines do."""
    async with serve(tmp_path, None, WireLimits(high_water_bytes=4 << 10)) as wire:
        client = HttpClient(*_streams(await wire.connect(limit=8 << 10)))
        client.send("POST", PATH, b"[" + b",".join([b'"%b"' % (b"x" * 100)] * 20_000) + b"]")
        before = -1
        while (waiting := client.writer.transport.get_write_buffer_size()) != before:
            before = waiting
            await asyncio.sleep(0.2)
        assert waiting > 0
        answer = await client.read(2 * GUARD_S)
    assert (answer.lines[-1]["n"], answer.lines[-1]["failed"]) == (20_000, 20_000)


@pytest.mark.parametrize("is_stuck", [False, True])
async def test_hanging_up_ends_all_items(tmp_path: Path, is_stuck: bool) -> None:
    """Also while the body is not read, when the end of the connection does not show by itself."""
    items = [{"prompt": "a", "x_pad": "x" * (20_000 if is_stuck else 1)}] * 100
    async with serve(tmp_path, fake_inference(LONG, step_s=0.01, speculates=False)) as wire:
        client = await connect(wire)
        client.send("POST", PATH, items)
        stats = wire.inference.stats
        await until(lambda: stats().running == 8)
        client.writer.transport.abort()
        await until(lambda: stats().running + stats().queued == 0)
        await asyncio.sleep(0.05)
        assert stats().totals["requests"] == 8


async def test_a_daemon_that_drains_ends_the_batch(tmp_path: Path) -> None:
    async with serve(tmp_path, fake_inference("Hi", step_s=0.002)) as wire:
        sender = await Sender.open(wire)
        sender.send(b'[{"prompt":"a"}')
        assert (await sender.status(), (await sender.line())["text"]) == (200, "Hi")
        await wire.inference.drain(1.0)
        sender.send(b',{"prompt":"a"},{"prompt":"b"},{"prompt":"c"}]')
        sender.send(b"")
        lines = await sender.rest()
    assert lines[-1]["error"]["code"] == "draining"
    assert lines[-1]["n"] <= 4
