"""`POST /eqp/<op>`: an operation of the socket protocol as an HTTP request, its frames as the lines of the response."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any, Final

from edgeqwen.errors import CODES, BadRequest, EdgeqwenError
from edgeqwen.http import web
from edgeqwen.http.replies import retry_headers
from edgeqwen.http.requests import read_object
from edgeqwen.http.seam import Operations
from edgeqwen.http.session import open_response
from edgeqwen.protocol.limits import WireLimits
from edgeqwen.protocol.messages import Generation, RequestId, read_envelope, read_id, read_operation
from edgeqwen.protocol.operation import LaterOperation, Operation
from edgeqwen.protocol.peer import Peer
from edgeqwen.protocol.replies import encode_frame, error_members

LINES_TYPE: Final = "application/x-ndjson"


class FrameQueue:
    """Frames on their way from a generation to a response. While some wait, the generation keeps its own back."""

    def __init__(self, request_id: RequestId | None) -> None:
        self._request_id = request_id
        self._frames: list[bytes] = []
        self._has_frame = asyncio.Event()
        self.is_done = False
        self.error: Mapping[str, Any] | None = None

    def emit(self, members: dict[str, Any], done: bool) -> None:
        self._frames.append(encode_frame(members, done=done, request_id=self._request_id))
        self.is_done = done
        self.error = members.get("error")
        self._has_frame.set()

    def is_empty(self) -> bool:
        return not self._frames

    async def take(self) -> bytes:
        """Everything that waits, at least one frame."""
        await self._has_frame.wait()
        self._has_frame.clear()
        data = b"".join(self._frames)
        self._frames.clear()
        return data


class LineOperations:
    """Serves the routes below `/eqp/`."""

    def __init__(self, operations: Operations, limits: WireLimits) -> None:
        self._operations = operations
        self._limits = limits

    async def answer(self, request: web.BaseRequest, op: str, peer: Peer) -> web.StreamResponse:
        """The response; its status is that of the first frame. Raises `EdgeqwenError` for a body that is no object."""
        members = await read_object(request, self._limits, may_be_empty=True)
        request_id: RequestId | None = None
        try:
            request_id = read_id(members)
            if members.get("op", op) != op:
                raise BadRequest("op is not that of the path", field="op")
            read_envelope({**members, "op": op})
            message = read_operation(op, members)
            if isinstance(message, Generation):
                return await self._generate(request, message, request_id, peer)
            return _whole(await self._answer(message, peer), request_id)
        except EdgeqwenError as exc:
            return refusal(exc, request_id=request_id)

    async def _answer(self, message: Operation, peer: Peer) -> dict[str, Any]:
        if isinstance(message, LaterOperation):
            return await self._operations.answer_later(message, peer)
        return self._operations.answer(message, peer, cancel_id=_no_such_id)

    async def _generate(
        self, request: web.BaseRequest, message: Generation, request_id: RequestId | None, peer: Peer
    ) -> web.StreamResponse:
        queue = FrameQueue(request_id)
        work = self._operations.start(message, peer, emit=queue.emit, is_writable=queue.is_empty)
        work.start()
        try:
            data = await queue.take()
            error = queue.error
            status = 200 if error is None else CODES[error["code"]].http_status
            retry = retry_headers(None if error is None else error.get("retry_ms"))
            response = await open_response(request, {"Content-Type": LINES_TYPE, **retry}, status=status)
            while True:
                await response.write(data)
                work.pump()
                if queue.is_done and queue.is_empty():
                    return response
                data = await queue.take()
        finally:
            work.cancel()


def _no_such_id(_: RequestId) -> int:
    """An id means something on its own connection only, and here that has one request at a time."""
    raise BadRequest("over HTTP a request is cancelled by its rid", field="target")


def refusal(error: EdgeqwenError, status: int | None = None, *, request_id: RequestId | None = None) -> web.Response:
    """The response to a request that is answered with an error alone."""
    response = _whole(error_members(error), request_id)
    response.set_status(CODES[error.code].http_status if status is None else status)
    response.headers.update(retry_headers(error.retry_ms))
    return response


def _whole(members: Mapping[str, Any], request_id: RequestId | None) -> web.Response:
    body = encode_frame(members, done=True, request_id=request_id)
    return web.Response(body=body, headers={"Content-Type": LINES_TYPE})
