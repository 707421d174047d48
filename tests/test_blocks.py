"""The tree of known prefixes: what is found, whose it is, and at what cost; and the order in which blocks go."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgeqwen.kvcache import BLOCK_TOKENS, SHARED, Block, Match
from edgeqwen.kvcache.blocks import BlockTree, Siblings, common_length
from edgeqwen.kvcache.eviction import COST_DOUBLES_AFTER, MOST_USES, EvictionOrder

Ids = tuple[int, ...]
CAPACITY = 1 << 20


def numbers(start: int, stop: int) -> Ids:
    return tuple(range(start, stop))


def add(tree: BlockTree, owner: str, ids: Ids, above: Block | None = None) -> Block:
    """Put in all of `ids`, behind `above`; returns the last block. Whatever is there already stays as it is."""
    parent = above or tree.root
    for at in range(0, len(ids), BLOCK_TOKENS):
        own = ids[at : at + BLOCK_TOKENS]
        siblings = parent.children.get(owner)
        block = None if siblings is None else siblings.get(own)
        if block is None:
            block = Block(owner, parent.stop, own, parent, data="kept")
            tree.add(block)
        parent = block
    return parent


def match(tree: BlockTree, owner: str, ids: Ids) -> Match:
    return tree.match(owner, ids, limit=len(ids))


# What is found.


@pytest.mark.parametrize("length", [0, 1, 63, 64, 65, 100, 128, 129, 150])
def test_beginning_is_found_to_the_token(length: int) -> None:
    tree = BlockTree(CAPACITY)
    add(tree, "a", numbers(0, 150))
    found = match(tree, "a", numbers(0, length) + (-1,) * 70)
    assert found.length == length
    assert [block.start for block in found.blocks] == list(range(0, length, BLOCK_TOKENS))


def test_no_more_is_found_than_asked_for() -> None:
    tree = BlockTree(CAPACITY)
    add(tree, "a", numbers(0, 150))
    for limit in (0, 1, 64, 70, 149, 150, 200):
        assert tree.match("a", numbers(0, 150), limit=limit).length == min(limit, 150)


def test_best_of_several_siblings_is_found() -> None:
    tree = BlockTree(CAPACITY)
    first = add(tree, "a", numbers(0, 64))
    tails = [(*numbers(100, 100 + size), tail) for size in (3, 20, 40, 62) for tail in (0, 7, 1000)]
    for tail in random.Random(3).sample(tails, len(tails)):
        add(tree, "a", tail, first)
    for tail in tails:
        assert match(tree, "a", numbers(0, 64) + tail).length == 64 + len(tail)
        assert match(tree, "a", numbers(0, 64) + tail + (5, 5)).blocks[-1].ids == tail
    assert match(tree, "a", numbers(0, 64) + numbers(100, 130) + (-9,)).length == 64 + 30
    assert match(tree, "a", (*numbers(0, 64), 99)).length == 64


siblings_ids = st.lists(st.integers(0, 2), min_size=1, max_size=6).map(tuple)


@given(st.sets(siblings_ids, min_size=1, max_size=30), siblings_ids, st.sets(st.integers(0, 29)))
def test_closest_sibling_is_one_with_the_longest_common_beginning(keys: set[Ids], ids: Ids, gone: set[int]) -> None:
    tree, siblings = BlockTree(CAPACITY), Siblings()
    blocks = [Block("a", 0, key, tree.root) for key in sorted(keys, key=hash)]
    for block in blocks:
        siblings.add(block)
    siblings.check()
    usable = [block for number, block in enumerate(blocks) if number not in gone]
    best = max((common_length(block.ids, ids) for block in usable), default=0)
    found = siblings.closest(ids, lambda block: block in usable)
    if found is None:
        assert best == 0
    else:
        assert found[0] in usable
        assert found[1] == common_length(found[0].ids, ids) == best
    assert all(siblings.get(block.ids) is block for block in blocks)


def test_block_that_no_slot_has_room_for_is_not_found_and_hides_no_other() -> None:
    tree = BlockTree(100)
    first = add(tree, "a", numbers(0, 64))
    add(tree, "a", numbers(64, 128), first)
    assert match(tree, "a", numbers(0, 128)).length == 64
    add(tree, "a", numbers(64, 80), first)
    assert match(tree, "a", numbers(0, 128)).length == 80
    assert tree.covering("a", numbers(0, 80)) == (first, 80)
    assert tree.covering("a", numbers(0, 81)) == (first, 64)


def test_block_that_is_nowhere_is_not_found_and_hides_no_other() -> None:
    tree = BlockTree(CAPACITY)
    first = add(tree, "a", numbers(0, 64))
    lost = add(tree, "a", numbers(64, 128), first)
    add(tree, "a", (*numbers(64, 100), -1), first)
    lost.data = None
    assert match(tree, "a", numbers(0, 128)).length == 100
    assert tree.covering("a", numbers(0, 99)) == (first, 99)
    assert tree.covering("a", numbers(0, 128)) == (first, 64)
    lost.is_stored = True
    assert match(tree, "a", numbers(0, 128)).unloaded == (lost,)
    assert match(tree, "a", numbers(0, 128)).loaded_part() == Match((first,), 64)


# Whose it is.


def test_blocks_of_another_owner_are_never_found() -> None:
    tree = BlockTree(CAPACITY)
    add(tree, "a", numbers(0, 200))
    assert match(tree, "b", numbers(0, 200)) == Match()
    assert match(tree, SHARED, numbers(0, 200)) == Match()
    assert tree.covering("b", numbers(0, 200)) == (tree.root, 0)
    own = add(tree, "b", numbers(0, 70))
    assert match(tree, "b", numbers(0, 200)).blocks[-1] is own


def test_shared_blocks_are_found_by_all_and_what_stands_behind_them_by_its_owner() -> None:
    tree = BlockTree(CAPACITY)
    shared = add(tree, SHARED, numbers(0, 128))
    add(tree, "a", numbers(128, 300), shared)
    assert match(tree, "a", numbers(0, 300)).length == 300
    assert match(tree, "b", numbers(0, 300)).length == 128
    assert match(tree, SHARED, numbers(0, 300)).length == 128
    assert tree.covering("b", numbers(0, 300)) == (shared, 128)


@pytest.mark.parametrize("longer", ["a", SHARED])
def test_of_the_same_tokens_twice_the_way_that_leads_further_is_taken(longer: str) -> None:
    tree = BlockTree(CAPACITY)
    for owner in ("a", SHARED):
        add(tree, owner, numbers(0, 330 if owner == longer else 130))
    assert match(tree, "a", numbers(0, 400)).length == 330
    assert match(tree, "b", numbers(0, 400)).length == (330 if longer == SHARED else 130)


def test_own_block_is_known_although_a_shared_one_of_the_same_tokens_is_nowhere() -> None:
    tree = BlockTree(CAPACITY)
    own, shared = add(tree, "a", numbers(0, 64)), add(tree, SHARED, numbers(0, 64))
    assert tree.covering("a", numbers(0, 64)) == (shared, 64)
    shared.data = None
    assert tree.covering("a", numbers(0, 64)) == (own, 64)
    assert match(tree, "a", numbers(0, 64)).blocks == (own,)


# The tree.


def test_tail_is_superfluous_once_a_longer_one_is_there() -> None:
    tree = BlockTree(CAPACITY)
    tail = add(tree, "a", numbers(0, 10))
    others = [add(tree, "a", (*numbers(0, 9), 99)), add(tree, "b", numbers(0, 9))]
    longer = Block("a", 0, numbers(0, 20), tree.root)
    assert tree.add(longer) == [tail]
    tree.remove(tail)
    assert tail not in tree
    assert longer in tree
    assert set(tree) == {longer, *others}


def test_blocks_are_visited_before_those_behind_them() -> None:
    tree = BlockTree(CAPACITY)
    first = add(tree, "a", numbers(0, 64))
    for last in range(3):
        add(tree, "a", (*numbers(64, 128), last), first)
    seen: set[Block] = {tree.root}
    for block in tree:
        assert block.parent in seen
        seen.add(block)
    assert len(seen) == 1 + 1 + 1 + 3
    assert set(tree.root.descendants()) == seen - {tree.root}


def test_name_covers_all_tokens_the_owners_and_the_model() -> None:
    tree = BlockTree(CAPACITY)
    last = [
        add(tree, "a", numbers(0, 130)),
        add(tree, "b", numbers(0, 130)),
        add(tree, "a", (9, *numbers(1, 130))),
        add(tree, "a", numbers(0, 129)),
    ]
    names = {block.name(model) for block in last for model in ("model", "other")}
    assert len(names) == 8
    assert add(BlockTree(CAPACITY), "a", numbers(0, 130)).name("model") == last[0].name("model")


class Counted(int):
    """A token that counts how often it is compared with another one."""

    num_comparisons = 0

    def _count(self) -> None:
        Counted.num_comparisons += 1

    def __eq__(self, other: object) -> bool:
        self._count()
        return int(self) == other

    def __ne__(self, other: object) -> bool:
        self._count()
        return int(self) != other

    def __lt__(self, other: int) -> bool:
        self._count()
        return int(self) < other

    def __gt__(self, other: int) -> bool:
        self._count()
        return int(self) > other

    __hash__ = int.__hash__


def num_comparisons(tree: BlockTree, ids: Ids, length: int) -> int:
    """How many tokens are compared to find that `length` of `ids` are known."""
    counted = tuple(Counted(token) for token in ids)
    Counted.num_comparisons = 0
    assert match(tree, "a", counted).length == length
    return Counted.num_comparisons


def test_finding_among_thousands_of_blocks_compares_few_tokens() -> None:
    tree = BlockTree(CAPACITY)
    shared_beginning = numbers(0, 64)
    first = add(tree, "a", shared_beginning)
    texts = [(number, *numbers(1, 40)) for number in range(2500)]
    for text in texts:
        add(tree, "a", text, first)
    add(tree, "a", numbers(0, 2500 * BLOCK_TOKENS)[::-1])
    assert len(list(tree)) == 1 + 2500 + 2500

    at_root = 4 * BLOCK_TOKENS  # a search in two siblings, twice the common part
    search = 2 * 13  # 2**12 > 2500: each look compares one token for equality and one for order
    few = num_comparisons(tree, shared_beginning + texts[1234], 64 + 40)
    assert few <= at_root + search + 4 * 40
    assert num_comparisons(tree, (5000, 1), 0) <= 8

    deep = 500 * BLOCK_TOKENS
    whole = numbers(0, 2500 * BLOCK_TOKENS)[::-1][:deep]
    assert num_comparisons(tree, whole, deep) <= 4 * deep


# The order in which blocks go.


class Order:
    """An eviction order over loose blocks, all evictable unless they are named."""

    def __init__(self) -> None:
        self.kept: set[Block] = set()
        self.order = EvictionOrder(lambda block: block.data is not None and block not in self.kept)
        self.root = BlockTree(CAPACITY).root

    def block(self, start: int = 0, **kwargs: Any) -> Block:
        block = Block("a", start, (1,), self.root, data="kept", **kwargs)
        self.order.use(block, is_new=True)
        return block

    def pop_all(self) -> list[Block]:
        popped = []
        while (block := self.order.pop()) is not None:
            block.data = None
            self.order.note_evicted(block)
            popped.append(block)
        return popped


def test_of_equal_blocks_the_longest_unused_goes_first() -> None:
    order = Order()
    blocks = [order.block() for _ in range(6)]
    for _ in range(MOST_USES):
        for block in (blocks[4], blocks[1]):
            order.order.use(block)
    order.order.use(blocks[4])
    assert blocks[4].num_uses == MOST_USES
    assert order.pop_all() == [blocks[0], blocks[2], blocks[3], blocks[5], blocks[1], blocks[4]]


def test_what_costs_more_to_have_again_goes_later() -> None:
    order = Order()
    later = order.block(start=COST_DOUBLES_AFTER)
    lasting = order.block(is_lasting=True, start=64)
    first = order.block()
    stored = order.block(is_stored=True, start=4 * COST_DOUBLES_AFTER)
    assert order.pop_all() == [stored, first, later, lasting]


def test_block_that_was_used_often_goes_in_the_end_if_it_is_used_no_more() -> None:
    order = Order()
    often = order.block()
    for _ in range(MOST_USES):
        order.order.use(often)
    num_outlived = 0
    while True:
        order.block()
        gone = order.order.pop()
        assert gone is not None
        order.order.note_evicted(gone)
        gone.data = None
        if gone is often:
            break
        num_outlived += 1
        assert num_outlived < 100
    assert num_outlived >= MOST_USES - 2


def test_block_that_may_not_go_is_passed_over_until_it_is_offered_again() -> None:
    order = Order()
    kept, other = order.block(), order.block()
    order.kept.add(kept)
    assert order.order.pop() is other
    other.data = None
    assert order.order.pop() is None
    order.kept.clear()
    order.order.offer(kept)
    assert order.order.pop() is kept


def test_bookkeeping_does_not_grow_with_uses() -> None:
    order = Order()
    blocks = [order.block() for _ in range(20)]
    for number in range(5000):
        order.order.use(blocks[number % 20])
        order.order.offer(blocks[7])
    assert len(order.order._heap) < 300
    assert order.order.offered() == set(blocks)
    assert set(order.pop_all()) == set(blocks)
