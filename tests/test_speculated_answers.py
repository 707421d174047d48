"""Answers with guesses ahead are the answers without, token by token, and come in fewer steps where they repeat.

Time is the scripted runtime's own, so speeds are exact. The last tests do the same with a real model.
"""

from __future__ import annotations

import asyncio
import functools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgeqwen.core.package import open_package
from edgeqwen.core.request import Delta, Done, Event, Failed, Started
from edgeqwen.core.step import Batch, StepResult
from edgeqwen.engine.generation import GenerationInput
from edgeqwen.engine.inference import Inference
from edgeqwen.engine.settings import EngineLimits, ModelFiles
from edgeqwen.errors import RuntimeFailed
from edgeqwen.runtime.fake import FakeRuntime, FakeScript
from edgeqwen.runtime.onnx import OnnxOptions, OnnxRuntime
from edgeqwen.text import ChatTemplate, Tokenizer
from tests.engines import Listener, Rig, eos, ids, running
from tests.models import needs_row_invariance, smollm2_package

PHRASE = "the fox and the other fox think of the world, not of the end of it; "


def outcome(listener: Listener, choices: int) -> dict[str, Any]:
    """All that a client is told, but for times: the deltas of each choice, and how it ended. How much of a prompt was
    known is a matter of time, too: whether another request with the same one was over when this one began.
    """
    last = listener.events[-1]
    started = listener.events[0]
    assert isinstance(started, Started)
    return {
        "deltas": [[d for d in listener.deltas if d.choice == choice] for choice in range(choices)],
        "end": (last.finishes, replace(last.usage, cached=0)) if isinstance(last, Done) else str(last),
        "terminals": sum(isinstance(event, Done | Failed) for event in listener.events),
    }


@dataclass(frozen=True)
class Case:
    """What is asked of one engine at once."""

    script: FakeScript
    requests: tuple[dict[str, Any], ...]
    cancel_after: tuple[int, ...] = ()

    async def answers(self, *, speculates: bool) -> tuple[list[dict[str, Any]], Rig]:
        async with running(self.script, speculates=speculates, defaults={}) as rig:
            listeners = []
            for index, request in enumerate(self.requests):
                # How far the other choices are when one of them comes to a delta is a matter of time.
                after = self.cancel_after[index] if index < len(self.cancel_after) and "n" not in request else 0
                listener = Listener()
                listener.on_event = functools.partial(_cancel, rig, listener, after)
                await rig.submit(listener=listener, **request)
                listeners.append(listener)
            for listener in listeners:
                await listener.end()
            await rig.settle()
            assert rig.inference.stats().running == 0
        return [outcome(one, asked.get("n", 1)) for one, asked in zip(listeners, self.requests, strict=True)], rig


def _cancel(rig: Rig, listener: Listener, after: int, event: Event) -> None:
    """The client hangs up at the delta number `after`."""
    if isinstance(event, Delta) and len(listener.deltas) == after:
        assert isinstance(listener.events[0], Started)
        rig.inference.cancel(listener.events[0].rid, owner=None)


ALPHABET = ids("the fox and of it; Hello own world")
tokens = st.lists(st.sampled_from(ALPHABET), min_size=2, max_size=8)


@st.composite
def scripts(draw: st.DrawFn) -> tuple[int, ...]:
    """What repeats itself in pieces, with other tokens between and perhaps an end."""
    pieces = draw(st.lists(tokens, min_size=1, max_size=3))
    script: list[int] = []
    for index in draw(st.lists(st.integers(0, 5), min_size=1, max_size=10)):
        script += pieces[index] if index < len(pieces) else [draw(st.sampled_from([*ALPHABET, eos()]))]
    return tuple(script)


