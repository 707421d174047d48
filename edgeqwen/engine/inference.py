"""`Inference`: the one thing that fronts talk to. Requests in, events out; everything on the event loop.

    loading --> ready --> draining
       |          |
       +----------+--> failed

While the model loads, `submit` tokenises and then waits. A request is accepted when the scheduler has taken it; from
then on its sink gets `Started`, any number of `Delta`, and exactly one of `Done` and `Failed`.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeAlias

from edgeqwen.constrain.form import Form
from edgeqwen.core.constraint import Constraint
from edgeqwen.core.request import Done, FinishReason, Started, Timings, Usage
from edgeqwen.core.step import Runtime
from edgeqwen.engine.answer_forms import AnswerForms
from edgeqwen.engine.defaults import read_defaults
from edgeqwen.engine.embeddings import (
    EmbeddingContext,
    EmbeddingEnded,
    EmbeddingInput,
    Embeddings,
    check_embedding,
    embedding_request,
)
from edgeqwen.engine.engine import Engine
from edgeqwen.engine.generation import GenerationInput, Sink
from edgeqwen.engine.prepare import TextThread
from edgeqwen.engine.resolve import ResolveContext, Resolved, check_input, resolve
from edgeqwen.engine.settings import EngineLimits, KvSettings, ModelFiles
from edgeqwen.engine.stats import EngineStats, OwnerStats, idle_owner_stats, idle_stats
from edgeqwen.engine.worker import EngineThread
from edgeqwen.errors import EdgeqwenError, RuntimeFailed
from edgeqwen.scheduler import Admission
from edgeqwen.text import Prompt

logger = logging.getLogger(__name__)

State: TypeAlias = Literal["loading", "ready", "draining", "failed"]
RuntimeFactory: TypeAlias = Callable[[Callable[[float], None]], Runtime]

LOADING_RETRY_MS: Final = 1500
CLOSE_TIMEOUT_S: Final = 5.0
DAY_S: Final = 86_400
BROKEN: Final = "the engine broke down; the log says why"


@dataclass(frozen=True, slots=True)
class Generation:
    """An accepted request. `params` are the effective values, as a client is shown them."""

    rid: str
    prompt_ids: tuple[int, ...]
    params: Mapping[str, Any]
    _inference: Inference

    def cancel(self) -> None:
        """End it with `cancelled`; nothing happens if it has ended."""
        self._inference.cancel(self.rid, owner=None)


@dataclass(frozen=True, slots=True)
class _Prepared:
    """What was made of an input beside the event loop; `echo` is the prompt's text if that is wanted."""

    prompt: Prompt
    constraint: Constraint | None
    echo: str


