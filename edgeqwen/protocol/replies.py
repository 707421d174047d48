"""Frames of `eqp/1`: from members to bytes.

A frame starts with `id` (if the request had one), then `done`, without spaces between tokens, so that a parser of a few
lines can read it. A streamed frame is at most `frame_bytes` long, its LF included; lengths are of the encoded text.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import msgspec

from edgeqwen.core.request import Delta, Timings, TokenLogprob, ToolCall, Usage
from edgeqwen.errors import EdgeqwenError
from edgeqwen.protocol.messages import RequestId

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


def split_logprobs(logprobs: Sequence[TokenLogprob], max_bytes: int) -> Iterator[list[dict[str, Any]]]:
    """Groups of encoded entries, each group of at most `max_bytes` (a single entry is never split)."""
    group: list[dict[str, Any]] = []
    size = 0
    for logprob in logprobs:
        members = logprob_members(logprob)
        length = len(msgspec.json.encode(members)) + 1
        if group and size + length > max_bytes:
            yield group
            group, size = [], 0
        group.append(members)
        size += length
    if group:
        yield group


def delta_frames(delta: Delta, *, frame_bytes: int, with_choice: bool) -> Iterator[dict[str, Any]]:
    """The members of the frames that carry `delta`. Text and log-probabilities are split side by side."""
    room = frame_bytes - ENVELOPE_BYTES
    name = "delta" if delta.channel == "content" else "reasoning"
    texts = list(split_text(delta.text, room // 2 if delta.logprobs else room))
    groups = list(split_logprobs(delta.logprobs, room // 2))
    for index in range(max(len(texts), len(groups))):
        members: dict[str, Any] = {"choice": delta.choice} if with_choice else {}
        members[name] = texts[index] if index < len(texts) else ""
        if index < len(groups):
            members["logprobs"] = groups[index]
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
