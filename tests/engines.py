"""What the tests of the engine share: an `Inference` over a scripted runtime, and a sink that checks the order."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from edgeqwen.core.model import Pooling
from edgeqwen.core.request import Delta, Done, Event, Failed, Started
from edgeqwen.engine.generation import GenerationInput
from edgeqwen.engine.inference import Inference
from edgeqwen.engine.intake import Generation
from edgeqwen.engine.settings import EngineLimits, KvSettings, ModelFiles
from edgeqwen.runtime.fake import FakeRuntime, FakeScript, load_fake
from edgeqwen.text import ChatTemplate, Tokenizer
from tests.tiny_tokenizers import byte_level

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and enable_thinking %}<think>\n{% endif %}"
)


@dataclass(eq=False)
class Listener:
    """A sink. It holds the events, and notes in `faults` what is out of place (the engine survives what it raises)."""

    faults: list[str] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    over: asyncio.Event = field(default_factory=asyncio.Event)
    on_event: Callable[[Event], None] | None = None

    def __call__(self, event: Event) -> None:
        if isinstance(event, Started) != (not self.events) or self.over.is_set():
            self.faults.append(f"{event} after {self.events[-1:]}")
        self.events.append(event)
        if isinstance(event, Done | Failed):
            self.over.set()
        if self.on_event is not None:
            self.on_event(event)

    async def end(self) -> Done | Failed:
        """The terminal event."""
        async with asyncio.timeout(20):
            await self.over.wait()
        last = self.events[-1]
        assert isinstance(last, Done | Failed)
        return last

    async def done(self) -> Done:
        """The terminal event of a request that must not fail."""
        last = await self.end()
        assert isinstance(last, Done), last.error
        return last

    @property
    def deltas(self) -> list[Delta]:
        return [event for event in self.events if isinstance(event, Delta)]

    def text(self, channel: str = "content", choice: int = 0) -> str:
        """All text of one channel of one choice."""
        return "".join(d.text for d in self.deltas if (d.channel, d.choice) == (channel, choice))


@dataclass(eq=False)
class Rig:
    """An engine under test."""

    inference: Inference
    tokenizer: Tokenizer
    runtimes: list[FakeRuntime]
    listeners: list[Listener] = field(default_factory=list)

    @property
    def runtime(self) -> FakeRuntime:
        return self.runtimes[0]

    @property
    def held_slots(self) -> set[int]:
        """What the runtime holds beside spare slots."""
        engine = self.inference._engine
        spares = () if engine is None else engine._store.spares.slots
        return set(self.runtime.held_slots) - set(spares)

    async def submit(
        self, owner: str = "1000", listener: Listener | None = None, **given: Any
    ) -> tuple[Generation, Listener]:
        listener = listener or Listener()
        self.listeners.append(listener)
        if not {"messages", "prompt", "tokens"} & set(given):
            given["prompt"] = "hi"
        generation = await self.inference.submit(GenerationInput(**given), owner=owner, sink=listener)
        return generation, listener

    async def run(self, **given: Any) -> tuple[Done, Listener]:
        """Submit and wait for the end."""
        _, listener = await self.submit(**given)
        return await listener.done(), listener

    async def idle(self) -> None:
        """Wait until there is nothing to do."""
        async with asyncio.timeout(20):
            while not self.inference.is_idle:  # noqa: ASYNC110 -- there is no event for it
                await asyncio.sleep(0.001)

    async def asleep(self) -> None:
        """Have the model fall asleep, and wait until it is gone."""
        await self.idle()
        assert self.inference.fall_asleep()
        await self.inference.until_settled()

    async def settle(self) -> None:
        """Wait until the runtime holds nothing but spare slots, as it must once every request is over."""
        async with asyncio.timeout(20):
            while self.held_slots:  # noqa: ASYNC110 -- the runtime lives on another thread and has no event
                await asyncio.sleep(0.001)


def ids(text: str, tokenizer: Tokenizer | None = None) -> tuple[int, ...]:
    """Token ids of `text`, added tokens as their ids."""
    return tuple((tokenizer or byte_level()).encode(text, special=True))


def eos(tokenizer: Tokenizer | None = None) -> int:
    """The end token of the small tokenizer."""
    found = (tokenizer or byte_level()).token_id("<|im_end|>")
    assert found is not None
    return found


def make_rig(
    script: FakeScript | None = None,
    *,
    tokenizer: Tokenizer | None = None,
    template: ChatTemplate | None = None,
    defaults: Mapping[str, Any] | None = None,
    limits: EngineLimits | None = None,
    eos_token_ids: tuple[int, ...] | None = None,
    speculates: bool = True,
    kv: KvSettings | None = None,
    pooling: Pooling | None = None,
    longest_step_s: float | None = None,
    sleep: Callable[[float], None] = time.sleep,
    clock: Callable[[], float] = time.monotonic,
) -> Rig:
    """An engine that is not started. Its default model is greedy and ends with the tokenizer's end token."""
    tokenizer = tokenizer or byte_level()
    runtimes: list[FakeRuntime] = []

    def factory(progress: Callable[[float], None]) -> FakeRuntime:
        size = tokenizer.num_tokens
        runtime = load_fake(script or FakeScript(), progress, vocab_size=size, capacity=256, sleep=sleep)
        runtimes.append(runtime)
        return runtime

    files = ModelFiles(
        name="fake",
        quant="fp32",
        tokenizer=tokenizer,
        template=ChatTemplate(TEMPLATE) if template is None else template,
        generation_defaults={"do_sample": False} if defaults is None else defaults,
        eos_token_ids=(eos(tokenizer),) if eos_token_ids is None else eos_token_ids,
        pooling=pooling,
    )
    seeds = itertools.count(1)
    inference = Inference(
        runtime_factory=factory,
        model=files,
        limits=limits or EngineLimits(),
        seed_source=lambda: next(seeds),
        speculates=speculates,
        kv=kv,
        longest_step_s=longest_step_s,
        clock=clock,
    )
    return Rig(inference, tokenizer, runtimes)


@asynccontextmanager
async def running(script: FakeScript | None = None, **settings: Any) -> AsyncIterator[Rig]:
    """A started engine, closed at the end. By then every accepted request must have ended, once and in order."""
    rig = make_rig(script, **settings)
    await rig.inference.start()
    try:
        yield rig
    finally:
        await rig.inference.close()
    for listener in rig.listeners:
        assert not listener.faults
        assert listener.over.is_set() == bool(listener.events)