requests = st.fixed_dictionaries(
    {
        "prompt": st.sampled_from([PHRASE, "the fox and the fox", "Hello own world; Hello own world", "x"]),
        "max_tokens": st.integers(1, 40),
        "temperature": st.sampled_from([0.0, 0.0, 0.7, 1.5]),
        "seed": st.integers(0, 3),
    },
    optional={
        "stop": st.sampled_from([("fox",), ("of it", "and th"), ("e", "zz"), ("own world; H",)]),
        "min_tokens": st.just(1),
        "n": st.integers(1, 3),
        "logprobs": st.just(True),
        "ignore_eos": st.booleans(),
        "top_k": st.sampled_from([1, 5]),
        "presence_penalty": st.sampled_from([0.0, 0.5]),
        "repetition_penalty": st.sampled_from([1.0, 1.1]),
        "echo": st.booleans(),
    },
)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """All sequences say the same: of several scripts, which one a sequence says would be a matter of time."""
    script = FakeScript(
        scripts=tuple(draw(st.lists(scripts(), max_size=1))),
        loop=draw(st.booleans()),
        eos=draw(st.sampled_from([None, eos()])),
        margin=draw(st.sampled_from([0.5, 4.0, 40.0])),
        num_slots=draw(st.integers(1, 4)),
        max_chunk=draw(st.sampled_from([3, 16, 64])),
    )
    asked = draw(st.lists(requests, min_size=1, max_size=4))
    return Case(script, tuple(asked), tuple(draw(st.lists(st.integers(0, 12), max_size=4))))


@settings(max_examples=150, deadline=None)
@given(cases())
def test_answers_are_the_same_with_and_without_guesses(case: Case) -> None:
    async def both() -> None:
        without, _ = await case.answers(speculates=False)
        answers, rig = await case.answers(speculates=True)
        assert answers == without
        assert all(answer["terminals"] == 1 for answer in answers)
        guesses = rig.inference.stats().speculation
        assert 0 <= guesses["accepted"] <= guesses["drafted"]

    asyncio.run(both())


async def test_a_stop_string_ends_the_text_within_a_step_of_many_tokens() -> None:
    script = FakeScript(tokens=ids(PHRASE), loop=True)
    case = Case(script, ({"prompt": PHRASE * 2, "stop": ("world",), "max_tokens": 100, "temperature": 0},))
    (answer,), rig = await case.answers(speculates=True)
    assert "".join(delta.text for delta in answer["deltas"][0]) == PHRASE.split("world", maxsplit=1)[0]
    finishes, usage = answer["end"]
    assert finishes == ("stop",)
    assert usage.completion == len(ids(PHRASE.split("world", maxsplit=1)[0])) + 1
    last = rig.runtime.batches[-1].chunks[0]
    assert last.num_logits > 1
    assert last.stop > usage.prompt + usage.completion, "the step went on behind the stop string"


async def test_an_end_token_ends_the_answer_within_a_step_of_many_tokens() -> None:
    script = FakeScript(tokens=(*ids(PHRASE)[:20], eos(), *ids(PHRASE)))
    asked = {"prompt": PHRASE * 2, "max_tokens": 100, "temperature": 0}
    (answer,), rig = await Case(script, (asked,)).answers(speculates=True)
    finishes, usage = answer["end"]
    assert (finishes, usage.completion) == (("stop",), 21)
    assert rig.runtime.batches[-1].chunks[0].num_logits > 1


async def test_a_failure_within_a_step_comes_after_the_tokens_before_it() -> None:
    """The row of one position is not a number: what came before it is delivered, as if there had been more steps."""

    async def answer(*, speculates: bool) -> tuple[list[Delta], Event]:
        async with running(FakeScript(tokens=ids(PHRASE), loop=True), speculates=speculates) as rig:
            rig.runtime.step = functools.partial(_poisoned, rig.runtime.step, at=len(ids(PHRASE)) + 17)  # type: ignore[method-assign]  # a faulty model
            _, listener = await rig.submit(prompt=PHRASE, max_tokens=60)
            last = await listener.end()
            assert isinstance(last, Failed)
            assert isinstance(last.error, RuntimeFailed)
            await rig.settle()
            return listener.deltas, last

    assert (await answer(speculates=True))[0] == (await answer(speculates=False))[0] != []


