"""What there is, and where: the tree of blocks, and the sums of what is in memory, pinned and on disk.

Every change of these goes through here, so that the sums always agree with the blocks (`check`). What is to be kept,
and for how long, is for the store to say.
"""

from __future__ import annotations

import heapq
from collections import Counter

from edgeqwen.core.step import KVData
from edgeqwen.kvcache.blocks import Block, BlockTree


class Inventory:
    """All blocks of a store. The block given to a method is one of them, unless it is to be added."""

    def __init__(self, capacity: int) -> None:
        self.tree = BlockTree(capacity)
        self.num_blocks = 0
        self.memory_bytes = 0
        self.pinned_bytes = 0
        self.disk_bytes = 0
        self._owner_bytes: Counter[str] = Counter()  # those in memory; only of owners that have some

    def owner_bytes(self, owner: str) -> int:
        """What the owner's blocks take in memory."""
        return self._owner_bytes.get(owner, 0)

    def add(self, block: Block) -> list[Block]:
        """Put a block below its parent; returns those that it makes superfluous, which are still there."""
        self.num_blocks += 1
        return self.tree.add(block)

    def remove(self, block: Block) -> None:
        """Forget a block that is neither in memory nor on disk, and that nothing stands behind."""
        assert not block.is_somewhere
        self.tree.remove(block)
        self.num_blocks -= 1

    def load(self, block: Block, data: KVData) -> None:
        assert block.data is None, "it is in memory already"
        assert block.parent is not None
        block.data = data
        self.memory_bytes += block.num_bytes
        self._owner_bytes[block.owner] += block.num_bytes
        self.pinned_bytes += block.num_bytes if block.num_pins else 0
        block.parent.num_loaded_children += 1

    def unload(self, block: Block) -> None:
        assert block.data is not None
        assert block.parent is not None
        assert not block.num_pins
        block.data = None
        self.memory_bytes -= block.num_bytes
        self._owner_bytes[block.owner] -= block.num_bytes
        if not self._owner_bytes[block.owner]:
            del self._owner_bytes[block.owner]
        block.parent.num_loaded_children -= 1

    def set_stored(self, block: Block) -> None:
        assert not block.is_stored
        assert block.parent is not None
        block.is_stored = True
        self.disk_bytes += block.num_bytes
        block.parent.num_stored_children += 1

    def clear_stored(self, block: Block) -> None:
        assert block.is_stored
        assert block.parent is not None
        block.is_stored = False
        self.disk_bytes -= block.num_bytes
        block.parent.num_stored_children -= 1

    def pin(self, block: Block) -> None:
        if not block.num_pins and block.data is not None:
            self.pinned_bytes += block.num_bytes
        block.num_pins += 1

    def unpin(self, block: Block) -> None:
        assert block.num_pins > 0
        block.num_pins -= 1
        if not block.num_pins and block.data is not None:
            self.pinned_bytes -= block.num_bytes

    def surplus(self, excess_bytes: int) -> list[Block]:
        """Blocks on disk, the longest unused first but none before those behind it, of `excess_bytes` or more."""
        found: list[Block] = []
        if excess_bytes <= 0:
            return found
        left = {block: block.num_stored_children for block in self.tree if block.is_stored}
        ready = [(block.used_at, block) for block, num in left.items() if not num and not block.num_pins]
        heapq.heapify(ready)  # `used_at` differs from block to block
        while excess_bytes > 0 and ready:
            _, block = heapq.heappop(ready)
            found.append(block)
            excess_bytes -= block.num_bytes
            above = block.parent
            if above is not None and above in left:
                left[above] -= 1
                if not left[above] and not above.num_pins:
                    heapq.heappush(ready, (above.used_at, above))
        return found

    def check(self) -> None:
        """Assert that sums and links are right."""
        blocks = list(self.tree)
        loaded = [block for block in blocks if block.data is not None]
        assert len(blocks) == self.num_blocks
        assert sum(block.num_bytes for block in loaded) == self.memory_bytes
        assert sum(block.num_bytes for block in loaded if block.num_pins) == self.pinned_bytes
        assert sum(block.num_bytes for block in blocks if block.is_stored) == self.disk_bytes
        assert sum(self._owner_bytes.values()) == self.memory_bytes
        for owner, num_bytes in self._owner_bytes.items():
            assert sum(block.num_bytes for block in loaded if block.owner == owner) == num_bytes
        for block in (self.tree.root, *blocks):
            _check_links(block)


def _check_links(block: Block) -> None:
    below = [child for siblings in block.children.values() for child in siblings.blocks]
    for owner, siblings in block.children.items():
        siblings.check()
        assert all(child.owner == owner for child in siblings.blocks)
    assert all(child.parent is block and child.start == block.stop for child in below)
    assert not below or block.parent is None or block.is_full
    assert block.num_loaded_children == sum(child.data is not None for child in below)
    assert block.num_stored_children == sum(child.is_stored for child in below)
    assert block.parent is None or all(child.num_pins <= block.num_pins for child in below), (
        "pinned, but not its parent"
    )
    assert block.parent is None or block.is_stored or not block.num_stored_children, "an orphan on disk"
    assert block.num_pins >= 0
