"""A loaded model at work: runtime, scheduler, records and loop, put together.

All on the event loop, save what the loop hands to the engine thread. Knows nothing of text before tokens.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from itertools import count
from typing import Any

from edgeqwen.core.request import Delta, Request, SamplingParams
from edgeqwen.core.step import KVData, Runtime, RuntimeSpec
from edgeqwen.engine.block_disk import BlockDisk
from edgeqwen.engine.embeddings import EmbeddingRecord, Embeddings
from edgeqwen.engine.generation import Sink
from edgeqwen.engine.kv_disk import make_disk
from edgeqwen.engine.live import LiveRequest
from edgeqwen.engine.loop import StepLoop
from edgeqwen.engine.memory_budget import make_store
from edgeqwen.engine.meters import Meters
from edgeqwen.engine.record import Record, Records
from edgeqwen.engine.settings import KvSettings, ModelFiles
from edgeqwen.engine.stats import EngineStats, OwnerStats, totals_of
from edgeqwen.engine.tallies import Tallies
from edgeqwen.engine.worker import EngineThread
from edgeqwen.errors import EdgeqwenError
from edgeqwen.kvcache import SHARED, Block
from edgeqwen.scheduler import Admission, Fetch, Scheduler


class Engine:
    """Runs requests that are resolved. `run` must be running; `close` ends it."""

    def __init__(
        self,
        runtime: Runtime,
        thread: EngineThread,
        *,
        files: ModelFiles,
        admission: Admission,
        kv: KvSettings,
        speculates: bool,
        longest_step_s: float | None,
        tallies: Tallies,
        meters: Meters,
        clock: Callable[[], float],
        today: Callable[[], int],
    ) -> None:
        self._runtime = runtime
        self._store = make_store(runtime.spec, kv)
        self._files = files
        self._meters = meters
        self._admission = admission
        self._clock = clock
        self._today = today
        self._retired = asyncio.Event()
        self._shared: dict[tuple[int, ...], str] = {}  # prompts that are kept for all, and the keys of their wishes
        self._shared_numbers = count()
        self._scheduler = Scheduler(
            runtime.spec,
            admission=admission,
            eos_token_ids=files.eos_token_ids,
            store=self._store,
            speculates=speculates,
            longest_step_s=longest_step_s,
            write_delay_s=kv.write_delay_s,
        )
        self._records = Records(self._scheduler, tallies=tallies, meters=meters, on_retired=self._retired.set)
        self._disk = None if kv.folder is None else self._make_disk(kv)
        self._loop = StepLoop(
            runtime,
            thread,
            scheduler=self._scheduler,
            records=self._records,
            meters=meters,
            fetch=self._fetch,
            on_plan=self._pump_disk,
            clock=clock,
        )

    def _make_disk(self, kv: KvSettings) -> BlockDisk:
        return make_disk(
            self.spec,
            kv,
            self._store,
            on_fetched=self._on_fetched,
            on_change=self._wake,
            clock=self._clock,
            today=self._today,
        )

    def set_disk(self, kv: KvSettings) -> None:
        """Have as much on disk as `kv` says now; without a folder that is nothing more."""
        budget = {"max_bytes": kv.disk_bytes, "daily_bytes": kv.daily_write_bytes}
        if self._disk is not None:
            self._disk.set_budget(**budget)
        elif kv.folder is not None:
            self._store.disk_limit_bytes = kv.disk_bytes
            self._disk = self._make_disk(kv)
            self._disk.begin()

    def _wake(self) -> None:
        self._loop.wake()

    def _fetch(self, fetch: Fetch) -> None:
        assert self._disk is not None, "blocks on disk, and no disk"
        self._disk.fetch(fetch)

    def _on_fetched(self, fetch: Fetch, data: list[KVData | None]) -> list[Block]:
        useless = self._scheduler.fetched(fetch, data)
        self._loop.wake()
        return useless

    def _pump_disk(self) -> None:
        if self._disk is not None:
            self._disk.pump()

    @property
    def spec(self) -> RuntimeSpec:
        return self._runtime.spec

    @property
    def num_tokens(self) -> int:
        """Ids that both model and tokenizer know."""
        return min(self.spec.num_tokens, self._files.tokenizer.num_tokens)

    async def run(self) -> None:
        """Step after step; returns after `close`."""
        if self._disk is not None:
            self._disk.begin()
        await self._loop.run()

    async def until_disk_is_known(self, timeout_s: float) -> None:
        """Return once it is known what is on disk, so that it need not be computed; or when that takes too long."""
        if self._disk is not None:
            await self._disk.until_ready(timeout_s)

    def accept(self, request: Request, sink: Sink, *, echo: str = "") -> None:
        """Queue a request and say so; `echo` comes first in every choice. Whether there is a place for it was asked on
        its arrival; raises what `Scheduler.submit` raises besides.
        """
        gaps = self._meters.token_gap_s
        record = Record(request, sink, files=self._files, num_tokens=self.num_tokens, token_gap_s=gaps)
        self._queue(record)
        for choice in range(request.n if echo else 0):
            if request.rid in self._records:  # a sink may cancel at any event
                record.emit(Delta(choice, "content", echo))
        self._start(record)

    def accept_embedding(self, request: Request) -> EmbeddingRecord:
        """Queue an embedding. Raises what `Scheduler.submit` raises."""
        record = EmbeddingRecord(request)
        self._queue(record)
        self._start(record)
        return record

    async def embedded(self, record: EmbeddingRecord) -> Embeddings:
        """Its vectors; it is cancelled with who waits here. Raises what `EmbeddingRecord.result` raises."""
        try:
            return await record.result()
        finally:
            self.cancel(record.request.rid, owner=None)

    def _queue(self, record: LiveRequest) -> None:
        num_before = self._scheduler.submit(record.request, now=self._clock(), had_place=True)  # on its arrival
        self._records.add(record, num_before=num_before)

    def _start(self, record: LiveRequest) -> None:
        if record.request.rid in self._records:
            self._arm(record)
        self._loop.wake()

    def _arm(self, record: LiveRequest) -> None:
        """Have the deadline come true also while a step runs or nothing does."""
        delay_s = max(0.001, record.request.deadline_at - self._clock())
        record.timer = asyncio.get_running_loop().call_later(delay_s, self._on_deadline, record)

    def _on_deadline(self, record: LiveRequest) -> None:
        now = self._clock()
        self._records.deliver(self._scheduler.expire(now), now)
        self._loop.wake()
        if record.request.rid in self._records:  # a timer may fire a little before the clock says so
            self._arm(record)

    def cancel(self, rid: str, *, owner: str | None) -> int:
        """End a request of `owner` (None: of anyone) with `cancelled`; 0 if there is none that still runs, else 1."""
        record = self._records.get(rid)
        if record is None or owner not in (None, record.request.owner):
            return 0
        now = self._clock()
        self._records.deliver(self._scheduler.cancel(rid, now=now), now)
        self._loop.wake()
        return 1

    def live_requests(self, owner: str | None, most: int) -> list[dict[str, Any]]:
        """See `Records.facts`."""
        return self._records.facts(self._clock(), owner=owner, most=most)

    def cancel_all(self) -> None:
        """End every request with `cancelled`."""
        for rid in self._records.rids():
            self.cancel(rid, owner=None)

    def fail_all(self, error: EdgeqwenError) -> None:
        """End every request with `error`; nothing may be accepted afterwards."""
        self._records.fail_all(error, self._clock())

    @property
    def context(self) -> int:
        """Tokens that prompt and answer may have together: what a slot holds and the budget of the cache allows."""
        return min(self.spec.capacity, self._store.budget_bytes // self.spec.kv_bytes_per_token)

    def want(self, key: str, owner: str, prompt_ids: tuple[int, ...], *, computes: bool = True) -> None:
        """Have a prompt known, on disk too: what is known of it stays so, and what is not is computed when there is
        nothing else to do, if that is wanted (`computes`). Replaces an earlier wish of the same key.
        """
        request = Request("", owner, prompt_ids, SamplingParams(), max_tokens=0, is_lasting=True)
        self._scheduler.want(key, request, now=self._clock(), computes=computes)
        self._loop.wake()

    def keep_shared(self, prompts: Collection[tuple[int, ...]]) -> None:
        """Have these known to everybody, for good; those of an earlier call that are not among them need not stay."""
        for ids in self._shared.keys() - set(prompts):
            self._scheduler.keep_no_longer(SHARED, ids)
            self.forget(self._shared.pop(ids))
        for ids in prompts:
            if ids not in self._shared:
                self._shared[ids] = f"shared {next(self._shared_numbers)}"
                self._scheduler.keep_for_good(SHARED, ids)
                self.want(self._shared[ids], SHARED, ids)

    def forget(self, key: str) -> None:
        """Nobody wants that prompt any more."""
        self._scheduler.forget(key)
        self._loop.wake()

    def discard(self, owner: str, ids: tuple[int, ...]) -> None:
        """Nobody comes back to `ids`: forget what is known of them alone, on disk too."""
        useless = self._store.discard(owner, ids)
        if self._disk is not None:
            self._disk.remove(useless)
        self._loop.wake()  # a slot may have to be released

    def cached_tokens(self, owner: str, ids: tuple[int, ...]) -> int:
        """How many of `ids` need not be computed if they come now, as far as the store knows."""
        return self._store.match(owner, ids, limit=len(ids)).length

    @property
    def is_idle(self) -> bool:
        """Nothing runs, waits, is computed beforehand or written."""
        is_working = len(self._records) or len(self._scheduler.background) or not self._scheduler.is_idle
        return not is_working and (self._disk is None or self._disk.is_idle)

    async def wait_until_idle(self) -> None:
        """Return when no request lives."""
        while len(self._records):
            self._retired.clear()
            await self._retired.wait()

    def close(self) -> None:
        """Let `run` return after the step that runs."""
        self._loop.close()

    async def close_disk(self) -> None:
        """Write what is worth it; after `run` has returned."""
        if self._disk is not None:
            await self._disk.close()

    def close_runtime(self) -> None:
        """Free the runtime; on the engine thread, after `run` has returned."""
        self._runtime.close()

    def stats(self) -> EngineStats:
        """A snapshot of what runs and what has been."""
        total, loop, drafting = self._records.tallies.total, self._loop, self._scheduler.drafting
        store, background = self._store.stats(), self._scheduler.background
        return EngineStats(
            slots=self.spec.num_slots,
            used=self._scheduler.num_taken_slots,
            running=self._admission.num_running,
            queued=self._admission.num_queued,
            kv_bytes=self._scheduler.num_held_tokens * self.spec.kv_bytes_per_token
            + store.memory_bytes
            + store.spare_bytes,
            tok_s={"prefill": round(loop.prefill_rate.per_s, 1), "decode": round(loop.decode_rate.per_s, 1)},
            totals=totals_of(total),
            speculation={"drafted": drafting.num_drafted, "accepted": drafting.num_accepted},
            kv={
                "budget_bytes": store.budget_bytes,
                "reserved_bytes": store.reserved_bytes,
                "block_bytes": store.memory_bytes,
                "spare_bytes": store.spare_bytes,
                "blocks": store.num_blocks,
                "disk_bytes": store.disk_bytes,
                "cached": total.num_cached,
                "computed": loop.num_prefilled,
                "evicted": store.num_evicted,
                "lost": store.num_lost,
                "preempted": self._scheduler.num_preempted,
                "settled": background.num_done,
                "settled_tokens": background.num_tokens,
                "settling_given_up": background.num_given_up,
                "failed_writes": 0 if self._disk is None else self._disk.num_failed_writes,
            },
        )

    def owner_stats(self, owner: str) -> OwnerStats:
        """The same of one owner's requests, as far as it can be told whose something is."""
        tally, num_running = self._records.tallies.of(owner), self._records.num_running(owner)
        return OwnerStats(
            running=num_running,
            queued=self._admission.count_of(owner) - num_running,
            kv_bytes=self._store.owner_bytes(owner),
            totals=totals_of(tally),
            kv={"budget_bytes": self._store.budget_bytes, "cached": tally.num_cached},
        )
