"""A loaded model at work: runtime, scheduler, records and loop, put together.

All on the event loop, save what the loop hands to the engine thread. Knows nothing of text before tokens.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from edgeqwen.core.request import Delta, Request
from edgeqwen.core.step import Runtime, RuntimeSpec
from edgeqwen.engine.generation import Sink
from edgeqwen.engine.loop import StepLoop
from edgeqwen.engine.record import Record, Records
from edgeqwen.engine.settings import ModelFiles
from edgeqwen.engine.stats import EngineStats
from edgeqwen.engine.worker import EngineThread
from edgeqwen.errors import EdgeqwenError
from edgeqwen.scheduler import Admission, Scheduler


class Engine:
    """Runs requests that are resolved. `run` must be running; `close` ends it."""

    def __init__(
        self,
        runtime: Runtime,
        thread: EngineThread,
        *,
        files: ModelFiles,
        admission: Admission,
        speculates: bool,
        clock: Callable[[], float],
    ) -> None:
        self._runtime = runtime
        self._files = files
        self._admission = admission
        self._clock = clock
        self._retired = asyncio.Event()
        self._scheduler = Scheduler(
            runtime.spec, admission=admission, eos_token_ids=files.eos_token_ids, speculates=speculates
        )
        self._records = Records(self._scheduler, on_retired=self._retired.set)
        self._loop = StepLoop(runtime, thread, scheduler=self._scheduler, records=self._records, clock=clock)

    @property
    def spec(self) -> RuntimeSpec:
        return self._runtime.spec

    @property
    def num_tokens(self) -> int:
        """Ids that both model and tokenizer know."""
        return min(self.spec.num_tokens, self._files.tokenizer.num_tokens)

    async def run(self) -> None:
        """Step after step; returns after `close`."""
        await self._loop.run()

    def accept(self, request: Request, sink: Sink, *, echo: str = "") -> None:
        """Queue a request and say so; `echo` comes first in every choice. Raises what `Scheduler.submit` raises."""
        record = Record(request, sink, files=self._files, num_tokens=self.num_tokens)
        num_before = self._scheduler.submit(request)
        self._records.add(record, num_before=num_before)
        for choice in range(request.n if echo else 0):
            if request.rid in self._records:  # a sink may cancel at any event
                record.emit(Delta(choice, "content", echo))
        if request.rid in self._records:
            self._arm(record)
        self._loop.wake()

    def _arm(self, record: Record) -> None:
        """Have the deadline come true also while a step runs or nothing does."""
        delay_s = max(0.001, record.request.deadline_at - self._clock())
        record.timer = asyncio.get_running_loop().call_later(delay_s, self._on_deadline, record)

    def _on_deadline(self, record: Record) -> None:
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

    def cancel_all(self) -> None:
        """End every request with `cancelled`."""
        for rid in self._records.rids():
            self.cancel(rid, owner=None)

    def fail_all(self, error: EdgeqwenError) -> None:
        """End every request with `error`; nothing may be accepted afterwards."""
        self._records.fail_all(error)

    async def wait_until_idle(self) -> None:
        """Return when no request lives."""
        while len(self._records):
            self._retired.clear()
            await self._retired.wait()

    def close(self) -> None:
        """Let `run` return after the step that runs."""
        self._loop.close()

    def close_runtime(self) -> None:
        """Free the runtime; on the engine thread, after `run` has returned."""
        self._runtime.close()

    def stats(self) -> EngineStats:
        """A snapshot of what runs and what has been."""
        records, loop, drafting = self._records, self._loop, self._scheduler.drafting
        return EngineStats(
            running=self._admission.num_running,
            queued=self._admission.num_queued,
            kv_bytes=self._scheduler.num_held_tokens * self.spec.kv_bytes_per_token,
            tok_s={"prefill": round(loop.prefill_rate.per_s, 1), "decode": round(loop.decode_rate.per_s, 1)},
            totals={"requests": records.num_accepted, "errors": records.num_failed, "tokens": records.num_tokens},
            speculation={"drafted": drafting.num_drafted, "accepted": drafting.num_accepted},
        )
