"""The engine over a scripted runtime: every accepted request ends exactly once, whatever happens to it.

What an answer's text must be is in `test_engine_text`.
"""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from edgeqwen.core.request import Delta, Done, Event, Failed, Started
from edgeqwen.engine.generation import GenerationInput
from edgeqwen.engine.settings import EngineLimits
from edgeqwen.engine.worker import EngineThread
from edgeqwen.errors import BadRequest, EdgeqwenError, ModelInvalid, RuntimeFailed
from edgeqwen.kvcache import SpareSlots
from edgeqwen.runtime.fake import FakeScript
from tests.engines import Listener, Rig, eos, ids, make_rig, running
from tests.wire import until


class Gate:
    """Stands for the runtime's sleep: a step (or a slice of loading) passes only when it is let through."""

    def __init__(self) -> None:
        self._permits = threading.Semaphore(0)
        self._is_open = False
        self.num_arrived = 0

    def __call__(self, _: float) -> None:
        self.num_arrived += 1
        if not self._is_open:
            assert self._permits.acquire(timeout=20)

    def let(self, num: int = 1) -> None:
        for _ in range(num):
            self._permits.release()

    def open(self) -> None:
        self._is_open = True
        self._permits.release(1000)

    async def arrival(self, num: int) -> None:
        """Wait until `num` steps have come to the gate."""
        async with asyncio.timeout(20):
            while self.num_arrived < num:  # noqa: ASYNC110 -- the other side is a thread
                await asyncio.sleep(0.001)


@asynccontextmanager
async def gated(script: FakeScript | None = None, **settings: Any) -> AsyncIterator[tuple[Rig, Gate]]:
    gate = Gate()
    async with running(script, sleep=gate, **settings) as rig:
        try:
            yield rig, gate
        finally:
            gate.open()


FOREVER = FakeScript(tokens=ids("Hello world"), loop=True)


async def test_a_request_starts_streams_and_is_done() -> None:
    async with running(FakeScript(tokens=(*ids("Hello world"), eos()))) as rig:
        generation, listener = await rig.submit(prompt="hi")
        done = await listener.done()
        started = listener.events[0]
        assert started == Started(generation.rid, 0, 2)
        assert [d.text for d in listener.deltas] == ["Hello", " ", "world"]
        assert done.finishes == ("stop",)
        assert (done.usage.prompt, done.usage.cached, done.usage.completion, done.usage.reasoning) == (2, 0, 4, 0)
        assert 0 <= done.ms.queue <= done.ms.ttft <= done.ms.total
        assert generation.prompt_ids == ids("hi")
        await rig.settle()


async def test_answers_do_not_depend_on_who_runs_beside() -> None:
    prompts = [f"prompt number {i} " * (1 + i % 3) for i in range(9)]
    async with running(FakeScript(num_slots=3, max_chunk=16)) as rig:
        alone = [(await rig.run(prompt=prompt, max_tokens=12, logprobs=True))[1] for prompt in prompts]
        together = [(await rig.submit(prompt=p, max_tokens=12, logprobs=True))[1] for p in prompts]
        for one, other in zip(alone, together, strict=True):
            await other.done()
            assert _tokens(one) == _tokens(other)
        assert any(len(batch.chunks) == 3 for batch in rig.runtime.batches), "they did run together"


def _tokens(listener: Listener) -> list[int]:
    return [logprob.token for delta in listener.deltas for logprob in delta.logprobs]


@pytest.mark.parametrize("num_steps", [0, 1, 2, 5], ids=["first chunk", "mid-prompt", "prompt done", "decoding"])
async def test_cancel_ends_a_request_within_a_step(num_steps: int) -> None:
    script = FakeScript(tokens=ids("Hello world"), loop=True, max_chunk=16)
    async with gated(script) as (rig, gate):
        generation, listener = await rig.submit(prompt="x" * 40)
        gate.let(num_steps)
        await gate.arrival(num_steps + 1)
        generation.cancel()
        assert (await listener.done()).finishes == ("cancelled",), "at once, while the step still runs"
        assert rig.inference.cancel(generation.rid, owner=None) == 0
        gate.let()
        await rig.settle()
        assert gate.num_arrived == num_steps + 1, "no further step"


