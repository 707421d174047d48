"""The block store against a naive model, under any run of operations, and its rules one by one."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from edgeqwen.core.step import KVData
from edgeqwen.kvcache import BLOCK_TOKENS, SHARED, Block, BlockStore, Match

Ids = tuple[int, ...]

PIECES: list[Ids] = [
    (0,) * 64,
    (0,) * 63 + (1,),
    (0,) * 30 + (2,) * 34,
    (1,) * 64,
    (0,) * 10,
    (0,) * 9 + (3,),
    (1,) * 7,
    (2,),
]
OWNERS = ["a", "b", SHARED]

owners = st.sampled_from(OWNERS)
texts = st.lists(st.sampled_from(PIECES), min_size=1, max_size=5).map(lambda pieces: sum(pieces, ()))
places = st.integers(0, 1 << 16)


def content(owner: str, ids: Ids) -> tuple[str, Ids]:
    """What stands for keys and values: it says whose they are, and the tokens up to their end that they depend on."""
    return owner, ids


def path_ids(block: Block) -> Ids:
    return sum((each.ids for each in block.lineage()), ())


def naive_length(store: BlockStore, owner: str, ids: Ids, capacity: int) -> int:
    """The longest beginning of `ids` that is held for `owner`, by looking at every block."""
    best = 0
    for block in store._tree:
        way = list(block.lineage())
        is_usable = all(each.is_somewhere and each.owner in {owner, SHARED} for each in way)
        if is_usable and block.stop <= capacity and path_ids(block)[: block.start] == ids[: block.start]:
            rest = ids[block.start :]
            common = next((n for n, pair in enumerate(zip(block.ids, rest, strict=False)) if pair[0] != pair[1]), None)
            best = max(best, block.start + (min(len(block.ids), len(rest)) if common is None else common))
    return best


class StoreMachine(RuleBasedStateMachine):
    """The store between callers that share it: sequences that pin and put, a reader and a writer of files."""

    @initialize(
        budget=st.sampled_from([150, 500, 2000]),
        disk_limit=st.sampled_from([0, 150, 2000]),
        capacity=st.sampled_from([150, 4096]),
        token_bytes=st.sampled_from([1, 2]),
    )
    def start(self, budget: int, disk_limit: int, capacity: int, token_bytes: int) -> None:
        self.budget = budget
        self.capacity = capacity
        self.token_bytes = token_bytes
        self.now = 0.0
        self.store = BlockStore(
            budget_bytes=budget, token_bytes=token_bytes, capacity=capacity, disk_limit_bytes=disk_limit
        )
        self.pins: list[tuple[Block, ...]] = []
        self.fetches: list[tuple[Block, ...]] = []
        self.writing: list[tuple[Block, KVData]] = []
        self.files: dict[str, KVData] = {}
        self.pinned_data: dict[Block, KVData] = {}

    # What sequences do.

    @rule(owner=owners, ids=texts, limit=st.integers(0, 320))
    def match(self, owner: str, ids: Ids, limit: int) -> None:
        self.checked_match(owner, ids, limit)

    @rule(owner=owners, ids=texts, is_lasting=st.booleans(), delay=st.sampled_from([0, 5]))
    def put(self, owner: str, ids: Ids, is_lasting: bool, delay: int) -> None:
        ids = ids[: self.capacity]
        self.now += 1
        missing = self.store.missing(owner, ids)
        assert [start % BLOCK_TOKENS for start, _ in missing] == [0] * len(missing)
        assert not missing or missing[-1][1] == len(ids)
        is_kept = True
        for start, stop in missing:
            if not self.store.make_room((stop - start) * self.token_bytes):
                return
            data = content(owner, ids[:stop])
            is_kept = self.store.put(owner, ids, start, data, is_lasting=is_lasting, due_at=self.now + delay)
            if is_kept:
                assert self.store.match(owner, ids[:stop], limit=stop).length == stop
        if is_kept:
            assert not self.store.missing(owner, ids)

    @rule(owner=owners, ids=texts)
    def use(self, owner: str, ids: Ids) -> None:
        self.store.use(self.checked_match(owner, ids, len(ids)))

    @rule(owner=owners, ids=texts)
    def make_lasting(self, owner: str, ids: Ids) -> None:
        self.store.make_lasting(self.checked_match(owner, ids, len(ids)).blocks, due_at=self.now + 2)

    @rule(owner=owners, ids=texts)
    def pin(self, owner: str, ids: Ids) -> None:
        blocks = self.checked_match(owner, ids, len(ids)).blocks
        self.store.pin(blocks)
        self.pins.append(blocks)

    @precondition(lambda self: self.pins)
    @rule(place=places)
    def unpin(self, place: int) -> None:
        self.store.unpin(self.pins.pop(place % len(self.pins)))

    @rule(num_bytes=st.integers(0, 600))
    def reserve(self, num_bytes: int) -> None:
        before = self.store.reserved_bytes
        is_reserved = self.store.reserve(num_bytes)
        assert self.store.reserved_bytes == before + (num_bytes if is_reserved else 0)

    @rule(place=places)
    def unreserve(self, place: int) -> None:
        self.store.unreserve(place % (self.store.reserved_bytes + 1))

    # What the reader and the writer do.

    @rule(owner=owners, ids=texts)
    def begin_fetch(self, owner: str, ids: Ids) -> None:
        match = self.checked_match(owner, ids, len(ids))
        if match.unloaded:
            self.store.pin(match.blocks)
            self.fetches.append(match.blocks)

    @precondition(lambda self: self.fetches)
    @rule(place=places, damaged=st.sampled_from([None, None, 0, 1, 2]), is_released=st.booleans())
    def end_fetch(self, place: int, damaged: int | None, is_released: bool) -> None:
        blocks = self.fetches.pop(place % len(self.fetches))
        for number, block in enumerate(block for block in blocks if block.data is None):
            if number == damaged:
                self.unstore(block)
            elif block.is_stored and self.store.make_room(block.num_bytes):
                self.store.fill(block, self.files[block.name("model")])
        if is_released:
            self.store.unpin(blocks)
        else:
            self.pins.append(blocks)

    @rule()
    def begin_write(self) -> None:
        self.now += 1
        is_due = self.store.next_write_at is not None and self.store.next_write_at <= self.now
        block = self.store.next_write(self.now)
        assert block is not None or not is_due or self.writing, "nobody would ever write what waits"
        if block is not None:
            assert block.data is not None
            assert all(each.is_stored for each in list(block.lineage())[:-1]), "predecessors first"
            self.writing.append((block, block.data))

    @precondition(lambda self: self.writing)
    @rule(place=places, works=st.sampled_from([True, True, False]))
    def end_write(self, place: int, works: bool) -> None:
        block, data = self.writing.pop(place % len(self.writing))
        assert block.data is data, "its memory went before it was written"
        name = block.name("model")
        for old in self.store.surplus(block.num_bytes):
            self.unstore(old)
        is_stored = works and self.store.disk_bytes + block.num_bytes <= self.store.disk_limit_bytes
        is_useful = self.store.written(block, is_stored=is_stored)
        assert is_useful or is_stored
        if is_stored and is_useful:
            self.files[name] = data

    @precondition(lambda self: self.files)
    @rule(place=places)
    def lose_file(self, place: int) -> None:
        stored = [block for block in self.store._tree if block.is_stored]
        self.unstore(stored[place % len(stored)])

    @rule(owner=owners, ids=texts)
    def discard(self, owner: str, ids: Ids) -> None:
        used = {block for block in self.store._tree if block.num_pins or block.is_writing or block.owner != owner}
        others = {block for block in self.store._tree if path_ids(block)[: len(ids)] != ids[: block.stop]}
        for block in self.store.discard(owner, ids):
            del self.files[block.name("model")]
        assert used | others <= set(self.store._tree)
        for block in self.store._tree:
            is_alone = not (block.num_pins or block.is_writing or block.children)
            is_beginning = path_ids(block) == ids[: block.stop]
            assert not (is_alone and is_beginning and block.owner == owner), "it could have gone"

    @rule(owner=owners, ids=texts, num_shared=st.integers(0, 2))
    def find_files(self, owner: str, ids: Ids, num_shared: int) -> None:
        above: Block | None = None
        for start in range(0, len(ids), BLOCK_TOKENS):
            own = ids[start : start + BLOCK_TOKENS]
            whose = SHARED if start < num_shared * BLOCK_TOKENS else owner
            above = self.store.add_stored(whose, above, own, len(own) * self.token_bytes)
            assert path_ids(above) == ids[: start + BLOCK_TOKENS]
            if not above.is_stored:
                return  # it is being written at the moment
            self.files[above.name("model")] = content(whose, ids[: start + BLOCK_TOKENS])

    @rule(is_sure=st.sampled_from([True, *[False] * 9]))
    def stop_writing(self, is_sure: bool) -> None:
        if is_sure:
            self.store.stop_writing()
            assert self.store.next_write_at is None

    # What must be so.

    def checked_match(self, owner: str, ids: Ids, limit: int) -> Match:
        match = self.store.match(owner, ids, limit=limit)
        assert match.length == naive_length(self.store, owner, ids[:limit], self.capacity)
        self.check_match(match, owner, ids)
        loaded = match.loaded_part()
        assert all(block.data is not None for block in loaded.blocks)
        assert loaded.blocks == match.blocks[: len(loaded.blocks)]
        assert (loaded == match) == (not match.unloaded)
        self.check_match(loaded, owner, ids)
        return match

    def check_match(self, match: Match, owner: str, ids: Ids) -> None:
        at = 0
        for block in match.blocks:
            assert block.start == at < match.length
            assert block.owner in {owner, SHARED}
            known = block.data if block.data is not None else self.files[block.name("model")]
            whose, tokens = known
            at = min(block.stop, match.length)
            assert whose == block.owner
            assert tokens[:at] == ids[:at]
            assert len(tokens) == block.stop
        assert at == match.length

    def unstore(self, block: Block) -> None:
        was_stored = block.is_stored
        below = self.store.unstore(block)
        for place, each in enumerate(below):
            assert not set(below[:place]) & set(list(each.lineage())[:-1]), "predecessors last"
        for each in [block, *below] if was_stored else below:
            del self.files[each.name("model")]

    @invariant()
    def accounts_are_right(self) -> None:
        store = self.store
        store.check()
        in_memory = sum(len(block.ids) for block in store._tree if block.data is not None)
        assert in_memory * self.token_bytes + store.reserved_bytes <= self.budget
        assert {block.name("model") for block in store._tree if block.is_stored} == set(self.files)
        num_stored = sum(len(ids) % BLOCK_TOKENS or BLOCK_TOKENS for _, ids in self.files.values())
        assert store.disk_bytes == num_stored * self.token_bytes

    @invariant()
    def pinned_data_stays(self) -> None:
        pinned = {block for blocks in (*self.pins, *self.fetches) for block in blocks}
        assert all(block in self.store._tree for block in pinned)
        for block, data in self.pinned_data.items():
            assert block not in pinned or block.data is data
        self.pinned_data = {block: block.data for block in pinned if block.data is not None}

    def teardown(self) -> None:
        """When nobody uses anything, all memory can be had again, and nothing is left without a file."""
        store = self.store
        store.unreserve(store.reserved_bytes)
        for blocks in (*self.pins, *self.fetches):
            store.unpin(blocks)
        while not store.make_room(self.budget):
            assert store.is_writing
            if not self.writing:
                self.begin_write()
            self.end_write(0, True)
        assert store.memory_bytes == 0
        store.check()
        while self.writing:
            self.end_write(0, True)
        assert store.stats().num_blocks == len(self.files)
        store.stop_writing()
        for block in store.surplus(0):
            self.unstore(block)
        assert store.stats().num_blocks == 0


StoreMachine.TestCase.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
TestStoreMachine = StoreMachine.TestCase


# The rules one by one: stores of one byte a token.


def numbers(start: int, stop: int) -> Ids:
    return tuple(range(start, stop))


def make_store(budget: int = 10_000, disk_limit: int = 0) -> BlockStore:
    return BlockStore(budget_bytes=budget, token_bytes=1, capacity=4096, disk_limit_bytes=disk_limit)


def put(store: BlockStore, owner: str, ids: Ids, *, is_lasting: bool = False, due_at: float = 0.0) -> None:
    """Put in all that is missing of `ids`, in whatever room can be made."""
    for start, stop in store.missing(owner, ids):
        assert store.make_room(stop - start)
        assert store.put(owner, ids, start, content(owner, ids[:stop]), is_lasting=is_lasting, due_at=due_at)
    store.check()


def length(store: BlockStore, owner: str, ids: Ids) -> int:
    return store.match(owner, ids, limit=len(ids)).length


def use(store: BlockStore, owner: str, ids: Ids) -> None:
    store.use(store.match(owner, ids, limit=len(ids)))


def write(store: BlockStore, now: float = 0.0, *, is_stored: bool = True) -> list[Block]:
    """Write all that is due, as it comes."""
    written: list[Block] = []
    while (block := store.next_write(now)) is not None:
        assert store.written(block, is_stored=is_stored)
        written.append(block)
        assert len(written) < 100
        store.check()
    return written


def in_memory(store: BlockStore, owner: str, ids: Ids) -> list[int]:
    """Where the blocks along `ids` begin that are in memory."""
    return [block.start for block in store.match(owner, ids, limit=len(ids)).blocks if block.data is not None]


def test_memory_of_blocks_and_reservations_never_exceeds_the_budget() -> None:
    store = make_store(budget=200)
    put(store, "a", numbers(0, 128))
    assert store.free_bytes == 72
    assert store.reserve(150)
    assert in_memory(store, "a", numbers(0, 128)) == []
    assert not store.make_room(51)
    assert not store.reserve(51)
    assert store.make_room(50)
    store.unreserve(100)
    put(store, "a", numbers(0, 150))
    assert (store.memory_bytes, store.reserved_bytes, store.free_bytes) == (150, 50, 0)
    assert store.stats().num_evicted == 2


def test_request_for_more_than_can_ever_be_had_drops_nothing() -> None:
    store = make_store(budget=200)
    put(store, "a", numbers(0, 64))
    put(store, "b", numbers(0, 64))
    store.pin(store.match("b", numbers(0, 64), limit=64).blocks)
    assert not store.make_room(137)
    assert store.stats().num_evicted == 0
    assert store.make_room(136)
    assert length(store, "b", numbers(0, 64)) == 64
    assert length(store, "a", numbers(0, 64)) == 0


def test_leaves_go_before_what_they_stand_behind() -> None:
    store = make_store(budget=256)
    ids = numbers(0, 256)
    put(store, "a", ids)
    for block in store.match("a", ids, limit=256).blocks[2:]:
        for _ in range(8):
            store.use(Match((block,), 0))
    for num_left in (3, 2, 1, 0):
        assert store.make_room(256 - 64 * num_left)
        assert length(store, "a", ids) == 64 * num_left
        store.check()


def test_what_was_not_used_goes_first() -> None:
    store = make_store(budget=192)
    for owner in ("a", "b", "c"):
        put(store, owner, numbers(0, 64))
    use(store, "a", numbers(0, 64))
    use(store, "c", numbers(0, 64))
    put(store, "d", numbers(0, 64))
    assert [length(store, owner, numbers(0, 64)) for owner in "abcd"] == [64, 0, 64, 64]


def test_what_is_stored_goes_first_and_is_found_still() -> None:
    store = make_store(budget=192, disk_limit=1000)
    for owner in ("a", "b", "c"):
        put(store, owner, numbers(0, 64), is_lasting=owner == "c")
    assert len(write(store)) == 1
    put(store, "d", numbers(0, 64))
    assert [in_memory(store, owner, numbers(0, 64)) for owner in "abcd"] == [[0], [0], [], [0]]
    assert length(store, "c", numbers(0, 64)) == 64
    assert store.stats().num_lost == 0


def test_single_requests_go_before_conversations() -> None:
    store = make_store(budget=128)
    put(store, "a", numbers(0, 64), is_lasting=True)
    put(store, "b", numbers(0, 64))
    put(store, "c", numbers(0, 64))
    assert [length(store, owner, numbers(0, 64)) for owner in "abc"] == [64, 0, 64]
    store = make_store(budget=128)
    put(store, "a", numbers(0, 64))
    put(store, "b", numbers(0, 64))
    store.make_lasting(store.match("a", numbers(0, 64), limit=64).blocks, due_at=0.0)
    put(store, "c", numbers(0, 64))
    assert [length(store, owner, numbers(0, 64)) for owner in "abc"] == [64, 0, 64]


# Putting in.


def test_block_is_not_put_in_twice_nor_without_what_comes_before() -> None:
    store = make_store()
    ids = numbers(0, 150)
    assert not store.put("a", ids, 64, "data", is_lasting=False, due_at=0.0)
    put(store, "a", ids)
    for start in (0, 64, 128):
        assert not store.put("a", ids, start, "data", is_lasting=False, due_at=0.0)
    assert store.memory_bytes == 150
    assert store.missing("a", ids[:140]) == store.missing("a", ids) == []
    assert store.missing("a", numbers(0, 200)) == [(128, 192), (192, 200)]
    assert store.missing("b", ids) == [(0, 64), (64, 128), (128, 150)]


def test_shared_blocks_are_not_kept_again_for_an_owner() -> None:
    store = make_store()
    put(store, SHARED, numbers(0, 128))
    assert store.missing("a", numbers(0, 150)) == [(128, 150)]
    put(store, "a", numbers(0, 150))
    assert store.memory_bytes == 150
    assert length(store, "a", numbers(0, 150)) == 150
    assert length(store, "b", numbers(0, 150)) == 128


def test_own_block_is_not_kept_twice_if_the_shared_one_of_the_same_tokens_is_lost() -> None:
    store = make_store(disk_limit=1000)
    ids = numbers(0, 64)
    put(store, "a", ids)
    store.add_stored(SHARED, None, ids, 64)
    shared = store.match("b", ids, limit=64).blocks
    store.pin(shared)
    store.unstore(shared[0])
    assert store.missing("a", ids) == []
    assert not store.put("a", ids, 0, "data", is_lasting=False, due_at=0.0)
    assert store.memory_bytes == 64
    store.check()
    store.unpin(shared)
    assert store.stats().num_blocks == 1


def test_tail_of_an_answer_goes_when_the_conversation_goes_on() -> None:
    store = make_store(disk_limit=1000)
    put(store, "a", numbers(0, 70), is_lasting=True, due_at=5.0)
    put(store, "a", numbers(0, 100), is_lasting=True, due_at=9.0)
    assert (store.memory_bytes, store.stats().num_blocks) == (100, 2)
    assert [block.stop for block in write(store, 9.0)] == [64, 100]


def test_tail_of_a_conversation_stays_lasting_in_what_a_single_request_adds() -> None:
    store = make_store(disk_limit=1000)
    put(store, "a", numbers(0, 70), is_lasting=True, due_at=5.0)
    put(store, "a", numbers(0, 80))
    assert [block.stop for block in write(store, 5.0)] == [64, 80]


def test_superfluous_tail_stays_while_it_is_in_use_or_has_a_file() -> None:
    store = make_store(disk_limit=1000)
    put(store, "a", numbers(0, 10), is_lasting=True)
    write(store)
    put(store, "a", numbers(0, 20))
    tail = store.match("a", numbers(0, 20), limit=20).blocks
    store.pin(tail)
    put(store, "a", numbers(0, 30))
    assert store.memory_bytes == 60
    assert tail[0].data == content("a", numbers(0, 20))
    store.unpin(tail)
    assert store.make_room(10_000)
    assert length(store, "a", numbers(0, 30)) == 10, "the one with a file"


def test_bookkeeping_does_not_grow_with_uses() -> None:
    store = make_store()
    put(store, "a", numbers(0, 200))
    for _ in range(3000):
        match = store.match("a", numbers(0, 200), limit=200)
        store.pin(match.blocks)
        store.unpin(match.blocks)
    for _ in range(3000):
        use(store, "a", numbers(0, 200))
    assert len(store._order._heap) < 200
    store.check()


# To disk and back.


def test_lasting_blocks_are_written_when_they_are_due_the_first_ones_first() -> None:
    store = make_store(disk_limit=1000)
    put(store, "a", numbers(0, 64))
    put(store, "a", numbers(0, 150), is_lasting=True, due_at=5.0)
    assert store.next_write_at == 5.0
    assert not store.is_writing
    assert store.next_write(4.9) is None
    first = store.next_write(5.0)
    assert first is not None
    assert store.is_writing
    assert (first.start, first.is_lasting) == (0, False), "what a lasting one stands behind"
    assert store.next_write(5.0) is None, "not before what comes before it"
    store.written(first, is_stored=True)
    assert [block.start for block in write(store, 5.0)] == [64, 128]
    assert store.next_write_at is None
    assert store.disk_bytes == 150


def test_memory_of_a_lasting_block_goes_once_it_is_written() -> None:
    store = make_store(budget=128, disk_limit=1000)
    put(store, "a", numbers(0, 128), is_lasting=True, due_at=1e9)
    assert not store.make_room(1)
    assert store.is_writing
    assert store.next_write_at == 0.0
    assert in_memory(store, "a", numbers(0, 128)) == [0, 64]
    first = store.next_write(0.0)
    assert first is not None
    assert first.start == 0
    store.written(first, is_stored=True)
    assert not store.make_room(1)
    last = store.next_write(0.0)
    assert last is not None
    assert not store.make_room(1)
    store.written(last, is_stored=True)
    assert not store.is_writing
    assert store.make_room(1)
    assert in_memory(store, "a", numbers(0, 128)) == [0]
    assert length(store, "a", numbers(0, 128)) == 128
    assert store.stats().num_lost == 0


def test_others_stay_while_enough_memory_is_about_to_come_from_a_write() -> None:
    store = make_store(budget=128, disk_limit=1000)
    put(store, "a", numbers(0, 64), is_lasting=True, due_at=1e9)
    put(store, "b", numbers(0, 64))
    for _ in range(4):
        use(store, "b", numbers(0, 64))
    assert not store.make_room(64)
    assert not store.make_room(64)
    block = store.next_write(0.0)
    assert block is not None
    assert not store.make_room(64)
    assert length(store, "b", numbers(0, 64)) == 64
    assert not store.make_room(65)
    assert length(store, "b", numbers(0, 64)) == 0, "that is not enough"
    store.written(block, is_stored=True)
    assert store.make_room(128)
    store.check()


def test_block_that_nobody_waits_for_any_more_can_go_when_writing_stops() -> None:
    store = make_store(budget=64, disk_limit=1000)
    put(store, "a", numbers(0, 64), is_lasting=True, due_at=1e9)
    assert not store.make_room(64)
    store.stop_writing()
    assert not store.is_writing
    store.check()
    assert store.make_room(64)


def test_tail_that_is_being_written_stays_until_that_is_done() -> None:
    store = make_store(disk_limit=1000)
    put(store, "a", numbers(0, 10), is_lasting=True)
    tail = store.next_write(0.0)
    assert tail is not None
    put(store, "a", numbers(0, 20))
    assert tail.data == content("a", numbers(0, 10))
    assert store.written(tail, is_stored=True)
    store.check()
    assert store.disk_bytes == 10


@pytest.mark.parametrize("is_begun", [False, True])
def test_file_found_of_a_block_that_waits_to_be_written_is_taken_for_it(is_begun: bool) -> None:
    store = make_store(disk_limit=1000)
    put(store, "a", numbers(0, 10), is_lasting=True)
    block = store.next_write(0.0) if is_begun else None
    found = store.add_stored("a", None, numbers(0, 10), 10)
    store.check()
    if block is not None:
        assert found is block
        assert not block.is_stored, "not before that is done"
        assert store.written(block, is_stored=True)
    assert store.next_write_at is None
    assert store.next_write(0.0) is None
    assert store.disk_bytes == 10


@pytest.mark.parametrize("is_stopped", [False, True])
def test_lasting_block_that_cannot_be_written_goes_like_any_other(is_stopped: bool) -> None:
    store = make_store(budget=150, disk_limit=1000)
    put(store, "a", numbers(0, 150), is_lasting=True)
    if is_stopped:
        store.stop_writing()
        assert store.next_write(0.0) is None
    else:
        assert [block.start for block in write(store, is_stored=False)] == [0], "nor what stands behind it"
    assert store.next_write_at is None
    assert store.make_room(150)
    assert store.stats().num_blocks == 0
    assert store.disk_bytes == 0
    assert store.stats().num_lost == (3 if is_stopped else 0)


def test_memory_that_waited_for_a_write_can_be_had_if_the_write_fails() -> None:
    store = make_store(budget=128, disk_limit=1000)
    put(store, "a", numbers(0, 128), is_lasting=True, due_at=1e9)
    assert not store.make_room(64)
    first = store.next_write(0.0)
    assert first is not None
    assert store.written(first, is_stored=False)
    store.check()
    assert store.make_room(128)


def test_block_larger_than_the_disk_is_dropped_at_once() -> None:
    store = make_store(budget=64, disk_limit=63)
    put(store, "a", numbers(0, 64), is_lasting=True, due_at=1e9)
    assert store.make_room(64)
    assert store.stats().num_lost == 1


def test_blocks_found_on_disk_are_fetched_into_memory() -> None:
    store = make_store(budget=200, disk_limit=1000)
    first = store.add_stored("a", None, numbers(0, 64), 64)
    assert store.add_stored("a", None, numbers(0, 64), 64) is first
    last = store.add_stored("a", first, numbers(64, 80), 16)
    assert (store.disk_bytes, store.memory_bytes, store.stats().num_blocks) == (80, 0, 2)
    match = store.match("a", numbers(0, 100), limit=100)
    assert match.unloaded == (first, last)
    assert match.length == 80
    assert match.loaded_part() == Match()
    store.pin(match.blocks)
    for block in match.unloaded:
        assert store.make_room(block.num_bytes)
        store.fill(block, content("a", numbers(0, block.stop)))
    assert not store.make_room(121), "they are pinned"
    store.unpin(match.blocks)
    store.check()
    assert not match.unloaded
    assert store.make_room(200)
    assert length(store, "a", numbers(0, 100)) == 80
    assert store.missing("a", numbers(0, 80)) == []


def test_damaged_file_makes_a_miss_of_all_that_stands_behind_it() -> None:
    store = make_store(disk_limit=1000)
    put(store, "a", numbers(0, 200), is_lasting=True)
    put(store, "b", numbers(0, 70), is_lasting=True)
    write(store)
    assert store.make_room(10_000)
    match = store.match("a", numbers(0, 200), limit=200)
    store.pin(match.blocks)
    useless = store.unstore(match.blocks[1])
    assert useless == [match.blocks[3], match.blocks[2]]
    store.check()
    assert length(store, "a", numbers(0, 200)) == 64
    assert store.disk_bytes == 64 + 70
    store.unpin(match.blocks)
    assert store.stats().num_blocks == 3
    put(store, "a", numbers(0, 200))
    assert length(store, "a", numbers(0, 200)) == 200


def test_block_whose_file_is_lost_stays_if_it_is_in_memory() -> None:
    store = make_store(disk_limit=1000)
    put(store, "a", numbers(0, 100), is_lasting=True)
    write(store)
    first, last = store.match("a", numbers(0, 100), limit=100).blocks
    assert store.unstore(first) == [last]
    assert store.disk_bytes == 0
    assert length(store, "a", numbers(0, 100)) == 100
    assert store.unstore(first) == []
    assert store.make_room(10_000)
    assert store.stats().num_blocks == 0


def test_block_on_disk_alone_is_forgotten_with_the_file_of_one_in_memory_before_it() -> None:
    store = make_store(disk_limit=1000)
    put(store, "a", numbers(0, 100), is_lasting=True)
    write(store)
    first, last = store.match("a", numbers(0, 100), limit=100).blocks
    assert store.make_room(store.budget_bytes - 64)
    assert (first.data is None, last.data is None) == (False, True)
    assert store.unstore(first) == [last]
    store.check()
    assert length(store, "a", numbers(0, 100)) == 64
    assert store.stats().num_blocks == 1


def test_lost_block_that_comes_back_while_it_is_in_use_leaves_nothing_behind() -> None:
    store = make_store(disk_limit=1000)
    first = store.add_stored("a", None, numbers(0, 64), 64)
    store.add_stored("a", first, numbers(64, 80), 16)
    store.pin([first])
    store.unstore(first)
    assert store.stats().num_blocks == 1, "what nobody uses is forgotten"
    put(store, "a", numbers(0, 64))
    store.unpin([first])
    assert in_memory(store, "a", numbers(0, 80)) == [0]
    assert store.make_room(10_000)
    assert store.stats().num_blocks == 0


def test_block_behind_a_lost_one_is_not_waited_for() -> None:
    store = make_store(budget=128, disk_limit=1000)
    first = store.add_stored("a", None, numbers(0, 64), 64)
    put(store, "a", numbers(0, 128), is_lasting=True, due_at=1e9)
    assert not store.make_room(100)
    assert store.is_writing, "its memory is needed"
    both = store.match("a", numbers(0, 128), limit=128).blocks
    store.pin(both)
    store.unstore(first)
    assert not store.is_writing, "it could never be written"
    assert store.next_write_at is None
    put(store, "b", numbers(0, 64))
    store.unpin(both)
    assert store.make_room(64)
    assert length(store, "b", numbers(0, 64)) == 64


def test_block_that_loses_its_file_is_worth_as_much_as_others_again() -> None:
    store = make_store(budget=128, disk_limit=1000)
    for owner in ("a", "b"):
        put(store, owner, numbers(0, 64), is_lasting=owner == "a")
        write(store)
    store.unstore(store.match("a", numbers(0, 64), limit=64).blocks[0])
    put(store, "c", numbers(0, 64))
    assert [length(store, owner, numbers(0, 64)) for owner in "abc"] == [64, 0, 64]


def test_block_being_written_behind_a_lost_one_is_forgotten_when_that_is_done() -> None:
    store = make_store(disk_limit=1000)
    first = store.add_stored("a", None, numbers(0, 64), 64)
    put(store, "a", numbers(0, 100), is_lasting=True)
    last = store.next_write(0.0)
    assert last is not None
    assert last.parent is first
    store.unstore(first)
    store.check()
    assert last.data == content("a", numbers(0, 100)), "somebody is reading it"
    assert length(store, "a", numbers(0, 100)) == 0
    assert not store.written(last, is_stored=True)
    assert (store.stats().num_blocks, store.memory_bytes, store.disk_bytes) == (0, 0, 0)
    store.check()


def test_file_is_useless_if_what_comes_before_it_was_lost_meanwhile() -> None:
    store = make_store(disk_limit=1000)
    put(store, "a", numbers(0, 100), is_lasting=True)
    first = store.next_write(0.0)
    assert first is not None
    store.written(first, is_stored=True)
    last = store.next_write(0.0)
    assert last is not None
    assert store.unstore(first) == []
    assert not store.written(last, is_stored=True)
    assert store.disk_bytes == 0
    assert length(store, "a", numbers(0, 100)) == 100
    store.check()


def test_longest_unused_files_go_first_and_leaves_before_what_they_stand_behind() -> None:
    store = make_store(disk_limit=400)
    for owner in ("a", "b"):
        put(store, owner, numbers(0, 150), is_lasting=True)
        write(store)
    use(store, "a", numbers(0, 150))
    assert store.surplus(100) == []
    old = list(store.match("b", numbers(0, 150), limit=150).blocks)
    used = list(store.match("a", numbers(0, 150), limit=150).blocks)
    assert store.surplus(101) == old[:1:-1]
    assert store.surplus(100 + 22 + 1) == old[:0:-1]
    assert store.surplus(400) == old[::-1] + used[::-1]
    store.pin(old)
    assert store.surplus(400) == used[::-1], "those in use stay"
    store.unpin(old)
    store.pin(old[:1])
    assert store.surplus(400) == old[:0:-1] + used[::-1]
    store.unpin(old[:1])
    for block in store.surplus(400):
        assert store.unstore(block) == []
        store.check()
    assert store.disk_bytes == 0


def test_long_text_gets_in_among_others_that_cost_more_to_have_again() -> None:
    store = make_store(budget=9 * 4096)
    ids = numbers(0, 4096)
    for owner in map(str, range(9)):
        put(store, owner, ids)
    assert store.stats().num_blocks == 9 * 64
    num_tries = 0
    while missing := store.missing("new", ids):
        for start, stop in missing:
            assert store.make_room(stop - start)
            if not store.put("new", ids, start, "data", is_lasting=False, due_at=0.0):
                break  # its own beginning had to go, which is worth more from now on
        num_tries += 1
        assert num_tries < 5
    assert length(store, "new", ids) == 4096
    assert sum(length(store, owner, ids) for owner in [*map(str, range(9)), "new"]) == store.memory_bytes == 9 * 4096
    store.check()


def test_discarding_stops_where_something_else_goes_on() -> None:
    store = make_store(budget=1000, disk_limit=1000)
    first, second = numbers(0, 200), (*numbers(0, 128), *numbers(500, 560))
    put(store, "a", first, is_lasting=True)
    put(store, "a", second, is_lasting=True)
    put(store, "b", first)
    write(store)
    useless = store.discard("a", first)
    assert [(block.start, len(block.ids)) for block in useless] == [(192, 8), (128, 64)]
    store.check()
    assert (length(store, "a", first), length(store, "a", second)) == (128, 188)
    assert length(store, "b", first) == 200, "what another owner knows is that owner's"
    assert len(store.discard("a", second)) == 3
    store.check()
    assert length(store, "a", second) == 0


def test_discarding_takes_the_former_ends_of_a_conversation_along() -> None:
    store = make_store(disk_limit=1000)
    for stop in (10, 20, 100, 110, 200):
        put(store, "a", numbers(0, stop), is_lasting=True)
        write(store)
    put(store, "b", numbers(0, 10))
    useless = store.discard("a", numbers(0, 200))
    assert sorted(block.stop for block in useless) == [10, 20, 64, 100, 110, 128, 192, 200]
    assert all(below not in useless[place:] for place, block in enumerate(useless) for below in block.descendants())
    store.check()
    assert (store.stats().num_blocks, store.disk_bytes, store.memory_bytes) == (1, 0, 10)


def test_discarding_leaves_what_is_in_use() -> None:
    store = make_store()
    put(store, "a", numbers(0, 150))
    match = store.match("a", numbers(0, 100), limit=100)
    store.pin(match.blocks)
    assert store.discard("a", numbers(0, 150)) == []
    store.check()
    assert length(store, "a", numbers(0, 150)) == 128
    store.unpin(match.blocks)
    store.discard("a", numbers(0, 150))
    assert store.stats().num_blocks == 0
    store.check()
