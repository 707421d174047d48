"""One connection that speaks HTTP: header blocks are checked here, then the library has them.

The library limits single header lines and their number, but neither the block nor the time it takes to come; hence the
guard. It stands before the first request and before each that begins while the library waits for one; requests that
come while another is served are under the library's limits only, and read as far as its queue has room.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final

import edgeqwen
from edgeqwen.errors import EdgeqwenError
from edgeqwen.http import web
from edgeqwen.http.replies import error_body, error_response
from edgeqwen.protocol.limits import WireLimits

log = logging.getLogger(__name__)

SERVER: Final[Mapping[str, str]] = {"Server": f"edgeqwen/{edgeqwen.__version__}"}
"""The library would name itself and Python, with their versions."""

HEAD_END: Final = b"\r\n\r\n"
MAX_HEADERS: Final = 64
HEAD_REFUSALS: Final = {"timeout": "408 Request Timeout", "too_large": "431 Request Header Fields Too Large"}


class HttpHandler(web.RequestHandler):
    """The library's protocol class, with errors in our form and nothing of the client's in the log.

    It also knows of the end of input: what came before is answered, and a body that will not be complete ends there.
    `common_headers` are what the response to the current request has besides its own.
    """

    __slots__ = ("_cut_short", "_has_ended", "common_headers")

    def __init__(self, server: web.Server, **options: Any) -> None:
        super().__init__(server, **options)
        self._has_ended = False
        self.common_headers = SERVER
        self._cut_short: web.StreamReader | None = None

    def data_received(self, data: bytes) -> None:
        """Also ends a body in which something came that is no part of one: its reader would wait for the rest."""
        super().data_received(data)
        request = self._current_request
        if request is not None and self._messages and isinstance(self._messages[-1][0], web.ErrInfo):
            self._end_body(request.content)

    def end_input(self) -> None:
        """The client sends no more. Requests that wait are answered before the connection closes."""
        self._has_ended = True
        if self._messages:
            self._end_body(self._messages[-1][1])
            return
        if self._current_request is not None:
            self._end_body(self._current_request.content)
        self.close()

    def begin(self, request: web.BaseRequest) -> None:
        """To be told of each request before it is read: the end of input may have come while it waited."""
        self.common_headers = SERVER
        if self._has_ended and not self._messages:
            self._end_body(request.content)
            self.close()

    def is_cut_short(self, request: web.BaseRequest) -> bool:
        """Whether the input ended inside the body of `request`."""
        return self._cut_short is request.content

    def _end_body(self, body: web.StreamReader) -> None:
        if not body.is_eof():
            self._cut_short = body
            body.feed_eof()

    @property
    def is_idle(self) -> bool:
        """Whether the library waits for a request. A request just taken off its queue shows nowhere else."""
        return self._waiter is not None and not self._waiter.done() and not self._messages

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        if status >= 500 and not isinstance(exc, ConnectionError):  # a client that has gone is no failure
            log.error("an HTTP request failed: %s", type(exc).__name__)
        if request.writer.output_size > 0:
            raise ConnectionError("the response has begun and cannot become an error")
        text = "internal error" if status >= 500 else "the HTTP request is malformed"
        response = error_response(EdgeqwenError(text, code="engine" if status >= 500 else "bad_request"), status)
        response.headers.update(SERVER)
        response.force_close()
        return response


def handler_of(request: web.BaseRequest) -> HttpHandler:
    """The connection that a request came on."""
    assert isinstance(request.protocol, HttpHandler)
    return request.protocol


async def open_response(
    request: web.BaseRequest, headers: Mapping[str, str], *, status: int = 200
) -> web.StreamResponse:
    """A response whose body comes in pieces, its headers sent. Where there are no chunks, the body ends with the
    connection; the library would keep one that the client (HTTP/1.0) asked it to keep.
    """
    response = web.StreamResponse(status=status, headers={**headers, **handler_of(request).common_headers})
    if request.version < web.HttpVersion11:
        response.force_close()
    await response.prepare(request)
    return response


class HttpServer(web.Server):
    """Makes the protocol objects. `handler` answers a request; its task is cancelled when the client hangs up."""

    def __init__(
        self, handler: Callable[[web.BaseRequest], Awaitable[web.StreamResponse]], *, limits: WireLimits
    ) -> None:
        super().__init__(handler, handler_cancellation=True)
        self._options: dict[str, Any] = {
            "keepalive_timeout": limits.http_keepalive_s,
            "tcp_keepalive": False,
            "access_log": None,
            "max_line_size": limits.header_bytes,
            "max_field_size": limits.header_bytes,
            "max_headers": MAX_HEADERS,
            "lingering_time": limits.linger_s,
            "auto_decompress": False,
        }

    def __call__(self) -> HttpHandler:
        return HttpHandler(self, loop=asyncio.get_running_loop(), **self._options)


class HttpSession:
    """What a connection is told goes through here to the library."""

    def __init__(self, transport: asyncio.Transport, handler: HttpHandler, limits: WireLimits) -> None:
        self._transport = transport
        self._handler = handler
        self._limits = limits
        self._head: bytes | None = None
        self._timer: asyncio.TimerHandle
        self._begin_head()
        handler.connection_made(transport)

    @property
    def is_idle(self) -> bool:
        return self._head == b"" or (self._head is None and self._handler.is_idle)

    def data_received(self, data: bytes) -> None:
        if self._head is None and self._handler.is_idle:
            self._begin_head()
        if self._head is None:
            self._handler.data_received(data)
            return
        self._head += data
        end = self._head.find(HEAD_END)
        head_len = len(self._head) if end < 0 else end + len(HEAD_END)
        if head_len > self._limits.header_bytes:
            self._refuse("too_large", f"the headers are longer than {self._limits.header_bytes} bytes")
        elif end >= 0:
            self._timer.cancel()
            data, self._head = self._head, None
            self._handler.data_received(data)

    def _begin_head(self) -> None:
        self._head = b""
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(self._limits.header_s, self._refuse, "timeout", "the headers took too long")

    def eof_received(self) -> None:
        """The client will send no more: answer what it asked, then close."""
        is_idle = self.is_idle or self._head is not None
        self._handler.end_input()
        if is_idle:
            self._transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._timer.cancel()
        self._handler.connection_lost(exc)

    def pause_writing(self) -> None:
        self._handler.pause_writing()

    def resume_writing(self) -> None:
        self._handler.resume_writing()

    def _refuse(self, code: str, message: str) -> None:
        self._timer.cancel()
        body = error_body(EdgeqwenError(message, code=code))
        head = f"HTTP/1.1 {HEAD_REFUSALS[code]}\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n"
        self._transport.write(head.encode("ascii") + b"Connection: close\r\n\r\n" + body)
        self._handler.close()
        self._transport.close()