async def test_a_waiting_request_is_cancelled_without_a_step() -> None:
    async with gated(FakeScript(tokens=ids("Hello"), loop=True, num_slots=1)) as (rig, gate):
        _, first = await rig.submit(max_tokens=2)
        await gate.arrival(1)
        second_generation, second = await rig.submit()
        _, third = await rig.submit(max_tokens=1)
        assert second.events == [Started(second_generation.rid, 0, 2)]
        assert isinstance(third.events[0], Started)
        assert third.events[0].queue == 1
        second_generation.cancel()
        done = await second.done()
        assert done.finishes == ("cancelled",)
        assert done.usage.completion == 0
        gate.let(3)
        assert (await first.done()).finishes == ("length",)
        assert (await third.done()).finishes == ("length",)


async def test_only_the_owner_or_an_admin_cancels() -> None:
    async with gated(FOREVER) as (rig, _):
        generation, listener = await rig.submit(owner="1000")
        assert rig.inference.cancel(generation.rid, owner="1001") == 0
        assert rig.inference.cancel("r0", owner=None) == 0
        assert not listener.over.is_set()
        assert rig.inference.cancel(generation.rid, owner="1000") == 1
        assert listener.over.is_set()


async def test_a_sink_may_cancel_its_own_request_and_others() -> None:
    async with running(FakeScript(tokens=(*ids("Hello world"), eos()), num_slots=3)) as rig:
        rids: list[str] = []
        seen: set[int] = set()

        def cancel(event: Event) -> None:
            if isinstance(event, Started):
                rids.append(event.rid)
            if isinstance(event, Delta):
                seen.add(event.choice)
            if isinstance(event, Delta) and event.choice == 0 and 1 in seen:  # choice 1's token of this step is to come
                for rid in rids:
                    rig.inference.cancel(rid, owner=None)

        _, other = await rig.submit(listener=Listener(on_event=cancel), ignore_eos=True)
        _, listener = await rig.submit(listener=Listener(on_event=cancel), n=2, logprobs=True, ignore_eos=True)
        assert (await listener.done()).finishes == ("cancelled", "cancelled")
        assert (await other.done()).finishes == ("cancelled",)
        assert (await rig.run())[0].finishes == ("stop",)
        await rig.settle()


@pytest.mark.parametrize("kind", [Started, Delta])
async def test_a_sink_may_cancel_before_the_first_step(kind: type[Event]) -> None:
    async with running(FOREVER) as rig:
        listener = Listener()

        def cancel(event: Event) -> None:
            started = listener.events[0]
            assert isinstance(started, Started)
            if isinstance(event, kind):
                assert rig.inference.cancel(started.rid, owner=None) == 1

        listener.on_event = cancel
        await rig.submit(listener=listener, n=2, echo=True)
        assert (await listener.done()).finishes == ("cancelled", "cancelled")
        assert len(listener.deltas) == (kind is Delta)
        assert rig.runtime.batches == []


async def test_choices_share_the_computed_prompt_and_answer_as_one_alone_would() -> None:
    """The scripted runtime's tokens follow from all tokens before them, so a wrong copy would show."""
    async with running() as rig:
        prompt = "word " * 40
        done, alone = await rig.run(prompt=prompt, max_tokens=12, temperature=0, cache=False)
        num_prompt = done.usage.prompt
        num_batches = len(rig.runtime.batches)
        _, three = await rig.run(prompt=prompt, max_tokens=12, temperature=0, n=3)
        assert [three.text(choice=choice) for choice in range(3)] == [alone.text()] * 3
        chunks = [chunk for batch in rig.runtime.batches[num_batches:] for chunk in batch.chunks]
        assert sum(len(chunk.ids) for chunk in chunks if chunk.stop <= num_prompt) == num_prompt + 2
        await rig.settle()


async def test_a_failing_step_fails_its_requests_alone_and_the_engine_goes_on() -> None:
    script = FakeScript(tokens=(*ids("Hello"), eos()), fail_at_step=1)
    async with running(script) as rig:
        _, first = await rig.submit()
        _, second = await rig.submit()
        failed = await first.end()
        assert isinstance(failed, Failed)
        assert failed.error.code == "engine"
        assert isinstance(failed.error, RuntimeFailed)
        assert (await second.done()).finishes == ("stop",)
        assert rig.inference.stats().totals["errors"] == 1
        assert rig.inference.state == "ready"
        await rig.settle()


async def test_a_fault_of_the_runtime_is_a_failure_too() -> None:
    async with running(FakeScript(tokens=(*ids("Hello"), eos()))) as rig:
        rig.runtime.step = lambda batch: 1 / 0  # type: ignore[method-assign,assignment,return-value]  # a broken runtime
        _, listener = await rig.submit()
        failed = await listener.end()
        assert isinstance(failed, Failed)
        assert failed.error.message == "the runtime failed in a step (ZeroDivisionError)"
        del rig.runtime.step
        assert (await rig.run())[0].finishes == ("stop",)


