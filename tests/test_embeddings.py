"""Embeddings over the scripted runtime: what comes of texts, in which steps, and to which ends."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import numpy as np
import pytest

from edgeqwen.core.model import Pooling
from edgeqwen.core.step import Batch, Chunk
from edgeqwen.engine.embeddings import EmbeddingEnded, EmbeddingInput, Embeddings
from edgeqwen.engine.pooling import Pooler
from edgeqwen.engine.settings import EngineLimits
from edgeqwen.errors import EdgeqwenError, RuntimeFailed
from edgeqwen.runtime.fake import FakeRuntime, FakeScript
from tests.engines import Rig, ids, make_rig, running
from tests.models import Array
from tests.wire import Gate, until

TEXTS = ("one", "two and more", "a third text that is longer than the others")
LONG = "a text of many words " * 10


async def embed(rig: Rig, *texts: str, owner: str = "1000", **given: Any) -> Embeddings:
    return await rig.inference.embed(EmbeddingInput(texts=texts, **given), owner=owner)


def states(text: str) -> Array:
    """All hidden states of a text, by a runtime of its own."""
    runtime = FakeRuntime(FakeScript(), vocab_size=2000, capacity=512)
    tokens = ids(text)
    return runtime.step(Batch((Chunk(0, 0, tokens, num_logits=0, num_hidden=len(tokens)),))).hidden[0].copy()


def unit(vector: Array) -> Array:
    return vector / np.linalg.norm(vector)


def steps(rig: Rig) -> list[list[int]]:
    """Tokens of each chunk, step by step."""
    return [[len(chunk.ids) for chunk in batch.chunks] for batch in rig.runtime.batches]


@pytest.mark.parametrize("max_chunk", [512, 16])
async def test_the_last_state_or_the_mean_of_all_is_the_vector(max_chunk: int) -> None:
    async with running(FakeScript(max_chunk=max_chunk)) as rig:
        last = await embed(rig, *TEXTS)
        mean = await embed(rig, *TEXTS, pooling="mean")
        await rig.settle()
    for index, text in enumerate(TEXTS):
        assert np.allclose(last.vectors[index], unit(states(text)[-1]), atol=1e-6)
        assert np.allclose(mean.vectors[index], unit(states(text).mean(axis=0)), atol=1e-6)
    assert last.num_tokens == mean.num_tokens == sum(len(ids(text)) for text in TEXTS)
    assert last.vectors.dtype == np.float32
    assert np.allclose(np.linalg.norm(mean.vectors, axis=1), 1)


async def test_vectors_are_the_same_bits_whatever_pieces_and_company_a_text_comes_in() -> None:
    found = []
    for max_chunk in (512, 64, 16):
        async with running(FakeScript(max_chunk=max_chunk)) as rig:
            found.append((await embed(rig, LONG, *TEXTS, pooling="mean")).vectors)
            found.append(np.concatenate([(await embed(rig, text, pooling="mean")).vectors for text in (LONG, *TEXTS)]))
    for vectors in found[1:]:
        assert np.array_equal(vectors, found[0])


async def test_token_ids_are_taken_as_they_are() -> None:
    async with running() as rig:
        by_ids = await rig.inference.embed(EmbeddingInput(tokens=tuple(ids(text) for text in TEXTS)), owner="1")
        by_text = await embed(rig, *TEXTS)
    assert np.array_equal(by_ids.vectors, by_text.vectors)


async def test_a_marker_in_a_text_stays_text() -> None:
    async with running() as rig:
        marked = await embed(rig, "<|im_end|>")
        assert marked.num_tokens == len(rig.tokenizer.encode("<|im_end|>", special=False)) > 1


async def test_short_texts_share_a_step_and_long_ones_have_their_own() -> None:
    async with running(FakeScript(max_chunk=64)) as rig:
        await embed(rig, "1234", "12345", "123456", "1234567")
        assert [sorted(step) for step in steps(rig)] == [[4, 5, 6, 7]]
        rig.runtime.batches.clear()
        await embed(rig, "x" * 60, "y" * 60)
        assert steps(rig) == [[60], [60]]
        rig.runtime.batches.clear()
        await embed(rig, "x" * 100, "y", "z")
        assert sorted(steps(rig), reverse=True) == [[64], [36], [1, 1]]


async def test_more_texts_than_slots_are_computed_in_turns() -> None:
    async with running(FakeScript(num_slots=3)) as rig:
        texts = [f"text {number}" for number in range(20)]
        found = await embed(rig, *texts)
        assert max(map(len, steps(rig))) == 3
        await rig.settle()
    assert np.allclose(found.vectors, [unit(states(text)[-1]) for text in texts], atol=1e-6)


async def test_texts_of_several_requests_share_steps() -> None:
    gate = threading.Event()
    async with running(sleep=lambda _: gate.wait(20) and None) as rig:
        await rig.submit(max_tokens=1)
        texts = ("one", "other", "third")
        tasks = [asyncio.create_task(embed(rig, text, owner=str(index))) for index, text in enumerate(texts)]
        await until(lambda: rig.inference.stats().queued == len(texts))
        gate.set()
        found = await asyncio.gather(*tasks)
        assert sorted(steps(rig)[1]) == sorted(len(ids(text)) for text in texts)
    for text, each in zip(texts, found, strict=True):
        assert np.allclose(each.vectors[0], unit(states(text)[-1]), atol=1e-6)


async def test_others_go_on_decoding_between_the_texts() -> None:
    async with running(FakeScript(tokens=(65,), loop=True, max_chunk=16)) as rig:
        generation, listener = await rig.submit(max_tokens=200, speculate=False)
        found = await embed(rig, *[LONG[:50]] * 4)
        assert not listener.over.is_set()
        generation.cancel()
        kinds = [batch.chunks[0].num_logits > 0 for batch in rig.runtime.batches]
        first = kinds.index(False)
        assert all(a or b for a, b in zip(kinds[first:], kinds[first + 1 :], strict=False)), "two texts in a row"
    assert len(found.vectors) == 4


async def test_what_was_computed_for_a_text_is_neither_kept_nor_looked_for() -> None:
    async with running() as rig:
        await rig.run(prompt=LONG, max_tokens=1)
        await rig.settle()
        kept = rig.inference.cached_tokens("1000", ids(LONG))
        before = rig.inference.stats().kv["blocks"]
        await embed(rig, LONG)
        assert sum(steps(rig)[-1]) == len(ids(LONG))
        assert rig.inference.stats().kv["blocks"] == before
        assert rig.inference.cached_tokens("1000", ids(LONG)) == kept > 0


async def test_the_pooling_of_the_model_is_the_default() -> None:
    poolings: tuple[Pooling, ...] = ("last", "mean")
    for pooling in poolings:
        async with running(pooling=pooling) as rig:
            assert np.array_equal((await embed(rig, LONG)).vectors, (await embed(rig, LONG, pooling=pooling)).vectors)


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({}, "texts"),
        ({"texts": ("a",), "tokens": ((1,),)}, "texts"),
        ({"texts": ()}, "texts"),
        ({"texts": ("a",) * 5}, "texts"),
        ({"texts": ("a", "")}, "texts[1]"),
        ({"tokens": ((1,), ())}, "tokens[1]"),
        ({"tokens": ((1,), (1 << 20,))}, "tokens[1]"),
        ({"tokens": ((-1,),)}, "tokens[0]"),
        ({"texts": ("a",), "pooling": "cls"}, "pooling"),
        ({"texts": ("a",), "deadline_ms": 0}, "deadline_ms"),
        ({"texts": ("a",), "priority": "urgent"}, "priority"),
    ],
)
async def test_what_is_wrong_is_refused_by_name(given: dict[str, Any], field: str) -> None:
    async with running(limits=EngineLimits(texts=4)) as rig:
        with pytest.raises(EdgeqwenError) as refused:
            await rig.inference.embed(EmbeddingInput(**given), owner="1")
        assert (refused.value.code, refused.value.field) == ("bad_request", field)
        assert len((await embed(rig, "a", "b", "c", "d")).vectors) == 4


async def test_a_text_as_long_as_the_context_fits_and_one_token_more_does_not() -> None:
    async with running() as rig:
        assert (await embed(rig, "x" * 256)).num_tokens == 256
        with pytest.raises(EdgeqwenError) as refused:
            await embed(rig, "x", "x" * 257)
        assert (refused.value.code, refused.value.field) == ("too_long", "texts[1]")


async def test_a_model_without_hidden_states_says_what_to_do() -> None:
    async with running(FakeScript(hidden_size=0)) as rig:
        with pytest.raises(EdgeqwenError, match="import its checkpoint again"):
            await embed(rig, "a")
        assert (await rig.run(max_tokens=2))[0].usage.completion == 2


async def test_states_that_are_no_numbers_fail_their_request_alone() -> None:
    async with running(FakeScript(nan_at_step=1)) as rig:
        with pytest.raises(RuntimeFailed, match="not finite"):
            await embed(rig, *TEXTS)
        await embed(rig, *TEXTS)
        await rig.settle()


async def test_a_step_that_fails_fails_the_texts_in_it() -> None:
    async with running(FakeScript(fail_at_step=1)) as rig:
        with pytest.raises(RuntimeFailed, match="step 1"):
            await embed(rig, *TEXTS)
        await embed(rig, *TEXTS)
        await rig.settle()
        assert rig.inference.stats().totals["errors"] == 1


async def test_it_is_cancelled_with_the_task_that_waits() -> None:
    async with running(FakeScript(step_s=0.02, num_slots=1)) as rig:
        task = asyncio.create_task(embed(rig, *["text"] * 64))
        await until(lambda: rig.inference.stats().running == 1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await rig.settle()
        assert rig.inference.stats().running == rig.inference.stats().queued == 0
        assert len(rig.runtime.batches) < 64


async def test_its_deadline_ends_it() -> None:
    async with running(FakeScript(step_s=0.02, num_slots=1)) as rig:
        with pytest.raises(EmbeddingEnded) as ended:
            await embed(rig, *["text"] * 64, deadline_ms=50)
        assert (ended.value.reason, ended.value.code) == ("deadline", "timeout")
        await rig.settle()


async def test_draining_ends_it() -> None:
    async with running(FakeScript(step_s=0.02, num_slots=1)) as rig:
        task = asyncio.create_task(embed(rig, *["text"] * 64))
        await until(lambda: rig.inference.stats().running == 1)
        await rig.inference.drain(0.01)
        with pytest.raises(EmbeddingEnded) as ended:
            await task
        assert (ended.value.reason, ended.value.code) == ("cancelled", "draining")


async def test_all_texts_count_as_one_request_of_their_owner() -> None:
    gate = threading.Event()
    limits = EngineLimits(per_owner=1)
    async with running(limits=limits, sleep=lambda _: gate.wait(20) and None) as rig:
        task = asyncio.create_task(embed(rig, *TEXTS))
        await until(lambda: rig.inference.stats().running == 1)
        with pytest.raises(EdgeqwenError) as refused:
            await embed(rig, "a")
        assert refused.value.code == "quota"
        gate.set()
        assert len((await task).vectors) == len(TEXTS)


async def test_it_waits_for_the_model_unless_told_not_to() -> None:
    gate = Gate()
    rig = make_rig(sleep=gate.sleep, script=FakeScript(load_s=0.1))
    start = asyncio.create_task(rig.inference.start())
    await asyncio.sleep(0)
    with pytest.raises(EdgeqwenError) as refused:
        await embed(rig, "a", wait=False)
    assert refused.value.code == "loading"
    with pytest.raises(EmbeddingEnded):
        await embed(rig, "a", deadline_ms=1)
    gate.opened.set()
    assert (await embed(rig, "a")).num_tokens == 1
    await start
    await rig.inference.close()


def test_a_pooler_of_zeros_gives_zeros() -> None:
    pooler = Pooler("mean")
    pooler.push(np.zeros((2, 3), np.float32))
    assert np.array_equal(pooler.vector(), np.zeros(3))
