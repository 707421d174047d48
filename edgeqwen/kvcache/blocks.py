"""The tree of known prefixes: blocks of up to 64 tokens, each below the block that comes before it.

    root --- [64 tokens] --- [64 tokens] --- [17 tokens]        a conversation
                  |
                  +--------- [64 tokens] --- ...                another one with the same first block

A block belongs to an owner, and is seen by that owner alone; those of `SHARED` are seen by all. Only full blocks have
successors: what begins inside a block is a block of its own, so a prefix is found to the token by taking a part of the
last one. Among the successors of a block, kept in the order of their tokens, the one that has most of a text's
beginning in common with it stands beside the place where that text would be put in.

This is structure only. What a block holds in memory or on disk, and for how long, is the store's business.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

from edgeqwen.core.step import KVData
from edgeqwen.kvcache.block_file import block_name

BLOCK_TOKENS: Final = 64
SHARED: Final = ""
"""The owner whose blocks everybody may use."""


@dataclass(eq=False, slots=True)
class Block:
    """Tokens `ids` at positions from `start` on, after all those of its parents.

    `data` is their cache in memory, None if it is on disk alone (`is_stored`). A pinned block stays where it is.
    """

    owner: str
    start: int
    ids: tuple[int, ...]
    parent: Block | None
    num_bytes: int = 0
    data: KVData | None = None
    is_stored: bool = False
    is_lasting: bool = False
    is_writing: bool = False
    num_pins: int = 0
    num_uses: int = 1
    value: float = 0.0
    used_at: int = 0
    num_loaded_children: int = 0
    num_stored_children: int = 0
    children: dict[str, Siblings] = field(default_factory=dict)

    @property
    def stop(self) -> int:
        return self.start + len(self.ids)

    @property
    def is_somewhere(self) -> bool:
        """In memory or on disk; else its file was lost while it was pinned, and it only waits to be forgotten."""
        return self.data is not None or self.is_stored

    @property
    def is_full(self) -> bool:
        return len(self.ids) == BLOCK_TOKENS

    def name(self, fingerprint: str) -> str:
        """The block's name on disk: a digest of the model, the owner and all tokens up to its end."""
        name = ""
        for block in self.lineage():
            name = block_name(name, block.owner, block.ids, fingerprint)
        return name

    def child(self, owner: str, ids: tuple[int, ...]) -> Block | None:
        """The successor of exactly these tokens that belongs to `owner`."""
        siblings = self.children.get(owner)
        return None if siblings is None else siblings.get(ids)

    def lineage(self) -> Iterator[Block]:
        """From the first block down to this one."""
        above: list[Block] = []
        block: Block | None = self
        while block is not None and block.parent is not None:
            above.append(block)
            block = block.parent
        return reversed(above)

    def descendants(self) -> Iterator[Block]:
        """All blocks below, parents first."""
        todo = [self]
        while todo:
            for siblings in todo.pop().children.values():
                todo += siblings.blocks
                yield from siblings.blocks


class Siblings:
    """The successors of one block that belong to one owner, in the order of their tokens."""

    def __init__(self) -> None:
        self._keys: list[tuple[int, ...]] = []
        self.blocks: list[Block] = []

    def __len__(self) -> int:
        return len(self.blocks)

    def get(self, ids: tuple[int, ...]) -> Block | None:
        """The block of exactly these tokens."""
        place = bisect_left(self._keys, ids)
        return self.blocks[place] if place < len(self._keys) and self._keys[place] == ids else None

    def closest(self, ids: tuple[int, ...], is_usable: Callable[[Block], bool]) -> tuple[Block, int] | None:
        """The usable block with the longest common beginning with `ids`, and that length; None if all begin otherwise.

        To either side of the place of `ids` that length only falls, so the first usable ones are the best.
        """
        place = bisect_left(self._keys, ids)
        sides = (range(place, len(self.blocks)), range(place - 1, -1, -1))
        nearest = (next((at for at in side if is_usable(self.blocks[at])), None) for side in sides)
        found = [(self.blocks[at], common_length(self._keys[at], ids)) for at in nearest if at is not None]
        best = max(found, key=lambda pair: pair[1], default=None)
        return best if best is not None and best[1] else None

    def add(self, block: Block) -> None:
        place = bisect_left(self._keys, block.ids)
        self._keys.insert(place, block.ids)
        self.blocks.insert(place, block)

    def remove(self, block: Block) -> None:
        place = bisect_left(self._keys, block.ids)
        assert self.blocks[place] is block
        del self._keys[place], self.blocks[place]

    def beginnings(self, ids: tuple[int, ...]) -> list[Block]:
        """Blocks whose tokens are a shorter beginning of `ids`, as far as they stand next to it."""
        found: list[Block] = []
        place = bisect_left(self._keys, ids) - 1
        while place >= 0 and ids[: len(self._keys[place])] == self._keys[place]:
            found.append(self.blocks[place])
            place -= 1
        return found

    def check(self) -> None:
        assert self._keys == sorted(set(self._keys))
        assert [block.ids for block in self.blocks] == self._keys