async def test_logits_that_are_not_numbers_fail_the_request() -> None:
    async with running(FakeScript(tokens=ids("Hello"), nan_at_step=2, loop=True)) as rig:
        _, listener = await rig.submit()
        failed = await listener.end()
        assert isinstance(failed, Failed)
        assert (failed.error.code, failed.error.message) == ("engine", "the model gave logits that are not numbers")
        await rig.settle()


async def test_a_hang_stops_neither_deadlines_nor_cancellations() -> None:
    async with gated(FOREVER) as (rig, gate):
        _, late = await rig.submit(deadline_ms=30)
        await gate.arrival(1)
        generation, cancelled = await rig.submit()
        assert (await late.done()).finishes == ("deadline",)
        generation.cancel()
        assert (await cancelled.done()).finishes == ("cancelled",)
        assert rig.runtime.batches[-1] is rig.runtime.batches[0], "still in the first step"
        _, after = await rig.submit(max_tokens=2)
        gate.open()
        assert (await after.done()).finishes == ("length",)
        await rig.settle()


async def test_a_deadline_comes_true_for_a_running_and_for_a_queued_request() -> None:
    async with running(FakeScript(tokens=ids("Hello"), loop=True, step_s=0.02, num_slots=1)) as rig:
        _, first = await rig.submit(deadline_ms=600, ignore_eos=True, speculate=False)
        _, second = await rig.submit(deadline_ms=30)
        done = await second.done()
        assert done.finishes == ("deadline",)
        assert done.usage.completion == 0
        assert done.ms.total >= 30
        done = await first.done()
        assert done.finishes == ("deadline",)
        assert done.usage.completion > 0
        assert first.text()


async def test_deadlines_are_on_the_engines_clock() -> None:
    now = [0.0]

    def pass_time(seconds: float) -> None:
        now[0] += seconds

    script = FakeScript(tokens=ids("Hello"), loop=True, step_s=1.0)
    async with running(script, sleep=pass_time, clock=lambda: now[0]) as rig:
        done, _ = await rig.run(deadline_ms=5500, speculate=False)
        assert done.finishes == ("deadline",)
        assert (done.usage.completion, done.ms.ttft, done.ms.total) == (6, 1000, 6000)


async def test_a_timer_that_comes_before_the_clock_says_so_comes_again() -> None:
    async with gated(FOREVER, clock=lambda: time.monotonic() / 3) as (rig, gate):
        _, listener = await rig.submit(deadline_ms=20)
        await gate.arrival(1)
        done = await listener.done()
        assert done.finishes == ("deadline",)
        assert done.ms.total >= 20


async def test_a_request_that_is_over_leaves_no_timer() -> None:
    async with gated(FOREVER) as (rig, gate):
        generation, listener = await rig.submit(max_tokens=1)
        engine = rig.inference._engine
        assert engine is not None
        timer = engine._records[generation.rid].timer
        assert timer is not None
        assert not timer.cancelled()
        gate.open()
        await listener.done()
        assert timer.cancelled()


async def test_requests_queue_while_the_model_loads() -> None:
    gate = Gate()
    rig = make_rig(FakeScript(tokens=(*ids("Hello"), eos()), load_s=1.0), sleep=gate)
    start = asyncio.create_task(rig.inference.start())
    await gate.arrival(1)
    assert (rig.inference.state, rig.inference.context) == ("loading", 0)
    submission = asyncio.create_task(rig.submit())
    with pytest.raises(EdgeqwenError) as caught:
        await rig.submit(wait=False)
    assert (caught.value.code, caught.value.retry_ms) == ("loading", 1500)
    with pytest.raises(BadRequest):
        await rig.submit(top_k=-1)
    await asyncio.sleep(0.01)
    assert rig.inference.stats().queued == 1
    gate.let(10)
    await gate.arrival(11)
    assert rig.inference.progress == 0.5
    assert not submission.done()
    gate.open()
    await start
    assert (rig.inference.state, rig.inference.progress, rig.inference.context) == ("ready", 1.0, 256)
    _, listener = await submission
    assert (await listener.done()).finishes == ("stop",)
    await rig.submit(wait=False)
    await rig.inference.close()


