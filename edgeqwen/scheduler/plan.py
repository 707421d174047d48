"""What the scheduler hands out: a planned step, and the events that a step, a cancellation or a deadline leads to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from edgeqwen.core.request import FinishReason
from edgeqwen.core.step import Batch, KVData
from edgeqwen.errors import EdgeqwenError


@dataclass(frozen=True, slots=True)
class SlotCopy:
    """The cache of the first `length` tokens of slot `src` goes to slot `dst`, which holds nothing yet."""

    src: int
    dst: int
    length: int


@dataclass(frozen=True, slots=True)
class SlotLoad:
    """`data` goes into `slot` from position `start` on; what stands there from `stop` on is of no use."""

    slot: int
    start: int
    stop: int
    data: KVData
    num_bytes: int


@dataclass(frozen=True, slots=True)
class SlotSave:
    """The cache of `[start, stop)` of `slot` is to be read, and handed over when the plan is committed."""

    slot: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Begun:
    """A request gets its slot for the first time; `num_cached` tokens of its prompt need not be computed."""

    rid: str
    num_cached: int


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What to do next, in this order: saves, loads, the copy, and a step unless `batch` is empty.

    `sequences[i]` is the (rid, choice) of `batch.chunks[i]`.
    """

    batch: Batch
    sequences: tuple[tuple[str, int], ...]
    is_prefill: bool
    copy: SlotCopy | None = None
    saves: tuple[SlotSave, ...] = ()
    loads: tuple[SlotLoad, ...] = ()
    begun: tuple[Begun, ...] = ()


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
