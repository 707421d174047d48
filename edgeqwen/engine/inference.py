"""`Inference`: the one thing that fronts talk to. Requests in, events out; everything on the event loop.

While the model loads (`engine.life`), `submit` tokenises and then waits. A request is accepted when the scheduler has
taken it (`engine.intake`); from then on its sink gets `Started`, any number of `Delta`, and exactly one of `Done` and
`Failed`.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final

from edgeqwen.core.step import RuntimeSpec
from edgeqwen.engine.embeddings import EmbeddingInput, Embeddings
from edgeqwen.engine.engine import Engine
from edgeqwen.engine.generation import GenerationInput, Sink
from edgeqwen.engine.intake import Generation, Intake
from edgeqwen.engine.kv_disk import discard_on_disk
from edgeqwen.engine.life import EngineLife, RuntimeFactory, State
from edgeqwen.engine.meters import Meters
from edgeqwen.engine.prepare import TextThread
from edgeqwen.engine.settings import EngineLimits, KvSettings, ModelFiles
from edgeqwen.engine.stats import EngineStats, OwnerStats, asleep_stats, continued, idle_owner_stats, idle_stats
from edgeqwen.engine.tallies import Tallies
from edgeqwen.errors import EdgeqwenError, RuntimeFailed
from edgeqwen.scheduler import Admission
from edgeqwen.text import Prompt

logger = logging.getLogger(__name__)

DAY_S: Final = 86_400


class Inference:
    """Loads one model and generates with it.

    `runtime_factory(progress)` runs on the engine thread and may call `progress(0..1)` there. `seed_source` gives a
    seed for requests that bring none. `speculates` allows guesses. Steps of prompts are cut so that they take
    `longest_step_s` at most (None: a second). `meters` measure all that comes, as long as the process lives. Raises
    `ModelInvalid` if the generation defaults are out of range.
    """

    def __init__(
        self,
        *,
        runtime_factory: RuntimeFactory,
        model: ModelFiles,
        limits: EngineLimits,
        seed_source: Callable[[], int],
        kv: KvSettings | None = None,
        speculates: bool = True,
        longest_step_s: float | None = None,
        clock: Callable[[], float] = time.monotonic,
        today: Callable[[], int] = lambda: int(time.time() // DAY_S),
    ) -> None:
        self._files = model
        self._kv = kv or KvSettings()
        self._admission = Admission(queue=limits.queue, per_owner=limits.per_owner)
        self._text = TextThread(model)
        self._tallies = Tallies()
        self.meters = Meters()
        self._make_engine = partial(
            Engine,
            files=model,
            admission=self._admission,
            speculates=speculates,
            longest_step_s=longest_step_s,
            tallies=self._tallies,
            meters=self.meters,
            clock=clock,
            today=today,
        )
        self._life = EngineLife(
            runtime_factory, lambda *parts: self._make_engine(*parts, kv=self._kv), on_ready=self._on_ready
        )
        self._facts: ModelFacts | None = None  # of the model as it was last loaded
        self._past: EngineStats | None = None  # the last word of the engine before
        self._discarded: list[tuple[str, tuple[int, ...]]] = []  # while the model sleeps or wakes
        self._clock, self._today = clock, today
        self._intake = Intake(
            self._life,
            files=model,
            limits=limits,
            admission=self._admission,
            text=self._text,
            outcomes=self.meters.outcomes,
            seed_source=seed_source,
            clock=clock,
        )
        self._keeping: asyncio.Task[None] | None = None  # new system prompts

    # The settings.

    @property
    def limits(self) -> EngineLimits:
        return self._intake.limits

    def set_limits(self, limits: EngineLimits) -> None:
        """For requests that come from now on; those that wait or run keep their place and their limits."""
        self._intake.limits = limits
        self._admission.set_limits(queue=limits.queue, per_owner=limits.per_owner)

    def set_kv(self, kv: KvSettings) -> None:
        """Take over what of `kv` may change at work: all but the memory, which the model was loaded beside."""
        before, self._kv = self._kv, replace(kv, memory_bytes=self._kv.memory_bytes)
        engine = self._engine
        if engine is None:
            return
        if _disk_of(kv) != _disk_of(before):
            engine.set_disk(kv)
        if kv.system_prompts != before.system_prompts:
            self._keeping = asyncio.create_task(self._keep_system_prompts(engine))

    # The model.

    @property
    def _engine(self) -> Engine | None:
        return self._life.engine

    @property
    def state(self) -> State:
        return self._life.state

    @property
    def progress(self) -> float:
        """How much of the model is loaded, from 0 to 1."""
        return self._life.progress

    @property
    def model_name(self) -> str:
        return self._files.name

    @property
    def quant(self) -> str:
        return self._files.quant

    @property
    def context(self) -> int:
        """Tokens that prompt and answer may have together; 0 until the model has been loaded."""
        return 0 if self._facts is None else self._facts.context

    @property
    def hidden_size(self) -> int:
        """Numbers of an embedding; 0 until the model has been loaded, and for one that makes none."""
        return 0 if self._facts is None else self._facts.spec.hidden_size

    @property
    def kv_bytes_per_token(self) -> int:
        """What the cache of one token takes; 0 until the model has been loaded."""
        return 0 if self._facts is None else self._facts.spec.kv_bytes_per_token

    @property
    def kv_disk_limit_bytes(self) -> int:
        """What keys and values may take on disk."""
        return 0 if self._kv.folder is None else self._kv.disk_bytes

    # Its life.

    async def start(self) -> None:
        """Load the model; returns when requests run. Raises what the factory raises, and the state is `failed` then.

        Raises `EdgeqwenError` (`draining`) if it is told to stop meanwhile.
        """
        self._text.warm_up()
        await self._life.start()
        if self._keeping is not None:
            await asyncio.wait({self._keeping})

    def _on_ready(self, engine: Engine) -> None:
        self._facts = ModelFacts(engine.spec, engine.context)
        discarded, self._discarded = self._discarded, []
        for owner, ids in discarded:
            engine.discard(owner, ids)
        self._keeping = asyncio.create_task(self._keep_system_prompts(engine))

    @property
    def is_idle(self) -> bool:
        """The model is loaded or asleep, and nothing is to be done: no request is there, nothing is computed beforehand
        or written.
        """
        if self.state not in {"ready", "asleep"} or self._admission.num_running or self._admission.num_queued:
            return False
        return not self._life.is_changing and (self._engine is None or self._engine.is_idle)

    @property
    def num_arrivals(self) -> int:
        """Grows with every request."""
        return self._admission.num_added

    def fall_asleep(self) -> bool:
        """Give the memory of the model back until the next request, which has it loaded again; False, and nothing is
        done, if there is something to do or it sleeps already. What is known of conversations stays on disk.
        """
        if not self.is_idle or self._engine is None:
            return False
        self._past = self.stats()
        self._intake.let_go()
        self._text.let_go()
        self._life.fall_asleep()
        return True

    async def until_settled(self) -> None:
        """Return when falling asleep or waking is over, if either is under way."""
        await self._life.until_settled()

    async def _keep_system_prompts(self, engine: Engine) -> None:
        """Have those of the configuration known to everybody, and no others."""
        texts = self._kv.system_prompts
        prompts: list[tuple[int, ...]] = []
        for number, text in enumerate(texts, 1):
            given = GenerationInput(messages=({"role": "system", "content": text},))
            try:
                prompts.append(await self._text.history_ids(given))
            except EdgeqwenError as error:
                logger.warning("kv.system_prompts: number %d cannot be kept: %s", number, error.message)
        if texts is self._kv.system_prompts:  # others may have come meanwhile, and are seen to
            engine.keep_shared(prompts)

    def check_ready(self) -> None:
        """Raise what keeps requests from running now: `loading`, `draining` or `engine`."""
        self._life.check_ready()

    async def answer(self) -> None:
        """Return when the engine thread has got round to answering, between two steps. Not before `start`."""
        await self._life.answer()

    async def wait_until_broken(self) -> RuntimeFailed:
        """Return if the engine's loop breaks, which nothing mends: only a new process serves again."""
        return await self._life.wait_until_broken()

    async def drain(self, timeout_s: float) -> None:
        """Refuse new work, let what runs finish, and cancel what is left after `timeout_s`."""
        await self._life.drain(timeout_s)

    async def close(self) -> None:
        """Cancel what is left and free the runtime; once is enough. A step that hangs is given up after a while."""
        if self._keeping is not None:
            self._keeping.cancel()
        self._text.close()
        await self._life.close()

    # Requests.

    async def submit(self, given: GenerationInput, *, owner: str, sink: Sink) -> Generation:
        """Accept a request. Raises `EdgeqwenError` if it is refused; the sink has got nothing then.

        The deadline counts from here. A caller that is cancelled while it waits here has no request.
        """
        return await self._intake.submit(given, owner=owner, sink=sink)

    async def embed(self, given: EmbeddingInput, *, owner: str) -> Embeddings:
        """Vectors of texts. It is a request like any other, and cancelled with the task that waits here.

        Raises `EdgeqwenError` if it is refused or fails, `EmbeddingEnded` (one of these) if it is cut short.
        """
        return await self._intake.embed(given, owner=owner)

    def cancel(self, rid: str, *, owner: str | None) -> int:
        """End a request of `owner` (None: of anyone) with `cancelled`; 0 if there is none that still runs, else 1."""
        return 0 if self._engine is None else self._engine.cancel(rid, owner=owner)

    def stats(self) -> EngineStats:
        """A snapshot of what runs and what has been."""
        num_queued = self._admission.num_queued
        if self._engine is None:
            return idle_stats(num_queued) if self._past is None else asleep_stats(self._past, num_queued)
        stats = self._engine.stats()
        return stats if self._past is None else continued(stats, self._past)

    def owner_stats(self, owner: str) -> OwnerStats:
        """The same of one owner, who learns nothing of others by it."""
        if self._engine is None:
            return idle_owner_stats(self._admission.count_of(owner), self._tallies.of(owner))
        return self._engine.owner_stats(owner)

    def live_requests(self, owner: str | None, most: int) -> list[dict[str, Any]]:
        """What runs and waits of `owner` (None: of everybody, with whose it is), oldest first: `rid`, `kind`, `state`,
        tokens of the prompt, those of them that were cached, tokens generated and how fast, seconds since it came.
        """
        return [] if self._engine is None else self._engine.live_requests(owner, most)

    # Tokens.

    async def tokenize(self, text: str, *, special: bool) -> list[int]:
        """Token ids of `text`; strings of added tokens become their ids if `special`, else they stay text."""
        return await self._text.tokenize(text, special=special)

    async def detokenize(self, tokens: Sequence[int]) -> bytes:
        """The exact bytes of `tokens`. Raises `BadRequest` (field `tokens`)."""
        return await self._text.detokenize(tokens)

    async def prompt(self, given: GenerationInput) -> Prompt:
        """The tokens of a prompt, without running it. Raises what `submit` raises of an input that is wrong."""
        self._intake.check(given)
        return await self._text.prompt(given)

    async def history_ids(self, given: GenerationInput) -> tuple[int, ...]:
        """The tokens with which every prompt begins that continues the conversation in `given.messages`, which end with
        an answer, by a further turn of the user.
        """
        return await self._text.history_ids(given)

    # Conversations.

    def settle(self, key: str, owner: str, ids: tuple[int, ...]) -> None:
        """The conversation `key` goes on with the prompt `ids`: what is known of it is kept, on disk too, and the rest
        is computed when nothing else is to do (unless the settings say no). Replaces what was said of `key` before.
        """
        if self._engine is not None and self.state == "ready":
            self._engine.want(key, owner, ids, computes=self._kv.settles)

    def unsettle(self, key: str) -> None:
        """Nobody wants that prompt any more."""
        if self._engine is not None:
            self._engine.forget(key)

    def discard(self, owner: str, ids: tuple[int, ...]) -> None:
        """Nobody comes back to a conversation that begins with `ids`: forget what is known of it alone, on disk too."""
        if self._engine is not None:
            self._engine.discard(owner, ids)
        elif self._facts is not None:
            self._discarded.append((owner, ids))
            if len(self._discarded) == 1 and self.state == "asleep":
                self._life.while_asleep(self._discard_on_disk)

    async def _discard_on_disk(self) -> None:
        assert self._facts is not None
        discarded, self._discarded = self._discarded, []
        await discard_on_disk(self._facts.spec, self._kv, discarded, clock=self._clock, today=self._today)

    def cached_tokens(self, owner: str, ids: tuple[int, ...]) -> int:
        """How many of `ids` would not have to be computed now."""
        return 0 if self._engine is None else self._engine.cached_tokens(owner, ids)


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What stays known of a model that has been loaded."""

    spec: RuntimeSpec
    context: int


def _disk_of(kv: KvSettings) -> tuple[Path | None, int, int]:
    return kv.folder, kv.disk_bytes, kv.daily_write_bytes
