"""All arenas of a model's KV cache, and how many tokens each slot holds."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from edgeqwen.core.model import KV_KINDS, KVType, ModelSpec
from edgeqwen.core.step import KVData
from edgeqwen.runtime.arena import Arena, ArenaShape, CacheType, mapped_array

DTYPES: Final[dict[KVType, CacheType]] = {"fp32": np.float32, "int8": np.int8, "bf16": np.uint16}


class Cache:
    """A key and a value arena for each layer; `lengths[slot]` is the tokens that the slot holds."""

    def __init__(self, spec: ModelSpec, kv_type: KVType, *, num_slots: int, capacity: int) -> None:
        shape = ArenaShape(num_slots, spec.num_kv_heads, capacity, spec.head_dim, DTYPES[kv_type])
        self.shape = shape
        self._spec = spec
        self._kv_type = kv_type
        self.lengths = [0] * num_slots
        self.bytes_per_token = spec.kv_floats_per_token * np.dtype(shape.dtype).itemsize
        self._arenas = {f"{layer}.{kind}": Arena(shape) for layer in range(spec.num_layers) for kind in KV_KINDS}

    def of_capacity(self, num_tokens: int) -> Cache:
        """Another cache of the same model and type, of one slot."""
        return Cache(self._spec, self._kv_type, num_slots=1, capacity=num_tokens)

    def views(self) -> list[tuple[NDArray[Any], NDArray[Any]]]:
        """The memory of each layer's keys and values: `[slots, kv_heads, capacity, head_dim]`."""
        return [
            (self._arenas[f"{layer}.key"].view, self._arenas[f"{layer}.value"].view)
            for layer in range(self._spec.num_layers)
        ]

    def bind(self, io: Any, first: int, num_slots: int) -> None:
        """Bind `num_slots` slots from `first` on as past and present: the same memory, so nothing is copied."""
        shape = self.shape
        dims = (num_slots, shape.num_heads, shape.capacity, shape.head_dim)
        for name, arena in self._arenas.items():
            address = arena.address(first)
            io.bind_input(f"past.{name}", "cpu", 0, shape.dtype, dims, address)
            io.bind_output(f"present.{name}", "cpu", 0, shape.dtype, dims, address)

    def read(self, slot: int, start: int, stop: int) -> KVData:
        """A copy of the cache of `[start, stop)`: `[arenas, kv_heads, tokens, head_dim]`."""
        assert 0 <= start <= stop <= self.lengths[slot]
        data = mapped_array((len(self._arenas), *self._block_shape(stop - start)), self.shape.dtype)
        for arena, block in zip(self._arenas.values(), data, strict=True):
            block[...] = arena.view[slot, :, start:stop]
        return data

    def expect(self, slot: int, start: int, stop: int) -> None:
        """Have the memory of `[start, stop)` of a slot."""
        for arena in self._arenas.values():
            if not arena.populate(slot, start, stop):
                return

    def write(self, slot: int, start: int, data: KVData) -> None:
        """Put what `read` gave, or the same bytes in any other buffer, into the slot from `start` on."""
        assert start <= self.lengths[slot]
        flat = np.frombuffer(data, self.shape.dtype)
        num_tokens = flat.nbytes // self.bytes_per_token
        stop = start + num_tokens
        assert flat.nbytes == num_tokens * self.bytes_per_token, "no whole number of tokens"
        assert stop <= self.shape.capacity, f"{stop} tokens in a capacity of {self.shape.capacity}"
        blocks = flat.reshape(len(self._arenas), *self._block_shape(num_tokens))
        for arena, block in zip(self._arenas.values(), blocks, strict=True):
            arena.view[slot, :, start:stop] = block
        self.lengths[slot] = stop

    def _block_shape(self, num_tokens: int) -> tuple[int, int, int]:
        return self.shape.num_heads, num_tokens, self.shape.head_dim

    def move(self, src: int, dst: int) -> None:
        """Move what slot `src` holds to `dst`."""
        length = self.lengths[src]
        for arena in self._arenas.values():
            arena.view[dst, :, :length] = arena.view[src, :, :length]
        self.lengths[dst] = length
        self.release(src)

    def release(self, slot: int) -> None:
        """Empty a slot and give its memory back."""
        for arena in self._arenas.values():
            arena.release(slot)
        self.lengths[slot] = 0

    def close(self) -> None:
        for arena in self._arenas.values():
            arena.close()
