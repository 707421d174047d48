"""Free slots that still hold what their last sequence left there, as long as the memory is not needed otherwise.

Giving a slot's pages back and having them again costs as much as the copying itself, and a conversation often goes on
where it was a moment ago: what its slot holds already need not be copied into it again. So a slot that is left stays as
it is for a while. Its bytes count in the budget and are the first to go when room is made.

Blocks are what is known; a spare slot only saves copies of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from edgeqwen.kvcache.blocks import common_length

SPARE_S: Final = 60.0


@dataclass(frozen=True, slots=True)
class Spare:
    """A free slot that holds the cache of `ids`, since `since`."""

    slot: int
    owner: str
    ids: tuple[int, ...]
    num_bytes: int
    since: float

    def common(self, owner: str, ids: Sequence[int]) -> int:
        """How many of `ids` the slot holds from its beginning on."""
        return common_length(self.ids, ids) if owner == self.owner else 0


class SpareSlots:
    """The spare slots by number, the longest left first, and what is to be released."""

    def __init__(self, *, spare_s: float = SPARE_S) -> None:
        self.num_bytes = 0
        self._spare_s = spare_s
        self._spares: dict[int, Spare] = {}
        self._releases: list[int] = []

    def __len__(self) -> int:
        return len(self._spares)

    def owner_bytes(self, owner: str) -> int:
        """What slots hold that the owner's sequences left."""
        return sum(spare.num_bytes for spare in self._spares.values() if spare.owner == owner)

    @property
    def slots(self) -> tuple[int, ...]:
        return tuple(self._spares)

    def get(self, slot: int) -> Spare | None:
        return self._spares.get(slot)

    def put(self, spare: Spare) -> None:
        assert spare.slot not in self._spares
        self._spares[spare.slot] = spare
        self.num_bytes += spare.num_bytes

    def take(self, slot: int) -> Spare | None:
        """The slot is somebody's now, with what it holds; None if that is nothing."""
        spare = self._spares.pop(slot, None)
        if spare is not None:
            self.num_bytes -= spare.num_bytes
        return spare

    def release(self, slot: int) -> None:
        """What the slot holds is to go."""
        self.take(slot)
        self._releases.append(slot)

    def give_up(self, *, but: int | None = None) -> bool:
        """Release the one that was left first, if there is one beside slot `but`."""
        slot = next((slot for slot in self._spares if slot != but), None)
        if slot is None:
            return False
        self.release(slot)
        return True

    @property
    def next_expiry_at(self) -> float | None:
        """When the first of them has stood long enough; None if there is none."""
        return next((spare.since + self._spare_s for spare in self._spares.values()), None)

    def expire(self, now: float) -> None:
        """Release those that have stood long enough."""
        while (at := self.next_expiry_at) is not None and at <= now:
            self.give_up()

    def discard(self, owner: str, ids: Sequence[int], *, least: int) -> None:
        """Release those that hold more than `least` of `ids`."""
        for spare in list(self._spares.values()):
            if spare.common(owner, ids) > least:
                self.release(spare.slot)

    def take_releases(self) -> tuple[int, ...]:
        """Slots to be released since the last call."""
        releases = tuple(self._releases)
        self._releases.clear()
        return releases

    def check(self) -> None:
        """Assert the sum."""
        assert self.num_bytes == sum(spare.num_bytes for spare in self._spares.values())
        assert all(slot == spare.slot for slot, spare in self._spares.items())
