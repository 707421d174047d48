"""The operation `batch`: items are answered as they end, one by one, whatever becomes of the others."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from edgeqwen.engine.settings import EngineLimits
from edgeqwen.protocol.limits import WireLimits
from tests.tiny_tokenizers import byte_level
from tests.wire import Gate, Wire, WireClient, fake_inference, serve, until

LONG = "x" * 2000


@pytest.fixture
async def wire(tmp_path: Path) -> AsyncIterator[Wire]:
    async with serve(tmp_path) as wire:
        yield wire


async def batch(client: WireClient, items: list[Any], **members: Any) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The last frame of a batch, and the frames of its items."""
    client.send({"op": "batch", "id": "b", "items": items, **members})
    final, frames = await client.read_final()
    assert all(frame["id"] == "b" for frame in [final, *frames])
    return final, frames


def numbers(frames: list[dict[str, Any]]) -> list[int]:
    return sorted(frame["item"] for frame in frames)


async def test_each_item_is_answered_and_then_the_batch(tmp_path: Path) -> None:
    items = [{"prompt": "a"}, {"prompt": "b", "max_tokens": 2}]
    async with serve(tmp_path, fake_inference("xyz123")) as wire:
        final, frames = await batch(await wire.connect(), items, common={"max_tokens": 3})
    assert final == {"id": "b", "done": True, "n": 2, "failed": 0}
    by_number = {frame["item"]: frame for frame in frames}
    assert {number: frame["text"] for number, frame in by_number.items()} == {0: "xyz", 1: "xy"}
    assert all(frame["finish"] == "length" and frame["usage"]["prompt"] > 0 for frame in frames)
    assert list(frames[0])[:3] == ["id", "done", "item"]


async def test_items_may_be_raw_prompts(wire: Wire) -> None:
    client = await wire.connect()
    final, frames = await batch(client, [{"prompt": "a"}, {"tokens": [40]}], each="generate", common={"echo": True})
    assert final["failed"] == 0
    prompt = byte_level().decode_bytes([40]).decode()
    assert {frame["text"] for frame in frames} == {"aHello!", f"{prompt}Hello!"}


async def test_items_may_be_texts_for_vectors(wire: Wire) -> None:
    client = await wire.connect()
    items = [{"texts": ["a", "b"]}, {"texts": []}, {"tokens": [[40]], "pooling": "mean"}]
    final, frames = await batch(client, items, each="embed", common={"pooling": "last"})
    by_number = {frame["item"]: frame for frame in frames}
    assert (final["n"], final["failed"]) == (3, 1)
    assert [len(by_number[number]["embeddings"]) for number in (0, 2)] == [2, 1]
    assert by_number[1]["error"]["field"] == "texts"


async def test_an_item_that_is_wrong_is_alone_in_that(wire: Wire) -> None:
    client = await wire.connect()
    items = [
        {"prompt": "a"},
        {"prompt": "a", "temprature": 1},
        {"prompt": "a", "temperature": -1},
        {"prompt": "z" * 20_000},
        "text",
        {},
        {"prompt": "a", "op": "chat"},
        {"prompt": "a", "id": 1},
        {"prompt": "a", "stream": True},
        {"prompt": "a", "x_note": 1, "stream": False},
    ]
    final, frames = await batch(client, items)
    assert final == {"id": "b", "done": True, "n": 10, "failed": 8}
    errors = {frame["item"]: frame["error"] for frame in frames if "error" in frame}
    assert numbers(frames) == list(range(10))
    assert {number: (error["code"], error.get("field")) for number, error in errors.items()} == {
        1: ("bad_request", "temprature"),
        2: ("bad_request", "temperature"),
        3: ("too_long", errors[3].get("field")),
        4: ("bad_request", None),
        5: ("bad_request", "messages"),
        6: ("bad_request", "op"),
        7: ("bad_request", "id"),
        8: ("bad_request", "stream"),
    }


