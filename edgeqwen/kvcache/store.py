"""Which blocks are kept, and where: one budget of memory, one of disk.

The memory budget covers all keys and values that there are: blocks, what running sequences have reserved for
themselves in their slots, and what slots hold that were left (`kvcache.spares`). So the sum never exceeds the budget,
whatever is asked for: room is made before anything is put in, by giving up spare slots, then blocks, or else there is
no room and the caller is told so.

    budget   |<- reserved by sequences ->|<-- blocks in memory -->|<- spare slots ->|<- free ->|

A block goes before the blocks that it needs before it: leaves first, in memory and on disk; which leaf is for
`kvcache.eviction` to say. Blocks of conversations are *lasting*: they are written to disk a while after they came, or
at the latest when their memory is needed, and stay in memory until that is done. Blocks of single requests are never
written, but for those that a lasting one stands behind.

Only bookkeeping happens here, on one thread; data is copied and files are written by others, who report.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from edgeqwen.core.step import KVData
from edgeqwen.kvcache.blocks import BLOCK_TOKENS, Block, Match
from edgeqwen.kvcache.eviction import EvictionOrder
from edgeqwen.kvcache.inventory import Inventory
from edgeqwen.kvcache.spares import Spare, SpareSlots
from edgeqwen.kvcache.write_line import WriteLine


@dataclass(frozen=True, slots=True)
class StoreStats:
    """Blocks and bytes by place; since the start: blocks whose memory was given up, and lasting ones that were lost."""

    num_blocks: int
    memory_bytes: int
    reserved_bytes: int
    spare_bytes: int
    budget_bytes: int
    disk_bytes: int
    num_evicted: int
    num_lost: int


class BlockStore:
    """Blocks within `budget_bytes` of memory and `disk_limit_bytes` of disk (0: nothing is written).

    `capacity` is the tokens that a slot holds, `token_bytes` what one of them takes.
    """

    def __init__(self, *, budget_bytes: int, token_bytes: int, capacity: int, disk_limit_bytes: int = 0) -> None:
        self.budget_bytes = budget_bytes
        self.token_bytes = token_bytes
        self.disk_limit_bytes = disk_limit_bytes
        self.reserved_bytes = 0
        self.spares = SpareSlots()
        self._num_evicted = 0
        self._num_lost = 0
        self._inventory = Inventory(capacity)
        self._tree = self._inventory.tree
        self._order = EvictionOrder(self._is_evictable)
        self._writes = WriteLine()

    # Finding.

    def match(self, owner: str, ids: Sequence[int], *, limit: int) -> Match:
        """The longest known beginning of `ids`, at most `limit` tokens; part of it may be on disk alone."""
        return self._tree.match(owner, ids, limit=limit)

    def use(self, match: Match) -> None:
        """The blocks of `match` are used now."""
        for block in match.blocks:
            self._order.use(block)

    def missing(self, owner: str, ids: Sequence[int]) -> list[tuple[int, int]]:
        """The blocks, (start, stop) in order, that would have to be put in so that all of `ids` is known."""
        _, start = self._tree.covering(owner, ids)
        return [(at, min(at + BLOCK_TOKENS, len(ids))) for at in range(start, len(ids), BLOCK_TOKENS)]

    def pin(self, blocks: Iterable[Block]) -> None:
        """Keep `blocks` where they are until `unpin`. What comes before them must be pinned too, for as long."""
        for block in blocks:
            self._inventory.pin(block)

    def unpin(self, blocks: Iterable[Block]) -> None:
        lost: list[Block] = []
        for block in blocks:
            self._inventory.unpin(block)
            self._order.offer(block)
            if not block.is_somewhere:
                lost.append(block)
        for block in lost:
            self._forget_what_is_lost(block)

    # Room.

    @property
    def memory_bytes(self) -> int:
        """What blocks take of the budget."""
        return self._inventory.memory_bytes

    def owner_bytes(self, owner: str) -> int:
        """What the owner's blocks and spare slots take of the budget."""
        return self._inventory.owner_bytes(owner) + self.spares.owner_bytes(owner)

    @property
    def disk_bytes(self) -> int:
        return self._inventory.disk_bytes

    @property
    def free_bytes(self) -> int:
        return self.budget_bytes - self.memory_bytes - self.reserved_bytes - self.spares.num_bytes

    @property
    def is_writing(self) -> bool:
        """Blocks are being written, or wait to be, whose memory is free afterwards."""
        return self._writes.is_writing

    def reserve(self, num_bytes: int, *, spare: Spare | None = None) -> bool:
        """Have `num_bytes` of the budget for what is not a block; False, and nothing done, if there is no room now.

        What `spare` holds is part of them: it is to be taken next, before anything else happens here.
        """
        if not self.make_room(num_bytes, spare=spare):
            return False
        self.reserved_bytes += num_bytes
        return True

    def unreserve(self, num_bytes: int) -> None:
        assert 0 <= num_bytes <= self.reserved_bytes
        self.reserved_bytes -= num_bytes

    def make_room(self, num_bytes: int, *, spare: Spare | None = None) -> bool:
        """Give up spare slots, then blocks, until `num_bytes` are free, or are so with those of `spare`. False means
        not now: `is_writing` tells whether waiting helps.
        """
        if self.reserved_bytes + self._inventory.pinned_bytes + num_bytes > self.budget_bytes:
            return False
        at_hand, kept_slot = (0, None) if spare is None else (spare.num_bytes, spare.slot)
        while (lacking := num_bytes - at_hand - self.free_bytes) > 0:
            if self.spares.give_up(but=kept_slot):
                continue
            if self._writes.is_writing and self._writes.coming_bytes >= lacking:
                return False
            block = self._order.pop()
            if block is None:
                return False
            if block.is_lasting and not block.is_stored and block.num_bytes <= self.disk_limit_bytes:
                self._writes.hurry(block)
            else:
                self._drop_data(block)
        return True

    def _is_evictable(self, block: Block) -> bool:
        if block.data is None or block.num_pins or block.num_loaded_children:
            return False
        return not block.is_writing and not self._writes.is_urgent(block)

    def _drop_data(self, block: Block) -> None:
        self._order.note_evicted(block)
        self._num_evicted += 1
        self._unload(block)
        if not block.is_stored:
            self._num_lost += block.is_lasting
            self._forget(block)

    # Putting in.

    def put(self, owner: str, ids: Sequence[int], start: int, data: KVData, *, is_lasting: bool, due_at: float) -> bool:
        """Keep the cache of the block of `ids` that begins at `start` and ends 64 tokens later, or where `ids` ends.

        There must be room. False, and nothing kept, if it is known or what comes before it is gone. A lasting block is
        to be written at `due_at`.
        """
        above, covered = self._tree.covering(owner, ids[: start + BLOCK_TOKENS])
        if covered > start or above.stop != start:
            return False
        own = tuple(ids[start : start + BLOCK_TOKENS])
        block = above.child(owner, own)  # one whose file was lost while it was to be read
        superfluous: list[Block] = []
        if block is None:
            block = Block(owner, start, own, above, self.token_bytes * len(own))
            superfluous = self._inventory.add(block)
        # What is lasting of a conversation must not be lost because somebody went on from its end.
        is_lasting = is_lasting or any(old.is_lasting and not old.is_stored for old in superfluous)
        block.is_lasting = is_lasting
        self._load(block, data)
        self._order.use(block, is_new=True)
        if is_lasting and self.disk_limit_bytes:
            self._writes.add(block, due_at)
        for old in superfluous:
            self._remove_superfluous(old)
        return True

    def make_lasting(self, blocks: Iterable[Block], *, due_at: float) -> None:
        """Blocks that were kept for a single request belong to a conversation now."""
        for block in blocks:
            if not block.is_lasting:
                block.is_lasting = True
                self._order.use(block, is_new=True)
                if not block.is_stored and block.data is not None and self.disk_limit_bytes:
                    self._writes.add(block, due_at)

    def fill(self, block: Block, data: KVData) -> None:
        """The data of a block that was on disk alone, and pinned while it was read; there must be room."""
        assert block.num_pins
        if block.data is None:
            self._load(block, data)
            self._order.use(block, is_new=True)

    def add_stored(self, owner: str, above: Block | None, ids: tuple[int, ...], num_bytes: int) -> Block:
        """A block that was found on disk, below another one (None: the first); the existing one if it is known."""
        parent = above or self._tree.root
        block = parent.child(owner, ids)
        if block is None:
            block = Block(owner, parent.stop, ids, parent, num_bytes)
            self._inventory.add(block)
        block.is_lasting = True
        if not block.is_stored and not block.is_writing:
            self._set_stored(block)
        self._order.use(block, is_new=True)
        return block

    def _remove_superfluous(self, block: Block) -> None:
        """A longer block says the same and more. One that is in use stays, and one with a file until its turn comes."""
        if block.num_pins or block.is_writing or block.is_stored or block.data is None:
            return
        self._writes.drop(block)
        self._unload(block)
        self._forget(block)

    def discard(self, owner: str, ids: Sequence[int]) -> list[Block]:
        """Forget what is known of `ids` alone: back to where something else of this owner goes on, or somebody is at
        work. Returns the blocks whose files are of no use now.
        """
        useless: list[Block] = []
        for block in reversed(self._tree.along(owner, ids)):
            if block.children or block.num_pins or block.is_writing:
                continue
            if block.is_stored:
                self._inventory.clear_stored(block)
                useless.append(block)
            if block.data is not None:
                self._unload(block)
            self._forget(block)
        self.spares.discard(owner, ids, least=self._tree.match(owner, ids, limit=len(ids)).length)
        return useless

    # Disk.

    @property
    def next_write_at(self) -> float | None:
        """When the next block is to be written; None if none is."""
        return self._writes.next_at

    def next_write(self, now: float) -> Block | None:
        """A block to be written now, after its predecessors; to be reported with `written`. None: nothing is due."""
        block = self._writes.first(now)
        if block is None:
            return None
        lineage = list(block.lineage())
        first = next(each for each in lineage if not each.is_stored)
        if first.is_writing or first.data is None:
            return None
        self.pin(lineage[: lineage.index(first)])
        self._writes.begin(first)
        return first

    def written(self, block: Block, *, is_stored: bool) -> bool:
        """What came of a write; False if there is a file and it is of no use: what comes before it was lost meanwhile.

        A block that could not be written is as good as one of a single request.
        """
        self._writes.end(block)
        before = list(block.lineage())[:-1]
        is_kept = is_stored and all(each.is_stored for each in before)
        if is_kept:
            self._set_stored(block)
        else:
            self._give_up_writing(block)
        self._order.use(block, is_new=True)
        self.unpin(before)
        return is_kept or not is_stored

    def _give_up_writing(self, block: Block) -> None:
        """What stands behind this block need not be written either."""
        for each in (block, *block.descendants()):
            each.is_lasting = False
            self._writes.drop(each)
            self._order.offer(each)

    def stop_writing(self) -> None:
        """There is no disk any more."""
        self.disk_limit_bytes = 0
        for block in self._writes.waiting():
            self._writes.drop(block)
            self._order.offer(block)

    def surplus(self, num_bytes: int) -> list[Block]:
        """Blocks, the longest unused first, that must leave the disk so that `num_bytes` more fit its budget."""
        return self._inventory.surplus(self.disk_bytes + num_bytes - self.disk_limit_bytes)

    def unstore(self, block: Block) -> list[Block]:
        """The file of a block is gone; returns the blocks behind it whose files are of no use now.

        Of those, what stands behind another comes before it.
        """
        below = [each for each in reversed(list(block.descendants())) if each.is_stored]
        for each in (*below, block):
            if each.is_stored:
                self._inventory.clear_stored(each)
                each.is_lasting = False
                self._order.use(each, is_new=True)
        for each in (block, *below):
            self._forget_what_is_lost(each)
        return below

    # What is in memory, on disk, and nowhere.

    def _load(self, block: Block, data: KVData) -> None:
        assert block.num_bytes <= self.free_bytes, "no room was made"
        self._inventory.load(block, data)

    def _unload(self, block: Block) -> None:
        self._inventory.unload(block)
        assert block.parent is not None
        self._order.offer(block.parent)

    def _set_stored(self, block: Block) -> None:
        self._inventory.set_stored(block)
        self._writes.drop(block)

    def _forget(self, block: Block) -> None:
        self._writes.drop(block)
        self._inventory.remove(block)

    def _forget_what_is_lost(self, block: Block) -> None:
        """A lost block, and all behind it: what is in use stays until that is over, but is not written any more."""
        lost = _first_lost(block)
        if lost is None or block not in self._tree:
            return
        for each in reversed((lost, *lost.descendants())):
            self._writes.drop(each)
            if each.num_pins or each.is_writing or each.children:
                continue
            if each.is_stored:
                self._inventory.clear_stored(each)
            if each.data is not None:
                self._unload(each)
            self._forget(each)

    def stats(self) -> StoreStats:
        return StoreStats(
            num_blocks=self._inventory.num_blocks,
            memory_bytes=self.memory_bytes,
            reserved_bytes=self.reserved_bytes,
            spare_bytes=self.spares.num_bytes,
            budget_bytes=self.budget_bytes,
            disk_bytes=self.disk_bytes,
            num_evicted=self._num_evicted,
            num_lost=self._num_lost,
        )

    def check(self) -> None:
        """Assert the accounting: sums, links, what waits for what, and that the budget holds."""
        self._inventory.check()
        self.spares.check()
        assert self.memory_bytes + self.reserved_bytes + self.spares.num_bytes <= self.budget_bytes
        blocks = list(self._tree)
        assert sum(block.is_writing for block in blocks) == self._writes.num_writing
        offered = self._order.offered()
        for block in blocks:
            assert block in offered or not self._is_evictable(block), "a block that would never be given up"
            is_used = bool(block.num_pins or block.is_writing or block.children)
            assert is_used or _first_lost(block) is None, "a block of no use"
        waiting = self._writes.waiting()
        assert set(waiting) <= set(blocks)
        assert all(block.data is not None and not block.is_stored for block in waiting)
        assert all(_first_lost(block) is None for block in waiting), "it can never be written"


def _first_lost(block: Block) -> Block | None:
    """The first block on the way to `block` that is neither in memory nor on disk."""
    return next((each for each in block.lineage() if not each.is_somewhere), None)
