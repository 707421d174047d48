"""What a request must satisfy before its content counts: a body of bounded size, in time."""

from __future__ import annotations

import asyncio
from typing import Any

from edgeqwen.errors import EdgeqwenError
from edgeqwen.http import web
from edgeqwen.http.session import handler_of
from edgeqwen.protocol.frames import decode_object
from edgeqwen.protocol.limits import WireLimits


async def read_body(request: web.BaseRequest, limits: WireLimits) -> bytes:
    """The body. Raises `too_large`, `timeout` (it did not come in time), `bad_request` (a coding we do not speak)."""
    too_large = EdgeqwenError(f"the body is longer than {limits.line_bytes} bytes", code="too_large")
    if (request.content_length or 0) > limits.line_bytes:
        raise too_large
    await open_body(request)
    body = bytearray()
    try:
        async with asyncio.timeout(limits.body_s):
            async for piece in request.content.iter_any():
                body += piece
                if len(body) > limits.line_bytes:
                    raise too_large
    except TimeoutError as exc:
        raise EdgeqwenError(f"the body was not complete within {limits.body_s:g} s", code="timeout") from exc
    if is_cut_short(request):
        raise EdgeqwenError("the input ended before the body did", code="bad_request")
    return bytes(body)


def is_cut_short(request: web.BaseRequest) -> bool:
    """Whether the input ended inside the body."""
    return handler_of(request).is_cut_short(request)


async def open_body(request: web.BaseRequest) -> None:
    """Have the body sent: clients with a large one ask first (RFC 9110, 10.1.1). Raises `bad_request` for a coding."""
    if request.headers.get("Content-Encoding", "identity") != "identity":
        raise EdgeqwenError("Content-Encoding is not supported", code="bad_request", field="Content-Encoding")
    if request.headers.get("Expect", "").lower() == "100-continue":
        await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        request.writer.output_size = 0  # the interim response does not count as a response that has begun


async def read_object(request: web.BaseRequest, limits: WireLimits, *, may_be_empty: bool = False) -> dict[str, Any]:
    """The body as a JSON object, under the same rules as a line of the socket protocol."""
    body = (await read_body(request, limits)).strip()
    if not body and may_be_empty:
        return {}
    try:
        return decode_object(body, max_nesting=limits.nesting)
    except EdgeqwenError as exc:
        raise EdgeqwenError(exc.message.replace("line 1", "the body"), code=exc.code) from exc
