"""A connection that speaks lines: which request runs when, and what is written.

At most `inflight` requests that take time are in flight. At that number the next line is still read: what answers at
once runs, other work becomes the one held request, and nothing more is taken from the buffer until something ends.
`LineSession` holds no socket and no timer: it is told of bytes, asked what state it is in, and writes through `write`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from edgeqwen.errors import CODES, EdgeqwenError, RuntimeFailed
from edgeqwen.protocol.batch_message import Batch
from edgeqwen.protocol.embed_message import Embed
from edgeqwen.protocol.frames import FrameDecoder, decode_object
from edgeqwen.protocol.limits import WireLimits
from edgeqwen.protocol.messages import (
    Envelope,
    Generation,
    RequestId,
    read_envelope,
    read_id,
    read_operation,
)
from edgeqwen.protocol.operation import LaterOperation, Operation
from edgeqwen.protocol.peer import Peer
from edgeqwen.protocol.replies import encode_frame, error_members
from edgeqwen.server.batch import ItemWork, LaterWork, ListedBatch
from edgeqwen.server.operations import Operations
from edgeqwen.server.turns import Turn, Turns

log = logging.getLogger(__name__)

LINES_PER_CALL: Final = 64
"""Lines taken in one go, so that a flood of small requests leaves the loop to others in between."""

MAX_TURNS: Final = 64
"""Requests without an id that may wait; each holds a finished frame at most."""


_GENERATING: Final = (Generation, Batch, Embed)
"""What is worked on by the engine; the others are answered by other threads, or at once."""


@dataclass(slots=True, eq=False)
class _Call:
    """A request in flight."""

    request_id: RequestId | None
    message: Operation
    turn: Turn | None = None
    work: ItemWork | None = None


class LineSession:
    """Requests and frames of one connection. `is_flooded` says that the client does not read what it is sent."""

    def __init__(
        self,
        operations: Operations,
        peer: Peer,
        limits: WireLimits,
        *,
        write: Callable[[bytes], None],
        is_writable: Callable[[], bool],
        is_flooded: Callable[[], bool],
        on_change: Callable[[], None],
    ) -> None:
        self._operations = operations
        self._peer = peer
        self._limits = limits
        self._write = write
        self._is_writable = is_writable
        self._is_flooded = is_flooded
        self._on_change = on_change
        self._decoder = FrameDecoder(max_line=limits.line_bytes)
        self._turns = Turns(write)
        self._calls: set[_Call] = set()
        self._by_id: dict[RequestId, _Call] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._held: tuple[Envelope, Operation] | None = None
        self._is_eof = False
        self.is_closing = False
        self.has_failed = False

    @property
    def num_lines(self) -> int:
        return self._decoder.num_lines

    @property
    def is_partial(self) -> bool:
        """Whether a line has begun and not ended (or waits to be taken)."""
        return self._decoder.is_partial

    @property
    def is_busy(self) -> bool:
        """Whether something is still to be answered."""
        return bool(self._calls or self._turns or self._held)

    @property
    def is_blocked(self) -> bool:
        """Whether no line is taken now, so that nothing should be read either."""
        return self._held is not None or self._is_flooded()

    def set_limits(self, limits: WireLimits) -> None:
        """For lines that begin from now on."""
        self._limits = limits
        self._decoder.set_max_line(limits.line_bytes)

    def feed(self, data: bytes) -> None:
        self._decoder.feed(data)

    def feed_eof(self) -> None:
        self._is_eof = True
        self._decoder.feed_eof()

    def take_lines(self) -> bool:
        """Take lines until none is left or no more may be; True if it stopped only to let others run."""
        self._take_held()
        for _ in range(LINES_PER_CALL):
            if self.is_closing or self.is_blocked or self.has_failed:
                return False
            try:
                line = next(self._decoder, None)
                if line is None:
                    self.is_closing = self._is_eof
                    return False
                number = self._decoder.num_lines
                members = decode_object(line, number=number, max_nesting=self._limits.nesting)
            except EdgeqwenError as exc:
                self.fail(exc)
                return False
            self._take(members)
        return True

    def pump(self) -> None:
        """The client reads again."""
        for call in tuple(self._calls):
            if call.work is not None:
                call.work.pump()

    def fail(self, error: EdgeqwenError) -> None:
        """Answer once and end everything: nothing after this can be trusted to be a request."""
        assert CODES[error.code].is_fatal
        self.has_failed = True
        self.cancel()
        self._write(self._encoded(error_members(error), None, done=True))

    def cancel(self) -> None:
        """End all that is in flight; nobody will read the answers."""
        self.is_closing = True
        self._held = None
        self._decoder.discard()
        for call in tuple(self._calls):
            if call.work is not None:
                call.work.cancel()
        for task in tuple(self._tasks):
            task.cancel()

    def _take(self, members: Mapping[str, Any]) -> None:
        """One request object: errors of its own are answered, and the connection goes on."""
        request_id: RequestId | None = None
        self.is_closing = members.get("close") is True
        try:
            request_id = read_id(members)
            envelope = read_envelope(members)
            if request_id is not None and request_id in self._by_id:
                raise EdgeqwenError("a request with this id is in flight", code="duplicate_id", field="id")
            message = read_operation(envelope.op, members)
        except EdgeqwenError as exc:
            self._reply(request_id, error_members(exc))
            return
        if self._may_begin(message, request_id):
            self._begin(envelope, message)
        else:
            self._held = (envelope, message)

    def _may_begin(self, message: Operation, request_id: RequestId | None) -> bool:
        if request_id is None and len(self._turns) >= MAX_TURNS:
            return False
        for kinds in (_GENERATING, LaterOperation):
            if isinstance(message, kinds):
                return self._num_calls(kinds) < self._limits.inflight
        return True

    def _num_calls(self, kinds: type[Operation] | tuple[type[Operation], ...]) -> int:
        return sum(isinstance(call.message, kinds) for call in self._calls)

    def _take_held(self) -> None:
        if self._held is None:
            return
        envelope, message = self._held
        if self._may_begin(message, envelope.id):
            self._held = None
            self._begin(envelope, message)

    def _begin(self, envelope: Envelope, message: Operation) -> None:
        try:
            if isinstance(message, _GENERATING):
                self._generate(envelope, message)
            elif isinstance(message, LaterOperation):
                self._answer_later(envelope, message)
            else:
                self._reply(envelope.id, self._operations.answer(message, self._peer, cancel_id=self._cancel_id))
        except EdgeqwenError as exc:
            self._reply(envelope.id, error_members(exc))

    def _generate(self, envelope: Envelope, message: Generation | Batch | Embed) -> None:
        call = _Call(envelope.id, message)

        def emit(members: Mapping[str, Any], done: bool) -> None:
            self._send(call, members, done=done)

        if isinstance(message, Batch):
            call.work = ListedBatch(
                message, self._operations, self._peer, self._limits, emit=emit, is_writable=self._is_writable
            )
        elif isinstance(message, Embed):
            call.work = LaterWork(lambda: self._operations.answer_later(message, self._peer), emit)
        else:
            call.work = self._operations.start(message, self._peer, emit=emit, is_writable=self._is_writable)
        self._add(call, call.work.start)

    def _answer_later(self, envelope: Envelope, message: LaterOperation) -> None:
        call = _Call(envelope.id, message)

        async def answer() -> None:
            try:
                members = await self._operations.answer_later(message, self._peer)
            except EdgeqwenError as exc:
                members = error_members(exc)
            except Exception as exc:
                # As in `Work`: an answer is owed whatever went wrong, and the error's text may hold the client's.
                log.error("%s failed: %s", envelope.op, type(exc).__name__)
                members = error_members(RuntimeFailed("internal error"))
            self._send(call, members, done=True)

        def start() -> None:
            task = asyncio.get_running_loop().create_task(answer())
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

        self._add(call, start)

    def _add(self, call: _Call, start: Callable[[], None]) -> None:
        self._calls.add(call)
        if call.request_id is not None:
            self._by_id[call.request_id] = call
            start()
        else:
            call.turn = Turn(start)
            self._turns.add(call.turn)

    def _send(self, call: _Call, members: Mapping[str, Any], *, done: bool) -> None:
        frame = self._encoded(members, call.request_id, done=done)
        if done:
            self._calls.discard(call)
            if call.request_id is not None:
                del self._by_id[call.request_id]
        if self.has_failed:
            return
        if call.turn is None:
            self._write(frame)
        else:
            self._turns.send(call.turn, frame, done=done)
        if done:
            self._on_change()

    def _reply(self, request_id: RequestId | None, members: Mapping[str, Any]) -> None:
        """The only frame of a request that is not in flight."""
        frame = self._encoded(members, request_id, done=True)
        if request_id is not None or not self._turns:
            self._write(frame)
        else:
            self._turns.add(Turn(frames=[frame], is_finished=True))

    def _encoded(self, members: Mapping[str, Any], request_id: RequestId | None, *, done: bool) -> bytes:
        """Every frame that is written comes from here, so errors are counted here."""
        if "error" in members:
            self._operations.note_error(members["error"]["code"])
        return encode_frame(members, done=done, request_id=request_id)

    def _cancel_id(self, target: RequestId) -> int:
        call = self._by_id.get(target)
        if call is None or call.work is None:
            return 0
        call.work.cancel()
        return 1
