"""Which blocks are to be written to disk: each a while after it came, or at once if its memory is needed."""

from __future__ import annotations

from collections import OrderedDict

from edgeqwen.kvcache.blocks import Block


class WriteLine:
    """Blocks that wait to be written, and those that are being written."""

    def __init__(self) -> None:
        self._due: OrderedDict[Block, float] = OrderedDict()
        self._urgent: OrderedDict[Block, None] = OrderedDict()
        self._num_writing = 0
        self._writing_bytes = 0

    def __contains__(self, block: Block) -> bool:
        return block in self._due or block in self._urgent

    def waiting(self) -> tuple[Block, ...]:
        return (*self._urgent, *self._due)

    @property
    def is_writing(self) -> bool:
        """Something is being written, or waits to be, whose memory is needed."""
        return bool(self._urgent) or self._num_writing > 0

    @property
    def num_writing(self) -> int:
        return self._num_writing

    @property
    def coming_bytes(self) -> int:
        """Memory that can be had once that is done."""
        return self._writing_bytes + sum(block.num_bytes for block in self._urgent)

    @property
    def next_at(self) -> float | None:
        """When the next one is due; None if nothing waits."""
        return 0.0 if self._urgent else min(self._due.values(), default=None)

    def is_urgent(self, block: Block) -> bool:
        return block in self._urgent

    def add(self, block: Block, due_at: float) -> None:
        self._due.setdefault(block, due_at)

    def hurry(self, block: Block) -> None:
        """The memory of this block is needed."""
        self._due.pop(block, None)
        self._urgent[block] = None

    def drop(self, block: Block) -> None:
        self._due.pop(block, None)
        self._urgent.pop(block, None)

    def first(self, now: float) -> Block | None:
        """A block that is due."""
        urgent = next(iter(self._urgent), None)
        return urgent or next((block for block, due_at in self._due.items() if due_at <= now), None)

    def begin(self, block: Block) -> None:
        assert not block.is_writing
        self.drop(block)
        block.is_writing = True
        self._num_writing += 1
        self._writing_bytes += block.num_bytes

    def end(self, block: Block) -> None:
        assert block.is_writing
        block.is_writing = False
        self._num_writing -= 1
        self._writing_bytes -= block.num_bytes
