"""Which block's memory is given up next: greedy dual-size with frequency (Cherkasova 1998, HPL-98-69).

A block is worth the cost of having it again, times how often it was used, above the worth of the block that was given
up last. So what is not used grows old. The cost is that of computing its tokens, which grows with their position, or a
small part of that if it can be read from disk.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from itertools import count
from typing import Final, TypeAlias

from edgeqwen.kvcache.blocks import Block

MOST_USES: Final = 8
COST_DOUBLES_AFTER: Final = 4096
"""A token at this position costs twice what the first one does (attention grows, the rest does not)."""

STORED_SHARE: Final = 0.1
LASTING_FACTOR: Final = 2.0
_SLACK: Final = 64
_Entry: TypeAlias = tuple[float, int, int, Block]
"""Worth, time of the last use, a number of its own, block: of blocks worth the same, the longest unused goes first."""


class EvictionOrder:
    """Blocks by worth. `is_evictable` says whether the memory of a block may be given up at the moment."""

    def __init__(self, is_evictable: Callable[[Block], bool]) -> None:
        self._is_evictable = is_evictable
        self._clock = 0.0
        self._numbers = count(1)
        self._heap: list[_Entry] = []  # entries of blocks that were used since stay for a while
        self._most_entries = _SLACK
        self._num_uses = 0

    def use(self, block: Block, *, is_new: bool = False) -> None:
        """The block is used now, or what it costs has changed (`is_new`: that is no use)."""
        if not is_new:
            block.num_uses = min(block.num_uses + 1, MOST_USES)
        self._num_uses += 1
        block.used_at = self._num_uses
        cost = 1.0 + block.start / COST_DOUBLES_AFTER
        factor = (STORED_SHARE if block.is_stored else 1.0) * (LASTING_FACTOR if block.is_lasting else 1.0)
        block.value = self._clock + cost * factor * block.num_uses
        self.offer(block)

    def offer(self, block: Block) -> None:
        """Consider a block that may have become evictable."""
        if block.parent is not None and self._is_evictable(block):
            heapq.heappush(self._heap, (block.value, block.used_at, next(self._numbers), block))
            if len(self._heap) > self._most_entries:
                self._compact()

    def pop(self) -> Block | None:
        """The cheapest block, no longer considered until it is offered again; None if there is none."""
        while self._heap:
            _, used_at, _, block = heapq.heappop(self._heap)
            if used_at == block.used_at and self._is_evictable(block):
                return block
        return None

    def note_evicted(self, block: Block) -> None:
        """The block was given up: what is used from now on is worth more."""
        self._clock = max(self._clock, block.value)

    def offered(self) -> frozenset[Block]:
        """Blocks that `pop` would find, were they evictable."""
        return frozenset(block for _, used_at, _, block in self._heap if used_at == block.used_at)

    def _compact(self) -> None:
        """Drop entries that are of no use: as many as were added since the last time, so that costs little."""
        current = {entry[-1]: entry for entry in self._heap if entry[1] == entry[-1].used_at}
        self._heap = [entry for block, entry in current.items() if self._is_evictable(block)]
        heapq.heapify(self._heap)
        self._most_entries = 2 * len(self._heap) + _SLACK
