"""Where each sequence stands, and who holds which slot: all ways in and out.

    waiting --admit--> prefilling --begin_decoding--> decoding
       ^                                                 |
       +---------------------- park ---------------------+          leave: from everywhere

A slot has one holder at a time: a sequence, in flight perhaps after its end, then `Transfers` if what it holds is worth
keeping, then nobody. Freed slots are collected for `take_releases`. A sequence of the background has a slot like any
other, but it is never among those that wait or run: nobody makes place for it, and it makes place for everybody.
"""

from __future__ import annotations

from collections.abc import Iterable

from edgeqwen.kvcache import BlockStore, SlotTable
from edgeqwen.scheduler.sequence import Sequence, State
from edgeqwen.scheduler.transfers import Transfers


class Residents:
    """The sequences of requests by where they stand, and the table of `num_slots` slots of `capacity` tokens."""

    def __init__(self, num_slots: int, capacity: int, store: BlockStore, transfers: Transfers) -> None:
        self._slots = SlotTable(num_slots, capacity)
        self._store = store
        self._transfers = transfers
        self._waiting: dict[Sequence, None] = {}
        self._prefilling: dict[Sequence, None] = {}
        self._decoding: dict[int, Sequence] = {}
        self._releases: list[int] = []

    @property
    def waiting(self) -> list[Sequence]:
        return list(self._waiting)

    @property
    def prefilling(self) -> list[Sequence]:
        return list(self._prefilling)

    @property
    def decoding(self) -> list[Sequence]:
        """In the order of their slots."""
        return [self._decoding[slot] for slot in sorted(self._decoding)]

    @property
    def is_decoding(self) -> bool:
        return bool(self._decoding)

    @property
    def running(self) -> list[Sequence]:
        """Those that hold a slot."""
        return [*self._prefilling, *self._decoding.values()]

    @property
    def has_free_slot(self) -> bool:
        return self._slots.num_free > 0

    @property
    def num_held_tokens(self) -> int:
        """Tokens in all taken slots."""
        return self._slots.num_held_tokens

    # In.

    def wait(self, sequence: Sequence) -> None:
        """The sequence is new, and waits."""
        assert sequence.state is State.WAITING
        self._waiting[sequence] = None

    def admit(self, sequence: Sequence) -> int:
        """Give a waiting sequence a free slot, of which there must be one; returns it."""
        slot = self._slots.acquire()
        assert slot is not None
        sequence.enter(State.PREFILLING)
        sequence.slot, sequence.num_computed, sequence.num_since_begin = slot, 0, 0
        if not sequence.is_background:
            del self._waiting[sequence]
            self._prefilling[sequence] = None
        return slot

    def begin_decoding(self, sequence: Sequence) -> None:
        assert sequence.slot is not None
        sequence.enter(State.DECODING)
        del self._prefilling[sequence]
        self._decoding[sequence.slot] = sequence

    def hold(self, sequence: Sequence, length: int) -> None:
        """The sequence's slot holds `length` tokens of it."""
        assert sequence.slot is not None
        sequence.num_computed = length
        self._slots.set_length(sequence.slot, length)

    # Out.

    def park(self, sequence: Sequence, now: float) -> bool:
        """Have a decoding sequence wait again, its slot being saved. False, and nothing done, if that has no room."""
        assert sequence.slot is not None
        if not self._transfers.park(sequence):
            return False
        del self._decoding[sequence.slot]
        sequence.num_known, sequence.since = sequence.num_computed, now
        sequence.slot, sequence.reserved_bytes, sequence.num_computed = None, 0, 0
        sequence.enter(State.WAITING)
        self._waiting[sequence] = None
        return True

    def leave(self, sequence: Sequence) -> None:
        """The sequence has ended. What is its own while it is in flight or fetches is given back after that."""
        if sequence.state is State.WAITING:
            self._waiting.pop(sequence, None)
        elif sequence.state is State.PREFILLING:
            self._prefilling.pop(sequence, None)
        elif sequence.slot is not None:
            del self._decoding[sequence.slot]
        if sequence.is_parking:
            self._transfers.forget_parked(sequence)
        sequence.enter(State.FINISHED)
        sequence.drafter = None
        if not sequence.is_fetching and not sequence.is_in_flight:
            self._store.unpin(sequence.take_pins())
        if sequence.slot is not None and not sequence.is_in_flight:
            self.give_slot_back(sequence)

    def give_slot_back(self, sequence: Sequence) -> None:
        """What the slot of an ended sequence holds is kept, if it is worth anything."""
        assert sequence.state is State.FINISHED
        assert not sequence.is_in_flight
        slot = sequence.slot
        if slot is None:  # given back before, when another choice of its request failed in the same step
            return
        self._store.unpin(sequence.take_pins())
        sequence.loads.clear()
        if sequence.request.may_cache and sequence.num_computed and not sequence.is_spoilt:
            self._transfers.take_slot(sequence)
        else:
            self._store.unreserve(sequence.reserved_bytes)
            self.free(slot)
        sequence.slot, sequence.reserved_bytes = None, 0

    def free(self, slot: int) -> None:
        """Nobody needs what the slot holds."""
        self._slots.release(slot)
        self._releases.append(slot)

    def take_releases(self) -> tuple[int, ...]:
        """Slots freed since the last call."""
        releases = tuple(self._releases)
        self._releases.clear()
        return releases

    def check(self, live: Iterable[Sequence], others: Iterable[Sequence]) -> None:
        """Assert that every slot has one holder, that all that is reserved is somebody's, and that each of the `live`
        sequences stands where its state says. `others`: of the background, or ended and in flight still.
        """
        self._slots.check()
        self._store.check()
        self._transfers.check()
        live = set(live)
        by_state = {state: {each for each in live if each.state is state} for state in State}
        assert by_state[State.WAITING] == set(self._waiting)
        assert by_state[State.PREFILLING] == set(self._prefilling)
        assert by_state[State.DECODING] == set(self._decoding.values())
        assert all(sequence.slot == slot for slot, sequence in self._decoding.items())
        holders = live.union(others)
        held = sorted([*(each.slot for each in holders if each.slot is not None), *self._transfers.slots])
        assert tuple(held) == self._slots.taken(), f"held {held}, taken {self._slots.taken()}"
        reserved = sum(each.reserved_bytes for each in holders) + self._transfers.reserved_bytes
        assert reserved == self._store.reserved_bytes, f"{reserved} of {self._store.reserved_bytes} reserved"

    def __repr__(self) -> str:
        counts = f"{len(self._waiting)} waiting, {len(self._prefilling)} prefilling, {len(self._decoding)} decoding"
        return f"{counts} | {self._slots!r}"
