"""Blocks on their way to disk and back: the store says what and when, a disk thread does it, the loop is never stopped.

One write at a time. A disk that fails is left alone for a while: until then nothing is lasting, and what would have
been written is kept in memory like the blocks of single requests, or dropped. So a full or dying disk costs speed after
a restart, and nothing else.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Coroutine, Iterable, Sequence
from functools import partial
from typing import Any, Final

from edgeqwen.core.disk_thread import DiskThread
from edgeqwen.core.step import KVData
from edgeqwen.errors import CannotWrite, EdgeqwenError
from edgeqwen.kvcache import Block, BlockStore
from edgeqwen.kvcache.block_file import BlockHead, block_name
from edgeqwen.kvcache.block_folder import BlockFolder, Found
from edgeqwen.logs import Event
from edgeqwen.scheduler import Fetch

logger = logging.getLogger(__name__)

PAUSE_S: Final = 60.0
FLUSH_S: Final = 2.0
AT_ONCE: Final = 256


class BlockDisk:
    """`open_folder` runs on the disk thread; if it fails there is no disk. `on_fetched` is given what a fetch read,
    `on_change` is called when memory may be had that could not be had before.
    """

    def __init__(
        self,
        open_folder: Callable[[], BlockFolder],
        store: BlockStore,
        *,
        on_fetched: Callable[[Fetch, list[KVData | None]], list[Block]],
        on_change: Callable[[], None],
        clock: Callable[[], float],
    ) -> None:
        self._open_folder = open_folder
        self._store = store
        self._limit_bytes = store.disk_limit_bytes
        self._daily_bytes: int | None = None  # as the folder was opened with
        self._on_fetched = on_fetched
        self._on_change = on_change
        self._clock = clock
        self._thread = DiskThread("blocks")
        self._folder: BlockFolder | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._ready = asyncio.Event()
        self._is_writing = False
        self._is_closing = False
        self._paused_until = 0.0
        self._last_reason = ""
        self._resumption: asyncio.TimerHandle | None = None
        self._timer: asyncio.TimerHandle | None = None
        self.num_failed_writes = 0

    def begin(self) -> None:
        """`start`, without waiting for it."""
        self._spawn(self.start())

    async def start(self) -> None:
        """Find what a daemon before this one has left."""
        try:
            found = await self._thread.run(self._open)
        except EdgeqwenError as error:
            logger.warning("no disk for the KV cache, what is known is lost at the end: %s", error.message)
            self._store.stop_writing()
        else:
            await self._add(found)
        self._ready.set()
        self._on_change()
        self.pump()

    @property
    def _is_ready(self) -> bool:
        return self._ready.is_set()

    async def until_ready(self, timeout_s: float) -> None:
        """Return once it is known what there is, or nothing can be known; or after that time."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._ready.wait()

    @property
    def is_idle(self) -> bool:
        """Nothing is on its way, and nothing waits that could be written before long."""
        can_write = self._folder is not None and self._clock() >= self._paused_until
        return self._is_ready and not self._tasks and (not can_write or self._store.next_write_at is None)

    def _open(self) -> list[Found]:
        self._folder = self._open_folder()
        self._limit_folder()
        return self._folder.scan()

    async def _add(self, found: Iterable[Found]) -> None:
        """Parents first; a block without its parent is of no use. What was unused longest is the first to go."""
        known: dict[str, Block] = {}
        useless: list[str] = []
        for number, each in enumerate(sorted(found, key=lambda each: (each.head.start, each.modified_ns)), 1):
            if number % AT_ONCE == 0:
                await asyncio.sleep(0)
            head = each.head
            above = known.get(head.parent)
            is_sound = head.num_bytes == len(head.ids) * self._store.token_bytes
            is_orphan = bool(head.parent) and (above is None or not above.is_full or not above.is_stored)
            if is_orphan or not is_sound:
                useless.append(head.name)
                continue
            known[head.name] = self._store.add_stored(head.owner, above, head.ids, head.num_bytes)
        useless += [self._drop(block) for block in self._store.surplus(0)]
        self._spawn(self._remove(useless))
        event = Event("cache_on_disk", blocks=len(known), bytes=self._store.disk_bytes, removed=len(useless))
        logger.info(event)

    def _drop(self, block: Block) -> str:
        """Forget the file of a block; returns its name."""
        assert self._folder is not None
        name = block.name(self._folder.fingerprint)
        self._store.unstore(block)
        return name

    # Another budget.

    def set_budget(self, *, max_bytes: int, daily_bytes: int) -> None:
        """Have at most so much on disk from now on, and write as much in a day. What is too much of it goes."""
        self._limit_bytes, self._daily_bytes = max_bytes, daily_bytes
        if self._is_ready and self._folder is None:
            return  # there is no disk
        if not max_bytes:
            self._store.stop_writing()
        elif self._clock() >= self._paused_until:
            self._store.disk_limit_bytes = max_bytes
        self._spawn(self._keep_budget())

    async def _keep_budget(self) -> None:
        await self._thread.run(self._limit_folder)
        await self._trim()
        self.pump()

    def _limit_folder(self) -> None:
        """On the disk thread."""
        if self._folder is not None and self._daily_bytes is not None:
            self._folder.set_budget(max_bytes=self._limit_bytes, daily_bytes=self._daily_bytes)

    async def _trim(self) -> None:
        """Remove what is more than there may be; the store's own limit is 0 while nothing is written, too."""
        if self._is_ready and self._folder is not None:
            surplus = self._store.surplus(self._store.disk_limit_bytes - self._limit_bytes)
            await self._remove([self._drop(block) for block in surplus])

    # Reading.

    def fetch(self, fetch: Fetch) -> None:
        """Read the blocks and report them."""
        self._spawn(self._fetch(fetch))

    async def _fetch(self, fetch: Fetch) -> None:
        folder = self._folder
        data: list[KVData | None] = [None] * len(fetch.blocks)
        if folder is not None:
            names = [block.name(folder.fingerprint) for block in fetch.blocks]
            data = await self._thread.run(lambda: [folder.read(name) for name in names])
            self._spawn(self._touch(names))
        self.remove(self._on_fetched(fetch, data))

    def remove(self, blocks: Sequence[Block]) -> None:
        """Remove the files of blocks that the store has forgotten."""
        folder = self._folder
        if folder is not None:
            self._spawn(self._remove([block.name(folder.fingerprint) for block in blocks]))

    async def _touch(self, names: list[str]) -> None:
        """What was read is worth keeping longer."""
        folder = self._folder
        assert folder is not None
        await self._thread.run(lambda: [folder.touch(name) for name in names])

    async def _remove(self, names: list[str]) -> None:
        folder = self._folder
        if folder is None or not names:
            return
        try:
            for name in names:
                await self._thread.run(partial(folder.remove, name))
        except CannotWrite as error:
            logger.warning("KV cache: %s", error.message)

    # Writing.

    def pump(self) -> None:
        """Begin the next write if one is due, or see to it that it begins when it is."""
        if self._folder is None or not self._is_ready or self._is_writing or self._is_closing:
            return
        now = self._clock()
        if now < self._paused_until or (self._timer is not None and not self._store.is_writing):
            return
        block = self._store.next_write(now)
        if block is not None:
            self._is_writing = True
            self._spawn(self._write(block))
        elif (due_at := self._store.next_write_at) is not None:
            self._wake_at(due_at)

    def _wake_at(self, due_at: float) -> None:
        delay_s = max(0.0, due_at - self._clock()) + 0.001
        self._timer = self._timer or asyncio.get_running_loop().call_later(delay_s, self._on_time)

    def _on_time(self) -> None:
        self._timer = None
        self.pump()

    async def _write(self, block: Block) -> None:
        is_stored = await self._is_written(block)
        if not self._store.written(block, is_stored=is_stored):
            assert self._folder is not None
            await self._remove([block.name(self._folder.fingerprint)])
        await self._trim()  # the budget may have shrunk meanwhile
        self._is_writing = False
        self._on_change()
        self.pump()

    async def _is_written(self, block: Block) -> bool:
        folder = self._folder
        assert folder is not None
        assert block.data is not None
        if folder.left_today_bytes < 2 * block.num_bytes:
            self._pause("the bytes that may be written in a day are spent (kv.daily_writes_mb)")
            return False
        head = _head_of(block, folder.fingerprint)
        num_bytes = block.num_bytes
        if excess_bytes := folder.excess_bytes(head):  # a file is a little more than what the store counts
            num_bytes = max(num_bytes, excess_bytes + self._store.disk_limit_bytes - self._store.disk_bytes)
        await self._remove([self._drop(old) for old in self._store.surplus(num_bytes)])
        try:
            return await self._thread.run(partial(folder.write, head, memoryview(block.data).cast("B")))
        except EdgeqwenError as error:
            self.num_failed_writes += 1
            self._pause(error.message)
            return False

    def _pause(self, reason: str) -> None:
        """Nothing can be written for now."""
        if reason != self._last_reason:
            logger.warning("KV cache: nothing is written to disk for now: %s", reason)
        self._last_reason = reason
        self._paused_until = self._clock() + PAUSE_S
        self._store.stop_writing()
        self._resumption = asyncio.get_running_loop().call_later(PAUSE_S, self._resume)

    def _resume(self) -> None:
        if not self._is_closing:
            self._store.disk_limit_bytes = self._limit_bytes
            self.pump()

    # The end.

    async def close(self) -> None:
        """Write what is due at any time, as far as that goes in a moment, and close the folder."""
        self._is_closing = True
        while self._tasks:
            await asyncio.gather(*self._tasks, return_exceptions=True)
        for timer in (self._timer, self._resumption):
            if timer is not None:
                timer.cancel()  # it would keep all blocks in memory until it comes
        give_up_at = self._clock() + FLUSH_S
        while self._folder is not None and self._paused_until <= self._clock() < give_up_at:
            block = self._store.next_write(float("inf"))
            if block is None:
                break
            self._store.written(block, is_stored=await self._is_written(block))
        folder, self._folder = self._folder, None
        if folder is not None:
            await self._thread.run(folder.close)
        self._thread.close()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _head_of(block: Block, fingerprint: str) -> BlockHead:
    assert block.parent is not None
    parent = block.parent.name(fingerprint)
    return BlockHead(
        fingerprint=fingerprint,
        owner=block.owner,
        name=block_name(parent, block.owner, block.ids, fingerprint),
        parent=parent,
        start=block.start,
        ids=block.ids,
        num_bytes=block.num_bytes,
    )