async def test_a_deadline_comes_true_while_the_model_loads() -> None:
    gate = Gate()
    rig = make_rig(FakeScript(load_s=1.0), sleep=gate)
    start = asyncio.create_task(rig.inference.start())
    generation, listener = await rig.submit(deadline_ms=20, n=2)
    done = await listener.done()
    assert done.finishes == ("deadline", "deadline")
    assert done.usage.prompt == len(generation.prompt_ids) == 2
    assert rig.inference.stats().queued == 0
    gate.open()
    await start
    await rig.inference.close()


async def test_a_caller_that_gives_up_while_the_model_loads_leaves_nothing_behind() -> None:
    gate = Gate()
    rig = make_rig(FakeScript(load_s=1.0), sleep=gate, limits=EngineLimits(per_owner=1))
    start = asyncio.create_task(rig.inference.start())
    await gate.arrival(1)
    listener = Listener()
    submission = asyncio.create_task(rig.submit(listener=listener))
    await asyncio.sleep(0.01)
    submission.cancel()
    with pytest.raises(asyncio.CancelledError):
        await submission
    assert rig.inference.stats().queued == 0
    gate.open()
    await start
    await rig.run(max_tokens=1)
    assert listener.events == []
    await rig.inference.close()


async def test_a_load_that_fails_fails_those_who_wait() -> None:
    gate = Gate()
    rig = make_rig(FakeScript(load_s=1.0, fail_load="weights.bin is cut off"), sleep=gate)
    start = asyncio.create_task(rig.inference.start())
    submission = asyncio.create_task(rig.submit())
    await gate.arrival(1)
    await asyncio.sleep(0.01)
    gate.open()
    with pytest.raises(RuntimeFailed, match=r"weights\.bin"):
        await start
    with pytest.raises(EdgeqwenError) as caught:
        await submission
    assert caught.value.code == "engine"
    assert rig.inference.state == "failed"
    with pytest.raises(EdgeqwenError) as caught:
        await rig.submit()
    assert caught.value.code == "engine"
    await rig.inference.close()
    assert rig.inference.state == "failed"


async def test_stopping_while_the_model_loads_ends_the_load() -> None:
    gate = Gate()
    rig = make_rig(FakeScript(load_s=1.0), sleep=gate)
    start = asyncio.create_task(rig.inference.start())
    submission = asyncio.create_task(rig.submit())
    await gate.arrival(1)
    await asyncio.sleep(0.01)
    await rig.inference.drain(5.0)
    with pytest.raises(EdgeqwenError) as caught:
        await submission
    assert caught.value.code == "draining"
    gate.open()
    with pytest.raises(EdgeqwenError, match="stopped") as caught:
        await start
    assert caught.value.code == "draining"
    assert rig.runtime.is_closed
    await rig.inference.close()


async def test_draining_lets_requests_finish_and_refuses_new_ones() -> None:
    async with gated(FakeScript(tokens=ids("Hello"), loop=True)) as (rig, gate):
        _, listener = await rig.submit(max_tokens=3)
        drain = asyncio.create_task(rig.inference.drain(20.0))
        await gate.arrival(1)
        assert rig.inference.state == "draining"
        with pytest.raises(EdgeqwenError) as caught:
            await rig.submit()
        assert caught.value.code == "draining"
        assert not drain.done()
        gate.open()
        await drain
        assert (await listener.done()).finishes == ("length",)


async def test_draining_cancels_what_is_left_in_the_end() -> None:
    async with running(FakeScript(tokens=ids("Hello"), loop=True, num_slots=1, step_s=0.005)) as rig:
        listeners = [(await rig.submit(max_tokens=200, speculate=False))[1] for _ in range(3)]
        await until(lambda: bool(listeners[0].deltas))
        await rig.inference.drain(0.05)
        assert [(await listener.done()).finishes for listener in listeners] == [("cancelled",)] * 3
        assert listeners[0].text()


async def test_closing_cancels_everything_and_frees_the_runtime() -> None:
    async with gated(FOREVER) as (rig, gate):
        listeners = [(await rig.submit())[1] for _ in range(3)]
        await gate.arrival(1)
        close = asyncio.create_task(rig.inference.close())
        assert [(await listener.done()).finishes for listener in listeners] == [("cancelled",)] * 3
        gate.open()
        await close
        assert rig.runtime.is_closed
        with pytest.raises(EdgeqwenError) as caught:
            await rig.inference.tokenize("x", special=False)
        assert caught.value.code == "draining"