def _poisoned(step: Callable[[Batch], StepResult], batch: Batch, *, at: int) -> StepResult:
    result = step(batch)
    for chunk, rows in zip(batch.chunks, result.logits, strict=True):
        for index, row in enumerate(rows):
            if chunk.stop - chunk.num_logits + index == at:
                row[:] = np.nan
    return result


async def test_guesses_are_counted_and_a_request_may_decline_them() -> None:
    async with running(FakeScript(tokens=ids(PHRASE), loop=True)) as rig:
        await rig.run(prompt=PHRASE, max_tokens=60, speculate=False)
        assert dict(rig.inference.stats().speculation) == {"drafted": 0, "accepted": 0}
        await rig.run(prompt=PHRASE, max_tokens=60)
        stats = rig.inference.stats()
        rows = [chunk.num_logits - 1 for batch in rig.runtime.batches for chunk in batch.chunks if chunk.start]
        assert stats.speculation["drafted"] == sum(rows) >= stats.speculation["accepted"] > 40
        assert stats.totals["tokens"] == 120


# Speed, by the clock of the scripted runtime


class Clock:
    """Time that passes in steps alone; `factor` makes wide steps dearer."""

    def __init__(self) -> None:
        self.now = 0.0
        self.factor: Callable[[int], float] = lambda width: 1.0
        self.runtime: FakeRuntime | None = None

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        chunks = self.runtime.batches[-1].chunks if self.runtime and self.runtime.batches else ()
        self.now += seconds * self.factor(max((len(chunk.ids) for chunk in chunks if chunk.start), default=1))


async def decode_seconds(
    script: Sequence[int], prompts: Sequence[str], *, speculates: bool, factor: Callable[[int], float] = lambda _: 1.0
) -> tuple[float, int, dict[str, int]]:
    """Seconds, steps and guesses of answers that say `script`, all at once."""
    clock = Clock()
    clock.factor = factor
    fake = FakeScript(tokens=tuple(script), step_s=0.05, row_s=0.0015, capacity=8192, num_slots=len(prompts))
    async with running(fake, speculates=speculates, clock=clock, sleep=clock.sleep) as rig:
        clock.runtime = rig.runtime
        listeners = [(await rig.submit(prompt=prompt, max_tokens=len(script)))[1] for prompt in prompts]
        for listener in listeners:
            assert (await listener.done()).usage.completion == len(script)
        return clock.now, len(rig.runtime.batches), dict(rig.inference.stats().speculation)


def free_text(length: int, *, seed: int = 1) -> list[int]:
    """Tokens as in free text: some are frequent, so pairs come again, and what follows them differs."""
    rng = random.Random(seed)
    return [min(int(rng.expovariate(0.05)), 200) for _ in range(length)]


@pytest.mark.parametrize("num_streams", [1, 4])
async def test_a_copy_is_several_times_faster(num_streams: int) -> None:
    edited = PHRASE.replace("fox", "own") * 6
    prompts = [PHRASE * 6 + str(number) for number in range(num_streams)]
    seconds, steps, guesses = await decode_seconds(ids(edited), prompts, speculates=True)
    slow, slow_steps, _ = await decode_seconds(ids(edited), prompts, speculates=False)
    assert seconds < slow / 2.5
    assert steps < slow_steps / 3
    assert guesses["accepted"] > 0.6 * guesses["drafted"]


@pytest.mark.parametrize("num_streams", [1, 4])
async def test_free_text_loses_next_to_nothing(num_streams: int) -> None:
    prompts = [PHRASE + str(number) for number in range(num_streams)]
    seconds, _, _ = await decode_seconds(free_text(800), prompts, speculates=True)
    slow, _, _ = await decode_seconds(free_text(800), prompts, speculates=False)
    assert seconds < slow / 0.97


