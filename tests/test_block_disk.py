"""Blocks on their way to disk and back: nothing waits for the disk, and nothing fails with it."""

from __future__ import annotations

import asyncio
import errno
import os
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from edgeqwen.core.request import Request, SamplingParams
from edgeqwen.core.step import KVData
from edgeqwen.engine import block_disk
from edgeqwen.engine.block_disk import BlockDisk
from edgeqwen.errors import CannotWrite
from edgeqwen.kvcache import BLOCK_TOKENS, Block, BlockStore
from edgeqwen.kvcache.block_file import BlockHead, Buffer
from edgeqwen.kvcache.block_folder import BlockFolder
from edgeqwen.scheduler import Fetch
from edgeqwen.scheduler.sequence import Sequence

Ids = tuple[int, ...]

TOKEN_BYTES = 64
BLOCK_BYTES = TOKEN_BYTES * BLOCK_TOKENS
PLENTY = 1 << 30
FINGERPRINT = "model|int4|1"


def ids_of(seed: int, num_blocks: int = 1) -> Ids:
    return tuple(seed * 100_000 + position for position in range(num_blocks * BLOCK_TOKENS))


def content(ids: Ids, start: int) -> bytes:
    """What stands for keys and values: it says which tokens they are of."""
    return b"".join(token.to_bytes(TOKEN_BYTES, "little") for token in ids[start : start + BLOCK_TOKENS])


@dataclass(eq=False)
class Device:
    """The folder's file system: `error` is what writing meets, `writes` the names it was asked to write."""

    error: int = 0
    writes: list[str] = field(default_factory=list)
    gate: threading.Event | None = None

    def wrap(self, folder: BlockFolder) -> BlockFolder:
        write = folder.write

        def faulty(head: BlockHead, data: Buffer) -> bool:
            if self.gate is not None:
                assert self.gate.wait(20)
            self.writes.append(head.name)
            if self.error:
                raise CannotWrite(f"{folder.path}: cannot keep the KV cache there: {os.strerror(self.error)}")
            return write(head, data)

        vars(folder)["write"] = faulty
        return folder


@dataclass(eq=False)
class Rig:
    """A store and its disk, as the engine has them."""

    store: BlockStore
    open_folder: Callable[[], BlockFolder]
    device: Device = field(default_factory=Device)
    fetched: list[tuple[Fetch, list[KVData | None]]] = field(default_factory=list)
    num_changes: int = 0

    def __post_init__(self) -> None:
        self.disk = BlockDisk(
            self.open_folder, self.store, on_fetched=self.on_fetched, on_change=self.on_change, clock=time.monotonic
        )

    def put(self, seed: int, num_blocks: int = 1, *, is_lasting: bool = True, due_at: float = 0.0) -> list[Block]:
        """Put in what is missing of it."""
        ids = ids_of(seed, num_blocks)
        pinned: list[Block] = []
        for start, stop in self.store.missing("o", ids):
            above = [block for block in self.store.match("o", ids, limit=start).blocks if block not in pinned]
            self.store.pin(above)
            pinned += above
            assert self.store.make_room(BLOCK_BYTES)
            assert self.store.put("o", ids[:stop], start, content(ids, start), is_lasting=is_lasting, due_at=due_at)
        self.store.unpin(pinned)
        return list(self.store.match("o", ids, limit=len(ids)).blocks)

    async def make_room(self, num_blocks: int) -> None:
        """As the engine does: try, and have the disk told, until there is room."""

        def has_room() -> bool:
            is_made = self.store.make_room(num_blocks * BLOCK_BYTES)
            self.disk.pump()
            return is_made

        await until(has_room)

    def known(self, seed: int, num_blocks: int = 1) -> int:
        ids = ids_of(seed, num_blocks)
        return self.store.match("o", ids, limit=len(ids)).length // BLOCK_TOKENS

    async def fetch(self, seed: int, num_blocks: int = 1) -> list[KVData | None]:
        """Read what of it is on disk alone, as for a sequence that waits; the store takes it in."""
        ids = ids_of(seed, num_blocks)
        match = self.store.match("o", ids, limit=len(ids))
        self.store.pin(match.blocks)
        fetch = Fetch(Sequence(Request("r", "o", ids, SamplingParams(), 1), 0), match.unloaded)
        self.disk.fetch(fetch)
        await until(lambda: any(each is fetch for each, _ in self.fetched))
        self.store.unpin(match.blocks)
        return self.fetched[-1][1]

    def on_fetched(self, fetch: Fetch, data: list[KVData | None]) -> list[Block]:
        self.fetched.append((fetch, data))
        useless: list[Block] = []
        for block, each in zip(fetch.blocks, data, strict=True):
            if each is None:
                useless += self.store.unstore(block)
            else:
                assert self.store.make_room(block.num_bytes)
                self.store.fill(block, each)
        return useless

    def on_change(self) -> None:
        self.num_changes += 1


