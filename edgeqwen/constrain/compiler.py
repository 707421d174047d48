"""Forms to constraints, beside the event loop and within bounds.

A grammar is compiled on a thread of its own, one grammar at a time; nothing but those who wait for a new grammar waits
for it. One that takes longer than `MAX_COMPILE_S` is refused, and its thread left to end by itself, since nothing ends
it from outside; when several such threads are still at work, no further grammar is begun. llguidance's own limits
bound what a compilation and each step later may take. It follows rules by recursion, tens of thousands of which fit
into the text that is read, so the thread has a large stack (of addresses; memory only as far as it is used).

Constraints are kept for the next request with the same form, the latest ones, as long as they took little time
together: what took long to compile is large.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TypeVar

import numpy as np

from edgeqwen.constrain.form import Form, Part, Rules, grammar_of, grammar_of_part
from edgeqwen.constrain.messages import TOO_COMPLEX, describe
from edgeqwen.constrain.state import GrammarConstraint
from edgeqwen.constrain.vocabulary import make_vocabulary
from edgeqwen.core.constraint import Constraint
from edgeqwen.errors import BadRequest, EdgeqwenError
from edgeqwen.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

T = TypeVar("T")

MAX_COMPILE_S: Final = 2.0
MAX_STUCK: Final = 2
MAX_KEPT: Final = 32
MAX_KEPT_S: Final = 1.0
_TRIED_TOKENS: Final = 48
"""White space and indentation are tried first, and what follows shall be too."""
_STACK_BYTES: Final = 256 << 20
_MAX_LEXER_STATES: Final = 50_000
"""About 2 kB each."""


@dataclass(frozen=True, slots=True)
class _Compiled:
    constraint: Constraint
    duration_s: float


class Compiler:
    """Compiles forms for one model. Used on the event loop alone."""

    def __init__(
        self, tokenizer: Tokenizer, eos_token_ids: tuple[int, ...], *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._tokenizer = tokenizer
        self._eos = eos_token_ids
        self._clock = clock
        self._vocabulary: LLTokenizer | None = None
        self._kept: OrderedDict[str, _Compiled] = OrderedDict()
        self._stuck: list[threading.Thread] = []
        self._lock = asyncio.Lock()

    async def compile(self, form: Form) -> Constraint:
        """The constraint that holds an answer to `form`. Raises `BadRequest` with the field at fault, and
        `EdgeqwenError` (`busy`) while earlier grammars are still being given up.
        """
        grammar = grammar_of(form, self._tokenizer)
        if (constraint := self._recall(grammar)) is not None:
            return constraint
        async with self._lock:
            if (constraint := self._recall(grammar)) is not None:
                return constraint
            compiled = await self._compile_new(form, grammar)
            self._keep(grammar, compiled)
            return compiled.constraint

    def let_go(self) -> None:
        """Keep nothing for later: neither constraints nor the vocabulary, which is made anew for the next form."""
        self._kept.clear()
        self._vocabulary = None

    def _recall(self, grammar: str) -> Constraint | None:
        """What was compiled before; who asks for that waits for nobody's grammar."""
        kept = self._kept.get(grammar)
        if kept is None:
            return None
        self._kept.move_to_end(grammar)
        return kept.constraint

    async def _compile_new(self, form: Form, grammar: str) -> _Compiled:
        self._stuck = [thread for thread in self._stuck if thread.is_alive()]
        if len(self._stuck) >= MAX_STUCK:
            raise EdgeqwenError(
                f"{form.field}: grammars that took too long are still being given up", code="busy", field=form.field,
                retry_ms=round(1000 * MAX_COMPILE_S),
            )  # fmt: skip
        if self._vocabulary is None:
            self._vocabulary = await self._run(lambda: make_vocabulary(self._tokenizer, self._eos))
        vocabulary = self._vocabulary
        began_at = self._clock()
        try:
            async with asyncio.timeout(MAX_COMPILE_S):
                constraint = await self._run(lambda: _compile(form, grammar, vocabulary))
        except TimeoutError:
            message = f"{form.field} {TOO_COMPLEX}: it takes more than {MAX_COMPILE_S:g} s to compile"
            raise BadRequest(message, field=form.field) from None
        return _Compiled(constraint, self._clock() - began_at)

    def _keep(self, grammar: str, compiled: _Compiled) -> None:
        self._kept[grammar] = compiled
        while len(self._kept) > MAX_KEPT or sum(each.duration_s for each in self._kept.values()) > MAX_KEPT_S:
            self._kept.popitem(last=False)

    async def _run(self, job: Callable[[], T]) -> T:
        """On a thread of its own; if the caller does not wait for its end, the thread counts as stuck."""
        loop = asyncio.get_running_loop()
        result: asyncio.Future[T] = loop.create_future()
        thread = _start(lambda: _work(job, loop, result))
        try:
            return await result
        except asyncio.CancelledError:
            self._stuck.append(thread)
            raise


def _start(job: Callable[[], None]) -> threading.Thread:
    before = threading.stack_size(_STACK_BYTES)  # of all threads begun meanwhile: too large does no harm
    try:
        thread = threading.Thread(target=job, name="grammar", daemon=True)
        thread.start()
    finally:
        threading.stack_size(before)
    return thread


def _work(job: Callable[[], T], loop: asyncio.AbstractEventLoop, result: asyncio.Future[T]) -> None:
    try:
        value: Any = job()
        error: Exception | None = None
    except Exception as exc:
        value, error = None, exc
    except BaseException as exc:  # a panic of llguidance is no Exception
        value, error = None, RuntimeError(type(exc).__name__)

    def tell() -> None:
        if result.done():
            return
        if error is None:
            result.set_result(value)
        else:
            result.set_exception(error)

    with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
        loop.call_soon_threadsafe(tell)


def _compile(form: Form, grammar: str, vocabulary: LLTokenizer) -> Constraint:
    """On the thread. Each part is compiled by itself first, so that an error is of the part at fault."""
    parts: list[Part] = [function.arguments for function in form.functions]
    if parts and form.format is not None:
        parts.append(form.format)
    for part in parts:
        _matcher(vocabulary, grammar_of_part(part), part.field, has_lines=isinstance(part, Rules))
    matcher = _matcher(vocabulary, grammar, form.field, has_lines=isinstance(form.format, Rules))
    return GrammarConstraint(matcher, vocab_size=vocabulary.vocab_size, field=form.field)


def _matcher(vocabulary: LLTokenizer, grammar: str, field: str, *, has_lines: bool) -> LLMatcher:
    from llguidance import LLMatcher

    matcher = LLMatcher(vocabulary, grammar, log_level=0, limits=_limits())
    wrong = matcher.get_error() or _try(matcher.deep_copy())
    if wrong:
        raise BadRequest(f"{field} {describe(wrong, has_lines=has_lines)}", field=field)
    return matcher


def _try(matcher: LLMatcher) -> str:
    """What is wrong with the first few tokens, which show most of what is too much to follow."""
    for _ in range(_TRIED_TOKENS):
        allowed = np.flatnonzero(np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little"))
        if not allowed.size or matcher.is_stopped():
            break
        matcher.consume_token(int(allowed[0]))
    return matcher.get_error()


def _limits() -> Any:
    from llguidance import LLParserLimits

    return LLParserLimits(max_lexer_states=_MAX_LEXER_STATES, verbose_errors=False)
