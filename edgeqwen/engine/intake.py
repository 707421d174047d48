"""How a request gets in: checked, made into tokens beside the event loop, held until the model is loaded, queued.

From its arrival on it counts as one of its owner's that wait. The scheduler's queue counts it next; in between, and
wherever it is refused, nothing of it is left.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from edgeqwen.constrain.form import Form
from edgeqwen.core.constraint import Constraint
from edgeqwen.core.request import Done, FinishReason, Started, Timings, Usage
from edgeqwen.engine.answer_forms import AnswerForms
from edgeqwen.engine.defaults import read_defaults
from edgeqwen.engine.embeddings import (
    EmbeddingContext,
    EmbeddingEnded,
    EmbeddingInput,
    EmbeddingRecord,
    Embeddings,
    check_embedding,
    embedding_request,
)
from edgeqwen.engine.engine import Engine
from edgeqwen.engine.generation import GenerationInput, Sink
from edgeqwen.engine.life import EngineLife
from edgeqwen.engine.outcomes import Kind, Outcome, Outcomes, Refusal
from edgeqwen.engine.prepare import TextThread
from edgeqwen.engine.resolve import ResolveContext, Resolved, check_input, resolve
from edgeqwen.engine.settings import EngineLimits, ModelFiles
from edgeqwen.errors import EdgeqwenError, RuntimeFailed
from edgeqwen.scheduler import Admission
from edgeqwen.text import Prompt

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Generation:
    """An accepted request. `params` are the effective values, as a client is shown them."""

    rid: str
    prompt_ids: tuple[int, ...]
    params: Mapping[str, Any]
    _engine: Engine | None

    def cancel(self) -> None:
        """End it with `cancelled`; nothing happens if it has ended."""
        if self._engine is not None:
            self._engine.cancel(self.rid, owner=None)


@dataclass(frozen=True, slots=True)
class _Prepared:
    """What was made of an input beside the event loop; `echo` is the prompt's text if that is wanted."""

    prompt: Prompt
    constraint: Constraint | None
    echo: str


