"""One generation that a client asked for, from submission to its final frame."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeAlias

from edgeqwen.core.request import Done, Event, FinishReason, Timings, Usage
from edgeqwen.engine.generation import Sink
from edgeqwen.engine.intake import Generation
from edgeqwen.errors import EdgeqwenError, RuntimeFailed
from edgeqwen.protocol.answers import Answer, AnswerForm, Emit
from edgeqwen.protocol.replies import error_members

Submit: TypeAlias = Callable[[Sink], Awaitable[Generation]]
"""Hands a request to whoever runs it; raises what refuses it. A caller that is cancelled meanwhile has no request."""

log = logging.getLogger(__name__)


class Work:
    """Submits on `start`, emits frames, and ends with exactly one final frame. `cancel` works at any time.

    `final_members` are what the final frame of a generation that came to an end says besides.
    """

    def __init__(
        self,
        submit: Submit,
        form: AnswerForm,
        *,
        emit: Emit,
        is_writable: Callable[[], bool],
        on_accepted: Callable[[str], None],
        final_members: Callable[[], Mapping[str, Any]] = dict,
    ) -> None:
        self._submit_to = submit
        self._emit = emit
        self._on_accepted = on_accepted
        self._final_members = final_members
        self._answer = Answer(form, emit=self._emit_frame, is_writable=is_writable, stop=self._cut)
        self._num_choices = form.num_choices
        self._generation: Generation | None = None
        self._task: asyncio.Task[None] | None = None
        self._has_begun = False  # a task that is cancelled before its first step runs nothing at all
        self._is_cancelled = False
        self._is_cut = False

    def start(self) -> None:
        assert self._task is None
        self._task = asyncio.get_running_loop().create_task(self._submit())

    def cancel(self) -> None:
        """Ask for the end; the final frame says `cancelled` unless the generation ended before."""
        self._is_cancelled = True
        if self._generation is not None:
            self._generation.cancel()
        elif self._task is not None and self._has_begun:
            self._task.cancel()

    def pump(self) -> None:
        """Go on emitting: the client reads again."""
        self._answer.pump()

    def _cut(self) -> None:
        """The reply is full. An echoed prompt may fill it before the engine has given the generation out."""
        self._is_cut = True
        if self._generation is not None:
            self._generation.cancel()

    def _emit_frame(self, members: dict[str, Any], done: bool) -> None:
        if done and "error" not in members:
            members = {**members, **self._final_members()}
        if done:
            self._let_go()
        self._emit(members, done)

    def _let_go(self) -> None:
        """Forget the request: work and answer know each other, so they live until garbage is collected, and thousands
        of prompts should not live as long.
        """
        self._generation = None
        self._submit_to = _submit_nothing

    def _on_event(self, event: Event) -> None:
        self._answer.push(event)

    async def _submit(self) -> None:
        self._has_begun = True
        began_at = asyncio.get_running_loop().time()
        if self._is_cancelled:
            self._end_unheard(0.0)
            return
        try:
            generation = await self._submit_to(self._on_event)
        except EdgeqwenError as exc:
            self._refuse(exc)
            return
        except asyncio.CancelledError:
            # Only `cancel` does this, and the engine has no request then.
            self._end_unheard(asyncio.get_running_loop().time() - began_at)
            return
        except Exception as exc:
            # The client must get its final frame whatever went wrong; the text of a foreign error may hold its prompt.
            log.error("a request could not be submitted: %s", type(exc).__name__)
            self._refuse(RuntimeFailed("internal error while the request was prepared"))
            return
        self._generation = generation
        self._on_accepted(generation.rid)
        self._answer.set_resolved(generation.params, generation.prompt_ids)
        if self._is_cut:
            generation.cancel()

    def _end_unheard(self, waited_s: float) -> None:
        """Cancelled before the engine had the request: the client gets a final frame all the same."""
        waited_ms = round(1000 * waited_s)
        finishes: list[FinishReason] = ["cancelled"] * self._num_choices
        self._answer.push(Done("", tuple(finishes), Usage(0, 0, 0), Timings(waited_ms, waited_ms, waited_ms)))

    def _refuse(self, error: EdgeqwenError) -> None:
        members: dict[str, Any] = error_members(error)
        self._let_go()
        self._emit(members, True)


async def _submit_nothing(_: Sink) -> Generation:
    raise AssertionError("work is submitted once")
