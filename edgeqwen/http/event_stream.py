"""A response that comes as server-sent events (HTML standard, 9.2), each of one `data` line."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import msgspec

from edgeqwen.http import web
from edgeqwen.http.session import open_response

EVENT_STREAM: Final = "text/event-stream"

CHUNK_OVERHEAD: Final = 1024
"""What an event holds besides a piece of an answer's text, at most."""


async def open_event_stream(request: web.BaseRequest) -> web.StreamResponse:
    """The response, its headers sent; `Cache-Control` keeps proxies from collecting the events."""
    return await open_response(request, {"Content-Type": EVENT_STREAM, "Cache-Control": "no-cache"})


def event(members: Mapping[str, Any], name: str | None = None) -> bytes:
    """One event; JSON holds no line break, so its data is one line."""
    head = b"" if name is None else b"event: " + name.encode("ascii") + b"\n"
    return head + b"data: " + msgspec.json.encode(members) + b"\n\n"
