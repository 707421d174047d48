"""Graphs of a package, ready to run over a cache: each takes chunks and fills rows of logits.

**Bindings are prepared once for a shape.** What a step needs in memory (ids, lengths, the rows wanted) lies in arrays
that were bound when its shape first came; the next step of that shape writes into them and runs. Past and present are
bound by pointer. So a decode step makes nothing anew and never loops over the layers.

**Why chunks are padded to an even length over a float32 cache.** A sequence's logits are to be the same bits however it
is cut into chunks and whoever is computed beside it. All operators here work row by row in an order that does not
depend on the number of rows, but for one: the attention's float product has a kernel of its own for a single row, which
adds up in another order. So a chunk never leaves a single row: an odd one gets a dummy token at its end, whose keys and
values stand where the next token's will, and are overwritten by it. Only behind the last position that the model knows
there is no place for one (the rotary tables end there), so that one row may differ in its last bits. Over an int8 cache
the same operator has no such kernel. This holds on x86 processors with AVX2 or later, where it is tested; with SSE4
alone and on ARM every kernel's order depends on the number of rows, and the last bits with it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Final, Protocol

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from edgeqwen.core.step import Chunk, Hidden, Logits
from edgeqwen.runtime.cache import Cache
from edgeqwen.runtime.session import graph_failures, hidden_size, shrinking_run

KEPT_SHAPES: Final = 64
LIGHT_ROWS: Final = 16
"""A step of so many rows, with logits of one, leaves next to nothing behind."""

SCORES_AT_ONCE: Final = 1 << 20  # query rows times keys of one run: 64 MB of scores with 16 heads


class StepGraph(Protocol):
    """Computes chunks (ascending slots) and writes their logits, chunk by chunk, into `logits` `[rows, vocabulary]`,
    their hidden states into `hidden` `[rows, hidden_size]`; `hidden_size` 0: it has none.

    What a wide step needed in memory beside the cache stays with the session (`is_worn`) until `give_back`, which costs
    about a step of one row and leaves the cache alone.
    """

    @property
    def is_worn(self) -> bool: ...

    @property
    def hidden_size(self) -> int: ...

    def run(self, chunks: Sequence[Chunk], logits: Logits, hidden: Hidden) -> None: ...

    def give_back(self) -> None: ...


@dataclass(slots=True)
class _Prepared:
    """A bound shape; the session reads `inputs` by pointer, so they live as long as the binding."""

    io: Any
    inputs: dict[str, NDArray[Any]]


class _Bindings:
    """The last `KEPT_SHAPES` shapes of one session."""

    def __init__(self, session: ort.InferenceSession, cache: Cache) -> None:
        self._session = session
        self._cache = cache
        self._kept: OrderedDict[tuple[int, ...], _Prepared] = OrderedDict()
        self.hidden_size = hidden_size(session)
        self.is_worn = False

    def prepare(self, first: int, num_slots: int, shapes: dict[str, tuple[tuple[int, ...], Any]]) -> _Prepared:
        """The binding of slots `[first, first + num_slots)` with inputs of these (shape, type)."""
        if not self.hidden_size:
            del shapes["hidden_rows"]
        key = (first, num_slots, *(size for shape, _ in shapes.values() for size in shape))
        prepared = self._kept.pop(key, None)
        if prepared is None:
            inputs = {name: np.zeros(shape, dtype) for name, (shape, dtype) in shapes.items()}
            prepared = self._bind(self._cache, first, num_slots, inputs)
        self._kept[key] = prepared
        if len(self._kept) > KEPT_SHAPES:
            self._kept.popitem(last=False)
        return prepared

    def _bind(self, cache: Cache, first: int, num_slots: int, inputs: dict[str, NDArray[Any]]) -> _Prepared:
        io = self._session.io_binding()
        cache.bind(io, first, num_slots)
        for name, array in inputs.items():
            io.bind_cpu_input(name, array)
        if self.hidden_size and not inputs["hidden_rows"].size:  # most steps; those that want some bind their own
            io.bind_output("hidden", "cpu", 0, np.float32, (0, self.hidden_size), _NOWHERE.ctypes.data)
        return _Prepared(io, inputs)

    def run(self, prepared: _Prepared, logits: Logits, hidden: Hidden) -> None:
        """Run a step; its logits go straight into `logits`, its hidden states into `hidden`."""
        self.is_worn = self.is_worn or len(logits) > 1 or prepared.inputs["input_ids"].size > LIGHT_ROWS
        address = logits.ctypes.data if len(logits) else _NOWHERE.ctypes.data
        with graph_failures():
            prepared.io.bind_output("logits", "cpu", 0, np.float32, logits.shape, address)
            if len(hidden):
                prepared.io.bind_output("hidden", "cpu", 0, np.float32, hidden.shape, hidden.ctypes.data)
            self._session.run_with_iobinding(prepared.io)

    def shrink(self, **inputs: NDArray[Any]) -> None:
        """Give back what steps have left behind, in a run of one token at position 0 over a cache of its own; `inputs`
        ask for no logits.
        """
        cache = self._cache.of_capacity(1)
        if self.hidden_size:
            inputs["hidden_rows"] = np.zeros(0, np.int64)
        prepared = self._bind(cache, 0, 1, inputs)
        with graph_failures():
            prepared.io.bind_output("logits")
            self._session.run_with_iobinding(prepared.io, shrinking_run())
        cache.close()
        self.is_worn = False


_NOWHERE: Final = np.empty(1, np.float32)  # what a binding of no rows points at


class BatchGraph:
    """A graph with the fused attention: any chunks at once, over the contiguous range of slots from the first to the
    last. A slot inside the range that has no chunk is a row with no tokens: the operator leaves its cache alone.

    `pads_to_even` and `max_position`: see the header. The operator wants room in every slot for as many tokens as the
    widest chunk has; where a slot has come too near its end for that, its chunk is a run of its own.
    """

    def __init__(self, session: ort.InferenceSession, cache: Cache, *, pads_to_even: bool, max_position: int) -> None:
        self._bindings = _Bindings(session, cache)
        self._capacity = cache.shape.capacity
        self._pads_to_even = pads_to_even
        self._max_position = max_position

    @property
    def is_worn(self) -> bool:
        return self._bindings.is_worn

    def give_back(self) -> None:
        count = np.ones(1, np.int32)
        self._bindings.shrink(
            input_ids=np.zeros((1, 1), np.int64),
            seqlens_k=np.zeros(1, np.int32),
            query_seqlens=count,
            total_len=count.reshape(()),
            logit_rows=np.zeros(0, np.int64),
        )

    @property
    def hidden_size(self) -> int:
        return self._bindings.hidden_size

    def run(self, chunks: Sequence[Chunk], logits: Logits, hidden: Hidden) -> None:
        last_start = self._capacity - max(self._padded_len(chunk) for chunk in chunks)
        place, hidden_place = 0, 0
        for part in _parts(chunks, last_start):
            stop = place + sum(chunk.num_logits for chunk in part)
            hidden_stop = hidden_place + sum(chunk.num_hidden for chunk in part)
            self._run(part, logits[place:stop], hidden[hidden_place:hidden_stop])
            place, hidden_place = stop, hidden_stop

    def _run(self, chunks: Sequence[Chunk], logits: Logits, hidden: Hidden) -> None:
        first = chunks[0].slot
        num_rows = chunks[-1].slot - first + 1
        width = max(self._padded_len(chunk) for chunk in chunks)
        shapes = {
            "input_ids": ((num_rows, width), np.int64),
            "seqlens_k": ((num_rows,), np.int32),
            "query_seqlens": ((num_rows,), np.int32),
            "total_len": ((), np.int32),
            "logit_rows": ((len(logits),), np.int64),
            "hidden_rows": ((len(hidden),), np.int64),
        }
        prepared = self._bindings.prepare(first, num_rows, shapes)
        self._fill(prepared.inputs, chunks, first=first, width=width)
        if len(hidden):
            prepared.inputs["hidden_rows"][:] = self._hidden_rows(chunks, first=first, width=width)
        self._bindings.run(prepared, logits, hidden)

    def _fill(self, inputs: dict[str, NDArray[Any]], chunks: Sequence[Chunk], *, first: int, width: int) -> None:
        ids, ends, new, wanted = (inputs[name] for name in ("input_ids", "seqlens_k", "query_seqlens", "logit_rows"))
        if len(chunks) < len(ids):  # holes
            ids.fill(0)
            ends.fill(0)
            new.fill(0)
        longest, place = 0, 0
        for chunk in chunks:
            row, count, padded = chunk.slot - first, len(chunk.ids), self._padded_len(chunk)
            ids[row, :count] = chunk.ids
            ids[row, count:] = 0
            new[row] = padded
            ends[row] = chunk.start + padded - 1
            longest = max(longest, chunk.start + padded)
            if chunk.num_logits:
                stop = row * width + count
                wanted[place : place + chunk.num_logits] = range(stop - chunk.num_logits, stop)
                place += chunk.num_logits
        inputs["total_len"][...] = longest

    def _hidden_rows(self, chunks: Sequence[Chunk], *, first: int, width: int) -> list[int]:
        stops = [(chunk.slot - first) * width + len(chunk.ids) for chunk in chunks]
        return [row for stop, chunk in zip(stops, chunks, strict=True) for row in range(stop - chunk.num_hidden, stop)]

    def _padded_len(self, chunk: Chunk) -> int:
        """Tokens of a chunk, with the dummy at its end if it gets one."""
        count = len(chunk.ids)
        is_padded = self._pads_to_even and chunk.stop < self._max_position
        return count + count % 2 if is_padded else count


def _parts(chunks: Sequence[Chunk], last_start: int) -> Iterator[Sequence[Chunk]]:
    """Chunks in order: neighbours that start no later than `last_start` together, every other one alone."""
    for is_later, found in groupby(chunks, lambda chunk: chunk.start > last_start):
        if is_later:
            yield from ([chunk] for chunk in found)
        else:
            yield list(found)


class ChunkGraph:
    """A graph with integer attention: one chunk at a time, in pieces whose scores stay within bounds."""

    def __init__(self, session: ort.InferenceSession, cache: Cache) -> None:
        self._bindings = _Bindings(session, cache)

    @property
    def is_worn(self) -> bool:
        return self._bindings.is_worn

    def give_back(self) -> None:
        ids, start, wanted = (np.zeros(shape, np.int64) for shape in ((1, 1), 1, 0))
        self._bindings.shrink(input_ids=ids, start=start, logit_rows=wanted)

    @property
    def hidden_size(self) -> int:
        return self._bindings.hidden_size

    def run(self, chunks: Sequence[Chunk], logits: Logits, hidden: Hidden) -> None:
        place, hidden_place = 0, 0
        for piece in (piece for chunk in chunks for piece in _pieces(chunk)):
            stop, hidden_stop = place + piece.num_logits, hidden_place + piece.num_hidden
            self._run(piece, logits[place:stop], hidden[hidden_place:hidden_stop])
            place, hidden_place = stop, hidden_stop

    def _run(self, chunk: Chunk, logits: Logits, hidden: Hidden) -> None:
        count = len(chunk.ids)
        shapes = {
            "input_ids": ((1, count), np.int64),
            "start": ((1,), np.int64),
            "logit_rows": ((chunk.num_logits,), np.int64),
            "hidden_rows": ((chunk.num_hidden,), np.int64),
        }
        prepared = self._bindings.prepare(chunk.slot, 1, shapes)
        prepared.inputs["input_ids"][0] = chunk.ids
        prepared.inputs["start"][0] = chunk.start
        prepared.inputs["logit_rows"][:] = range(count - chunk.num_logits, count)
        if chunk.num_hidden:
            prepared.inputs["hidden_rows"][:] = range(count - chunk.num_hidden, count)
        self._bindings.run(prepared, logits, hidden)


def _pieces(chunk: Chunk) -> Iterator[Chunk]:
    """The chunk cut so that rows times keys stay within `SCORES_AT_ONCE`; logits and hidden states stay
    with the rows they belong to.
    """
    size = max(1, SCORES_AT_ONCE // chunk.stop)
    first_wanted, first_hidden = (len(chunk.ids) - wanted for wanted in (chunk.num_logits, chunk.num_hidden))
    for start in range(0, len(chunk.ids), size):
        ids = chunk.ids[start : start + size]
        stop = start + len(ids)
        wanted = [max(0, stop - max(start, first)) for first in (first_wanted, first_hidden)]
        yield Chunk(chunk.slot, chunk.start + start, ids, *wanted)
