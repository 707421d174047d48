"""What came of requests, told to whoever wants to know: counters, logs.

Every request that comes in is told once: as an `Outcome` when it is over, or as a `Refusal` if it never was accepted.
Whoever listens is told on the event loop, at once, and must not block. Nothing here holds text of a client.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

from edgeqwen.core.request import FinishReason

logger = logging.getLogger(__name__)

Kind: TypeAlias = Literal["generation", "embedding"]

KINDS: Final[tuple[Kind, ...]] = ("generation", "embedding")

FINISHES: Final[tuple[FinishReason, ...]] = ("stop", "tool_calls", "length", "deadline", "cancelled")
"""Mildest first: a request of several choices is called by the harshest end among them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a request ended, and what it had taken. `outcome` is its finish reason, or the code of its error.

    Seconds from its arrival: until it had a slot (`queue_s`), until its first token (None: it had none), until the end;
    what never came counts as coming at the end. Tokens: `num_prompt` of the prompt or of all texts, `num_cached` those
    of it that were not computed, `num_generated` of all choices. `rid` is empty if it ended before it had one.
    """

    rid: str
    owner: str
    kind: Kind
    outcome: str
    queue_s: float
    first_token_s: float | None
    total_s: float
    num_prompt: int = 0
    num_cached: int = 0
    num_generated: int = 0


@dataclass(frozen=True, slots=True)
class Refusal:
    """A request that was answered with an error instead of being accepted; `code` is the error's."""

    owner: str
    kind: Kind
    code: str


def harshest(finishes: tuple[FinishReason, ...]) -> FinishReason:
    """The finish that a request of these choices is called by."""
    return max(finishes, key=FINISHES.index)


class Outcomes:
    """Tells everybody who subscribed. One that raises is logged, and harms nobody."""

    def __init__(self) -> None:
        self._on_outcome: list[Callable[[Outcome], None]] = []
        self._on_refusal: list[Callable[[Refusal], None]] = []

    def subscribe(
        self, on_outcome: Callable[[Outcome], None], on_refusal: Callable[[Refusal], None] | None = None
    ) -> None:
        """Have these called from now on."""
        self._on_outcome.append(on_outcome)
        if on_refusal is not None:
            self._on_refusal.append(on_refusal)

    def tell(self, outcome: Outcome) -> None:
        """A request is over."""
        for listener in self._on_outcome:
            try:
                listener(outcome)
            except Exception:
                logger.exception("who is told of outcomes failed")

    def refuse(self, refusal: Refusal) -> None:
        """A request is not accepted."""
        for listener in self._on_refusal:
            try:
                listener(refusal)
            except Exception:
                logger.exception("who is told of refusals failed")
