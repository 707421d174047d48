"""Embeddings by the clients: any number of texts, whatever one line or one reply has room for."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence

import pytest

from edgeqwen.client import AsyncClient
from edgeqwen.client.embedding import EmbedJob
from edgeqwen.client.results import Embeddings
from edgeqwen.errors import BadRequest, EdgeqwenError
from tests.daemons import DaemonProcess, running_daemon, script_of

TEXTS = [f"text {number}" for number in range(150)]


@pytest.fixture(scope="module")
def daemon() -> Iterator[DaemonProcess]:
    with running_daemon(script_of("x")) as running:
        yield running


async def embed_async(daemon: DaemonProcess, texts: Sequence[str]) -> Embeddings:
    async with await AsyncClient.connect(daemon.socket_path) as client:
        return await client.embed(texts)


def test_more_texts_than_the_daemon_takes_at_once_are_one_result(daemon: DaemonProcess) -> None:
    with daemon.client() as client:
        assert client.hello()["limits"]["texts"] < len(TEXTS)
        found = client.embed(TEXTS)
        alone = [client.request("embed", texts=[TEXTS[index]]) for index in (0, 3, 4, 149)]
    assert len(found.vectors) == len(TEXTS)
    assert [list(found.vectors[index]) for index in (0, 3, 4, 149)] == [frame["embeddings"][0] for frame in alone]
    assert found.dims == len(found.vectors[0])
    assert found.num_tokens > sum(frame["usage"]["prompt"] for frame in alone)
    assert asyncio.run(embed_async(daemon, TEXTS)) == found


def test_error_about_a_text_says_which_of_all(daemon: DaemonProcess) -> None:
    texts = [*TEXTS[:120], "", *TEXTS]
    with daemon.client() as client, pytest.raises(BadRequest, match=r"texts\[120\] is empty") as caught:
        client.embed(texts)
    assert caught.value.field == "texts[120]"
    with pytest.raises(BadRequest, match=r"texts\[120\]"):
        asyncio.run(embed_async(daemon, texts))


def test_no_texts_are_refused_by_the_daemon(daemon: DaemonProcess) -> None:
    with daemon.client() as client, pytest.raises(BadRequest, match="texts"):
        client.embed([])


def sizes(job: EmbedJob, dims: int, **limits: int) -> list[int]:
    """How many texts go with each request."""
    found = []
    while (members := job.next_members()) is not None:
        (texts,) = (value for name, value in members.items() if name in {"texts", "tokens"})
        found.append(len(texts))
        job.add({"embeddings": [[0.0] * dims] * len(texts), "dims": dims, "usage": {"prompt": len(texts)}})
        if job.needs_limits:
            job.limits = limits
    return found


def test_groups_fit_into_a_reply_and_a_line() -> None:
    assert sizes(EmbedJob(["x"] * 100, None), 1024, reply=256 << 10, texts=64) == [4, 23, 23, 23, 23, 4]
    assert sizes(EmbedJob(["x"] * 100, None), 8, reply=256 << 10, texts=64) == [4, 64, 32]
    assert sizes(EmbedJob([[1] * 100_000] * 4, None), 8, reply=256 << 10, texts=64) == [1, 1, 1, 1]
    assert sizes(EmbedJob(["é" * 100_000] * 5, None), 8, reply=256 << 10, texts=64) == [2, 2, 1]
    assert sizes(EmbedJob(["x"] * 3, None), 100_000, reply=1, texts=1) == [3]


def test_group_that_was_cut_short_is_no_result() -> None:
    job = EmbedJob(["x"], None)
    job.next_members()
    with pytest.raises(EdgeqwenError, match="deadline") as caught:
        job.add({"finish": "deadline", "usage": {"prompt": 1}})
    assert caught.value.code == "timeout"