class Intake:
    """Of one engine, loaded or not. `limits` may be replaced: a request keeps those that there were on its arrival.

    Raises `ModelInvalid` if the model's generation defaults are out of range."""

    def __init__(
        self,
        life: EngineLife,
        *,
        files: ModelFiles,
        limits: EngineLimits,
        admission: Admission,
        text: TextThread,
        outcomes: Outcomes,
        seed_source: Callable[[], int],
        clock: Callable[[], float],
    ) -> None:
        self._life = life
        self._files = files
        self.limits = limits
        self._admission = admission
        self._text = text
        self._outcomes = outcomes
        self._seed_source = seed_source
        self._clock = clock
        self._defaults = read_defaults(files.generation_defaults)
        self._forms = AnswerForms(files)
        self._rids = itertools.count(seed_source() & 0xFFFFF)  # not those of the process before

    async def submit(self, given: GenerationInput, *, owner: str, sink: Sink) -> Generation:
        """See `Inference.submit`."""
        arrived_at = self._clock()
        with self._telling("generation", owner, arrived_at):
            return await self._submit(given, owner=owner, sink=sink, arrived_at=arrived_at)

    async def _submit(self, given: GenerationInput, *, owner: str, sink: Sink, arrived_at: float) -> Generation:
        limits = self.limits
        self._check_state(given)
        form = self.check(given)
        prepare = partial(self._prepare, given, form)
        deadline_at = _deadline_at(given, limits, arrived_at)
        prepared, is_late = await self._hold(prepare, owner=owner, deadline_at=deadline_at)
        if is_late:
            return self._expire(given, prepared.prompt, owner=owner, sink=sink, arrived_at=arrived_at)
        engine = self._ready_engine()
        # Resolved, queued, and the sink told: all of it at once, nothing of it if anything is wrong.
        resolved = self._resolve(given, prepared, engine, limits=limits, owner=owner, arrived_at=arrived_at)
        request = resolved.request
        engine.accept(request, sink, echo=prepared.echo)
        return Generation(request.rid, request.prompt_ids, resolved.params, engine)

    async def embed(self, given: EmbeddingInput, *, owner: str) -> Embeddings:
        """See `Inference.embed`."""
        arrived_at = self._clock()
        with self._telling("embedding", owner, arrived_at):
            engine, record = await self._queue_embedding(given, owner=owner, arrived_at=arrived_at)
        return await engine.embedded(record)

    async def _queue_embedding(
        self, given: EmbeddingInput, *, owner: str, arrived_at: float
    ) -> tuple[Engine, EmbeddingRecord]:
        limits = self.limits
        self._check_state(given)
        check_embedding(given, limits=limits, num_tokens=self._num_tokens)
        prepare = partial(self._embedded_ids, given)
        deadline_at = _deadline_at(given, limits, arrived_at)
        texts, is_late = await self._hold(prepare, owner=owner, deadline_at=deadline_at)
        if is_late:
            raise EmbeddingEnded("deadline")
        engine = self._ready_engine()
        at = EmbeddingContext(
            limits=limits,
            context=engine.context,
            hidden_size=engine.spec.hidden_size,
            num_tokens=engine.num_tokens,
            pooling=self._files.pooling,
            rid=self._next_rid(),
            owner=owner,
            arrived_at=arrived_at,
        )
        return engine, engine.accept_embedding(embedding_request(given, texts, at))

    def let_go(self) -> None:
        """Give memory back that the next request needs again."""
        self._forms.let_go()
        self._files.tokenizer.let_go()

    def check(self, given: GenerationInput) -> Form | None:
        """Raise what can be said against an input at sight; the form that its answer is to have, if any."""
        check_input(
            given,
            limits=self.limits,
            num_tokens=self._num_tokens,
            has_template=self._files.template is not None,
        )
        return self._forms.read(given)

    @property
    def _num_tokens(self) -> int:
        engine = self._life.engine
        return self._files.tokenizer.num_tokens if engine is None else engine.num_tokens

    def _check_state(self, given: GenerationInput | EmbeddingInput) -> None:
        """Raise what keeps the request from running, or from waiting until it can. A model that sleeps is woken."""
        self._life.wake()
        if self._life.state != "loading" or given.wait is False:
            self._life.check_ready()

    def _ready_engine(self) -> Engine:
        self._life.check_ready()
        assert self._life.engine is not None
        return self._life.engine

    async def _hold(self, prepare: Callable[[], Awaitable[T]], *, owner: str, deadline_at: float) -> tuple[T, bool]:
        """What `prepare` makes of an input that waits meanwhile, and whether the deadline came before the model."""
        self._admission.add(owner)
        try:
            made = await prepare()
            is_loaded = await self._life.is_loaded_within(deadline_at - self._clock())
        finally:
            self._admission.remove(owner, has_started=False)
        return made, not is_loaded

    async def _prepare(self, given: GenerationInput, form: Form | None) -> _Prepared:
        prompt = await self._text.prompt(given)
        echo = await self._text.prompt_text(given) if given.echo else ""
        return _Prepared(prompt, await self._forms.constraint(form), echo)

    async def _embedded_ids(self, given: EmbeddingInput) -> tuple[tuple[int, ...], ...]:
        if given.texts is not None:
            return await self._text.embedded_ids(given.texts)
        assert given.tokens is not None
        return given.tokens

    @contextlib.contextmanager
    def _telling(self, kind: Kind, owner: str, arrived_at: float) -> Iterator[None]:
        """Have it told if the request comes to its end in here: refused, late, or given up by who asked."""
        try:
            yield
        except EmbeddingEnded as error:
            self._tell_end(kind, owner, arrived_at, error.reason)
            raise
        except asyncio.CancelledError:
            self._tell_end(kind, owner, arrived_at, "cancelled")
            raise
        except Exception as error:
            code = error.code if isinstance(error, EdgeqwenError) else RuntimeFailed.code
            self._outcomes.refuse(Refusal(owner, kind, code))
            raise

    def _tell_end(
        self, kind: Kind, owner: str, arrived_at: float, reason: FinishReason, *, rid: str = "", num_prompt: int = 0
    ) -> None:
        """Of a request that never came to the scheduler."""
        waited_s = self._clock() - arrived_at
        self._outcomes.tell(
            Outcome(
                rid=rid,
                owner=owner,
                kind=kind,
                outcome=reason,
                queue_s=waited_s,
                first_token_s=None,
                total_s=waited_s,
                num_prompt=num_prompt,
            )
        )

    def _expire(
        self, given: GenerationInput, prompt: Prompt, *, owner: str, sink: Sink, arrived_at: float
    ) -> Generation:
        """The deadline came before the model: the request is accepted and over at once."""
        rid, waited_ms = self._next_rid(), round(1000 * (self._clock() - arrived_at))
        sink(Started(rid, self._admission.num_queued, len(prompt.ids)))
        finishes: list[FinishReason] = ["deadline"] * (given.n or 1)
        sink(Done(rid, tuple(finishes), Usage(len(prompt.ids), 0, 0), Timings(waited_ms, waited_ms, waited_ms)))
        self._tell_end("generation", owner, arrived_at, "deadline", rid=rid, num_prompt=len(prompt.ids))
        return Generation(rid, prompt.ids, {}, None)

    def _next_rid(self) -> str:
        return f"r{next(self._rids):x}"

    def _resolve(
        self,
        given: GenerationInput,
        prepared: _Prepared,
        engine: Engine,
        *,
        limits: EngineLimits,
        owner: str,
        arrived_at: float,
    ) -> Resolved:
        at = ResolveContext(
            limits=limits,
            defaults=self._defaults,
            context=engine.context,
            num_tokens=engine.num_tokens,
            rid=self._next_rid(),
            owner=owner,
            seed=self._seed_source() if given.seed is None else 0,
            arrived_at=arrived_at,
            constraint=prepared.constraint,
            thinking=self._forms.thinking(given, prepared.prompt),
        )
        return resolve(given, prepared.prompt, at)


def _deadline_at(given: GenerationInput | EmbeddingInput, limits: EngineLimits, arrived_at: float) -> float:
    """When a request ends that has not by then, on the clock of `arrived_at`."""
    deadline_ms = limits.max_deadline_ms if given.deadline_ms is None else given.deadline_ms
    return arrived_at + deadline_ms / 1000