@pytest.mark.parametrize(
    ("members", "field"),
    [
        ({"each": "batch"}, "each"),
        ({"each": "stats"}, "each"),
        ({"common": {"temprature": 1}}, "common.temprature"),
        ({"common": {"max_tokens": "many"}}, "common.max_tokens"),
        ({"common": {"stream": True}}, "common.stream"),
        ({"common": {"id": 1}}, "common.id"),
        ({"common": 1}, "common"),
        ({"items": {}}, "items"),
        ({"items": [{"prompt": "a"}] * 65}, "items"),
        ({"items": None}, "items"),
        ({"item": []}, "item"),
    ],
)
async def test_what_concerns_all_items_refuses_the_batch(wire: Wire, members: dict[str, Any], field: str) -> None:
    client = await wire.connect()
    final, frames = await batch(client, **{"items": [{"prompt": "a"}], **members})
    assert (final["error"]["code"], final["error"]["field"], frames) == ("bad_request", field, [])
    assert (await client.ask({"op": "chat", "prompt": "x"}))["text"] == "Hello!"


async def test_a_batch_of_nothing_is_over_at_once(wire: Wire) -> None:
    final, frames = await batch(await wire.connect(), [])
    assert (final["n"], final["failed"], frames) == (0, 0, [])


async def test_the_number_of_items_is_configured_and_told(tmp_path: Path) -> None:
    async with serve(tmp_path, None, WireLimits(batch_items=2)) as wire:
        client = await wire.connect()
        hello = await client.ask({"op": "hello"})
        assert (hello["limits"]["batch"], "batch" in hello["features"]) == (2, True)
        assert (await batch(client, [{"prompt": "a"}] * 2))[0]["n"] == 2
        assert (await batch(client, [{"prompt": "a"}] * 3))[0]["error"]["field"] == "items"


async def test_frames_come_as_items_end(tmp_path: Path) -> None:
    async with serve(tmp_path, fake_inference(LONG, step_s=0.002)) as wire:
        client = await wire.connect()
        lengths = (120, 5, 60)
        final, frames = await batch(client, [{"prompt": "a", "max_tokens": length} for length in lengths])
    assert [frame["item"] for frame in frames] == [1, 2, 0]
    assert final["n"] == 3


async def test_no_more_than_eight_items_are_in_flight_and_all_are_answered(tmp_path: Path) -> None:
    gate = Gate()
    async with serve(tmp_path, fake_inference("Hi", gate=gate, num_slots=16)) as wire:
        client = await wire.connect()
        client.send({"op": "batch", "id": "b", "items": [{"prompt": "a"}] * 20})
        await until(lambda: wire.inference.stats().running + wire.inference.stats().queued == 8)
        await asyncio.sleep(0.05)
        stats = wire.inference.stats()
        assert stats.running + stats.queued == 8
        gate.opened.set()
        final, frames = await client.read_final()
    assert numbers(frames) == list(range(20))
    assert final == {"id": "b", "done": True, "n": 20, "failed": 0}


async def test_each_item_counts_as_a_request(tmp_path: Path) -> None:
    gate = Gate()
    async with serve(tmp_path, fake_inference("Hi", gate=gate, limits=EngineLimits(per_owner=3))) as wire:
        client = await wire.connect()
        client.send({"op": "batch", "id": "b", "items": [{"prompt": "a"}] * 5})
        refused = [await client.read(), await client.read()]
        assert {frame["error"]["code"] for frame in refused if frame is not None} == {"quota"}
        gate.opened.set()
        final, frames = await client.read_final()
    assert (len(frames), final["n"], final["failed"]) == (3, 5, 2)


async def test_other_requests_go_on_beside_a_batch(tmp_path: Path) -> None:
    async with serve(tmp_path, fake_inference(LONG, step_s=0.005)) as wire:
        client = await wire.connect()
        items = [{"prompt": "a", "max_tokens": 300, "speculate": False}] * 2
        client.send({"op": "batch", "id": "b", "items": items})
        client.send({"op": "health", "id": "h"}, {"op": "chat", "id": "c", "prompt": "x", "max_tokens": 2})
        order = []
        for _ in range(5):
            frame = await client.read()
            assert frame is not None
            order.append(frame["id"])
    assert order == ["h", "c", "b", "b", "b"]


