"""`POST /eqp/batch`: a body of any length, whose items are answered while it is still being sent.

Three things hold each other back, so that memory does not grow with the body. The body is read only while an item may
begin; an item may begin only while fewer than `inflight` run and few frames wait; an item whose answer cannot be sent
still runs. So a client that does not read its answers is soon no longer read from.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Mapping
from typing import Any, Final

from edgeqwen.errors import BadRequest, EdgeqwenError, RuntimeFailed
from edgeqwen.http import web
from edgeqwen.http.operations import LINES_TYPE
from edgeqwen.http.requests import is_cut_short, open_body
from edgeqwen.http.seam import Operations
from edgeqwen.http.session import open_response
from edgeqwen.protocol.batch_message import BatchHead
from edgeqwen.protocol.batch_plan import BatchPlan, read_plan
from edgeqwen.protocol.item_reader import ItemReader, blocks
from edgeqwen.protocol.limits import WireLimits
from edgeqwen.protocol.messages import ENVELOPE, RequestId, convert, read_envelope
from edgeqwen.protocol.peer import Peer
from edgeqwen.protocol.replies import encode_frame, error_members
from edgeqwen.server.batch import ItemRunner
from edgeqwen.server.timers import PeerWatch

log = logging.getLogger(__name__)

LINES_TYPES: Final = frozenset({
    "application/x-ndjson",
    "application/ndjson",
    "application/jsonl",
    "application/x-jsonlines",
})
READ_BYTES: Final = 64 << 10
MAX_WAITING: Final = 64
"""Frames that may wait for the client; those of items that are wrong are there at once."""


class Batches:
    """Serves the route."""

    def __init__(self, operations: Operations, limits: WireLimits) -> None:
        self._operations = operations
        self._limits = limits

    async def answer(self, request: web.BaseRequest, _: str, peer: Peer) -> web.StreamResponse:
        """Raises `EdgeqwenError` as long as no item was read; later errors stand in the last line."""
        await open_body(request)
        exchange = Exchange(request, peer, self._operations, self._limits)
        return await exchange.run()


class Exchange:
    """One batch: `_feed` reads the body in a task of its own, `run` writes."""

    def __init__(self, request: web.BaseRequest, peer: Peer, operations: Operations, limits: WireLimits) -> None:
        self._request = request
        self._peer = peer
        self._operations = operations
        self._limits = limits
        self._reader = ItemReader(
            item_bytes=limits.line_bytes, nesting=limits.nesting, is_lines=request.content_type in LINES_TYPES
        )
        self._runner: ItemRunner | None = None
        self._request_id: RequestId | None = None
        self._frames: list[bytes] = []
        self._has_frame = asyncio.Event()
        self._has_room = asyncio.Event()
        self._has_begun = asyncio.Event()
        self._is_fed = False
        self._is_done = False
        self._error: EdgeqwenError | None = None

    async def run(self) -> web.StreamResponse:
        """The response, written to its end."""
        feeding = asyncio.create_task(self._feed())
        watch = self._watch()
        watch.begin()
        try:
            await self._has_begun.wait()
            runner = self._runner
            if self._error is not None and (runner is None or (runner.is_idle and runner.num_answered == 0)):
                raise self._error
            assert runner is not None
            return await self._write(runner)
        finally:
            watch.end()
            feeding.cancel()
            if self._runner is not None:
                self._runner.cancel()

    def _watch(self) -> PeerWatch:
        """A client that hangs up while nothing is read shows nowhere else."""
        transport = self._request.transport
        assert transport is not None
        return PeerWatch(
            transport,
            period_s=self._limits.probe_s,
            is_needed=lambda: True,
            needs_sign=lambda: False,
            give_sign=lambda: None,
            on_gone=transport.abort,
        )

    # Reading.

    async def _feed(self) -> None:
        try:
            await self._read_items()
        except EdgeqwenError as exc:
            self._error = self._error or exc
        except ConnectionError:  # nobody will read of it
            self._error = BadRequest("the input ended before the body did")
        except Exception as exc:
            log.error("a batch could not be read: %s", type(exc).__name__)
            self._error = RuntimeFailed("internal error while the batch was read")
        self._is_fed = True
        if self._runner is None and self._error is None:
            self._begin()  # of no items
        self._end_if_over()
        self._has_begun.set()

    async def _read_items(self) -> None:
        num_bytes = 0
        async for piece in self._pieces():
            for block in blocks(piece, num_bytes):
                await self._add(self._reader.feed(block))
                await asyncio.sleep(0)  # parsing is quick, but others have work too
            num_bytes += len(piece)
        await self._add(self._reader.finish())

    async def _pieces(self) -> AsyncIterator[bytes]:
        limits = self._limits
        while True:
            try:
                async with asyncio.timeout(limits.idle_s):
                    piece = await self._request.content.read(READ_BYTES)
            except TimeoutError as exc:
                raise EdgeqwenError(f"nothing came for {limits.idle_s:g} s", code="timeout") from exc
            except (web.ClientPayloadError, web.HttpProcessingError) as exc:
                raise BadRequest("the body is malformed") from exc
            if piece:
                yield piece
            elif is_cut_short(self._request):
                raise BadRequest("the input ended before the body did")
            else:
                return

    async def _add(self, items: list[Any]) -> None:
        """Begin items as there is room, then raise what is wrong after them."""
        runner = self._runner
        if runner is None and self._reader.has_begun and (items or self._reader.error is None):
            runner = self._begin()
        for item in items:
            assert runner is not None
            while runner.is_full or len(self._frames) >= MAX_WAITING:
                self._has_room.clear()
                await self._has_room.wait()
            if self._error is not None:
                break
            runner.add(item)
            self._has_begun.set()
        if (error := self._error or self._reader.error) is not None:
            raise error

    def _begin(self) -> ItemRunner:
        """The head has come: what all items have in common. Raises `EdgeqwenError`."""
        self._runner = ItemRunner(
            self._operations,
            self._read_head(self._reader.head),
            self._peer,
            max_inflight=self._limits.inflight,
            emit=self._emit,
            is_writable=lambda: not self._frames,
            on_end=self._on_end,
        )
        return self._runner

    def _read_head(self, head: Mapping[str, Any]) -> BatchPlan:
        self._request_id = read_envelope({"op": "batch", **head}).id
        if head.get("op", "batch") != "batch":
            raise BadRequest("op is not that of the path", field="op")
        own = {name: value for name, value in head.items() if name not in ENVELOPE and not name.startswith("x_")}
        given: BatchHead = convert(own, BatchHead)
        each = given.each or self._request.query.get("each", "chat")
        return read_plan(each, given.common, has_ids=True)

    # Writing.

    def _emit(self, item_id: RequestId | None, members: dict[str, Any]) -> None:
        if members.get("error", {}).get("code") == "draining":
            self._error = EdgeqwenError("the daemon is shutting down", code="draining")
        self._put(members, item_id if item_id is not None else self._request_id, done=False)

    def _on_end(self) -> None:
        self._has_room.set()
        self._end_if_over()

    def _end_if_over(self) -> None:
        runner = self._runner
        if self._is_fed and runner is not None and runner.is_idle and not self._is_done:
            self._is_done = True
            error = {} if self._error is None else error_members(self._error)
            self._put({**runner.total(), **error}, self._request_id, done=True)

    def _put(self, members: dict[str, Any], request_id: RequestId | None, *, done: bool) -> None:
        self._frames.append(encode_frame(members, done=done, request_id=request_id))
        self._has_frame.set()

    async def _write(self, runner: ItemRunner) -> web.StreamResponse:
        response = await open_response(self._request, {"Content-Type": LINES_TYPE})
        while True:
            await self._has_frame.wait()
            self._has_frame.clear()
            frames, self._frames = self._frames, []
            await response.write(b"".join(frames))
            runner.pump()
            self._has_room.set()
            if self._is_done and not self._frames:
                return response