def common_length(left: Sequence[int], right: Sequence[int]) -> int:
    """How many tokens both begin with."""
    most = min(len(left), len(right))
    if left[:most] == right[:most]:
        return most
    return next(index for index in range(most) if left[index] != right[index])


def _is_either_beginning(left: tuple[int, ...], right: tuple[int, ...]) -> bool:
    """Whether one begins with all of the other."""
    return common_length(left, right) == min(len(left), len(right))


@dataclass(frozen=True, slots=True)
class Match:
    """Known blocks from position 0 on; of the last one perhaps only a part is of use: `length` tokens in all."""

    blocks: tuple[Block, ...] = ()
    length: int = 0

    @property
    def unloaded(self) -> tuple[Block, ...]:
        """Blocks that are on disk alone."""
        return tuple(block for block in self.blocks if block.data is None)

    def loaded_part(self) -> Match:
        """What can be had without the disk."""
        kept: list[Block] = []
        for block in self.blocks:
            if block.data is None:
                return Match(tuple(kept), block.start)
            kept.append(block)
        return self


class BlockTree:
    """All blocks. `root` is no block itself: it stands before position 0.

    Blocks that reach beyond `capacity` tokens are not found: no slot has room for them.
    """

    def __init__(self, capacity: int) -> None:
        self.root = Block(SHARED, 0, (), None)
        self._capacity = capacity

    def match(self, owner: str, ids: Sequence[int], *, limit: int) -> Match:
        """The longest known beginning of `ids` that `owner` may use, at most `limit` tokens."""
        return self._match(self.root, owner, tuple(ids[:limit]))

    def _match(self, above: Block, owner: str, ids: tuple[int, ...]) -> Match:
        path: list[Block] = []
        while True:
            start = above.stop
            rest = ids[start : start + BLOCK_TOKENS]
            visible = self._visible(above, owner) if rest else []
            usable = [pair for siblings in visible if (pair := siblings.closest(rest, self._is_usable))]
            if not usable:
                return Match(tuple(path), start)
            block, size = max(usable, key=lambda pair: pair[1])
            if len(usable) == 2 and all(each_size == BLOCK_TOKENS for _, each_size in usable):
                # The same tokens, of this owner and of all: go the way that leads further.
                ways = [(each, self._match(each, owner, ids)) for each, _ in usable]
                first, way = max(ways, key=lambda pair: pair[1].length)
                return Match((*path, first, *way.blocks), way.length)
            path.append(block)
            if size < BLOCK_TOKENS:
                return Match(tuple(path), start + size)
            above = block

    def _is_usable(self, block: Block) -> bool:
        return block.is_somewhere and block.stop <= self._capacity

    @staticmethod
    def _visible(above: Block, owner: str) -> list[Siblings]:
        names = (owner, SHARED) if owner != SHARED else (SHARED,)
        return [above.children[name] for name in names if name in above.children]

    def covering(self, owner: str, ids: Sequence[int]) -> tuple[Block, int]:
        """The last full block on the way along `ids`, and how many tokens are covered: those of a block behind it that
        begins with all that is left count too.
        """
        above, start = self.root, 0
        while rest := tuple(ids[start : start + BLOCK_TOKENS]):
            visible = self._visible(above, owner)
            if len(rest) < BLOCK_TOKENS:
                ends = [siblings.closest(rest, self._is_usable) for siblings in visible]
                is_known = any(pair and pair[1] == len(rest) for pair in ends)
                return above, start + len(rest) if is_known else start
            same = [siblings.get(rest) for siblings in reversed(visible)]
            block = next((each for each in same if each is not None and self._is_usable(each)), None)
            if block is None:
                return above, start
            above, start = block, start + BLOCK_TOKENS
        return above, start

    def along(self, owner: str, ids: Sequence[int]) -> list[Block]:
        """All blocks of the owner on the way along `ids`, parents first: former ends of it too, and what begins with
        all that is left.
        """
        found: list[Block] = []
        todo = [self.root]
        while todo:
            above = todo.pop()
            rest = tuple(ids[above.stop : above.stop + BLOCK_TOKENS])
            beside = [block for siblings in self._visible(above, owner) for block in siblings.blocks]
            on_the_way = [block for block in beside if rest and _is_either_beginning(block.ids, rest)]
            found += [block for block in on_the_way if block.owner == owner]
            todo += [block for block in on_the_way if block.is_full]
        return found

    def add(self, block: Block) -> list[Block]:
        """Put a block below its parent; returns those that it makes superfluous, which are still there."""
        assert block.parent is not None
        siblings = block.parent.children.setdefault(block.owner, Siblings())
        siblings.add(block)
        return siblings.beginnings(block.ids)

    def remove(self, block: Block) -> None:
        """Take out a block without successors."""
        assert not any(len(siblings) for siblings in block.children.values())
        assert block.parent is not None
        siblings = block.parent.children[block.owner]
        siblings.remove(block)
        if not siblings:
            del block.parent.children[block.owner]

    def __contains__(self, block: Block) -> bool:
        """Whether the block has not been removed."""
        return block.parent is not None and block.parent.child(block.owner, block.ids) is block

    def __iter__(self) -> Iterator[Block]:
        """All blocks, parents before their successors."""
        return self.root.descendants()
