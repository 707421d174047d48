"""How a waiting sequence gets its slot: room in the budget, what is known of its tokens, and the slot, or none of it.

What is known may be in blocks, in memory or on disk, or in the slot of a sequence that runs or has just ended. Blocks
in memory are loaded as they are. Those on disk are fetched first, and what is only in a slot is put into blocks first;
the sequence waits for that, others go on.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from enum import Enum, auto
from typing import Final

from edgeqwen.core.request import Request
from edgeqwen.core.step import RuntimeSpec
from edgeqwen.kvcache import Block, BlockStore, Match, SlotTable
from edgeqwen.kvcache.blocks import common_length
from edgeqwen.scheduler.plan import SlotLoad
from edgeqwen.scheduler.sequence import Sequence, State
from edgeqwen.scheduler.transfers import Transfers

WORTH_WAITING: Final = 32
"""Tokens that must be gained by waiting for blocks that are being made."""


class Entered(Enum):
    """What came of it. `ROOM_SOON` and `NO_ROOM` keep others from entering as well, else small ones might overtake a
    large one for ever; `SOON` does not.
    """

    YES = auto()
    SOON = auto()
    ROOM_SOON = auto()
    NO_ROOM = auto()


@dataclass(frozen=True, slots=True)
class Fetch:
    """Blocks to be read from disk for a sequence, which waits for them; they are pinned meanwhile."""

    sequence: Sequence
    blocks: tuple[Block, ...]


class Entry:
    """Gives slots to sequences. `fetches` are for the engine to take and to report."""

    def __init__(self, spec: RuntimeSpec, store: BlockStore, slots: SlotTable, transfers: Transfers) -> None:
        self._spec = spec
        self._store = store
        self._slots = slots
        self._transfers = transfers
        self.fetches: list[Fetch] = []

    def enter(self, sequence: Sequence, running: Seq[Sequence], *, has_donor: bool = False) -> Entered:
        """Try to give `sequence` a slot beside those that are `running`. `has_donor`: its prompt is copied from another
        slot, so nothing else is looked for.
        """
        if sequence.is_fetching or sequence.is_parking:
            return Entered.SOON
        if not self._slots.num_free:
            return Entered.ROOM_SOON if self._transfers.slots else Entered.NO_ROOM
        match = Match() if has_donor else self._match(sequence)
        if not has_donor and self._is_worth_waiting(sequence, match, running):
            return Entered.SOON
        self._store.pin(match.blocks)
        if not self._has_room(sequence, match):
            self._store.unpin(match.blocks)
            if self._store.is_writing or self._transfers.slots:
                return Entered.ROOM_SOON
            if running or not self._reserve_alone(sequence):
                return Entered.NO_ROOM
            match = self._match(sequence).loaded_part()
            self._store.pin(match.blocks)
        if match.unloaded:
            self._fetch(sequence, match)
            return Entered.SOON
        self._take_slot(sequence, match)
        return Entered.YES

    def num_known(self, request: Request) -> int:
        """Tokens of a prompt that need not be computed, as things are now."""
        if not request.may_cache:
            return 0
        return self._store.match(request.owner, request.prompt_ids, limit=len(request.prompt_ids) - 1).length

    def is_known(self, sequence: Sequence) -> bool:
        """Whether there is nothing to compute of a sequence that waits."""
        return self._match(sequence).length == sequence.num_tokens

    def _match(self, sequence: Sequence) -> Match:
        if not sequence.request.may_cache:
            return Match()
        limit = sequence.num_tokens - (0 if sequence.is_background else 1)
        return self._store.match(sequence.request.owner, sequence.tokens(0, limit), limit=limit)

    def _is_worth_waiting(self, sequence: Sequence, match: Match, running: Seq[Sequence]) -> bool:
        """Others know more of its tokens than the store does: have that put there, once."""
        request = sequence.request
        if not request.may_cache:
            return False
        ids, least = sequence.tokens(0, sequence.num_tokens - 1), match.length + WORTH_WAITING
        if self._transfers.covered_by_saving(request.owner, ids) >= least:
            return True
        if sequence.has_asked:
            return self._transfers.is_serving(sequence)
        donors = [each for each in running if each.request.owner == request.owner and each.request.may_cache]
        lengths = [common_length(each.tokens(0, each.num_computed), ids) for each in donors]
        best = max(range(len(donors)), key=lambda index: lengths[index], default=None)
        if best is None or lengths[best] < least:
            return False
        sequence.has_asked = True
        self._transfers.ask(sequence, donors[best], lengths[best])
        return True

    def _has_room(self, sequence: Sequence, match: Match) -> bool:
        """Reserve for all that the sequence may come to, and have room for what must be fetched."""
        needed = self._needed_bytes(sequence)
        if not self._store.reserve(needed):
            return False
        if not self._store.make_room(sum(block.num_bytes for block in match.unloaded)):
            self._store.unreserve(needed)
            return False
        sequence.reserved_bytes = needed
        return True

    def _needed_bytes(self, sequence: Sequence) -> int:
        request = sequence.request
        return (len(request.prompt_ids) + request.max_tokens) * self._spec.kv_bytes_per_token

    def _reserve_alone(self, sequence: Sequence) -> bool:
        """Nothing runs that could give room back, so what is known of this sequence may have to go for its sake."""
        self._store.unpin(sequence.pins)
        sequence.pins = []
        sequence.reserved_bytes = self._needed_bytes(sequence)
        if self._store.reserve(sequence.reserved_bytes):
            return True
        sequence.reserved_bytes = 0
        return False

    def _fetch(self, sequence: Sequence, match: Match) -> None:
        """The reservation is given back: what is fetched needs the room, and nobody knows how long it takes."""
        self._store.unreserve(sequence.reserved_bytes)
        sequence.reserved_bytes = 0
        sequence.is_fetching = True
        sequence.pins += match.blocks
        self.fetches.append(Fetch(sequence, match.unloaded))

    def _take_slot(self, sequence: Sequence, match: Match) -> None:
        slot = self._slots.acquire()
        assert slot is not None
        self._store.use(match)
        self._store.unpin(sequence.pins)
        sequence.pins = list(match.blocks)
        sequence.slot = slot
        sequence.num_computed = 0
        sequence.num_since_begin = 0
        sequence.enter(State.PREFILLING)
        stops = [*(block.stop for block in match.blocks[:-1]), match.length]
        sequence.loads.extend(
            SlotLoad(slot, block.start, stop, block.data, block.num_bytes)
            for block, stop in zip(match.blocks, stops, strict=False)
        )
        if sequence.num_cached is None:
            sequence.num_cached = min(match.length, len(sequence.request.prompt_ids))
