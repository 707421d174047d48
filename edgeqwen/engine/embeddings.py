"""Embeddings: texts in, one vector for each out.

An embedding is a request like any other to the scheduler (queue, fairness, slots, pieces of long texts, deadline,
cancellation); nothing is drawn. Its texts are the choices of one request, and as many as fit are computed in one step.

A text stands as it is between the tokens that the model's tokenizer puts around one (the end token of an embedding
model, say); what looks like a marker in it stays text. Token ids are taken as they are.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from edgeqwen.core.model import Pooling
from edgeqwen.core.request import PRIORITIES, Done, Event, Failed, FinishReason, Request, SamplingParams, Usage
from edgeqwen.core.step import Hidden
from edgeqwen.engine.checks import boolean, integer, one_of
from edgeqwen.engine.live import LiveRequest
from edgeqwen.engine.pooling import Pooler
from edgeqwen.engine.settings import EngineLimits
from edgeqwen.errors import BadRequest, EdgeqwenError
from edgeqwen.sampling import Sampled
from edgeqwen.scheduler import TokenDrawn

POOLINGS: Final[tuple[Pooling, ...]] = ("last", "mean")
DEFAULT_POOLING: Final[Pooling] = "last"
"""Of a model that does not say. In a decoder only the last token has seen the whole text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingInput:
    """Exactly one of `texts` and `tokens` (a list of token ids for each text) is given; None means "not given"."""

    texts: tuple[str, ...] | None = None
    tokens: tuple[tuple[int, ...], ...] | None = None
    pooling: str | None = None
    deadline_ms: int | None = None
    priority: str | None = None
    wait: bool | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Embeddings:
    """`vectors` is float32 `[texts, dims]`, each row of length 1, in the order of the texts; `num_tokens` are those of
    all texts together, what the tokenizer put around them included.
    """

    vectors: NDArray[np.float32]
    num_tokens: int


class EmbeddingEnded(EdgeqwenError):
    """An embedding that came to another end than its vectors: `reason` says which."""

    def __init__(self, reason: FinishReason, *, num_tokens: int = 0) -> None:
        is_late = reason == "deadline"
        message = "the deadline came before the embeddings" if is_late else "the embedding was cancelled"
        super().__init__(message, code="timeout" if is_late else "draining")
        self.reason = reason
        self.num_tokens = num_tokens


def check_embedding(given: EmbeddingInput, *, limits: EngineLimits, num_tokens: int) -> None:
    """Raise `BadRequest` for the first field that no model state could make right. `num_tokens`: ids with a text."""
    if (given.texts is None) == (given.tokens is None):
        raise BadRequest("give either texts or tokens", field="texts")
    field = "tokens" if given.texts is None else "texts"
    count = len(given.texts or given.tokens or ())
    if not 1 <= count <= limits.texts:
        raise BadRequest(f"{field} must hold 1 to {limits.texts} texts, not {count}", field=field)
    for index, text in enumerate(given.texts or ()):
        if not text:
            raise BadRequest(f"texts[{index}] is empty", field=f"texts[{index}]")
    for index, ids in enumerate(given.tokens or ()):
        if not ids or not all(type(token) is int and 0 <= token < num_tokens for token in ids):
            message = f"tokens[{index}] must hold token ids between 0 and {num_tokens - 1}, at least one"
            raise BadRequest(message, field=f"tokens[{index}]")
    one_of("pooling", given.pooling, POOLINGS)
    integer("deadline_ms", given.deadline_ms, least=1, most=limits.max_deadline_ms)
    boolean("wait", given.wait)
    one_of("priority", given.priority, PRIORITIES)


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingContext:
    """What `embedding_request` needs beside the input. `hidden_size` is 0 for a model that gives no hidden states."""

    limits: EngineLimits
    context: int
    hidden_size: int
    num_tokens: int
    pooling: Pooling | None
    rid: str
    owner: str
    arrived_at: float


def embedding_request(given: EmbeddingInput, texts: tuple[tuple[int, ...], ...], at: EmbeddingContext) -> Request:
    """The request for a checked `given` and its texts' tokens. Raises `EdgeqwenError` (`too_long`) or `BadRequest`."""
    if not at.hidden_size:
        raise BadRequest(
            "this model was imported without what embeddings need: import its checkpoint again", field="op"
        )
    field = "tokens" if given.texts is None else "texts"
    for index, ids in enumerate(texts):
        if not ids or max(ids) >= at.num_tokens:
            message = f"{field}[{index}] must have tokens, all of them below {at.num_tokens}"
            raise BadRequest(message, field=f"{field}[{index}]")
        if len(ids) > at.context:
            message = f"{field}[{index}] has {len(ids)} tokens, {len(ids) - at.context} more than the context"
            raise EdgeqwenError(f"{message} of {at.context}", code="too_long", field=f"{field}[{index}]")
    deadline_ms = at.limits.max_deadline_ms if given.deadline_ms is None else given.deadline_ms
    return Request(
        rid=at.rid,
        owner=at.owner,
        prompt_ids=(),
        sampling=SamplingParams(),
        max_tokens=0,
        n=len(texts),
        may_speculate=False,
        may_cache=False,
        priority=PRIORITIES["normal" if given.priority is None else given.priority],
        pooling=_pooling(given.pooling) or at.pooling or DEFAULT_POOLING,
        texts=texts,
        deadline_at=at.arrived_at + deadline_ms / 1000,
        arrived_at=at.arrived_at,
    )


def _pooling(name: str | None) -> Pooling | None:
    return next((pooling for pooling in POOLINGS if pooling == name), None)


class EmbeddingRecord(LiveRequest):
    """An embedding while it lives; `result` gives what comes of it."""

    def __init__(self, request: Request) -> None:
        super().__init__(request, self._on_event)
        assert request.pooling is not None
        self._poolers = [Pooler(request.pooling) for _ in request.texts]
        self._finishes: list[FinishReason | None] = [None] * len(request.texts)
        self._over: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def result(self) -> Embeddings:
        """The vectors. Raises `EmbeddingEnded`, or the error that the request ended with."""
        await self._over
        reason = next((reason for reason in self._finishes if reason not in (None, "stop")), None)
        num_tokens = self.request.num_prompt_tokens
        if reason is not None:
            raise EmbeddingEnded(reason, num_tokens=num_tokens)
        return Embeddings(np.stack([pooler.vector() for pooler in self._poolers]), num_tokens)

    def _on_event(self, event: Event) -> None:
        if self._over.done():
            return
        if isinstance(event, Done):
            self._over.set_result(None)
        elif isinstance(event, Failed):
            self._over.set_exception(event.error)

    def sampler(self, choice: int) -> None:
        """Nothing is drawn."""

    def push_hidden(self, choice: int, rows: Hidden) -> None:
        self._poolers[choice].push(rows)

    def take(self, event: TokenDrawn, sampled: Sampled, now: float) -> bool:
        raise AssertionError("a token of an embedding")

    def end(self, index: int, reason: FinishReason) -> None:
        assert self._finishes[index] is None
        self._finishes[index] = reason

    @property
    def is_over(self) -> bool:
        return None not in self._finishes

    def done(self, now: float) -> Done:
        finishes = tuple(reason for reason in self._finishes if reason is not None)
        usage = Usage(self.request.num_prompt_tokens, 0, 0)
        return Done(self.request.rid, finishes, usage, self.timings(now))