async def test_cancelling_a_batch_ends_its_items_and_gives_one_final_frame(tmp_path: Path) -> None:
    async with serve(tmp_path, fake_inference(LONG, step_s=0.005, speculates=False)) as wire:
        client = await wire.connect()
        client.send({"op": "batch", "id": "b", "items": [{"prompt": "a"}] * 12})
        await until(lambda: wire.inference.stats().running == 8)
        client.send({"op": "cancel", "id": "c", "target": "b"})
        frames: list[dict[str, Any]] = []
        while sum(frame["done"] for frame in frames) < 2:
            frame = await client.read()
            assert frame is not None
            frames.append(frame)
        assert (await client.ask({"op": "cancel", "id": "d", "target": "b"}))["cancelled"] == 0
        await until(lambda: wire.inference.stats().running == 0)
    assert [frame["cancelled"] for frame in frames if frame["id"] == "c"] == [1]
    items = [frame for frame in frames if "item" in frame]
    assert numbers(items) == list(range(8))
    assert {frame["finish"] for frame in items} == {"cancelled"}
    finals = [frame for frame in frames if frame["id"] == "b" and frame["done"]]
    assert finals == [{"id": "b", "done": True, "n": 8, "failed": 0, "finish": "cancelled"}]


async def test_hanging_up_ends_all_items(tmp_path: Path) -> None:
    async with serve(tmp_path, fake_inference(LONG, step_s=0.005, speculates=False)) as wire:
        client = await wire.connect()
        client.send({"op": "batch", "items": [{"prompt": "a"}] * 12}, {"op": "batch", "items": [{"prompt": "a"}]})
        await until(lambda: wire.inference.stats().running == 8)
        client.close()
        await until(lambda: wire.inference.stats().running + wire.inference.stats().queued == 0)
        await asyncio.sleep(0.05)
        assert wire.inference.stats().totals["requests"] == 8


async def test_batches_without_an_id_are_answered_one_after_another(tmp_path: Path) -> None:
    async with serve(tmp_path, fake_inference("Hello!", step_s=0.001)) as wire:
        client = await wire.connect()
        client.send({"op": "batch", "items": [{"prompt": "a"}] * 3}, {"op": "batch", "items": [{"prompt": "a"}]})
        first, frames = await client.read_final()
        second, more = await client.read_final()
    assert ((first["n"], len(frames)), (second["n"], len(more))) == ((3, 3), (1, 1))


async def test_a_batch_counts_as_one_request_of_its_connection(tmp_path: Path) -> None:
    gate = Gate()
    async with serve(tmp_path, fake_inference("Hi", gate=gate), WireLimits(inflight=1)) as wire:
        client = await wire.connect()
        client.send({"op": "batch", "id": 1, "items": [{"prompt": "a"}] * 2}, {"op": "chat", "id": 2, "prompt": "x"})
        await until(lambda: wire.inference.stats().running == 1)
        client.send({"op": "health", "id": 3})
        gate.opened.set()
        frames = [await client.read() for _ in range(5)]
    assert [(frame["id"], frame["done"]) for frame in frames if frame] == [
        (1, False), (1, False), (1, True), (3, True), (2, True),
    ]  # fmt: skip


async def test_a_client_that_reads_nothing_holds_the_items_back(tmp_path: Path) -> None:
    """Items of which an answer waits are still in flight, so no other begins; nothing is lost."""
    async with serve(tmp_path, fake_inference(), WireLimits(high_water_bytes=4 << 10, batch_items=400)) as wire:
        client = await wire.connect(limit=8 << 10)
        prompt = "x" * 3500
        common = {"prompt": prompt, "echo": True, "max_tokens": 1}
        client.send({"op": "batch", "id": "b", "each": "generate", "items": [{}] * 400, "common": common})
        await until(lambda: wire.inference.stats().totals["requests"] > 8)
        await until(lambda: wire.inference.stats().running + wire.inference.stats().queued == 0)
        assert wire.inference.stats().totals["requests"] < 400
        final, frames = await client.read_final()
    assert (final["n"], numbers(frames)) == (400, list(range(400)))
    assert {frame["text"] for frame in frames} == {prompt + "Hello"}


async def test_an_answer_of_an_item_is_cut_at_the_greatest_reply(tmp_path: Path) -> None:
    async with serve(tmp_path, fake_inference(LONG), WireLimits(reply_bytes=2048)) as wire:
        final, (frame,) = await batch(await wire.connect(), [{"prompt": "a"}])
    assert (final["failed"], frame["finish"]) == (0, "length")
    assert 500 < len(frame["text"]) < 2048


async def test_items_of_sessions_are_turns(wire: Wire) -> None:
    client = await wire.connect()
    final, frames = await batch(client, [{"prompt": "a", "session": "@one"}, {"prompt": "a", "session": "@two"}])
    assert (final["failed"], {frame["rev"] for frame in frames}) == (0, {1})
