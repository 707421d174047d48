"""What the scheduler hands out: a planned step, and the events that a step, a cancellation or a deadline leads to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from edgeqwen.core.request import FinishReason
from edgeqwen.core.step import Batch
from edgeqwen.errors import EdgeqwenError


@dataclass(frozen=True, slots=True)
class SlotCopy:
    """The cache of the first `length` tokens of slot `src` goes to slot `dst`, which holds nothing yet."""

    src: int
    dst: int
    length: int


@dataclass(frozen=True, slots=True)
class StepPlan:
    """A step to run, after the copy if there is one. `sequences[i]` is the (rid, choice) of `batch.chunks[i]`."""

    batch: Batch
    sequences: tuple[tuple[str, int], ...]
    is_prefill: bool
    copy: SlotCopy | None = None


Outcome: TypeAlias = Sequence[int | EdgeqwenError]
"""What came of one chunk: its tokens, an error of a row last of all, or nothing (a chunk without logits)."""


@dataclass(frozen=True, slots=True)
class TokenDrawn:
    """Choice `choice` of `rid` got `token` from chunk `chunk` of the step; `is_end`: an end token that ends it."""

    rid: str
    choice: int
    chunk: int
    token: int
    is_end: bool


@dataclass(frozen=True, slots=True)
class SequenceEnded:
    """No more tokens for this choice. Follows its last `TokenDrawn`."""

    rid: str
    choice: int
    reason: FinishReason


@dataclass(frozen=True, slots=True)
class RequestFailed:
    """The whole request ended with an error: no more events for any of its choices."""

    rid: str
    error: EdgeqwenError


SchedulerEvent: TypeAlias = TokenDrawn | SequenceEnded | RequestFailed
