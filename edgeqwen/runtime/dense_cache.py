"""The KV cache of graphs that take a sequence's past as one dense array and give past and new tokens as another.

Each slot has a *row* of memory in each layer's arenas. What it holds lies there as `[kv_heads, stride, head_dim]`, of
which the first `length` tokens of each head are filled. A graph wants `stride` to be the length; then it reads the past
where it is. What it gives goes to the spare row, and the two rows change their parts: a sequence that goes on alone is
never copied outside of the graph. Sequences computed together are copied: side by side into the padded past of all, and
their new tokens back, into a row with room to spare (`stride` above `length`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from edgeqwen.core.model import KV_KINDS, KVType, ModelSpec
from edgeqwen.core.step import Chunk, KVData
from edgeqwen.runtime.arena import Arena, ArenaShape, CacheType, mapped_array

ELEMENTS: Final[dict[KVType, CacheType]] = {"fp32": np.float32, "fp16": np.float16}
ROOM: Final = 64
"""Tokens that a row which is copied into gets room for beyond what it needs now."""


@dataclass(slots=True)
class _Row:
    """Where a slot's tokens are; see the header."""

    place: int
    stride: int = 0
    length: int = 0


@dataclass(frozen=True, slots=True)
class Padded:
    """Sequences side by side: `past` tokens of each (shorter ones padded at their end), then `width` new ones."""

    chunks: Sequence[Chunk]
    past: int
    width: int

    @classmethod
    def of(cls, chunks: Sequence[Chunk]) -> Padded:
        return cls(chunks, max(chunk.start for chunk in chunks), max(len(chunk.ids) for chunk in chunks))


