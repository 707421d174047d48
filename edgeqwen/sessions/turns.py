"""One turn of a session, from a request to a revision.

    hold the session -> (drop old turns until the prompt fits) -> generate -> have it on disk -> release -> last event

A turn that ends with `stop`, `tool_calls` or `length` is kept, and its last event goes out once it is on disk: who has
seen it will find it after any crash. Any other end, a refusal included, leaves the session as it was. Whatever happens,
the session is released, and the sink gets what the engine's contract says: at most one terminal event, and nothing
after it.
"""

from __future__ import annotations

import dataclasses
import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from edgeqwen.core.request import Delta, Done, Event, Failed, Started, ToolCall
from edgeqwen.engine.generation import GenerationInput, Sink
from edgeqwen.engine.inference import Inference
from edgeqwen.engine.intake import Generation
from edgeqwen.errors import BadRequest, EdgeqwenError, RuntimeFailed
from edgeqwen.sessions.addition import Addition, read_addition
from edgeqwen.sessions.keeper import Keeper
from edgeqwen.sessions.session import Session, answer_message, appended, check_rev
from edgeqwen.sessions.tokens import SessionTokens

ROOM_SHARE: Final = 4
"""A truncated history leaves this part of the context to an answer whose length is not given."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnRequest:
    """`ref` is an id, or `@name` of a session that is created if there is none. The messages of `given` are new; with
    `may_repeat` they may begin with the session's history.
    """

    owner: str
    ref: str
    given: GenerationInput
    if_rev: int | None = None
    may_repeat: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnRules:
    """What holds for all turns. `default_max_tokens` is the engine's; `ttl_s` is for sessions that a turn creates."""

    default_max_tokens: int = 2048
    ttl_s: int = 7 * 86_400
    max_messages: int = 256