async def until(is_met: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not is_met():  # noqa: ASYNC110 -- the other side is a thread
            await asyncio.sleep(0.001)


@asynccontextmanager
async def disk_in(
    root: Path,
    *,
    budget_blocks: int = 100,
    disk_bytes: int = PLENTY,
    daily_bytes: int = PLENTY,
    device: Device | None = None,
    today: Callable[[], int] = lambda: 1,
) -> AsyncIterator[Rig]:
    """A disk that has started, closed at the end."""
    device = device or Device()

    def open_folder() -> BlockFolder:
        folder = BlockFolder.open(
            root, fingerprint=FINGERPRINT, max_bytes=disk_bytes, daily_bytes=daily_bytes, today=today
        )
        return device.wrap(folder)

    store = BlockStore(
        budget_bytes=budget_blocks * BLOCK_BYTES, token_bytes=TOKEN_BYTES, capacity=4096, disk_limit_bytes=disk_bytes
    )
    rig = Rig(store, open_folder, device)
    await rig.disk.start()
    try:
        yield rig
        store.check()
    finally:
        await rig.disk.close()


def file_of(root: Path, name: str) -> Path:
    (path,) = root.glob(f"*/{name}.kv")
    return path


def files_in(root: Path) -> list[Path]:
    return sorted(root.glob("*/*.kv"))


async def test_what_was_written_is_found_after_a_restart(tmp_path: Path) -> None:
    async with disk_in(tmp_path) as rig:
        blocks = rig.put(1, 3)
        rig.disk.pump()
        await until(lambda: all(block.is_stored for block in blocks))
    async with disk_in(tmp_path) as rig:
        assert rig.known(1, 3) == 3
        assert rig.store.memory_bytes == 0
        ids = ids_of(1, 3)
        data = await rig.fetch(1, 3)
        assert [bytes(each or b"") for each in data] == [
            content(ids, start) for start in range(0, len(ids), BLOCK_TOKENS)
        ]
        assert rig.store.memory_bytes == 3 * BLOCK_BYTES
        assert rig.known(2) == 0


async def test_what_is_not_lasting_is_never_written(tmp_path: Path) -> None:
    async with disk_in(tmp_path) as rig:
        rig.put(1, 2, is_lasting=False)
        rig.disk.pump()
    assert files_in(tmp_path) == []


async def test_nothing_is_written_before_it_is_due_and_then_by_itself(tmp_path: Path) -> None:
    async with disk_in(tmp_path) as rig:
        (block,) = rig.put(1, due_at=time.monotonic() + 0.5)
        rig.disk.pump()
        assert not block.is_writing
        await until(lambda: block.is_stored)


async def test_closing_writes_what_is_not_due_yet(tmp_path: Path) -> None:
    async with disk_in(tmp_path) as rig:
        rig.put(1, 5, due_at=time.monotonic() + 1000)
        rig.disk.pump()
    async with disk_in(tmp_path) as rig:
        assert rig.known(1, 5) == 5


async def test_closing_in_the_middle_of_writing_writes_the_rest(tmp_path: Path) -> None:
    device = Device(gate=threading.Event())
    assert device.gate is not None
    async with disk_in(tmp_path, device=device) as rig:
        rig.put(1, 6)
        rig.disk.pump()
        asyncio.get_running_loop().call_later(0.02, device.gate.set)
    async with disk_in(tmp_path) as rig:
        assert rig.known(1, 6) == 6


@pytest.mark.parametrize("damage", ["bytes", "cut", "gone"])
async def test_a_damaged_file_is_a_miss_and_what_stands_behind_it_goes_too(tmp_path: Path, damage: str) -> None:
    async with disk_in(tmp_path) as rig:
        name = rig.put(1, 3)[1].name(FINGERPRINT)
    path = file_of(tmp_path, name)
    async with disk_in(tmp_path) as rig:
        match damage:
            case "bytes":
                path.write_bytes(path.read_bytes()[:-1] + b"?")
            case "cut":
                path.write_bytes(path.read_bytes()[:-1])
            case "gone":
                path.unlink()
        data = await rig.fetch(1, 3)
        assert [each is None for each in data] == [False, True, False]
        assert rig.known(1, 3) == 1
        await until(lambda: len(files_in(tmp_path)) == 1)
        rig.put(1, 3)
    async with disk_in(tmp_path) as rig:
        assert rig.known(1, 3) == 3, "what was computed again is there again"


async def test_a_block_without_the_one_before_it_is_of_no_use(tmp_path: Path) -> None:
    async with disk_in(tmp_path) as rig:
        name = rig.put(1, 3)[0].name(FINGERPRINT)
        rig.put(2)
    file_of(tmp_path, name).unlink()
    async with disk_in(tmp_path) as rig:
        assert (rig.known(1, 3), rig.known(2)) == (0, 1)
        await until(lambda: len(files_in(tmp_path)) == 1)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EIO])
