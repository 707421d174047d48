"""One step of a model, and the contract of whatever executes it (`Runtime`).

A step computes, for a few sequences at once, some tokens each: a *chunk*. A sequence lives in one *slot* of the KV
cache; a chunk says where in the slot it starts, so the cache before `start` is the sequence's past:

    slot   |<-------- past (cached) -------->|<---- chunk ---->|      free      |
           0                               start       start + len(ids)     capacity
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

Logits: TypeAlias = NDArray[np.float32]
Hidden: TypeAlias = NDArray[np.float32]
"""Rows of what leaves the model's last norm, in the basis of the model as it was published."""

KVData: TypeAlias = Any
"""A contiguous buffer of `kv_bytes_per_token` bytes a token; what is in it is the business of the runtime alone."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens `ids` (not empty) of the sequence in `slot`, from position `start` on; logits for the last `num_logits`,
    hidden states for the last `num_hidden` (0 where the runtime has none to give).
    """

    slot: int
    start: int
    ids: tuple[int, ...]
    num_logits: int = 1
    num_hidden: int = 0

    @property
    def stop(self) -> int:
        return self.start + len(self.ids)


@dataclass(frozen=True, slots=True)
class Batch:
    """Chunks computed together, at most one a slot, in ascending slot order."""

    chunks: tuple[Chunk, ...]


@dataclass(frozen=True, slots=True)
class StepResult:
    """`logits[i]` is float32 `[chunks[i].num_logits, vocab_size]`, `hidden[i]` `[chunks[i].num_hidden, hidden_size]`;
    both are valid until the next call of the runtime. `hidden` is empty if no chunk wanted any.
    """

    logits: tuple[Logits, ...]
    hidden: tuple[Hidden, ...] = ()


@dataclass(frozen=True, slots=True)
class RuntimeSpec:
    """What a runtime offers: `num_slots` slots of `capacity` tokens, logits of `vocab_size`, of which `num_tokens`
    real.

    `kv_fingerprint` names all that the content of the cache depends on (model, quantisation, type of cache): what was
    read from a runtime means something only to one with the same. `row_costs` says what was found by timing: (rows of
    one sequence in a step, seconds), rising; empty if nothing was. `hidden_size` is the length of a hidden state, 0 if
    the runtime gives none.
    """

    num_slots: int
    capacity: int
    vocab_size: int
    num_tokens: int
    kv_bytes_per_token: int
    max_chunk: int
    row_costs: tuple[tuple[int, float], ...] = ()
    kv_fingerprint: str = ""
    hidden_size: int = 0


class Runtime(Protocol):
    """Executes steps. Used by one thread only (the engine's); no method is safe from another.

    Errors: any method may raise `RuntimeFailed`; the slots of that call then hold nothing and must be released, the
    others are untouched, and the runtime stays usable.
    """

    @property
    def spec(self) -> RuntimeSpec:
        """Constant for the life of the runtime; may be read from any thread."""
        ...

    def step(self, batch: Batch) -> StepResult:
        """Compute the chunks and append their keys and values to the slots.

        Mutates the slots `[start, stop)`; what a slot held from `start` on is overwritten, so a sequence is cut back by
        starting earlier. Requires that the slot holds `[0, start)` and that `stop <= capacity`.
        """
        ...

    def read_kv(self, slot: int, start: int, stop: int) -> KVData:
        """A copy of the cache of `[start, stop)`, independent of the slot from then on; its memory goes back to the
        system when nobody refers to it any more.
        """
        ...

    def expect_kv(self, slot: int, start: int, stop: int) -> None:
        """`write_kv` is about to fill `[start, stop)`: a hint, so that the memory for it can be had at one go."""
        ...

    def write_kv(self, slot: int, start: int, data: KVData) -> None:
        """Put `data` (a buffer with what `read_kv` gave, perhaps of another process) into the slot from `start` on."""
        ...

    def move(self, src: int, dst: int) -> None:
        """Move the sequence of slot `src` to the free slot `dst`; `src` is free afterwards."""
        ...

    def release(self, slot: int) -> None:
        """Forget what the slot holds and give its memory back to the system."""
        ...

    def close(self) -> None:
        """Free everything; nothing may be called afterwards."""
        ...