async def test_guessing_stops_where_wide_steps_turn_out_dear_and_goes_on_where_they_do_not() -> None:
    copy, prompt = ids(PHRASE) * 12, [PHRASE * 4]

    def dear(width: int) -> float:
        return 1.0 if width == 1 else 40.0

    seconds, _, guesses = await decode_seconds(copy, prompt, speculates=True, factor=dear)
    slow, steps, _ = await decode_seconds(copy, prompt, speculates=False)
    num_wide = (seconds - slow) / 0.05 / 40
    assert num_wide < 18, "two tries of each width, no more"
    assert guesses["drafted"] < 250
    seconds, _, guesses = await decode_seconds(copy, prompt, speculates=True, factor=lambda w: 1.0 if w < 9 else 40.0)
    assert guesses["accepted"] > 0.7 * len(copy), "the widths that are cheap are found"
    assert seconds < slow
    assert steps > len(copy) - 2


async def test_guessing_begins_again_when_free_text_turns_into_a_copy() -> None:
    script = [*free_text(600), *ids(PHRASE * 4)]
    seconds, _, _ = await decode_seconds(script, [PHRASE * 4], speculates=True)
    slow, _, _ = await decode_seconds(script, [PHRASE * 4], speculates=False)
    copy_s = 0.05 * len(ids(PHRASE * 4))
    assert slow - seconds > copy_s * 0.6, "most of the copy's time is saved"


# The real model


def real_engine(*, speculates: bool) -> tuple[Inference, list[int]]:
    """SmolLM2 in int8, and the rows of each step that it runs."""
    package = open_package(smollm2_package("int8"))
    files = ModelFiles(
        name="smollm2",
        quant="int8",
        tokenizer=Tokenizer.from_file(package.tokenizer_path),
        template=ChatTemplate(package.read_template() or ""),
        generation_defaults=package.generation_config,
        eos_token_ids=package.eos_token_ids,
    )
    widths: list[int] = []

    def load(progress: Callable[[float], None]) -> OnnxRuntime:
        runtime = OnnxRuntime.load(package, OnnxOptions(num_slots=4, capacity=1024, num_threads=2), progress)
        step = runtime.step

        def counted(batch: Batch) -> StepResult:
            widths.append(max(len(chunk.ids) for chunk in batch.chunks))
            return step(batch)

        runtime.step = counted  # type: ignore[method-assign]  # counts, and changes nothing
        return runtime

    engine = Inference(
        runtime_factory=load, model=files, limits=EngineLimits(), speculates=speculates, seed_source=lambda: 1
    )
    return engine, widths


TEXT = (
    "The committee met on Tuesday evening in the library. Mrs Hale reported that the roof of the reading room had been "
    "repaired for 4,200 pounds, which was 300 pounds less than planned. Mr Osei proposed to spend the remainder on new "
    "lamps for the staircase, because visitors had complained that the steps were hard to see in winter."
)
QUESTION = "Sum up this text in four sentences that quote it:"
ASKED: tuple[dict[str, Any], ...] = (
    {"content": f"{QUESTION}\n\n{TEXT}", "temperature": 0.0, "logprobs": True, "top_logprobs": 3},
    {"content": f"{QUESTION}\n\n{TEXT} ", "temperature": 0.5, "top_p": 0.9, "seed": 5},
    {"content": f"{QUESTION}\n{TEXT}", "temperature": 0.0, "stop": ("new lamps",)},
)


async def real_answers(*, speculates: bool) -> tuple[list[dict[str, Any]], int]:
    engine, widths = real_engine(speculates=speculates)
    await engine.start()
    listeners = []
    for each in ASKED:
        message = {"role": "user", "content": each["content"]}
        options = {name: value for name, value in each.items() if name != "content"}
        listeners.append(Listener())
        given = GenerationInput(messages=(message,), max_tokens=60, **options)
        await engine.submit(given, owner="0", sink=listeners[-1])
    for listener in listeners:
        async with asyncio.timeout(240):
            await listener.over.wait()
    await engine.close()
    return [outcome(listener, 1) for listener in listeners], len(widths)


async def test_a_real_model_answers_the_same_in_fewer_steps_greedily_and_by_lot() -> None:
    needs_row_invariance()
    plain, num_plain = await real_answers(speculates=False)
    answers, num_steps = await real_answers(speculates=True)
    assert answers == plain
    assert sum(len(answer["deltas"][0]) for answer in answers) > 60
    assert num_steps < 0.7 * num_plain