async def test_a_disk_that_fails_is_left_alone_for_a_while(
    tmp_path: Path, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(block_disk, "PAUSE_S", 1.0)
    async with disk_in(tmp_path, budget_blocks=4, device=Device(error=number)) as rig:
        rig.put(1, 3)
        rig.disk.pump()
        await until(lambda: rig.disk.num_failed_writes == 1)
        await until(lambda: rig.num_changes >= 2)
        assert rig.known(1, 3) == 3, "it is still in memory"
        rig.put(2, 4)
        rig.disk.pump()
        assert len(rig.device.writes) == 1, "and room is made without the disk"
        assert not rig.store.is_writing
        rig.device.error = 0
        await until(lambda: rig.store.disk_limit_bytes > 0)
        await rig.make_room(2)
        blocks = rig.put(3, 2)
        rig.disk.pump()
        await until(lambda: all(block.is_stored for block in blocks))
    assert rig.disk.num_failed_writes == 1


async def test_closing_writes_though_the_disk_had_failed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_disk, "PAUSE_S", 0.02)
    async with disk_in(tmp_path, device=Device(error=errno.ENOSPC)) as rig:
        rig.put(1)
        rig.disk.pump()
        await until(lambda: rig.disk.num_failed_writes == 1)
        await until(lambda: rig.store.disk_limit_bytes > 0)
        rig.device.error = 0
        rig.put(2, 2, due_at=time.monotonic() + 1000)
    async with disk_in(tmp_path) as rig:
        assert rig.known(2, 2) == 2


async def test_closing_does_not_wait_for_a_disk_that_fails(tmp_path: Path) -> None:
    async with disk_in(tmp_path, device=Device(error=errno.ENOSPC)) as rig:
        rig.put(1, 4, due_at=time.monotonic() + 1000)
    assert len(rig.device.writes) == 1


async def test_no_more_is_written_in_a_day_than_is_allowed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_disk, "PAUSE_S", 0.05)
    day = 1
    async with disk_in(tmp_path, daily_bytes=5 * BLOCK_BYTES, today=lambda: day) as rig:
        rig.put(1, 10)
        rig.disk.pump()
        await until(lambda: rig.store.disk_limit_bytes == 0)
        assert 1 <= len(rig.device.writes) <= 4
        assert sum(path.stat().st_size for path in files_in(tmp_path)) <= 5 * BLOCK_BYTES
        assert rig.disk.num_failed_writes == 0
        assert rig.known(1, 10) == 10
        day = 2
        await until(lambda: rig.store.disk_limit_bytes > 0)
        (block,) = rig.put(2)
        rig.disk.pump()
        await until(lambda: block.is_stored)


