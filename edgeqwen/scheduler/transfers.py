"""What goes out of slots into blocks: of sequences that ended, that were preempted, or that others can learn from.

A slot whose sequence has left it belongs to `Transfers` until what it holds is in the store, and is free then. Every
plan takes a piece of at most `MAX_BYTES` with it, so that nobody waits long for the copying. Room in the budget is
reserved before a piece is read; where there is none and none will come, what is left is given up. What is there already
is pinned until then: else room for the next block might be made by dropping the one before it, for ever.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final, NamedTuple

from edgeqwen.core.step import KVData
from edgeqwen.kvcache import Block, BlockStore
from edgeqwen.kvcache.blocks import common_length
from edgeqwen.scheduler.plan import SlotSave
from edgeqwen.scheduler.sequence import Sequence, State

MAX_BYTES: Final = 64 << 20
SHARED_BYTES: Final = 16 << 20
"""A piece while others decode: they wait for it, and nobody else does so soon."""

WRITE_DELAY_S: Final = 5.0
"""Lasting blocks are written so long after they came: a conversation that goes on makes its last block useless soon."""


@dataclass(eq=False, slots=True)
class _Saving:
    """`ids` are the tokens whose cache the slot holds, `pins` the blocks of them that there are. `parked` is the
    sequence that was preempted and will be back: room is reserved for all of it (`parked_bytes` are left), and it gets
    the pins.
    """

    slot: int
    owner: str
    ids: tuple[int, ...]
    is_lasting: bool
    reserved_bytes: int = 0
    parked: Sequence | None = None
    parked_bytes: int = 0
    pins: list[Block] = field(default_factory=list)


class Left(NamedTuple):
    """A slot that is nobody's now, and the tokens whose cache it holds."""

    slot: int
    owner: str
    ids: tuple[int, ...]


def _saving(sequence: Sequence, length: int) -> _Saving:
    """Of the first `length` tokens in its slot."""
    assert sequence.slot is not None
    request = sequence.request
    return _Saving(sequence.slot, request.owner, sequence.tokens(0, length), request.is_lasting)


@dataclass(frozen=True, slots=True)
class _Piece:
    save: SlotSave
    saving: _Saving
    num_bytes: int


@dataclass(eq=False, slots=True)
class _Export:
    """The beginning of a sequence that runs, for another one that begins in the same way and waits."""

    asker: Sequence
    donor: Sequence
    saving: _Saving


