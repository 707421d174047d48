"""The operation `embed`, by line and by HTTP."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgeqwen.engine.embeddings import EmbeddingInput
from edgeqwen.protocol.limits import WireLimits
from tests.wire import Gate, Wire, fake_inference, serve, until

TEXTS = ["one", "two and more", "a third"]


@pytest.fixture
async def wire(tmp_path: Path) -> AsyncIterator[Wire]:
    async with serve(tmp_path) as running:
        yield running


@pytest.mark.parametrize("pooling", ["last", "mean"])
async def test_the_vectors_are_those_of_the_engine(wire: Wire, pooling: str) -> None:
    client = await wire.connect()
    answer = await client.ask({"op": "embed", "id": 1, "texts": TEXTS, "pooling": pooling})
    wanted = await wire.inference.embed(EmbeddingInput(texts=tuple(TEXTS), pooling=pooling), owner="1")
    assert list(answer) == ["id", "done", "embeddings", "dims", "usage"]
    assert answer["dims"] == wanted.vectors.shape[1]
    assert answer["usage"] == {"prompt": wanted.num_tokens}
    assert np.abs(np.array(answer["embeddings"]) - wanted.vectors).max() <= 0.51e-7


async def test_token_ids_are_embedded_too(wire: Wire) -> None:
    client = await wire.connect()
    tokens = [(await client.ask({"op": "tokenize", "text": text}))["tokens"] for text in TEXTS]
    by_ids = await client.ask({"op": "embed", "tokens": tokens})
    assert by_ids["embeddings"] == (await client.ask({"op": "embed", "texts": TEXTS}))["embeddings"]


@pytest.mark.parametrize(
    ("members", "field"),
    [
        ({}, "texts"),
        ({"texts": "one"}, "texts"),
        ({"texts": ["one", 2]}, "texts[1]"),
        ({"texts": []}, "texts"),
        ({"texts": ["one", ""]}, "texts[1]"),
        ({"texts": ["one"], "pooling": "first"}, "pooling"),
        ({"texts": ["one"], "stream": True}, "stream"),
        ({"texts": ["x"] * 65}, "texts"),
    ],
)
async def test_what_is_wrong_is_refused_by_name(wire: Wire, members: dict[str, Any], field: str) -> None:
    error = (await (await wire.connect()).ask({"op": "embed", **members}))["error"]
    assert (error["code"], error["field"]) == ("bad_request", field)


async def test_more_vectors_than_a_reply_holds_are_refused_with_the_number_that_fits(tmp_path: Path) -> None:
    limits = WireLimits(reply_bytes=16 << 10)
    async with serve(tmp_path, fake_inference(hidden_size=200), limits) as wire:
        client = await wire.connect()
        error = (await client.ask({"op": "embed", "texts": ["x"] * 20}))["error"]
        assert (error["code"], error["field"]) == ("bad_request", "texts")
        most = int(error["message"].rsplit("at most ", 1)[1].split()[0])
        assert 1 < most < 20
        client.send({"op": "embed", "texts": [f"text {number}" for number in range(most)]})
        line = await client.reader.readline()
        assert 12 << 10 < len(line) <= 16 << 10
        assert len(json.loads(line)["embeddings"]) == most


async def test_it_is_cancelled_by_its_id_and_by_hanging_up(tmp_path: Path) -> None:
    async with serve(tmp_path, fake_inference(step_s=0.02, num_slots=1)) as wire:
        client = await wire.connect()
        client.send({"op": "embed", "id": 1, "texts": TEXTS * 20})
        await until(lambda: wire.inference.stats().running == 1)
        client.send({"op": "cancel", "id": 2, "target": 1})
        finals = {final["id"]: final for final in [(await client.read_final())[0] for _ in range(2)]}
        assert finals[2]["cancelled"] == 1
        assert finals[1] == {"id": 1, "done": True, "finish": "cancelled"}
        client.send({"op": "embed", "id": 1, "texts": TEXTS * 20})
        await until(lambda: wire.inference.stats().running == 1)
        client.close()
        await until(lambda: wire.inference.stats().running == 0)


async def test_its_deadline_is_its_finish(tmp_path: Path) -> None:
    async with serve(tmp_path, fake_inference(step_s=0.02, num_slots=1)) as wire:
        answer = await (await wire.connect()).ask({"op": "embed", "texts": TEXTS * 20, "deadline_ms": 50})
        assert answer["finish"] == "deadline"
        assert "embeddings" not in answer


async def test_it_counts_among_what_is_in_flight_and_control_goes_before_it(tmp_path: Path) -> None:
    gate = Gate()
    async with serve(tmp_path, fake_inference(gate=gate), WireLimits(inflight=2)) as wire:
        client = await wire.connect()
        client.send(*({"op": "embed", "id": number, "texts": TEXTS} for number in range(3)))
        client.send({"op": "health", "id": 9})
        await until(lambda: wire.inference.stats().running + wire.inference.stats().queued == 2)
        with pytest.raises(TimeoutError):  # the third is held, and nothing behind it is read
            await client.read(0.2)
        gate.opened.set()
        found = [(await client.read_final())[0]["id"] for _ in range(4)]
        assert sorted(found) == [0, 1, 2, 9]


async def test_those_without_an_id_are_answered_in_order(wire: Wire) -> None:
    client = await wire.connect()
    client.send({"op": "embed", "texts": TEXTS}, {"op": "chat", "prompt": "x"}, {"op": "embed", "texts": ["x"]})
    first, second, third = [(await client.read_final())[0] for _ in range(3)]
    assert (len(first["embeddings"]), second["text"], len(third["embeddings"])) == (3, "Hello!", 1)


async def test_a_batch_embeds_each_item(wire: Wire) -> None:
    client = await wire.connect()
    client.send({"op": "batch", "each": "embed", "items": [{"texts": [text]} for text in TEXTS]})
    last, frames = await client.read_final()
    assert (last["n"], last["failed"]) == (3, 0)
    together = (await client.ask({"op": "embed", "texts": TEXTS}))["embeddings"]
    for frame in frames:
        assert frame["embeddings"] == [together[frame["item"]]]


async def test_over_http_it_is_a_line(wire: Wire) -> None:
    body = json.dumps({"texts": TEXTS}).encode()
    reader, writer = await asyncio.open_unix_connection(str(wire.path))
    head = f"POST /eqp/embed HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)
    status, answer = (await reader.read()).split(b"\r\n\r\n", 1)
    writer.close()
    assert status.startswith(b"HTTP/1.1 200")
    assert (
        json.loads(answer)["embeddings"]
        == (await (await wire.connect()).ask({"op": "embed", "texts": TEXTS}))["embeddings"]
    )