async def test_a_folder_that_another_has_open_is_left_alone(tmp_path: Path) -> None:
    async with disk_in(tmp_path) as rig:
        rig.put(1)
        rig.disk.pump()
        async with disk_in(tmp_path) as other:
            assert other.store.disk_limit_bytes == 0
            assert other.num_changes == 1, "who waits for the disk is told"
            other.put(2)
            other.disk.pump()
            assert other.known(2) == 1
        assert len(other.device.writes) == 0
    assert len(files_in(tmp_path)) == 1


async def test_what_waits_for_a_folder_that_is_being_opened_is_written_then(tmp_path: Path) -> None:
    async with disk_in(tmp_path) as rig:
        rig.put(1, 3)
    store = BlockStore(budget_bytes=2 * BLOCK_BYTES, token_bytes=TOKEN_BYTES, capacity=4096, disk_limit_bytes=PLENTY)

    def open_folder() -> BlockFolder:
        return BlockFolder.open(tmp_path, fingerprint=FINGERPRINT, max_bytes=PLENTY, daily_bytes=PLENTY, today=int)

    rig = Rig(store, open_folder)
    rig.put(2, 2)
    assert not store.make_room(BLOCK_BYTES), "they are to be written first"
    rig.disk.pump()
    await rig.disk.start()
    assert rig.num_changes == 1, "who waits for room may look again"
    await until(lambda: store.make_room(BLOCK_BYTES))
    await rig.disk.close()
    assert len(files_in(tmp_path)) >= 4


@pytest.mark.parametrize("num_kept", [3, 5])
async def test_the_longest_unused_make_place_on_a_disk_of_limited_size(tmp_path: Path, num_kept: int) -> None:
    """The limit is a whole number of blocks, and files are a little larger than those."""
    async with disk_in(tmp_path, disk_bytes=num_kept * BLOCK_BYTES) as rig:
        for seed in range(10):
            (block,) = rig.put(seed)
            rig.disk.pump()
            await until(lambda: block.is_stored)  # noqa: B023 -- used at once
            assert sum(path.stat().st_size for path in files_in(tmp_path)) <= num_kept * BLOCK_BYTES
    async with disk_in(tmp_path, disk_bytes=num_kept * BLOCK_BYTES) as rig:
        known = [seed for seed in range(10) if rig.known(seed)]
        assert known[-1] == 9
        assert known == list(range(10 - len(known), 10))
        assert len(known) >= num_kept - 2


async def test_blocks_whose_memory_is_needed_are_written_first_and_at_once(tmp_path: Path) -> None:
    async with disk_in(tmp_path, budget_blocks=3) as rig:
        for seed in range(10):
            await rig.make_room(1)
            rig.put(seed, due_at=time.monotonic() + 1000)
        assert rig.store.stats().num_lost == 0
        assert all(rig.known(seed) for seed in range(10))
        for seed in range(7):
            assert [bytes(each or b"") for each in await rig.fetch(seed)] == [content(ids_of(seed), 0)]
    async with disk_in(tmp_path) as rig:
        assert all(rig.known(seed) for seed in range(10))


async def test_a_smaller_budget_removes_the_longest_unused_and_a_larger_one_has_more_written(tmp_path: Path) -> None:
    async with disk_in(tmp_path) as rig:
        for seed in range(6):
            (block,) = rig.put(seed)
            rig.disk.pump()
            await until(lambda: block.is_stored)  # noqa: B023 -- used at once
        rig.disk.set_budget(max_bytes=3 * BLOCK_BYTES, daily_bytes=PLENTY)
        await until(lambda: len(files_in(tmp_path)) == 3)
        (late,) = rig.put(7)
        rig.disk.pump()
        await until(lambda: late.is_stored)
        assert sum(path.stat().st_size for path in files_in(tmp_path)) <= 3 * BLOCK_BYTES
        rig.disk.set_budget(max_bytes=PLENTY, daily_bytes=PLENTY)
        for seed in range(8, 14):
            (block,) = rig.put(seed)
            rig.disk.pump()
            await until(lambda: block.is_stored)  # noqa: B023 -- used at once
        assert len(files_in(tmp_path)) > 3