class Transfers:
    """The slots that are being saved, and what of running ones is wanted."""

    def __init__(self, store: BlockStore, *, write_delay_s: float = WRITE_DELAY_S) -> None:
        self._store = store
        self._write_delay_s = write_delay_s
        self._savings: dict[int, _Saving] = {}
        self._exports: list[_Export] = []
        self._pieces: list[_Piece] = []

    @property
    def slots(self) -> tuple[int, ...]:
        """Slots that are being saved, ascending."""
        return tuple(sorted(self._savings))

    @property
    def reserved_bytes(self) -> int:
        """What is reserved for slots that are being saved, and for what comes out of them."""
        own = sum(each.reserved_bytes + each.parked_bytes for each in self._savings.values())
        return own + sum(piece.num_bytes for piece in self._pieces)

    def take_slot(self, sequence: Sequence) -> None:
        """Save what the slot of a sequence that has ended holds; the slot and what is reserved are ours from now on."""
        saving = _saving(sequence, sequence.num_computed)
        self._pin(saving)
        self._take_over(sequence, saving)

    def park(self, sequence: Sequence) -> bool:
        """As `take_slot`, for a sequence that is to go on later. False, and nothing done, if there is no room."""
        saving = _saving(sequence, sequence.num_computed)
        missing = self._store.missing(saving.owner, saving.ids)
        num_bytes = sum(stop - start for start, stop in missing) * self._store.token_bytes
        self._pin(saving)
        if not self._store.reserve(num_bytes):
            self._store.unpin(saving.pins)
            return False
        sequence.is_parking = True
        saving.parked, saving.parked_bytes = sequence, num_bytes
        self._take_over(sequence, saving)
        return True

    def _take_over(self, sequence: Sequence, saving: _Saving) -> None:
        """The sequence's slot and reservation, but for what was reserved for tokens that never came."""
        self._savings[saving.slot] = saving
        saving.reserved_bytes = min(sequence.reserved_bytes, len(saving.ids) * self._store.token_bytes)
        self._store.unreserve(sequence.reserved_bytes - saving.reserved_bytes)

    def forget_parked(self, sequence: Sequence) -> None:
        """A preempted sequence has ended: what was kept for it is kept like anything else."""
        sequence.is_parking = False
        for saving in self._savings.values():
            if saving.parked is sequence:
                saving.parked = None
                self._store.unreserve(saving.parked_bytes)
                saving.parked_bytes = 0

    def make_lasting(self, owner: str, ids: tuple[int, ...], now: float) -> None:
        """The blocks that are known of `ids` belong to a conversation, those on their way into the store too."""
        match = self._store.match(owner, ids, limit=len(ids))
        whole = [block for block in match.blocks if block.stop <= match.length]
        self._store.make_lasting(whole, due_at=now + self._write_delay_s)
        for saving in self._savings.values():
            if saving.owner == owner and common_length(saving.ids, ids) > match.length:
                saving.is_lasting = True

    def ask(self, asker: Sequence, donor: Sequence, length: int) -> None:
        """Have the first `length` tokens of a running sequence put into the store."""
        export = _Export(asker, donor, _saving(donor, length))
        self._pin(export.saving)
        self._exports.append(export)

    def is_serving(self, asker: Sequence) -> bool:
        """What was asked for is still on its way."""
        return any(export.asker is asker for export in self._exports)

    def covered_by_saving(self, owner: str, ids: tuple[int, ...]) -> int:
        """Tokens that `ids` begins with as a slot does that is being saved."""
        lengths = (common_length(each.ids, ids) for each in self._savings.values() if each.owner == owner)
        return max(lengths, default=0)

    def plan(self, *, is_shared: bool = False) -> tuple[tuple[SlotSave, ...], list[Left]]:
        """The next pieces to read, small ones if others decode (`is_shared`), and the slots that are nobody's now."""
        assert not self._pieces
        room = self._plan_exports(MAX_BYTES)
        done: list[Left] = []
        room = min(room, SHARED_BYTES) if is_shared else room
        for saving in tuple(self._savings.values()):
            is_done, room = self._take_pieces(saving, room)
            if is_done:
                done.append(Left(saving.slot, saving.owner, saving.ids))
                self._end(saving)
        return tuple(piece.save for piece in self._pieces), done

    def _plan_exports(self, room: int) -> int:
        """Plan what fits `room`; the room that is left. What several ask of one sequence is read once."""
        donors: set[Sequence] = set()
        for export in tuple(self._exports):
            donor = export.donor
            # One that has left its slot is being saved anyway.
            is_done = donor.slot != export.saving.slot or export.asker.state is State.FINISHED
            if not is_done and donor not in donors:
                is_done, room = self._take_pieces(export.saving, room)
                donors.add(donor)
            if is_done:
                self._exports.remove(export)
                self._store.unpin(export.saving.pins)
        return room

    def _take_pieces(self, saving: _Saving, room: int) -> tuple[bool, int]:
        """Plan what fits `room`; whether nothing of it is left to do, and the room that is left."""
        missing = self._store.missing(saving.owner, saving.ids)
        for start, stop in missing:
            num_bytes = (stop - start) * self._store.token_bytes
            if num_bytes > room and self._pieces:
                return False, room
            if saving.parked_bytes >= num_bytes:
                saving.parked_bytes -= num_bytes
            elif not self._store.reserve(num_bytes):
                is_over = not self._store.is_writing and not any(piece.saving is saving for piece in self._pieces)
                return is_over, room
            self._pieces.append(_Piece(SlotSave(saving.slot, start, stop), saving, num_bytes))
            room -= num_bytes
        return not missing, room

    def _end(self, saving: _Saving) -> None:
        del self._savings[saving.slot]
        self._store.unreserve(saving.reserved_bytes + saving.parked_bytes)
        if saving.parked is None:
            self._store.unpin(saving.pins)
        else:
            saving.parked.is_parking = False
            saving.parked.pins = saving.pins

    def commit(self, data: tuple[KVData, ...], now: float) -> None:
        """Take in what was read, in the order of the plan."""
        pieces, self._pieces = self._pieces, []
        changed: dict[_Saving, None] = {}
        for piece, block in zip(pieces, data, strict=True):
            saving, start = piece.saving, piece.save.start
            self._store.unreserve(piece.num_bytes)
            is_kept = self._store.put(
                saving.owner,
                saving.ids[: piece.save.stop],
                start,
                block,
                is_lasting=saving.is_lasting,
                due_at=now + self._write_delay_s,
            )
            if is_kept:
                changed[saving] = None
        for saving in changed:  # once for all its pieces: it is looked for from the start
            self._pin(saving)

    def _pin(self, saving: _Saving) -> None:
        """Keep what is known of its tokens."""
        blocks = self._store.match(saving.owner, saving.ids, limit=len(saving.ids)).blocks
        pinned = set(saving.pins)
        new = [block for block in blocks if block not in pinned]
        self._store.pin(new)
        saving.pins += new

    def fail(self) -> list[int]:
        """Nothing was read: give up the slots in question; they are nobody's now."""
        pieces, self._pieces = self._pieces, []
        for piece in pieces:
            self._store.unreserve(piece.num_bytes)
        failed = {piece.saving.slot: piece.saving for piece in pieces if piece.saving.slot in self._savings}
        for saving in failed.values():
            self._end(saving)
        return list(failed)

    def check(self) -> None:
        assert all(slot == saving.slot for slot, saving in self._savings.items())
        assert all(each.parked is None or each.parked.is_parking for each in self._savings.values())
