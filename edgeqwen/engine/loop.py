"""The engine's loop: plan, run the step on the engine thread, commit, deliver; then the next.

Decisions are made on the event loop, synchronously; the step is computed and its tokens are drawn on the engine thread.
While a step runs, requests may come, be cancelled or run out of time: the scheduler marks them for the next plan.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Final, TypeAlias

from edgeqwen.core.step import Chunk, KVData, Logits, Runtime, StepResult
from edgeqwen.engine.live import LiveRequest
from edgeqwen.engine.meters import Meters
from edgeqwen.engine.record import Records
from edgeqwen.engine.stats import Rate
from edgeqwen.engine.worker import EngineThread
from edgeqwen.errors import EdgeqwenError, RuntimeFailed
from edgeqwen.sampling import Sampled, Sampler
from edgeqwen.scheduler import Fetch, Scheduler, SlotCopy, StepPlan

logger = logging.getLogger(__name__)

COPY_TOKENS: Final = 64

Draw: TypeAlias = Sampled | EdgeqwenError


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """What a step gave, chunk by chunk: the draws, an error of a row last of all, nothing where no logits were asked
    for; and what was to be saved, None if it could not be read.
    """

    draws: tuple[tuple[Draw, ...], ...]
    duration_s: float
    saved: tuple[KVData, ...] | None = ()

    def of_round(self, number: int) -> list[Sampled | None]:
        """By chunk: draw `number`, None where there is none."""
        return [_sampled(draws[number]) if number < len(draws) else None for draws in self.draws]


class StepLoop:
    """Drives one runtime. `run` ends after `close`, never inside a step. `fetch` is given blocks that are to be read
    from disk; `on_plan` is called after each plan, which may have made work for the disk.
    """

    def __init__(
        self,
        runtime: Runtime,
        thread: EngineThread,
        *,
        scheduler: Scheduler,
        records: Records,
        meters: Meters,
        fetch: Callable[[Fetch], None],
        on_plan: Callable[[], None],
        clock: Callable[[], float],
    ) -> None:
        self._runtime = runtime
        self._thread = thread
        self._scheduler = scheduler
        self._records = records
        self._meters = meters
        self._fetch = fetch
        self._on_plan = on_plan
        self._clock = clock
        self._masks = ThreadPoolExecutor(1, thread_name_prefix="masks")  # its thread begins with the first mask
        self._work = asyncio.Event()
        self._is_closing = False
        self.num_prefilled = 0
        self.prefill_rate = Rate()
        self.decode_rate = Rate()

    def wake(self) -> None:
        """There may be something to do: a request came, or a slot was freed."""
        self._work.set()

    def close(self) -> None:
        """Let `run` return once the step that runs is over."""
        self._is_closing = True
        self._masks.shutdown(wait=False)
        self._work.set()

    async def run(self) -> None:
        """Step after step until closed; sleeps while there is nothing to compute."""
        while not self._is_closing:
            now = self._clock()
            self._records.deliver(self._scheduler.expire(now), now)
            plan = self._scheduler.plan(now)
            releases = self._scheduler.take_releases()
            for fetch in self._scheduler.take_fetches():
                self._fetch(fetch)
            self._on_plan()
            if plan is not None:
                await self._step(plan, releases, now)
            elif releases:
                await self._release(releases)
            else:
                await self._sleep()

    async def _sleep(self) -> None:
        """Until there may be something to do."""
        self._work.clear()
        at = self._scheduler.next_release_at
        timer = None if at is None else asyncio.get_running_loop().call_later(at - self._clock(), self.wake)
        await self._work.wait()
        if timer is not None:
            timer.cancel()

    async def _step(self, plan: StepPlan, releases: tuple[int, ...], now: float) -> None:
        for begun in plan.begun:
            self._records.note_begun(begun.rid, begun.num_cached, now)
        takers = [_Taker(self._records[rid] if rid else None, choice) for rid, choice in plan.sequences]
        job = _Step(self._runtime, plan, takers, releases, self._clock, self._prepare_masks(plan, takers))
        try:
            outcome = await self._thread.run(job)
        except EdgeqwenError as error:
            self._fail(plan, error)
        except Exception as error:
            # Whatever a runtime raises, only the requests of its step may end with it. The text of a foreign error may
            # hold anything, so the client gets its type and the log the rest.
            logger.exception("a step failed")
            self._fail(plan, RuntimeFailed(f"the runtime failed in a step ({type(error).__name__})"))
        else:
            self._commit(plan, outcome)

    def _prepare_masks(self, plan: StepPlan, takers: Sequence[_Taker]) -> list[Future[None]]:
        """Begin with what is needed when the logits are there. From here, since a thread keeps to the processors of the
        one that starts it, and the engine thread may be bound to one. A plan that only fetches has no chunks.
        """
        return [
            self._masks.submit(taker.prepare)
            for taker, chunk in zip(takers, plan.batch.chunks, strict=False)
            if chunk.num_logits and taker.needs_preparation
        ]

    def _fail(self, plan: StepPlan, error: EdgeqwenError) -> None:
        now = self._clock()
        self._records.deliver(self._scheduler.fail(plan, error, now=now), now)

    def _commit(self, plan: StepPlan, outcome: StepOutcome) -> None:
        now = self._clock()
        tokens = [[draw.token if isinstance(draw, Sampled) else draw for draw in draws] for draws in outcome.draws]
        if plan.is_prefill:
            num_prefilled = sum(len(chunk.ids) for chunk in plan.batch.chunks)
            self.num_prefilled += num_prefilled
            self.prefill_rate.add(num_prefilled, outcome.duration_s)
        else:
            self.decode_rate.add(sum(map(len, tokens)), outcome.duration_s)
        self._meters.count_step(plan, outcome.duration_s)
        rounds = self._scheduler.commit(plan, tokens, duration_s=outcome.duration_s, now=now, saved=outcome.saved)
        for number, events in enumerate(rounds):
            self._records.deliver(events, now, outcome.of_round(number))

    async def _release(self, releases: tuple[int, ...]) -> None:
        try:
            await self._thread.run(lambda: _release(self._runtime, releases))
        except Exception:  # nothing waits for this, and the next use of the slot overwrites what it holds
            logger.exception("slots could not be released")


class _Taker:
    """Who gets what a chunk gives: a choice of a live request, or nobody."""

    def __init__(self, live: LiveRequest | None, choice: int) -> None:
        self._live = live
        self._choice = choice
        self._sampler = None if live is None else live.sampler(choice)

    @property
    def needs_preparation(self) -> bool:
        """Something can be worked out while the graph computes."""
        return self._sampler is not None and self._sampler.needs_preparation

    def prepare(self) -> None:
        """Work it out; on any thread."""
        assert self._sampler is not None
        self._sampler.prepare()

    def take(self, chunk: Chunk, result: StepResult, index: int) -> tuple[Draw, ...]:
        """What is drawn from the chunk's logits. Of hidden states nothing but an error is."""
        if chunk.num_hidden:
            assert self._live is not None
            try:
                self._live.push_hidden(self._choice, result.hidden[index])
            except RuntimeFailed as error:
                return (error,)
        return _draw(self._sampler, chunk, result.logits[index])