async def test_with_no_budget_nothing_stays_and_nothing_is_written(tmp_path: Path) -> None:
    device = Device(gate=threading.Event())
    assert device.gate is not None
    async with disk_in(tmp_path, device=device) as rig:
        (block,) = rig.put(1)
        rig.disk.pump()
        await until(lambda: block.is_writing)
        rig.disk.set_budget(max_bytes=0, daily_bytes=PLENTY)
        device.gate.set()
        await until(lambda: not block.is_writing)
        rig.put(2)
        rig.disk.pump()
        await until(lambda: not files_in(tmp_path))
        assert rig.known(1) == rig.known(2) == 1, "it is in memory still"
    assert files_in(tmp_path) == []


async def test_what_may_be_written_in_a_day_may_be_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_disk, "PAUSE_S", 0.05)
    async with disk_in(tmp_path, daily_bytes=0) as rig:
        rig.put(1)
        rig.disk.pump()
        await until(lambda: rig.store.disk_limit_bytes == 0)
        rig.disk.set_budget(max_bytes=PLENTY, daily_bytes=PLENTY)
        await until(lambda: rig.store.disk_limit_bytes == PLENTY)
        (block,) = rig.put(2)
        rig.disk.pump()
        await until(lambda: block.is_stored)


async def test_a_budget_that_shrinks_while_nothing_is_written_costs_no_more_than_that(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with disk_in(tmp_path) as rig:
        for seed in range(4):
            (block,) = rig.put(seed)
            rig.disk.pump()
            await until(lambda: block.is_stored)  # noqa: B023 -- used at once
        rig.device.error = errno.ENOSPC
        rig.put(5)
        rig.disk.pump()
        await until(lambda: rig.store.disk_limit_bytes == 0)
        assert len(files_in(tmp_path)) == 4
        rig.disk.set_budget(max_bytes=3 * BLOCK_BYTES, daily_bytes=PLENTY)
        await until(lambda: len(files_in(tmp_path)) == 3)
        assert rig.store.disk_limit_bytes == 0


async def test_a_budget_that_comes_while_the_folder_is_opened_counts(tmp_path: Path) -> None:
    async with disk_in(tmp_path) as rig:
        for seed in range(6):
            rig.put(seed)
    assert len(files_in(tmp_path)) == 6
    may_open = threading.Event()

    def open_folder() -> BlockFolder:
        assert may_open.wait(20)
        return BlockFolder.open(tmp_path, fingerprint=FINGERPRINT, max_bytes=PLENTY, daily_bytes=PLENTY, today=int)

    store = BlockStore(budget_bytes=PLENTY, token_bytes=TOKEN_BYTES, capacity=4096, disk_limit_bytes=PLENTY)
    rig = Rig(store, open_folder)
    rig.disk.begin()
    await asyncio.sleep(0)
    rig.disk.set_budget(max_bytes=2 * BLOCK_BYTES, daily_bytes=PLENTY)
    may_open.set()
    await until(lambda: len(files_in(tmp_path)) == 2)
    await rig.disk.close()


async def test_a_disk_that_failed_keeps_nothing_in_memory_once_it_is_closed(tmp_path: Path) -> None:
    """It would have been tried again after a while; what waits for that must not hold the blocks."""
    async with disk_in(tmp_path, device=Device(error=errno.ENOSPC)) as rig:
        rig.put(1)
        rig.disk.pump()
        await until(lambda: rig.disk.num_failed_writes == 1)
        await rig.disk.close()
        assert rig.disk._resumption is not None
        assert rig.disk._resumption.cancelled()