class Turn:
    """`submit` may be called once. Raises `BadRequest` if the request cannot be one of a session."""

    def __init__(
        self, inference: Inference, keeper: Keeper, tokens: SessionTokens, request: TurnRequest, rules: TurnRules
    ) -> None:
        if request.given.n not in {None, 1}:
            raise BadRequest("n must be 1 in a session", field="n")
        self._inference = inference
        self._keeper = keeper
        self._tokens = tokens
        self._request = request
        self._rules = rules
        self._sink: Sink
        self._session: Session | None = None  # as it was; its system message is already what it is to be
        self._addition: Addition
        self._is_new = False
        self._given = request.given
        self._num_dropped = 0
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._calls: list[ToolCall] = []
        self._generation: Generation | None = None
        self._is_deaf = False
        self._kept: Session | None = None
        self._is_saved = False

    def members(self) -> dict[str, Any]:
        """What the final frame says of the session; nothing if there is none."""
        if self._kept is not None:
            dropped = {"dropped": self._num_dropped} if self._num_dropped else {}
            unsaved = {} if self._is_saved else {"saved": False}
            return {"session": self._kept.id, "rev": self._kept.rev, **dropped, **unsaved}
        if self._session is None or self._is_new:
            return {}
        return {"session": self._session.id, "rev": self._session.rev}

    async def submit(self, sink: Sink) -> Generation:
        """As `Inference.submit`; raises also `not_found`, `session_busy`, `conflict`, `quota`."""
        self._sink = sink
        await self._keeper.until_loaded()
        session = self._begin()
        try:
            if session.overflow == "truncate" and self._inference.context:
                self._num_dropped = await self._num_to_drop(session)
            self._given = self._with_history(session, self._num_dropped)
            generation = await self._inference.submit(self._given, owner=self._request.owner, sink=self._on_event)
        except BaseException as error:
            self._release()
            if isinstance(error, BadRequest):
                raise self._renumbered(error, session) from error
            raise
        self._generation = generation
        if self._is_deaf:
            generation.cancel()
        return generation

    def _begin(self) -> Session:
        """Find or create the session, read what is new, and hold it; all of it or nothing."""
        request, table = self._request, self._keeper.table
        self._keeper.sweep()
        now = self._keeper.clock()
        found = table.find(request.owner, request.ref)
        if found is None and request.ref.startswith("@"):
            session = self._create(now)
        else:
            session = table.get(request.owner, request.ref)
        try:
            table.check_idle(session)
            check_rev(session, request.if_rev)
            messages = request.given.messages
            assert messages is not None
            most = self._rules.max_messages
            self._addition = read_addition(session, messages, may_repeat=request.may_repeat, most=most)
        except EdgeqwenError:
            if self._is_new:
                table.remove(session)
            raise
        table.hold(session, now)
        self._tokens.unsettle(session)
        self._session = msgspec.structs.replace(session, system=self._addition.system)
        return self._session

    def _create(self, now: float) -> Session:
        request = self._request
        try:
            session = self._keeper.table.create(request.owner, now, ttl_s=self._rules.ttl_s, name=request.ref[1:])
        except BadRequest as error:
            raise BadRequest(error.message, field="session") from error
        self._is_new = True
        return session

    def _with_history(self, session: Session, num_dropped: int) -> GenerationInput:
        messages = (*session.history(num_dropped=num_dropped), *self._addition.messages)
        return dataclasses.replace(self._request.given, messages=messages, has_history=True)

    async def _num_to_drop(self, session: Session) -> int:
        """The fewest of the oldest turns without which prompt and answer fit; all, if nothing helps."""
        # While the model loads the context is unknown: a history that leaves little room is then found a turn later.
        context = self._inference.context
        given = self._request.given.max_tokens
        room = min(self._rules.default_max_tokens, context // ROOM_SHARE) if given is None else given
        least, most = 0, len(session.turns)
        while least < most:
            # The whole history is tried first, since it mostly fits.
            middle = 0 if least == 0 and most == len(session.turns) else (least + most) // 2
            prompt = await self._inference.prompt(self._with_history(session, middle))
            if len(prompt.ids) + room <= context:
                most = middle
            else:
                least = middle + 1
        return least

    def _renumbered(self, error: BadRequest, session: Session) -> BadRequest:
        """The engine counts messages from the start of the history, the client from the start of its request."""
        offset = len(session.history(num_dropped=self._num_dropped)) - self._addition.offset

        def own(match: re.Match[str]) -> str:
            return f"messages[{max(0, int(match[1]) - offset)}]"

        pattern = r"messages\[(\d+)\]"
        field = None if error.field is None else re.sub(pattern, own, error.field)
        return BadRequest(re.sub(pattern, own, error.message), field=field)

    def _on_event(self, event: Event) -> None:
        match event:
            case Delta():
                (self._content if event.channel == "content" else self._reasoning).append(event.text)
            case ToolCall():
                self._calls.append(event)
            case Done() if event.finishes[0] in {"stop", "length", "tool_calls"}:
                self._keeper.spawn(self._commit(event))
                return
            case Done() | Failed():
                self._release()
            case Started():
                pass
        self._forward(event)

    def _forward(self, event: Event) -> None:
        """A sink that breaks ends its turn, but must not keep this one from hearing of that end."""
        if self._is_deaf:
            return
        try:
            self._sink(event)
        except Exception:
            log.exception("the receiver of a turn failed")
            self._is_deaf = True
            if self._generation is not None:
                self._generation.cancel()

    async def _commit(self, done: Done) -> None:
        event: Event = done
        try:
            await self._keep(done)
        except Exception as error:
            log.error("a turn could not be kept: %s", type(error).__name__)
            event = Failed(done.rid, RuntimeFailed("the turn could not be kept"))
        self._release()
        self._forward(event)
        if self._kept is not None and self._given.cache is not False:
            await self._settle(self._kept)

    async def _keep(self, done: Done) -> None:
        session = self._session
        assert session is not None
        answer = answer_message("".join(self._content), "".join(self._reasoning), self._calls, done.finishes[0])
        kept = appended(
            session,
            (*self._addition.messages, answer),
            system=self._addition.system,
            num_dropped=self._num_dropped,
            num_tokens=done.usage.prompt + done.usage.completion,
            model=self._inference.model_name,
            now=self._keeper.clock(),
        )
        self._is_saved = await self._keeper.store.save(kept)
        self._keeper.table.replace(kept)
        self._kept = kept

    def _release(self) -> None:
        session = self._session
        assert session is not None
        table = self._keeper.table
        table.release(session, self._keeper.clock())
        if self._is_new and self._kept is None:
            table.remove(session)

    async def _settle(self, kept: Session) -> None:
        """Ask for what the next prompt begins with, unless the session has gone on meanwhile."""
        given: Mapping[str, Any] = {"messages": kept.history()}
        try:
            ids = await self._tokens.read(kept, dataclasses.replace(self._given, **given))
        except EdgeqwenError:
            return
        table = self._keeper.table
        current = table.find(kept.owner, kept.id)
        if current is not None and current.rev == kept.rev and not table.is_busy(current):
            self._tokens.settle(kept, ids)