async def test_full_queues_and_shares_are_refused() -> None:
    limits = EngineLimits(queue=2, per_owner=2)
    async with gated(FakeScript(tokens=ids("Hello"), loop=True, num_slots=1), limits=limits) as (rig, gate):
        await rig.submit(owner="a")
        await gate.arrival(1)
        await rig.submit(owner="a")
        with pytest.raises(EdgeqwenError) as caught:
            await rig.submit(owner="a")
        assert caught.value.code == "quota"
        results = await asyncio.gather(*(rig.submit(owner=o) for o in "bcd"), return_exceptions=True)
        refused = [result for result in results if isinstance(result, EdgeqwenError)]
        assert [error.code for error in refused] == ["busy", "busy"], "those being tokenised count"
        assert all(error.retry_ms for error in refused)
        assert (rig.inference.stats().running, rig.inference.stats().queued) == (1, 2)


async def test_a_refused_request_leaves_no_trace() -> None:
    async with running() as rig:
        listener = Listener()
        for given in ({"prompt": "x" * 300}, {"max_tokens": 300}, {"tokens": (10**6,)}, {"n": 9}):
            with pytest.raises(EdgeqwenError):
                await rig.submit(listener=listener, **given)
        with pytest.raises(BadRequest, match="must be"):
            await rig.submit(listener=listener, messages=({"role": "robot", "content": "x"},))
        stats = rig.inference.stats()
        assert (stats.running, stats.queued, dict(stats.totals)) == (0, 0, {"requests": 0, "errors": 0, "tokens": 0})
        assert listener.events == []


async def test_a_receiver_that_raises_loses_its_request_and_nobody_elses() -> None:
    def broken(event: Event) -> None:
        if isinstance(event, Delta):
            raise OSError("gone")

    async with running(FOREVER) as rig:
        await rig.inference.submit(GenerationInput(prompt="hi"), owner="a", sink=broken)
        done, _ = await rig.run(max_tokens=5)
        assert done.finishes == ("length",)
        assert rig.inference.stats().totals["tokens"] == 1 + 5
        await rig.settle()
        assert rig.inference.stats().running == 0


async def test_choices_are_drawn_apart_and_reproducibly() -> None:
    async with running(FakeScript(margin=0.1, num_slots=2)) as rig:
        given = {"n": 3, "temperature": 1.0, "seed": 7, "max_tokens": 10}
        done, first = await rig.run(**given)
        _, again = await rig.run(**given)
        assert done.finishes == ("length",) * 3
        assert done.usage.prompt == 2
        assert done.usage.completion == 30
        texts = [first.text(choice=i) for i in range(3)]
        assert texts == [again.text(choice=i) for i in range(3)]
        assert len(set(texts)) == 3


async def test_the_stats_count_what_happened() -> None:
    async with gated(FakeScript(tokens=ids("Hello"), loop=True, kv_bytes_per_token=10)) as (rig, gate):
        await rig.submit(prompt="abcd", max_tokens=3)
        gate.let(2)
        await gate.arrival(3)
        stats = rig.inference.stats()
        assert (stats.running, stats.queued, stats.kv_bytes) == (1, 0, 50)
        assert dict(stats.totals) == {"requests": 1, "errors": 0, "tokens": 2}
        assert stats.tok_s["prefill"] > 0
        assert stats.tok_s["decode"] > 0


async def test_a_models_defaults_out_of_range_are_refused_at_the_start() -> None:
    with pytest.raises(ModelInvalid, match="top_p"):
        make_rig(defaults={"top_p": 2})


async def test_should_the_loop_break_no_request_waits_for_ever() -> None:
    async with gated(FOREVER) as (rig, gate):
        _, listener = await rig.submit()
        await gate.arrival(1)
        engine = rig.inference._engine
        assert engine is not None
        engine._scheduler.plan = lambda now: 1 / 0  # type: ignore[method-assign,assignment,return-value]  # a fault of ours
        gate.let()
        failed = await listener.end()
        assert isinstance(failed, Failed)
        assert failed.error.code == "engine"
        assert rig.inference.state == "failed"


