"""Embeddings over the scripted runtime: what comes of texts, in which steps, and to which ends."""

from __future__ import annotations

import numpy as np

from edgeqwen.core.step import Batch, Chunk
from edgeqwen.engine.embeddings import EmbeddingInput, Embeddings
from edgeqwen.runtime.fake import FakeRuntime, FakeScript
from tests.engines import Rig, ids, running
from tests.models import Array

TEXTS = ("one", "two and more", "a third text that is longer than the others")


async def embed(rig: Rig, *texts: str, owner: str = "1000", **given: object) -> Embeddings:
    return await rig.inference.embed(EmbeddingInput(texts=texts, **given), owner=owner)  # type: ignore[arg-type]


def states(text: str) -> Array:
    """All hidden states of a text, by a runtime of its own."""
    runtime = FakeRuntime(FakeScript(), vocab_size=2000, capacity=512)
    tokens = ids(text)
    return runtime.step(Batch((Chunk(0, 0, tokens, num_logits=0, num_hidden=len(tokens)),))).hidden[0].copy()


def unit(vector: Array) -> Array:
    return vector / np.linalg.norm(vector)


async def test_the_last_state_or_the_mean_of_all_is_the_vector() -> None:
    async with running() as rig:
        last = await embed(rig, *TEXTS)
        mean = await embed(rig, *TEXTS, pooling="mean")
    for index, text in enumerate(TEXTS):
        assert np.allclose(last.vectors[index], unit(states(text)[-1]), atol=1e-6)
        assert np.allclose(mean.vectors[index], unit(states(text).mean(axis=0)), atol=1e-6)
    assert last.num_tokens == sum(len(ids(text)) for text in TEXTS)
    assert np.allclose(np.linalg.norm(mean.vectors, axis=1), 1)
