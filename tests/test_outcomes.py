"""Every request that comes in is told once: how it ended, or why it was refused."""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass, field
from typing import Any

import pytest

from edgeqwen.core.request import Done, Event
from edgeqwen.engine.embeddings import EmbeddingEnded, EmbeddingInput
from edgeqwen.engine.generation import GenerationInput
from edgeqwen.engine.outcomes import Outcome, Outcomes, Refusal, harshest
from edgeqwen.engine.settings import EngineLimits
from edgeqwen.errors import EdgeqwenError, RuntimeFailed
from edgeqwen.runtime.fake import FakeScript
from edgeqwen.scheduler import Scheduler
from tests.engines import Listener, Rig, make_rig, running


@dataclass
class Told:
    """What was told of one engine."""

    outcomes: list[Outcome] = field(default_factory=list)
    refusals: list[Refusal] = field(default_factory=list)

    @classmethod
    def of(cls, rig: Rig) -> Told:
        told = cls()
        rig.inference.meters.outcomes.subscribe(told.outcomes.append, told.refusals.append)
        return told


class SteppedClock:
    """Moves when a step of the runtime sleeps, and at no other time."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, duration_s: float) -> None:
        self.now += duration_s


async def test_an_outcome_says_how_a_request_ended_and_what_it_took() -> None:
    clock = SteppedClock()
    script = FakeScript(step_s=0.25)
    async with running(script, clock=clock, sleep=clock.sleep, speculates=False) as rig:
        told = Told.of(rig)
        generation, listener = await rig.submit(owner="7", prompt="some words", max_tokens=3)
        done = await listener.done()
    (outcome,) = told.outcomes
    assert outcome == Outcome(
        rid=generation.rid,
        owner="7",
        kind="generation",
        outcome="length",
        queue_s=0.0,
        first_token_s=0.25,
        total_s=0.75,
        num_prompt=done.usage.prompt,
        num_cached=0,
        num_generated=3,
    )
    assert not told.refusals


async def test_the_time_between_two_tokens_of_one_choice_is_counted_as_they_come() -> None:
    clock = SteppedClock()
    async with running(FakeScript(step_s=0.25), clock=clock, sleep=clock.sleep, speculates=False) as rig:
        gaps = rig.inference.meters.token_gap_s
        await rig.run(max_tokens=1)
        assert gaps.count == 0, "one token has nothing before it"
        await rig.run(max_tokens=4)
        assert (gaps.count, gaps.sum) == (3, 0.75)
        await rig.run(max_tokens=4, n=2)
        assert gaps.count == 9, "of each choice its own"


async def test_steps_are_counted_by_kind_with_what_they_took() -> None:
    clock = SteppedClock()
    async with running(FakeScript(step_s=0.25), clock=clock, sleep=clock.sleep, speculates=False) as rig:
        await rig.run(max_tokens=4)
        meters = rig.inference.meters
    assert {kind: (step.count, step.sum) for kind, step in meters.step_s.items()} == {
        "prefill": (1, 0.25),
        "decode": (3, 0.75),
    }
    assert meters.step_sequences["decode"].cumulative()[0] == 3, "one sequence in each"


async def test_known_tokens_are_told_as_cached() -> None:
    async with running() as rig:
        told = Told.of(rig)
        await rig.run(prompt="the same words again", max_tokens=1)
        await rig.run(prompt="the same words again", max_tokens=1)
    first, second = told.outcomes
    assert (first.num_cached, second.num_cached > 0) == (0, True)
    assert first.num_prompt == second.num_prompt


async def test_an_error_after_acceptance_is_an_outcome_by_its_code() -> None:
    async with running(FakeScript(fail_at_step=2)) as rig:
        told = Told.of(rig)
        _, listener = await rig.submit(max_tokens=5)
        await listener.end()
    assert [outcome.outcome for outcome in told.outcomes] == ["engine"]
    assert not told.refusals


@pytest.mark.parametrize("given", [{"temperature": -1.0}, {"prompt": "x" * 1000}], ids=["bad_request", "too_long"])
async def test_a_request_that_is_not_accepted_is_a_refusal(
    given: dict[str, Any], request: pytest.FixtureRequest
) -> None:
    async with running() as rig:
        told = Told.of(rig)
        with pytest.raises(EdgeqwenError):
            await rig.submit(**given)
    assert told.refusals == [Refusal("1000", "generation", request.node.callspec.id)]
    assert not told.outcomes


async def test_a_full_share_is_a_refusal_of_its_owner() -> None:
    async with running(FakeScript(step_s=0.01), limits=EngineLimits(per_owner=1)) as rig:
        told = Told.of(rig)
        generation, _ = await rig.submit(max_tokens=200)
        with pytest.raises(EdgeqwenError):
            await rig.submit()
        generation.cancel()
    assert told.refusals == [Refusal("1000", "generation", "quota")]
    assert [outcome.outcome for outcome in told.outcomes] == ["cancelled"]


async def test_embeddings_are_told_as_such_whatever_becomes_of_them() -> None:
    async with running() as rig:
        told = Told.of(rig)
        await rig.inference.embed(EmbeddingInput(texts=("one", "two")), owner="5")
        with pytest.raises(EdgeqwenError):
            await rig.inference.embed(EmbeddingInput(texts=("",)), owner="5")
    (outcome,) = told.outcomes
    assert (outcome.kind, outcome.owner, outcome.outcome, outcome.num_generated) == ("embedding", "5", "stop", 0)
    assert (outcome.first_token_s, outcome.num_prompt > 0) == (None, True)
    assert told.refusals == [Refusal("5", "embedding", "bad_request")]


async def test_who_waits_for_a_model_that_does_not_come_in_time_is_told_of_once() -> None:
    rig = make_rig(FakeScript(load_s=0.3))
    told = Told.of(rig)
    loading = asyncio.create_task(rig.inference.start())
    await asyncio.sleep(0)
    _, listener = await rig.submit(deadline_ms=1)
    await listener.done()
    with pytest.raises(EmbeddingEnded):
        await rig.inference.embed(EmbeddingInput(texts=("one",), deadline_ms=1), owner="1000")
    waiting = asyncio.create_task(rig.inference.submit(GenerationInput(prompt="hi"), owner="1000", sink=Listener()))
    await asyncio.sleep(0.01)
    waiting.cancel()
    await asyncio.wait({waiting})
    await loading
    await rig.inference.close()
    told_of = [(outcome.kind, outcome.outcome) for outcome in told.outcomes]
    assert told_of == [("generation", "deadline"), ("embedding", "deadline"), ("generation", "cancelled")]
    assert not told.refusals


async def test_requests_that_a_broken_engine_fails_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise KeyError("the scheduler is wrong")

    async with running(FakeScript(step_s=0.01)) as rig:
        told = Told.of(rig)
        _, listener = await rig.submit(max_tokens=100)
        monkeypatch.setattr(Scheduler, "plan", fail)
        await listener.end()
        with pytest.raises(RuntimeFailed):
            await rig.submit()
    assert [outcome.outcome for outcome in told.outcomes] == ["engine"]
    assert told.refusals == [Refusal("1000", "generation", "engine")]


async def test_the_meters_go_on_when_the_model_has_slept() -> None:
    async with running() as rig:
        told = Told.of(rig)
        await rig.run(max_tokens=3)
        await rig.asleep()
        await rig.run(max_tokens=3)
    assert len(told.outcomes) == 2
    assert rig.inference.meters.token_gap_s.count == 4


async def test_a_listener_that_raises_harms_neither_request_nor_other_listeners() -> None:
    def broken(_: object) -> None:
        raise ValueError("no")

    async with running() as rig:
        rig.inference.meters.outcomes.subscribe(broken, broken)
        told = Told.of(rig)
        done, _ = await rig.run(max_tokens=2)
        with pytest.raises(EdgeqwenError):
            await rig.submit(temperature=-1.0)
    assert done.finishes == ("length",)
    assert (len(told.outcomes), len(told.refusals)) == (1, 1)


async def test_the_sink_has_its_last_event_before_others_are_told() -> None:
    async with running() as rig:
        order: list[str] = []

        def on_event(event: Event) -> None:
            if isinstance(event, Done):
                order.append("sink")

        rig.inference.meters.outcomes.subscribe(lambda _: order.append("told"))
        await rig.run(listener=Listener(on_event=on_event), max_tokens=1)
    assert order == ["sink", "told"]


@pytest.mark.parametrize("seed", range(4))
async def test_whatever_happens_each_request_is_told_once(seed: int) -> None:
    rng = random.Random(seed)
    async with running(FakeScript(step_s=0.001, fail_at_step=(30, 70)), limits=EngineLimits(queue=6)) as rig:
        told = Told.of(rig)
        accepted: list[str] = []
        num_asked = 0

        async def one() -> None:
            nonlocal num_asked
            num_asked += 1  # a task that is cancelled before its first step asks for nothing
            max_tokens = rng.choice([-1, 1, 5, 20])
            if rng.random() < 0.3:
                given = EmbeddingInput(texts=("a text",) * rng.randint(0, 3), deadline_ms=rng.choice([1, 1000]))
                await rig.inference.embed(given, owner="1000")
                return
            generation, listener = await rig.submit(max_tokens=max_tokens, deadline_ms=rng.choice([1, 3, 5000]))
            accepted.append(generation.rid)
            if rng.random() < 0.3:
                await asyncio.sleep(rng.random() / 100)
                generation.cancel()
            await listener.end()

        tasks = []
        for _ in range(60):
            tasks.append(asyncio.create_task(one()))
            await asyncio.sleep(rng.random() / 200)
            if rng.random() < 0.1:
                rng.choice(tasks).cancel()
        await asyncio.wait(tasks, timeout=20)
        await rig.idle()
    rids = [outcome.rid for outcome in told.outcomes if outcome.rid]
    assert len(rids) == len(set(rids))
    assert set(accepted) <= set(rids)
    assert len(told.outcomes) + len(told.refusals) == num_asked
    assert told.refusals
    assert len({outcome.outcome for outcome in told.outcomes}) >= 3


def test_a_request_is_called_by_the_harshest_end_of_its_choices() -> None:
    assert harshest(("stop", "deadline", "length")) == "deadline"
    assert harshest(("stop", "tool_calls")) == "tool_calls"


def test_nobody_need_listen_to_refusals() -> None:
    outcomes = Outcomes()
    outcomes.subscribe(lambda _: None)
    outcomes.refuse(Refusal("1", "generation", "busy"))