class Inference:
    """Loads one model and generates with it.

    `runtime_factory(progress)` runs on the engine thread and may call `progress(0..1)` there. `seed_source` gives a
    seed for requests that bring none. `speculates` allows guesses. Raises `ModelInvalid` if the generation defaults are
    out of range.
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
        clock: Callable[[], float] = time.monotonic,
        today: Callable[[], int] = lambda: int(time.time() // DAY_S),
    ) -> None:
        self.state: State = "loading"
        self.progress = 0.0
        self._factory = runtime_factory
        self._files = model
        self.limits = limits
        self._seed_source = seed_source
        self._kv = kv or KvSettings()
        self._speculates = speculates
        self._today = today
        self._clock = clock
        self._defaults = read_defaults(model.generation_defaults)
        self._admission = Admission(queue=limits.queue, per_owner=limits.per_owner)
        self._text = TextThread(model)
        self._forms = AnswerForms(model)
        self._thread = EngineThread()
        self._engine: Engine | None = None
        self._task: asyncio.Task[None] | None = None
        self._is_closed = False
        self._settled = asyncio.Event()  # loading is over, one way or the other
        self._broken = asyncio.Event()
        self._rids = itertools.count(seed_source() & 0xFFFFF)  # not those of the process before

    @property
    def model_name(self) -> str:
        return self._files.name

    @property
    def quant(self) -> str:
        return self._files.quant

    @property
    def context(self) -> int:
        """Tokens that prompt and answer may have together; 0 until the model is loaded."""
        return 0 if self._engine is None else self._engine.context

    @property
    def _num_tokens(self) -> int:
        return self._files.tokenizer.num_tokens if self._engine is None else self._engine.num_tokens

    async def start(self) -> None:
        """Load the model; returns when requests run. Raises what the factory raises, and the state is `failed` then.

        Raises `EdgeqwenError` (`draining`) if it is told to stop meanwhile.
        """
        assert self.state == "loading"
        self._text.warm_up()
        self._thread.start()
        try:
            runtime = await self._thread.run(self._load)
        except Exception:
            if self.state == "loading":
                self.state = "failed"
            self._settled.set()
            raise
        if self.state != "loading":  # stopped between the end of loading and here
            raise EdgeqwenError("stopped while the model was loaded", code="draining")
        self._engine = self._make_engine(runtime)
        self._task = asyncio.create_task(self._run(self._engine))
        self.state = "ready"
        self.progress = 1.0
        self._settled.set()
        await self._keep_system_prompts(self._engine)

    def _make_engine(self, runtime: Runtime) -> Engine:
        try:
            return Engine(
                runtime,
                self._thread,
                files=self._files,
                admission=self._admission,
                kv=self._kv,
                speculates=self._speculates,
                clock=self._clock,
                today=self._today,
            )
        except EdgeqwenError:
            self.state = "failed"
            self._settled.set()
            raise

    def _load(self) -> Runtime:
        """On the engine thread."""
        runtime = self._factory(self._set_progress)
        if self.state != "loading":
            runtime.close()
            raise EdgeqwenError("stopped while the model was loaded", code="draining")
        return runtime

    def _set_progress(self, progress: float) -> None:
        self.progress = progress  # a float is replaced as a whole, so the event loop may read it at any time

    async def _run(self, engine: Engine) -> None:
        """The engine's loop, and what is left to do should it break: no request may wait for ever."""
        try:
            await engine.run()
        except Exception:
            logger.exception("the engine's loop broke")
            self.state = "failed"
            self._broken.set()
            engine.fail_all(RuntimeFailed(BROKEN))

    async def wait_until_broken(self) -> RuntimeFailed:
        """Return if the engine's loop breaks, which nothing mends: only a new process serves again."""
        await self._broken.wait()
        return RuntimeFailed(BROKEN)

    async def submit(self, given: GenerationInput, *, owner: str, sink: Sink) -> Generation:
        """Accept a request. Raises `EdgeqwenError` if it is refused; the sink has got nothing then.

        The deadline counts from here. A caller that is cancelled while it waits here has no request.
        """
        arrived_at = self._clock()
        self._check_state(given)
        form = self._check_input(given)
        self._admission.add(owner)
        try:
            prompt = await self._text.prompt(given)
            echo = await self._text.prompt_text(given) if given.echo else ""
            prepared = _Prepared(prompt, await self._forms.constraint(form), echo)
            is_late = not await self._is_loaded_in_time(given, arrived_at)
        finally:
            self._admission.remove(owner, has_started=False)
        if is_late:
            return self._expire(given, prompt, sink=sink, arrived_at=arrived_at)
        self._check_state(given)
        return self._accept(given, prepared, owner=owner, sink=sink, arrived_at=arrived_at)

    async def embed(self, given: EmbeddingInput, *, owner: str) -> Embeddings:
        """Vectors of texts. It is a request like any other, and cancelled with the task that waits here.

        Raises `EdgeqwenError` if it is refused or fails, `EmbeddingEnded` (one of these) if it is cut short.
        """
        arrived_at = self._clock()
        self._check_state(given)
        check_embedding(given, limits=self.limits, num_tokens=self._num_tokens)
        self._admission.add(owner)
        try:
            texts = given.tokens if given.texts is None else await self._text.embedded_ids(given.texts)
            is_late = not await self._is_loaded_in_time(given, arrived_at)
        finally:
            self._admission.remove(owner, has_started=False)
        if is_late:
            raise EmbeddingEnded("deadline")
        self._check_state(given)
        assert self._engine is not None
        assert texts is not None
        at = EmbeddingContext(
            limits=self.limits,
            context=self.context,
            hidden_size=self.hidden_size,
            num_tokens=self._num_tokens,
            pooling=self._files.pooling,
            rid=self._next_rid(),
            owner=owner,
            arrived_at=arrived_at,
        )
        return await self._engine.embed(embedding_request(given, texts, at))

    @property
    def hidden_size(self) -> int:
        """Numbers of an embedding; 0 until the model is loaded, and for one that makes none."""
        return 0 if self._engine is None else self._engine.spec.hidden_size

    def _check_input(self, given: GenerationInput) -> Form | None:
        check_input(
            given,
            limits=self.limits,
            num_tokens=self._num_tokens,
            has_template=self._files.template is not None,
        )
        return self._forms.read(given)

    def _check_state(self, given: GenerationInput | EmbeddingInput) -> None:
        if self.state != "loading" or given.wait is False:
            self.check_ready()

    def check_ready(self) -> None:
        """Raise what keeps requests from running now: `loading`, `draining` or `engine`."""
        match self.state:
            case "loading":
                raise EdgeqwenError("model loading", code="loading", retry_ms=LOADING_RETRY_MS)
            case "draining":
                raise EdgeqwenError("the daemon is shutting down", code="draining")
            case "failed":
                raise EdgeqwenError("the model could not be loaded, or its engine broke down", code="engine")

    async def _is_loaded_in_time(self, given: GenerationInput | EmbeddingInput, arrived_at: float) -> bool:
        if self.state != "loading":
            return True
        deadline_ms = self.limits.max_deadline_ms if given.deadline_ms is None else given.deadline_ms
        try:
            async with asyncio.timeout(max(0.0, arrived_at + deadline_ms / 1000 - self._clock())):
                await self._settled.wait()
        except TimeoutError:
            return False
        return True

    def _expire(self, given: GenerationInput, prompt: Prompt, *, sink: Sink, arrived_at: float) -> Generation:
        """The deadline came before the model: the request is accepted and over at once."""
        rid, waited_ms = self._next_rid(), round(1000 * (self._clock() - arrived_at))
        sink(Started(rid, self._admission.num_queued, len(prompt.ids)))
        finishes: list[FinishReason] = ["deadline"] * (given.n or 1)
        sink(Done(rid, tuple(finishes), Usage(len(prompt.ids), 0, 0), Timings(waited_ms, waited_ms, waited_ms)))
        return Generation(rid, prompt.ids, {}, self)

    def _next_rid(self) -> str:
        return f"r{next(self._rids):x}"

    def _accept(
        self, given: GenerationInput, prepared: _Prepared, *, owner: str, sink: Sink, arrived_at: float
    ) -> Generation:
        """Resolve, queue, and tell the sink: all of it at once, nothing of it if anything is wrong."""
        engine = self._engine
        assert engine is not None
        resolved = self._resolve(given, prepared, owner=owner, arrived_at=arrived_at)
        request = resolved.request
        engine.accept(request, sink, echo=prepared.echo)
        return Generation(request.rid, request.prompt_ids, resolved.params, self)

    def _resolve(self, given: GenerationInput, prepared: _Prepared, *, owner: str, arrived_at: float) -> Resolved:
        at = ResolveContext(
            limits=self.limits,
            defaults=self._defaults,
            context=self.context,
            num_tokens=self._num_tokens,
            rid=self._next_rid(),
            owner=owner,
            seed=self._seed_source() if given.seed is None else 0,
            arrived_at=arrived_at,
            constraint=prepared.constraint,
            thinking=self._forms.thinking(given, prepared.prompt),
        )
        return resolve(given, prepared.prompt, at)

    def cancel(self, rid: str, *, owner: str | None) -> int:
        """End a request of `owner` (None: of anyone) with `cancelled`; 0 if there is none that still runs, else 1."""
        return 0 if self._engine is None else self._engine.cancel(rid, owner=owner)

    async def _keep_system_prompts(self, engine: Engine) -> None:
        """Have those of the configuration known to everybody."""
        for number, text in enumerate(self._kv.system_prompts):
            given = GenerationInput(messages=({"role": "system", "content": text},))
            try:
                engine.want_shared(f"system {number}", await self._text.history_ids(given))
            except EdgeqwenError as error:
                logger.warning("kv.system_prompts: number %d cannot be kept: %s", number + 1, error.message)

    async def prompt(self, given: GenerationInput) -> Prompt:
        """The tokens of a prompt, without running it. Raises what `submit` raises of an input that is wrong."""
        self._check_input(given)
        return await self._text.prompt(given)

    async def history_ids(self, given: GenerationInput) -> tuple[int, ...]:
        """The tokens with which every prompt begins that continues the conversation in `given.messages`, which end with
        an answer, by a further turn of the user.
        """
        return await self._text.history_ids(given)

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

    def cached_tokens(self, owner: str, ids: tuple[int, ...]) -> int:
        """How many of `ids` would not have to be computed now."""
        return 0 if self._engine is None else self._engine.cached_tokens(owner, ids)

    @property
    def kv_bytes_per_token(self) -> int:
        """What the cache of one token takes; 0 until the model is loaded."""
        return 0 if self._engine is None else self._engine.spec.kv_bytes_per_token

    async def tokenize(self, text: str, *, special: bool) -> list[int]:
        """Token ids of `text`; strings of added tokens become their ids if `special`, else they stay text."""
        return await self._text.tokenize(text, special=special)

    async def detokenize(self, tokens: Sequence[int]) -> bytes:
        """The exact bytes of `tokens`. Raises `BadRequest` (field `tokens`)."""
        return await self._text.detokenize(tokens)

    def stats(self) -> EngineStats:
        """A snapshot of what runs and what has been."""
        return idle_stats(self._admission.num_queued) if self._engine is None else self._engine.stats()

    def owner_stats(self, owner: str) -> OwnerStats:
        """The same of one owner, who learns nothing of others by it."""
        if self._engine is None:
            return idle_owner_stats(self._admission.count_of(owner))
        return self._engine.owner_stats(owner)

    async def drain(self, timeout_s: float) -> None:
        """Refuse new work, let what runs finish, and cancel what is left after `timeout_s`."""
        self._refuse_work()
        engine = self._engine
        if engine is None:
            return
        try:
            async with asyncio.timeout(timeout_s):
                await engine.wait_until_idle()
        except TimeoutError:
            engine.cancel_all()

    def _refuse_work(self) -> None:
        if self.state != "failed":
            self.state = "draining"
        self._settled.set()

    async def close(self) -> None:
        """Cancel what is left and free the runtime; once is enough. A step that hangs is given up after a while."""
        if self._is_closed:
            return
        self._is_closed = True
        self._refuse_work()
        self._text.close()
        engine = self._engine
        if engine is not None:
            engine.cancel_all()
            engine.close()
        try:
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                if self._task is not None:
                    await self._task
                if engine is not None:
                    await engine.close_disk()
                    await self._thread.run(engine.close_runtime)
        except TimeoutError:
            logger.warning("the engine thread is still inside the runtime: it is left behind")
        self._thread.stop()