@dataclass(frozen=True, slots=True)
class _Step:
    """The job of the engine thread: release, save, load, copy, compute, draw (no sampler where nothing is drawn).

    `masks` are being worked out for the first row of each sampler that needs one; what goes wrong there shows again
    when the mask is used.
    """

    runtime: Runtime
    plan: StepPlan
    takers: Sequence[_Taker]
    releases: tuple[int, ...]
    clock: Callable[[], float]
    masks: Sequence[Future[None]]

    def __call__(self) -> StepOutcome:
        _release(self.runtime, self.releases)
        saved = self._read_saves()
        if loads := self.plan.loads:
            self.runtime.expect_kv(loads[0].slot, loads[0].start, loads[-1].stop)
        for load in loads:
            self.runtime.write_kv(load.slot, load.start, load.data)
        if self.plan.copy is not None:
            _copy(self.runtime, self.plan.copy)
        if not self.plan.batch.chunks:
            return StepOutcome((), 0.0, saved)
        started_at = self.clock()
        result = self.runtime.step(self.plan.batch)
        duration_s = self.clock() - started_at
        wait(self.masks)
        pairs = zip(self.takers, self.plan.batch.chunks, strict=True)
        draws = [taker.take(chunk, result, index) for index, (taker, chunk) in enumerate(pairs)]
        return StepOutcome(tuple(draws), duration_s, saved)

    def _read_saves(self) -> tuple[KVData, ...] | None:
        """None, for want of memory perhaps: that costs somebody time later, and nobody of this step an answer."""
        try:
            return tuple(self.runtime.read_kv(save.slot, save.start, save.stop) for save in self.plan.saves)
        except Exception:
            logger.exception("what a slot holds could not be saved")
            return None


def _draw(sampler: Sampler | None, chunk: Chunk, rows: Logits) -> tuple[Draw, ...]:
    """Row after row, as long as what is drawn is what the chunk goes on with: later rows follow from a wrong guess."""
    # ids    | last token | guess 1 | guess 2 |        row i is the one from which guess i + 1 is drawn
    # rows   |     0      |    1    |    2    |
    guesses = chunk.ids[len(chunk.ids) - len(rows) + 1 :]
    draws: list[Draw] = []
    for number, row in enumerate(rows):
        assert sampler is not None
        try:
            draw = sampler.sample(row)
        except RuntimeFailed as error:  # of this row alone; the others of the step are sound
            return (*draws, error)
        draws.append(draw)
        if number < len(guesses) and draw.token != guesses[number]:
            break
    return tuple(draws)


def _sampled(draw: Draw) -> Sampled | None:
    return draw if isinstance(draw, Sampled) else None


def _copy(runtime: Runtime, copy: SlotCopy) -> None:
    """In pieces, so that a long prompt does not stand in memory a third time."""
    for start in range(0, copy.length, COPY_TOKENS):
        stop = min(copy.length, start + COPY_TOKENS)
        runtime.write_kv(copy.dst, start, runtime.read_kv(copy.src, start, stop))


def _release(runtime: Runtime, slots: tuple[int, ...]) -> None:
    for slot in slots:
        runtime.release(slot)
