"""What every accepted request has while it lives, whatever is made of it."""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from typing import Any

from edgeqwen.core.request import Done, Event, FinishReason, Request, Timings
from edgeqwen.core.step import Hidden
from edgeqwen.engine.generation import Sink
from edgeqwen.engine.outcomes import Kind, Outcome
from edgeqwen.sampling import Sampled, Sampler
from edgeqwen.scheduler import TokenDrawn

logger = logging.getLogger(__name__)


class LiveRequest(ABC):
    """One accepted request: its events go to `sink`. `timer` is its deadline's, `is_broken` if the sink has failed."""

    def __init__(self, request: Request, sink: Sink) -> None:
        self.request = request
        self.timer: asyncio.TimerHandle | None = None
        self.is_broken = False
        self._sink = sink
        self._num_cached = 0
        self._scheduled_at: float | None = None
        self._first_at: float | None = None
        self._num_generated = 0

    def emit(self, event: Event) -> None:
        """Hand an event to the front. If that raises, its request is cancelled, and no other suffers."""
        try:
            self._sink(event)
        except Exception:
            logger.exception("the receiver of request %s failed", self.request.rid)
            self.is_broken = True
            self._sink = _ignore

    def note_begun(self, num_cached: int, now: float) -> None:
        """The request has a slot; so many tokens of its prompt are known."""
        self._num_cached = num_cached
        self._scheduled_at = now

    @property
    def has_begun(self) -> bool:
        """Whether it has got a slot."""
        return self._scheduled_at is not None

    def timings(self, now: float) -> Timings:
        """Of a request that ends now. What never came counts as coming at the end."""
        arrived_at = self.request.arrived_at
        return Timings(
            queue=_ms(arrived_at, now if self._scheduled_at is None else self._scheduled_at),
            ttft=_ms(arrived_at, now if self._first_at is None else self._first_at),
            total=_ms(arrived_at, now),
        )

    def outcome(self, name: str, now: float) -> Outcome:
        """Of a request that ends now: its finish reason or the code of its error is `name`."""
        request, first_at = self.request, self._first_at
        return Outcome(
            rid=request.rid,
            owner=request.owner,
            kind=self.kind,
            outcome=name,
            queue_s=_seconds(request.arrived_at, now if self._scheduled_at is None else self._scheduled_at),
            first_token_s=None if first_at is None else _seconds(request.arrived_at, first_at),
            total_s=_seconds(request.arrived_at, now),
            num_prompt=request.num_prompt_tokens,
            num_cached=self._num_cached,
            num_generated=self._num_generated,
        )

    def facts(self, now: float) -> dict[str, Any]:
        """What may be shown of it while it lives, nothing of what it says."""
        first_at = self._first_at
        taken_s = 0.0 if first_at is None else now - first_at
        return {
            "rid": self.request.rid,
            "kind": self.kind,
            "state": "queued" if not self.has_begun else "prefill" if first_at is None else "decode",
            "prompt": self.request.num_prompt_tokens,
            "cached": self._num_cached,
            "tokens": self._num_generated,
            "tok_s": round(max(0, self._num_generated - 1) / taken_s, 1) if taken_s > 0 else 0.0,
            "age_s": round(_seconds(self.request.arrived_at, now), 1),
        }

    @property
    def kind(self) -> Kind:
        return "generation" if self.request.pooling is None else "embedding"

    # What the engine thread asks for.

    @abstractmethod
    def sampler(self, choice: int) -> Sampler | None:
        """What draws the tokens of a choice; None if none are drawn."""

    @abstractmethod
    def push_hidden(self, choice: int, rows: Hidden) -> None:
        """The next hidden states of a choice, if any were wanted. Raises `RuntimeFailed`."""

    # What comes of the scheduler's events.

    @abstractmethod
    def take(self, event: TokenDrawn, sampled: Sampled, now: float) -> bool:
        """Take in a token and emit the text that it completes; True if that completes a stop string."""

    @abstractmethod
    def end(self, index: int, reason: FinishReason) -> None:
        """A choice has ended."""

    @property
    @abstractmethod
    def is_over(self) -> bool:
        """Whether all choices have ended."""

    @abstractmethod
    def done(self, now: float) -> Done:
        """The terminal event of a request whose choices have all ended."""


def _ignore(event: Event) -> None:
    """Receives the events of a request whose front has failed."""


def _seconds(start: float, stop: float) -> float:
    return max(0.0, stop - start)


def _ms(start: float, stop: float) -> int:
    return round(1000 * _seconds(start, stop))
