"""Many requests in one: a few run at a time, each ends in one frame, and one more frame ends them all.

`ItemRunner` runs the items that it is given, by whichever front they come; `ListedBatch` is the operation `batch`, with
all of its items in one line. To the engine each item is a request of its own, and counts as one.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any, Protocol, TypeAlias

from edgeqwen.errors import BadRequest, EdgeqwenError, RuntimeFailed
from edgeqwen.protocol.answers import Emit
from edgeqwen.protocol.batch_message import Batch
from edgeqwen.protocol.batch_plan import BatchPlan, read_plan
from edgeqwen.protocol.limits import WireLimits
from edgeqwen.protocol.messages import Generation, RequestId
from edgeqwen.protocol.operation import LaterOperation, Operation
from edgeqwen.protocol.peer import Peer
from edgeqwen.protocol.replies import error_members

log = logging.getLogger(__name__)

EmitItem: TypeAlias = Callable[[RequestId | None, dict[str, Any]], None]
"""Takes the id that an item brought, if it did, and the members of the frame that answers it."""


class ItemWork(Protocol):
    """An item on its way; `server.work.Work` is one."""

    def start(self) -> None: ...

    def cancel(self) -> None: ...

    def pump(self) -> None: ...


class ItemServer(Protocol):
    """Who answers items; `server.operations.Operations` does."""

    def start(self, message: Generation, peer: Peer, *, emit: Emit, is_writable: Callable[[], bool]) -> ItemWork: ...

    async def answer_later(self, message: LaterOperation, peer: Peer) -> dict[str, Any]: ...


class ItemRunner:
    """Runs at most `max_inflight` items. `emit` gets one frame of each, in the order in which they end; `on_end` is
    called after that of an item that took time.
    """

    def __init__(
        self,
        server: ItemServer,
        plan: BatchPlan,
        peer: Peer,
        *,
        max_inflight: int,
        emit: EmitItem,
        is_writable: Callable[[], bool],
        on_end: Callable[[], None],
    ) -> None:
        self._server = server
        self._plan = plan
        self._peer = peer
        self._max_inflight = max_inflight
        self._emit = emit
        self._is_writable = is_writable
        self._on_end = on_end
        self._works: dict[int, ItemWork] = {}
        self._num_added = 0
        self.num_answered = 0
        self.num_failed = 0

    @property
    def is_idle(self) -> bool:
        """Whether every item that was added is answered."""
        return not self._works

    @property
    def is_full(self) -> bool:
        return len(self._works) >= self._max_inflight

    def add(self, item: Any) -> None:
        """Begin an item; one that is wrong is answered at once."""
        number = self._num_added
        self._num_added += 1
        item_id: RequestId | None = None
        try:
            item_id, message = self._plan.read_item(item)
            work = self._make(number, item_id, message)
        except EdgeqwenError as exc:
            self._answer(number, item_id, error_members(exc))
            return
        self._works[number] = work
        work.start()

    def cancel(self) -> None:
        """Ask for the end of all that run; each still gets its frame."""
        for work in tuple(self._works.values()):
            work.cancel()

    def pump(self) -> None:
        """The client reads again."""
        for work in tuple(self._works.values()):
            work.pump()

    def total(self) -> dict[str, Any]:
        """Members of the frame that ends the batch: items that were answered, and those of them with an error."""
        return {"n": self.num_answered, "failed": self.num_failed}

    def _make(self, number: int, item_id: RequestId | None, message: Operation) -> ItemWork:
        def end(members: dict[str, Any], is_last: bool) -> None:
            assert is_last, "an item is answered in one frame"
            del self._works[number]
            self._answer(number, item_id, members)
            self._on_end()

        if isinstance(message, Generation):
            return self._server.start(message, self._peer, emit=end, is_writable=self._is_writable)
        assert isinstance(message, LaterOperation)
        return LaterWork(lambda: self._server.answer_later(message, self._peer), end)

    def _answer(self, number: int, item_id: RequestId | None, members: dict[str, Any]) -> None:
        self.num_answered += 1
        self.num_failed += "error" in members
        self._emit(item_id, {"item": number, **members})


class LaterWork:
    """An item that is no generation. It holds its answer back for nobody: there is one, and it is there at once."""

    def __init__(self, answer: Callable[[], Awaitable[dict[str, Any]]], emit: Emit) -> None:
        self._answer = answer
        self._emit = emit
        self._task: asyncio.Task[dict[str, Any]] | None = None

    def start(self) -> None:
        self._task = asyncio.ensure_future(self._members())
        self._task.add_done_callback(self._end)

    def cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()

    def pump(self) -> None:
        """Nothing waits here."""

    async def _members(self) -> dict[str, Any]:
        try:
            return await self._answer()
        except EdgeqwenError as exc:
            return error_members(exc)
        except Exception as exc:
            # As in `Work`: an answer is owed whatever went wrong, and the error's text may hold the client's.
            log.error("an item failed: %s", type(exc).__name__)
            return error_members(RuntimeFailed("internal error"))

    def _end(self, task: asyncio.Task[dict[str, Any]]) -> None:
        self._emit({"finish": "cancelled"} if task.cancelled() else task.result(), True)


class ListedBatch:
    """The work of one `batch`. Raises `BadRequest` for what concerns all items."""

    def __init__(
        self,
        message: Batch,
        server: ItemServer,
        peer: Peer,
        limits: WireLimits,
        *,
        emit: Emit,
        is_writable: Callable[[], bool],
    ) -> None:
        if len(message.items) > limits.batch_items:
            raise BadRequest(f"a batch of one line has at most {limits.batch_items} items", field="items")
        self._waiting: deque[Any] = deque(message.items)
        self._emit = emit
        self._has_begun = False
        self._is_cancelled = False
        self._runner = ItemRunner(
            server,
            read_plan(message.each, message.common, has_ids=False),
            peer,
            max_inflight=limits.inflight,
            emit=lambda _, members: emit(members, False),
            is_writable=is_writable,
            on_end=self._go_on,
        )

    def start(self) -> None:
        self._has_begun = True
        self._go_on()

    def cancel(self) -> None:
        """End all items. Those that run get a frame that says so, those that have not begun get none."""
        if self._is_cancelled:
            return
        self._is_cancelled = True
        self._waiting.clear()
        if self._has_begun:
            self._runner.cancel()

    def pump(self) -> None:
        self._runner.pump()

    def _go_on(self) -> None:
        while self._waiting and not self._runner.is_full:
            self._runner.add(self._waiting.popleft())
        if not self._waiting and self._runner.is_idle:
            finish = {"finish": "cancelled"} if self._is_cancelled else {}
            self._emit({**self._runner.total(), **finish}, True)
