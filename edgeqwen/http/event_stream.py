"""A response that comes as server-sent events (HTML standard, 9.2), each of one `data` line."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, TypeVar

import msgspec

from edgeqwen.http import web
from edgeqwen.http.session import open_response

T = TypeVar("T")

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


def groups_of(entries: Sequence[T], max_bytes: int) -> Iterator[list[T]]:
    """`entries` in their order, in groups that take at most `max_bytes` as JSON; one that is longer stands alone."""
    group: list[T] = []
    num_bytes = 0
    for entry in entries:
        size = len(msgspec.json.encode(entry)) + 1
        if group and num_bytes + size > max_bytes:
            yield group
            group, num_bytes = [], 0
        group.append(entry)
        num_bytes += size
    if group:
        yield group