async def test_a_hundred_random_requests_each_end_exactly_once() -> None:
    rng = random.Random(5)
    script = FakeScript(num_slots=4, max_chunk=24, capacity=200, fail_at_step=(40, 90), nan_at_step=(70,))
    limits = EngineLimits(queue=30, per_owner=40)
    listeners: list[Listener] = []
    refused: list[str] = []

    async def client(rig: Rig) -> None:
        listener = Listener()
        given: dict[str, Any] = {
            "prompt": "x" * rng.randint(1, 80),
            "max_tokens": rng.randint(1, 30),
            "n": rng.choice([1, 1, 2, 3]),
            "temperature": rng.choice([0.0, 1.5]),
            "stop": rng.choice([(), ("e",)]),
            "deadline_ms": rng.choice([600_000, 5]),
        }
        pause, is_cancelled = rng.random() * 0.05, rng.random() < 0.4
        await asyncio.sleep(rng.random() * 0.1)
        try:
            generation, _ = await rig.submit(owner=rng.choice("abc"), listener=listener, **given)
        except EdgeqwenError as error:
            refused.append(error.code)
            return
        listeners.append(listener)
        if is_cancelled:
            await asyncio.sleep(pause)
            generation.cancel()
        last = await listener.end()
        if isinstance(last, Done):
            assert len(last.finishes) == given["n"]
            assert last.usage.completion <= given["n"] * given["max_tokens"]

    async with running(script, limits=limits) as rig:
        await asyncio.gather(*(client(rig) for _ in range(100)))
        await rig.settle()
        engine = rig.inference._engine
        assert engine is not None
        engine._scheduler.check()
        assert engine._scheduler.is_idle
        stats = rig.inference.stats()
        assert (stats.running, stats.queued, stats.kv["reserved_bytes"]) == (0, 0, 0)
        assert stats.kv_bytes == stats.kv["block_bytes"] + stats.kv["spare_bytes"]
        assert stats.totals["requests"] == len(listeners)
    assert len(listeners) + len(refused) == 100
    assert set(refused) <= {"busy", "quota"}
    kinds = {
        reason
        for listener in listeners
        if isinstance(listener.events[-1], Done)
        for reason in listener.events[-1].finishes
    }
    assert kinds >= {"length", "cancelled"}
    assert any(isinstance(listener.events[-1], Failed) for listener in listeners)


async def test_the_engine_thread_hands_back_results_and_errors_and_drops_the_unwanted() -> None:
    thread = EngineThread("test")
    assert thread.join(0.0)
    thread.start()
    assert await thread.run(threading.current_thread) is not threading.current_thread()
    with pytest.raises(KeyError):
        await thread.run(lambda: dict[str, int]()["x"])
    for strange in (StopIteration(), SystemExit()):
        with pytest.raises(RuntimeError, match=type(strange).__name__):
            await thread.run(lambda error=strange: _raise(error))  # type: ignore[misc]  # bound in the loop
    entered, leave = threading.Event(), threading.Event()

    def wait() -> None:
        entered.set()
        leave.wait(20)

    running_job = thread.run(wait)
    waiting_job = thread.run(lambda: pytest.fail("a cancelled job ran"))
    await asyncio.to_thread(entered.wait, 20)
    running_job.cancel()
    waiting_job.cancel()
    assert not thread.join(0.0)
    leave.set()
    assert await thread.run(lambda: 5) == 5
    thread.stop()
    assert await asyncio.to_thread(thread.join, 20)


def _raise(error: BaseException) -> None:
    raise error


async def test_a_slot_that_was_left_is_released_after_a_while_with_nothing_else_to_do() -> None:
    async with running() as rig:
        engine = rig.inference._engine
        assert engine is not None
        engine._store.spares = SpareSlots(spare_s=0.2)
        await rig.run(prompt="hello")
        async with asyncio.timeout(20):
            while not rig.inference.stats().kv["spare_bytes"]:  # noqa: ASYNC110 -- nothing tells
                await asyncio.sleep(0.001)
            while rig.runtime.held_slots:  # noqa: ASYNC110 -- the runtime lives on another thread and has no event
                await asyncio.sleep(0.001)
        assert rig.inference.stats().kv["spare_bytes"] == 0


async def test_what_is_known_of_a_prompt_may_take_several_plans_to_fetch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "edgeqwen.scheduler.pieces.MAX_BYTES", 1
    )  # a block at a time, and nothing computed till the last
    async with running(FakeScript(num_slots=1, kv_bytes_per_token=64)) as rig:
        prompt, other = tuple(range(40, 240)), tuple(range(30, 230))
        first = await rig.run(tokens=prompt, max_tokens=4, temperature=0)
        await rig.run(tokens=other, max_tokens=4)
        done, again = await rig.run(tokens=prompt, max_tokens=4, temperature=0)
        assert done.usage.cached == len(prompt) - 1
        assert again.text() == first[1].text()
        await rig.settle()
