"""Frames of `eqp/1`: from members to bytes.

A frame starts with `id` (if the request had one), then `done`, without spaces between tokens, so that a parser of a few
lines can read it. A streamed frame is at most `frame_bytes` long, its LF included; lengths are of the encoded text.
"""

from __future__ import annotations

import base64
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import Any, Final, TypeVar

import msgspec

from edgeqwen.core.request import Delta, Timings, TokenLogprob, ToolCall, Usage
from edgeqwen.errors import EdgeqwenError
from edgeqwen.protocol.messages import RequestId

T = TypeVar("T")

# `{"id":"<64>","done":false,"choice":7,"reasoning":"",...}` and LF, with room to spare.
ENVELOPE_BYTES: Final = 512
# A code point takes at most six bytes in JSON (a control character as \u0000).
MAX_CHAR_BYTES: Final = 6


def encode_frame(members: Mapping[str, Any], *, done: bool, request_id: RequestId | None = None) -> bytes:
    """One line. `members` must be JSON values whose strings are valid Unicode."""
    envelope: dict[str, Any] = {} if request_id is None else {"id": request_id}
    return msgspec.json.encode({**envelope, "done": done, **members}) + b"\n"


def error_members(error: EdgeqwenError) -> dict[str, Any]:
    members: dict[str, Any] = {"code": error.code, "message": error.message}
    if error.field is not None:
        members["field"] = error.field
    if error.retry_ms is not None:
        members["retry_ms"] = error.retry_ms
    return {"error": members}


def encoded_len(text: str) -> int:
    """Bytes of `text` inside a JSON string, the quotes not counted."""
    return len(msgspec.json.encode(text)) - 2


def split_text(text: str, max_bytes: int) -> Iterator[str]:
    """Pieces of `text`, each of at most `max_bytes` encoded bytes and cut between code points. Nothing for no text."""
    if not text:
        return
    if encoded_len(text) <= max_bytes:
        yield text
        return
    step = max_bytes // MAX_CHAR_BYTES
    assert step > 0
    for start in range(0, len(text), step):
        yield text[start : start + step]


def cut_text(text: str, max_bytes: int) -> str:
    """The longest beginning of `text` that takes at most `max_bytes` encoded bytes."""
    if encoded_len(text) <= max_bytes:
        return text
    low, high = 0, len(text)
    while low < high:
        middle = (low + high + 1) // 2
        if encoded_len(text[:middle]) <= max_bytes:
            low = middle
        else:
            high = middle - 1
    return text[:low]


def logprob_members(logprob: TokenLogprob) -> dict[str, Any]:
    members: dict[str, Any] = {"token": logprob.token, "text": logprob.text, "logprob": logprob.logprob}
    if logprob.top:
        members["top"] = logprob.top
    return members


def groups_of(entries: Iterable[T], max_bytes: int) -> Iterator[list[T]]:
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


def side_by_side(text: str, entries: Sequence[T], max_bytes: int) -> Iterator[tuple[str, list[T]]]:
    """A text and what is said of its tokens, split so that both pieces of a pair take at most `max_bytes` together.
    Where one of them has come to its end the other goes on beside nothing.
    """
    room = max_bytes // 2 if entries else max_bytes
    for piece, group in zip_longest(split_text(text, room), groups_of(entries, room)):
        yield piece or "", group or []


def delta_frames(delta: Delta, *, frame_bytes: int, with_choice: bool) -> Iterator[dict[str, Any]]:
    """The members of the frames that carry `delta`."""
    name = "delta" if delta.channel == "content" else "reasoning"
    logprobs = [logprob_members(each) for each in delta.logprobs]
    for text, group in side_by_side(delta.text, logprobs, frame_bytes - ENVELOPE_BYTES):
        members: dict[str, Any] = {"choice": delta.choice} if with_choice else {}
        members[name] = text
        if group:
            members["logprobs"] = group
        yield members


def call_members(call: ToolCall) -> dict[str, Any]:
    return {"id": call.call_id, "name": call.name, "arguments": call.arguments}


def call_frames(call: ToolCall, *, frame_bytes: int, with_choice: bool) -> Iterator[dict[str, Any]]:
    """The members of the frames that carry a call: its arguments are those of all entries with its id, joined."""
    first = {"id": call.call_id, "name": call.name, "arguments": ""}
    room = frame_bytes - ENVELOPE_BYTES - len(msgspec.json.encode(first))
    for number, text in enumerate(split_text(call.arguments, room)):
        entry = {**first, "arguments": text} if number == 0 else {"id": call.call_id, "arguments": text}
        members: dict[str, Any] = {"choice": call.choice} if with_choice else {}
        yield {**members, "tool_calls": [entry]}


def bytes_members(data: bytes, name: str = "text") -> dict[str, Any]:
    """The member `name` with a text; of bytes that are none, `b64` with them in base64."""
    try:
        return {name: data.decode("utf-8")}
    except UnicodeDecodeError:
        return {"b64": base64.b64encode(data).decode("ascii")}


def usage_members(usage: Usage) -> dict[str, int]:
    members = {"prompt": usage.prompt, "cached": usage.cached, "completion": usage.completion}
    return members | {"reasoning": usage.reasoning} if usage.reasoning else members


def timing_members(ms: Timings) -> dict[str, int]:
    return {"queue": ms.queue, "ttft": ms.ttft, "total": ms.total}
