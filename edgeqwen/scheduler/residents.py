"""Where each sequence stands, and who holds which slot: all ways in and out.

    waiting --admit--> prefilling --begin_decoding--> decoding
       ^                                                 |
       +---------------------- park ---------------------+          leave: from everywhere

A slot has one holder at a time: a sequence, in flight perhaps after its end, then `Transfers` if what it holds is worth
keeping, then nobody. What was saved out of a free slot may stay there (`kvcache.spares`), other slots are collected for
`take_releases`. A sequence of the background has a slot like any
other, but it is never among those that wait or run: nobody makes place for it, and it makes place for everybody.
"""

from __future__ import annotations

from collections.abc import Iterable

from edgeqwen.kvcache import BLOCK_TOKENS, BlockStore, SlotTable, Spare
from edgeqwen.kvcache.slots import Worth
from edgeqwen.scheduler.sequence import Sequence, State
from edgeqwen.scheduler.transfers import Left, Transfers


class Residents:
    """The sequences of requests by where they stand, and the table of `num_slots` slots of `capacity` tokens."""

    def __init__(self, num_slots: int, capacity: int, store: BlockStore, transfers: Transfers) -> None:
        self._slots = SlotTable(num_slots, capacity)
        self._store = store
        self._transfers = transfers
        self._waiting: dict[Sequence, None] = {}
        self._prefilling: dict[Sequence, None] = {}
        self._decoding: dict[int, Sequence] = {}

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
    def num_taken_slots(self) -> int:
        return self._slots.num_taken

    @property
    def num_held_tokens(self) -> int:
        """Tokens in all taken slots."""
        return self._slots.num_held_tokens

    # In.

    def wait(self, sequence: Sequence) -> None:
        """The sequence is new, and waits."""
        assert sequence.state is State.WAITING
        self._waiting[sequence] = None

    def choose(self, sequence: Sequence, needed_bytes: int) -> int:
        """The free slot for a sequence in need of so many bytes; there must be one."""
        slot = self._slots.choose(self._worth_to(sequence, needed_bytes))
        assert slot is not None
        return slot

    def spare_in(self, slot: int, needed_bytes: int) -> Spare | None:
        """What a free slot holds, if it may stay there for one in need of so many bytes: more than that would be in
        nobody's account.
        """
        spare = self._store.spares.get(slot)
        return spare if spare is not None and spare.num_bytes <= needed_bytes else None

    def _worth_to(self, sequence: Sequence, needed_bytes: int) -> Worth:
        """Most of all a slot is worth what the sequence begins with; otherwise an empty one is, for what a spare one
        holds may be wanted by others, and then the one that was left first.
        """
        spares, owner = self._store.spares, sequence.request.owner
        ids = sequence.tokens(0, sequence.num_tokens) if len(spares) else ()

        def worth(slot: int) -> tuple[int, bool, float]:
            spare = spares.get(slot)
            if spare is None:
                return 0, True, 0.0
            common = spare.common(owner, ids) if spare.num_bytes <= needed_bytes else 0
            return common // BLOCK_TOKENS, False, -spare.since

        return worth

    def admit(self, sequence: Sequence, slot: int) -> int:
        """Give a waiting sequence a free slot; returns how many of the sequence's tokens it holds already."""
        spares, held = self._store.spares, 0
        spare = self.spare_in(slot, sequence.reserved_bytes)
        if spare is not None:
            spares.take(slot)
            held = spare.common(sequence.request.owner, sequence.tokens(0, sequence.num_tokens))
        elif spares.get(slot) is not None:
            spares.release(slot)
        self._slots.acquire(slot)
        sequence.enter(State.PREFILLING)
        sequence.slot, sequence.num_computed, sequence.num_since_begin = slot, 0, 0
        if not sequence.is_background:
            del self._waiting[sequence]
            self._prefilling[sequence] = None
        return held

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
        self._store.spares.release(slot)

    def leave_spare(self, left: Left, now: float) -> None:
        """What the slot holds has been saved; it stays there too if the budget has room for it as it is."""
        num_bytes = len(left.ids) * self._store.token_bytes
        if num_bytes > self._store.free_bytes:
            self.free(left.slot)
            return
        self._slots.release(left.slot)
        self._store.spares.put(Spare(left.slot, left.owner, left.ids, num_bytes, now))

    def check(self, live: Iterable[Sequence], others: Iterable[Sequence]) -> None:
        """Assert that every slot has one holder, that all that is reserved is somebody's, and that each of the `live`
        sequences stands where its state says. `others`: of the background, or ended and in flight still.
        """
        self._slots.check()
        assert not set(self._slots.taken()) & set(self._store.spares.slots), "taken and spare at once"
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
