"""The connection of the asynchronous client: frames go to whoever waits for their id."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any, cast

from edgeqwen.client.failures import CutOff, error_of
from edgeqwen.client.frames import FrameBuffer, encode_request
from edgeqwen.client.sync import RETRY_S
from edgeqwen.errors import EdgeqwenError


class Link(asyncio.Protocol):
    """Frames in to whoever waits for their id, requests out."""

    def __init__(self) -> None:
        self._frames = FrameBuffer()
        self._calls: dict[int, asyncio.Queue[dict[str, Any] | EdgeqwenError]] = {}
        self._transport: asyncio.Transport
        self._failure: EdgeqwenError | None = None
        self._is_writable = asyncio.Event()
        self._is_writable.set()
        self._num_requests = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self._frames.feed(data)
        try:
            while (frame := self._frames.take()) is not None:
                self._dispatch(frame)
        except CutOff as exc:
            self._fail(exc)
            self.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._fail(CutOff("the connection ended before the answer did"))
        self._is_writable.set()

    def pause_writing(self) -> None:
        self._is_writable.clear()

    def resume_writing(self) -> None:
        self._is_writable.set()

    def close(self) -> None:
        self._transport.abort()

    async def begin(self, op: str, members: Mapping[str, Any]) -> tuple[int, asyncio.Queue[Any]]:
        """Send a request; its frames come in the queue, or an error in place of one."""
        self._num_requests += 1
        request_id = self._num_requests
        line = encode_request(op, request_id, members)
        if self._failure is not None:
            raise self._failure
        queue: asyncio.Queue[Any] = asyncio.Queue()
        self._calls[request_id] = queue
        self._transport.write(line)
        await self._is_writable.wait()
        return request_id, queue

    def end(self, request_id: int, *, is_over: bool) -> None:
        """Nobody waits for its frames any more; one that is not over is cancelled."""
        self._calls.pop(request_id, None)
        if not is_over and self._failure is None:
            self.cancel(request_id)

    def cancel(self, request_id: int) -> None:
        self._num_requests += 1
        self._transport.write(encode_request("cancel", self._num_requests, {"target": request_id}))

    def _dispatch(self, frame: dict[str, Any]) -> None:
        if "id" not in frame and "error" in frame:  # of a line that could not be read, or of the connection
            self._fail(error_of(frame))
        elif (queue := self._calls.get(frame.get("id", -1))) is not None:
            queue.put_nowait(frame)

    def _fail(self, error: EdgeqwenError) -> None:
        if self._failure is None:
            self._failure = error
            for queue in self._calls.values():
                queue.put_nowait(error)


async def open_link(path: str) -> Link:
    """While too many others wait to be accepted the system says so at once, and it has to be asked again."""
    loop = asyncio.get_running_loop()
    while True:
        try:
            _, link = await loop.create_unix_connection(Link, path)
            return link
        except BlockingIOError:
            await asyncio.sleep(RETRY_S)
