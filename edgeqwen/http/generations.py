"""Generations on their way from the engine to a response: of one prompt or of several, as one stream of events.

A response holds its generations: when it is over, or its client has hung up, they are cancelled.
"""

from __future__ import annotations

import asyncio
import dataclasses
import re
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Final, TypeAlias

from edgeqwen.core.request import Delta, Done, Event, Failed, FinishReason, Started, ToolCall, Usage
from edgeqwen.engine.generation import GenerationInput, Sink
from edgeqwen.engine.inference import Inference
from edgeqwen.engine.intake import Generation
from edgeqwen.errors import EdgeqwenError
from edgeqwen.protocol.answers import Backlog
from edgeqwen.sessions.sessions import Sessions
from edgeqwen.sessions.turns import TurnRequest

Submit: TypeAlias = Callable[[Sink], Awaitable[Generation]]
Piece: TypeAlias = Delta | ToolCall

MAX_AT_ONCE: Final = 8
"""Prompts of one request that are with the engine at the same time."""


def is_shown(piece: Piece, *, with_reasoning: bool) -> bool:
    """Whether a piece goes to a client that wants thoughts, or wants none."""
    return with_reasoning or isinstance(piece, ToolCall) or piece.channel == "content"


@dataclass(frozen=True, slots=True)
class Head:
    """What every object of one answer repeats. `created` is in seconds since 1970."""

    rid: str
    model: str
    created: int


@dataclass(frozen=True, slots=True)
class Ending:
    """How all choices have ended, those of a later prompt behind those of an earlier one. `stop` is the stop string
    that ended the first.
    """

    finishes: tuple[FinishReason, ...]
    usage: Usage
    stop: str | None = None


class Mailbox:
    """Events, waited for one at a time; deltas that pile up are joined."""

    def __init__(self) -> None:
        self._backlog = Backlog()
        self._has_event = asyncio.Event()

    def push(self, event: Event) -> None:
        self._backlog.push(event)
        self._has_event.set()

    async def next(self) -> Event:
        while not self._backlog:
            self._has_event.clear()
            await self._has_event.wait()
        return self._backlog.pop()


class Running:
    """The generations of one request. `head` is that of the first; `ending` is known once `pieces` has come to its end.

    The choices of the i-th prompt have the numbers from `i * num_choices` on.
    """

    def __init__(self, submits: Sequence[Submit], num_choices: int, on_accepted: Callable[[str], None]) -> None:
        self._waiting = deque(enumerate(submits))
        self._num_choices = num_choices
        self._on_accepted = on_accepted
        self._mailbox = Mailbox()
        self._generations: list[Generation] = []
        self._index_of: dict[str, int] = {}  # rid to the number of its prompt
        self._dones: dict[int, Done] = {}
        self._num_prompts = len(submits)

    @property
    def rid(self) -> str:
        """That of the first generation, which was accepted."""
        return self._generations[0].rid

    @property
    def num_prompt_tokens(self) -> int:
        """Those of the first prompt."""
        return len(self._generations[0].prompt_ids)

    async def start(self) -> None:
        """Hand over the first prompts. Raises what refuses one."""
        while self._waiting and len(self._generations) < MAX_AT_ONCE:
            await self._submit_next()

    async def _submit_next(self) -> None:
        index, submit = self._waiting.popleft()

        def sink(event: Event) -> None:
            if isinstance(event, Started):
                self._index_of[event.rid] = index
            elif index and isinstance(event, Delta | ToolCall):
                event = dataclasses.replace(event, choice=index * self._num_choices + event.choice)
            self._mailbox.push(event)

        generation = await submit(sink)
        self._generations.append(generation)
        self._on_accepted(generation.rid)

    async def pieces(self) -> AsyncIterator[Piece]:
        """What the choices say, as it comes, until all have ended. Raises the error that a generation fails with."""
        while len(self._dones) < self._num_prompts:
            match await self._mailbox.next():
                case Delta() | ToolCall() as piece:
                    yield piece
                case Done() as done:
                    self._dones[self._index_of[done.rid]] = done
                    if self._waiting:
                        await self._submit_next()
                case Failed() as failed:
                    raise failed.error
                case Started():
                    pass

    @property
    def ending(self) -> Ending:
        assert len(self._dones) == self._num_prompts
        dones = [self._dones[index] for index in range(self._num_prompts)]
        sums = {
            name: sum(getattr(done.usage, name) for done in dones)
            for name in ("prompt", "cached", "completion", "reasoning")
        }
        finishes = tuple(finish for done in dones for finish in done.finishes)
        return Ending(finishes, Usage(**sums), dones[0].stops[0] if dones[0].stops else None)

    def cancel(self) -> None:
        for generation in self._generations:
            generation.cancel()


class Generations:
    """Begins generations. `remember(rid, owner)` is told of those accepted; `clock` gives seconds since 1970."""

    def __init__(
        self,
        inference: Inference,
        sessions: Sessions,
        *,
        remember: Callable[[str, str], None],
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.inference = inference
        self._sessions = sessions
        self._remember = remember
        self._clock = clock

    @asynccontextmanager
    async def open(
        self, given: Sequence[GenerationInput], owner: str, *, conversation: str | None = None
    ) -> AsyncIterator[tuple[Head, Running]]:
        """The generations of these inputs, which ask for equally many choices; cancelled at the end of the block.

        `conversation` is the name of the caller's session that the only input goes on with. Raises `EdgeqwenError` if
        one of the first is refused.
        """
        submits = [self._submit(each, owner, conversation) for each in given]
        running = Running(submits, given[0].n or 1, lambda rid: self._remember(rid, owner))
        try:
            await running.start()
            yield Head(running.rid, self.inference.model_name, int(self._clock())), running
        finally:
            running.cancel()

    def _submit(self, given: GenerationInput, owner: str, conversation: str | None) -> Submit:
        if conversation is None:
            return lambda sink: self.inference.submit(given, owner=owner, sink=sink)
        request = TurnRequest(owner=owner, ref=f"@{conversation}", given=given, may_repeat=True)
        return self._sessions.turn(request).submit


def renamed(error: EdgeqwenError, names: Mapping[str, str]) -> EdgeqwenError:
    """The error of a field, by the name that it has in the client's format: engine's name to the client's."""
    field = error.field or ""
    name = re.split(r"[\[.]", field, maxsplit=1)[0]
    if name not in names:
        return error
    message = error.message
    if message.startswith(name):
        message = names[name] + message.removeprefix(name)
    field = names[name] + field.removeprefix(name)
    return error.reworded(message, field=field)
