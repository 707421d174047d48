"""Which slots of the cache are taken, and how many tokens each of them holds.

A step binds one contiguous range of slots by pointer, so a free slot between two taken ones costs an idle row:

    slots   0   1   2   3   4   5   6   7
            A   B   .   C   .   .   .   .      span [0, 4), one hole
                    ^ the next sequence goes here: the span does not grow

This table is bookkeeping only. It knows neither sequences nor the runtime, and it never moves anything.
"""

from __future__ import annotations

from collections.abc import Callable

Worth = Callable[[int], tuple[float, ...]]
"""What a free slot is worth to the one who asks."""


class SlotTable:
    """Accounts for `num_slots` slots of `capacity` tokens each."""

    def __init__(self, num_slots: int, capacity: int) -> None:
        assert num_slots > 0
        assert capacity > 0
        self.num_slots = num_slots
        self.capacity = capacity
        self._lengths: dict[int, int] = {}
        self._free = set(range(num_slots))

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_taken(self) -> int:
        return len(self._lengths)

    @property
    def num_held_tokens(self) -> int:
        """Tokens that all taken slots hold together."""
        return sum(self._lengths.values())

    def taken(self) -> tuple[int, ...]:
        """The taken slots, ascending."""
        return tuple(sorted(self._lengths))

    def length(self, slot: int) -> int:
        """Tokens that the taken slot `slot` holds."""
        return self._lengths[slot]

    def choose(self, worth: Worth = lambda _: ()) -> int | None:
        """The free slot that widens the span of taken slots least, of those one that is worth most, of those the
        lowest; None if there is none.
        """
        return max(self._free, key=lambda slot: (-self._growth(slot), worth(slot), -slot), default=None)

    def acquire(self, slot: int) -> None:
        """Take a free slot."""
        self._free.remove(slot)
        self._lengths[slot] = 0

    def _growth(self, candidate: int) -> int:
        if not self._lengths:
            return 0
        return max(0, min(self._lengths) - candidate, candidate - max(self._lengths))

    def set_length(self, slot: int, length: int) -> None:
        """Record that the taken slot `slot` now holds `length` tokens."""
        assert slot in self._lengths, f"slot {slot} is not taken"
        assert 0 <= length <= self.capacity, f"slot {slot}: {length} tokens in a capacity of {self.capacity}"
        self._lengths[slot] = length

    def release(self, slot: int) -> None:
        """Give the taken slot `slot` back."""
        assert slot in self._lengths, f"slot {slot} is not taken"
        del self._lengths[slot]
        self._free.add(slot)

    def check(self) -> None:
        """Assert that every slot is either free or taken, and that no length is out of range."""
        taken = set(self._lengths)
        assert not taken & self._free, f"free and taken at once: {sorted(taken & self._free)}"
        assert taken | self._free == set(range(self.num_slots)), (
            f"{len(taken)} taken and {len(self._free)} free of {self.num_slots} slots"
        )
        assert all(0 <= length <= self.capacity for length in self._lengths.values()), self._lengths

    def __repr__(self) -> str:
        return f"<SlotTable [{len(self._lengths)}/{self.num_slots} taken, {self.num_held_tokens} tokens]>"