class DenseCache:
    """Keys and values of `num_slots` sequences of up to `capacity` tokens; names are `LAYER.key` and `LAYER.value`."""

    def __init__(self, spec: ModelSpec, kv_type: KVType, *, num_slots: int, capacity: int) -> None:
        self.element = ELEMENTS[kv_type]
        self.num_heads, self._capacity, self.head_dim = spec.num_kv_heads, capacity, spec.head_dim
        self.bytes_per_token = spec.kv_floats_per_token * np.dtype(self.element).itemsize
        shape = ArenaShape(num_slots + 1, spec.num_kv_heads, capacity, spec.head_dim, self.element)
        self._arenas = {f"{layer}.{kind}": Arena(shape) for layer in range(spec.num_layers) for kind in KV_KINDS}
        self._rows = [_Row(place) for place in range(num_slots)]
        self._spare = num_slots
        self._packed: dict[str, NDArray[Any]] = {}
        self._given: dict[str, NDArray[Any]] = {}

    def length(self, slot: int) -> int:
        return self._rows[slot].length

    def bind_one(self, io: Any, chunk: Chunk) -> None:
        """Bind the past of a chunk's slot where it lies, and the spare row for what the graph gives."""
        row = self._rows[chunk.slot]
        row.length = chunk.start
        if row.stride != chunk.start:
            self._restride(row, chunk.start)
        before = (1, self.num_heads, chunk.start, self.head_dim)
        after = (1, self.num_heads, chunk.stop, self.head_dim)
        for name, arena in self._arenas.items():
            past, present = arena.address(row.place), arena.address(self._spare)
            io.bind_input(f"past_key_values.{name}", "cpu", 0, self.element, before, past)
            io.bind_output(f"present.{name}", "cpu", 0, self.element, after, present)

    def keep_one(self, chunk: Chunk) -> None:
        """The graph has filled what `bind_one` gave it."""
        row = self._rows[chunk.slot]
        row.place, self._spare = self._spare, row.place
        row.stride = row.length = chunk.stop

    def bind_padded(self, io: Any, padded: Padded) -> None:
        """Copy the pasts of all chunks side by side, and bind them and memory for what the graph gives."""
        count = len(padded.chunks)
        before = (count, self.num_heads, padded.past, self.head_dim)
        after = (count, self.num_heads, padded.past + padded.width, self.head_dim)
        for name, arena in self._arenas.items():
            past = _buffer(self._packed, name, before, self.element)
            for index, chunk in enumerate(padded.chunks):
                row = self._rows[chunk.slot]
                past[index, :, : chunk.start] = self._view(arena, row.place, row.stride)[:, : chunk.start]
                past[index, :, chunk.start :] = 0  # what is masked is multiplied by 0 all the same: no NaN there
            present = _buffer(self._given, name, after, self.element)
            io.bind_input(f"past_key_values.{name}", "cpu", 0, self.element, before, past.ctypes.data)
            io.bind_output(f"present.{name}", "cpu", 0, self.element, after, present.ctypes.data)

    def keep_padded(self, padded: Padded) -> None:
        """The graph has filled what `bind_padded` gave it: append each chunk's tokens to its slot."""
        after = (len(padded.chunks), self.num_heads, padded.past + padded.width, self.head_dim)
        for index, chunk in enumerate(padded.chunks):
            row = self._rows[chunk.slot]
            row.length = chunk.start
            self._have_room(row, chunk.stop, wanted=chunk.stop + ROOM)
            new = slice(padded.past, padded.past + len(chunk.ids))
            for name, arena in self._arenas.items():
                present = _buffer(self._given, name, after, self.element)
                self._view(arena, row.place, row.stride)[:, chunk.start : chunk.stop] = present[index, :, new]
            row.length = chunk.stop

    def read(self, slot: int, start: int, stop: int) -> KVData:
        """A copy of the cache of `[start, stop)`: `[arenas, kv_heads, tokens, head_dim]`."""
        row = self._rows[slot]
        assert 0 <= start <= stop <= row.length
        data = mapped_array((len(self._arenas), self.num_heads, stop - start, self.head_dim), self.element)
        for arena, block in zip(self._arenas.values(), data, strict=True):
            block[...] = self._view(arena, row.place, row.stride)[:, start:stop]
        return data

    def expect(self, slot: int, stop: int) -> None:
        """Lay out a slot's row for tokens up to `stop`, so that the writes to come find room."""
        self._have_room(self._rows[slot], stop, wanted=stop)

    def write(self, slot: int, start: int, data: KVData) -> None:
        """Put what `read` gave, or the same bytes in any other buffer, into the slot from `start` on."""
        row = self._rows[slot]
        assert start <= row.length
        flat = np.frombuffer(data, self.element)
        num_tokens = flat.nbytes // self.bytes_per_token
        stop = start + num_tokens
        assert flat.nbytes == num_tokens * self.bytes_per_token, "no whole number of tokens"
        assert stop <= self._capacity, f"{stop} tokens in a capacity of {self._capacity}"
        row.length = start
        self._have_room(row, stop, wanted=max(stop, 2 * row.stride))
        blocks = flat.reshape(len(self._arenas), self.num_heads, num_tokens, self.head_dim)
        for arena, block in zip(self._arenas.values(), blocks, strict=True):
            self._view(arena, row.place, row.stride)[:, start:stop] = block
        row.length = stop

    def move(self, src: int, dst: int) -> None:
        """Move what slot `src` holds to `dst`: they change rows."""
        self._rows[src], self._rows[dst] = self._rows[dst], self._rows[src]
        self.release(src)

    def release(self, slot: int) -> None:
        """Empty a slot and give its memory back."""
        row = self._rows[slot]
        row.stride = row.length = 0
        for arena in self._arenas.values():
            arena.release(row.place)

    def give_back(self) -> None:
        """Give back all memory that no slot's tokens lie in."""
        self._packed.clear()
        self._given.clear()
        for arena in self._arenas.values():
            arena.release(self._spare)

    def close(self) -> None:
        for arena in self._arenas.values():
            arena.close()

    def _have_room(self, row: _Row, needed: int, *, wanted: int) -> None:
        """Have room in a row for `needed` tokens; if it is to be laid out anew for them, for `wanted` at once."""
        if row.stride < needed:
            self._restride(row, min(wanted, self._capacity))

    def _restride(self, row: _Row, stride: int) -> None:
        """Lay a row's tokens out with another stride, in the spare row, which takes its part."""
        if row.length:
            for arena in self._arenas.values():
                old, new = (self._view(arena, *place) for place in ((row.place, row.stride), (self._spare, stride)))
                new[:, : row.length] = old[:, : row.length]
            row.place, self._spare = self._spare, row.place
        row.stride = stride

    def _view(self, arena: Arena, place: int, stride: int) -> NDArray[Any]:
        """A row `[kv_heads, stride, head_dim]`."""
        flat: NDArray[Any] = arena.view[place].reshape(-1)
        return flat[: self.num_heads * stride * self.head_dim].reshape(self.num_heads, stride, self.head_dim)


def _buffer(kept: dict[str, NDArray[Any]], name: str, shape: tuple[int, ...], element: CacheType) -> NDArray[Any]:
    """Memory of a shape, the same from step to step as long as it is large enough."""
    size = int(np.prod(shape))
    if name not in kept or kept[name].size < size:
        kept[name] = mapped_array((size,), element)
    return kept[name][:size].reshape(shape)
