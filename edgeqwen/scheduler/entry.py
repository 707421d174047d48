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
from edgeqwen.core.step import KVData, RuntimeSpec
from edgeqwen.errors import EdgeqwenError
from edgeqwen.kvcache import Block, BlockStore, Match
from edgeqwen.kvcache.blocks import common_length
from edgeqwen.scheduler.plan import SlotLoad
from edgeqwen.scheduler.residents import Residents
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
    """Gives slots to sequences that wait."""

    def __init__(self, spec: RuntimeSpec, store: BlockStore, residents: Residents, transfers: Transfers) -> None:
        self._spec = spec
        self._store = store
        self._residents = residents
        self._transfers = transfers
        self._fetches: list[Fetch] = []

    def check_size(self, request: Request) -> None:
        """Raises `EdgeqwenError` (`too_long`) for what can never enter: it exceeds a slot, or the whole budget."""
        prompt_len = max(map(len, request.texts), default=len(request.prompt_ids))
        num_tokens = prompt_len + request.max_tokens
        sizes = f"a prompt of {prompt_len} tokens and an answer of {request.max_tokens}"
        excess = num_tokens - self._spec.capacity
        if excess > 0:
            message = f"{sizes} are {excess} more than the context of {self._spec.capacity}"
            raise EdgeqwenError(message, code="too_long")
        needed, budget = num_tokens * self._spec.kv_bytes_per_token, self._store.budget_bytes
        if needed > budget:
            message = f"{sizes} take {needed} bytes of cache, and all there is to have is {budget} (kv.memory_mb)"
            raise EdgeqwenError(message, code="too_long")

    def enter(self, sequence: Sequence, *, has_donor: bool = False) -> Entered:
        """Try to give `sequence` a slot. `has_donor`: its prompt is copied from another slot, so nothing else is looked
        for.
        """
        if sequence.is_fetching or sequence.is_parking:
            return Entered.SOON
        if not self._residents.has_free_slot:
            return Entered.ROOM_SOON if self._transfers.slots else Entered.NO_ROOM
        match = Match() if has_donor else self._match(sequence)
        if not has_donor and self._is_worth_waiting(sequence, match):
            return Entered.SOON
        slot = self._residents.choose(sequence, self._needed_bytes(sequence))
        self._store.pin(match.blocks)
        if not self._has_room(sequence, match, slot):
            self._store.unpin(match.blocks)
            if self._store.is_writing or self._transfers.slots:
                return Entered.ROOM_SOON
            if self._residents.running or not self._reserve_alone(sequence, slot):
                return Entered.NO_ROOM
            match = self._match(sequence).loaded_part()
            self._store.pin(match.blocks)
        if match.unloaded:
            self._fetch(sequence, match)
            return Entered.SOON
        self._take_slot(sequence, match, slot)
        return Entered.YES

    def num_known(self, sequence: Sequence) -> int:
        """Tokens of a sequence that need not be computed, as things are now."""
        return self._match(sequence).length

    def _match(self, sequence: Sequence) -> Match:
        if not sequence.request.may_cache:
            return Match()
        limit = sequence.num_tokens - (0 if sequence.is_background else 1)
        return self._store.match(sequence.request.owner, sequence.tokens(0, limit), limit=limit)

    def _is_worth_waiting(self, sequence: Sequence, match: Match) -> bool:
        """Others know more of its tokens than the store does: have that put there, once."""
        request = sequence.request
        if not request.may_cache:
            return False
        ids, least = sequence.tokens(0, sequence.num_tokens - 1), match.length + WORTH_WAITING
        if self._transfers.covered_by_saving(request.owner, ids) >= least:
            return True
        if sequence.has_asked:
            return self._transfers.is_serving(sequence)
        running = self._residents.running
        donors = [each for each in running if each.request.owner == request.owner and each.request.may_cache]
        lengths = [common_length(each.tokens(0, each.num_computed), ids) for each in donors]
        best = max(range(len(donors)), key=lambda index: lengths[index], default=None)
        if best is None or lengths[best] < least:
            return False
        sequence.has_asked = True
        self._transfers.ask(sequence, donors[best], lengths[best])
        return True

    def _has_room(self, sequence: Sequence, match: Match, slot: int) -> bool:
        """Reserve for all that the sequence may come to, and have room for what must be fetched."""
        if not self._reserve(sequence, slot):
            return False
        if match.unloaded and not self._store.make_room(sum(block.num_bytes for block in match.unloaded)):
            self._unreserve(sequence)
            return False
        return True

    def _needed_bytes(self, sequence: Sequence) -> int:
        return (len(sequence.prompt_ids) + sequence.request.max_tokens) * self._spec.kv_bytes_per_token

    def _reserve_alone(self, sequence: Sequence, slot: int) -> bool:
        """Nothing runs that could give room back, so what is known of this sequence may have to go for its sake."""
        self._store.unpin(sequence.take_pins())
        return self._reserve(sequence, slot)

    def _reserve(self, sequence: Sequence, slot: int) -> bool:
        needed = self._needed_bytes(sequence)
        if not self._store.reserve(needed, spare=self._residents.spare_in(slot, needed)):
            return False
        sequence.reserved_bytes = needed
        return True

    def _unreserve(self, sequence: Sequence) -> None:
        self._store.unreserve(sequence.reserved_bytes)
        sequence.reserved_bytes = 0

    def _fetch(self, sequence: Sequence, match: Match) -> None:
        """The reservation is given back: what is fetched needs the room, and nobody knows how long it takes."""
        self._unreserve(sequence)
        sequence.is_fetching = True
        sequence.pins += match.blocks
        self._fetches.append(Fetch(sequence, match.unloaded))

    def _take_slot(self, sequence: Sequence, match: Match, slot: int) -> None:
        held = self._residents.admit(sequence, slot)
        self._store.use(match)
        self._store.unpin(sequence.take_pins())
        sequence.pins = list(match.blocks)
        stops = [*(block.stop for block in match.blocks[:-1]), match.length]
        sequence.loads.extend(
            SlotLoad(slot, block.start, stop, block.data, block.num_bytes)
            for block, stop in zip(match.blocks, stops, strict=False)
            if stop >= held or block is match.blocks[-1]  # so what the slot holds ends with what is loaded
        )
        if sequence.num_cached is None:
            sequence.num_cached = min(match.length, len(sequence.prompt_ids))

    def take_fetches(self) -> tuple[Fetch, ...]:
        """What is to be read since the last call; each is to be reported with `fetched`."""
        fetches = tuple(self._fetches)
        self._fetches.clear()
        return fetches

    def fetched(self, fetch: Fetch, data: Seq[KVData | None]) -> list[Block]:
        """What was read, None for files that are damaged or gone; returns the blocks whose files are of no use now."""
        useless: list[Block] = []
        for block, content in zip(fetch.blocks, data, strict=True):
            if content is None:
                useless += self._store.unstore(block)
            elif block.data is None and block.is_stored and self._store.make_room(block.num_bytes):
                self._store.fill(block, content)
        sequence = fetch.sequence
        sequence.is_fetching = False
        if sequence.state is State.FINISHED:
            self._store.unpin(sequence.take_pins())
        return useless
