"""The memory of the KV cache: for each layer a key and a value arena `[slots, kv_heads, capacity, head_dim]`.

Arenas are anonymous mappings without reserved swap: they cost address space when made, memory only where a sequence has
written, and `release` gives a slot's pages back. The engine's operators read and write them in place, by pointer.

Transparent huge pages are declined: a head's rows of one slot lie megabytes apart from the next head's, so where the
kernel hands out 2 MB at a time, the first token of a conversation would take that much for each head (940 MB in all
instead of 2 for Qwen3-0.6B).
"""

from __future__ import annotations

import contextlib
import mmap
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from edgeqwen.errors import ConfigInvalid

MAP_NORESERVE: Final = getattr(mmap, "MAP_NORESERVE", 0x4000)
MADV_POPULATE_WRITE: Final = 23  # asm-generic/mman-common.h


CacheType: TypeAlias = type[np.float32] | type[np.float16] | type[np.int8] | type[np.uint16]
"""numpy has no bf16: its 16 bits are taken for a whole number."""


@dataclass(frozen=True, slots=True)
class ArenaShape:
    """Shape of one arena."""

    num_slots: int
    num_heads: int
    capacity: int
    head_dim: int
    dtype: CacheType = np.float32

    @property
    def slot_bytes(self) -> int:
        return self.num_heads * self.capacity * self.head_dim * np.dtype(self.dtype).itemsize


class Arena:
    """One arena; `view` is the whole, `address(slot)` where a slot begins."""

    def __init__(self, shape: ArenaShape) -> None:
        self.shape = shape
        total = shape.slot_bytes * shape.num_slots
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
        try:
            self._map = mmap.mmap(-1, total, flags=flags)
        except OSError as error:
            raise ConfigInvalid(
                f"cannot reserve {total >> 20} MiB of address space for the KV cache ({error.strerror}): "
                "lower --slots or --context, or set vm.overcommit_memory to 0 or 1"
            ) from error
        with contextlib.suppress(OSError):  # a kernel without huge pages does not know the advice
            self._map.madvise(mmap.MADV_NOHUGEPAGE)
        dims = (shape.num_slots, shape.num_heads, shape.capacity, shape.head_dim)
        self.view: NDArray[Any] = np.frombuffer(self._map, self.shape.dtype).reshape(dims)
        self._base = int(self.view.ctypes.data)

    def address(self, slot: int) -> int:
        """Address of the first byte of a slot."""
        assert 0 <= slot < self.shape.num_slots
        return self._base + slot * self.shape.slot_bytes

    def populate(self, slot: int, start: int, stop: int) -> bool:
        """Have the pages of tokens `[start, stop)` of a slot at one go, which costs half of what page faults do; False
        if the kernel cannot (before Linux 5.14).
        """
        page, shape = mmap.PAGESIZE, self.shape
        row_bytes = shape.head_dim * np.dtype(shape.dtype).itemsize
        for head in range(shape.num_heads):
            base = slot * shape.slot_bytes + head * shape.capacity * row_bytes
            first = (base + start * row_bytes) // page * page
            last = -(-(base + stop * row_bytes) // page) * page
            try:
                self._map.madvise(MADV_POPULATE_WRITE, first, min(last, len(self._map)) - first)
            except OSError:
                return False
        return True

    def release(self, slot: int) -> None:
        """Give the pages that are the slot's alone back to the system; what they held reads as zeros afterwards."""
        page = mmap.PAGESIZE
        start = slot * self.shape.slot_bytes
        first, last = -(-start // page) * page, (start + self.shape.slot_bytes) // page * page
        if last > first:
            self._map.madvise(mmap.MADV_DONTNEED, first, last - first)

    def close(self) -> None:
        """Unmap; the view must not be used afterwards."""
        del self.view
        self._map.close()


def mapped_array(shape: tuple[int, ...], dtype: CacheType) -> NDArray[Any]:
    """An array of zeros with a mapping of its own, which is gone with the last reference to the array.

    The heap keeps what is freed inside it; blocks of a cache come and go by the hundred, each some megabytes.
    """
    num_bytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
    memory = mmap.mmap(-1, max(num_bytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return np.frombuffer(memory, dtype, num_bytes // np.dtype(dtype).itemsize).reshape(shape)
