"""Anthropic's message objects, stream events and errors, out of the engine's events. Without I/O.

A message is a list of blocks; a stream tells of each its start, its deltas and its end, one after another:

    message_start, ping,
    (content_block_start, content_block_delta..., content_block_stop)...,
    message_delta, message_stop
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

import msgspec

from edgeqwen.core.request import FinishReason, ToolCall, Usage
from edgeqwen.errors import CODES, EdgeqwenError
from edgeqwen.http import web
from edgeqwen.http.event_stream import CHUNK_OVERHEAD, event
from edgeqwen.http.generations import Ending, Head, Piece
from edgeqwen.http.replies import JSON_TYPE, retry_headers
from edgeqwen.protocol.replies import split_text

STOP_REASONS: Final[Mapping[FinishReason, str]] = {
    "stop": "end_turn",
    "length": "max_tokens",
    "tool_calls": "tool_use",
    "deadline": "max_tokens",
    "cancelled": "max_tokens",
}

ERROR_TYPES: Final[Mapping[int, str]] = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
"""By HTTP status; of others below 500 those of 400, above that `api_error`."""


def error_object(error: EdgeqwenError, status: int | None = None) -> dict[str, Any]:
    status = CODES[error.code].http_status if status is None else status
    kind = ERROR_TYPES.get(status, "api_error" if status >= 500 else "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": error.message}, "request_id": None}


def error_response(error: EdgeqwenError, status: int | None = None) -> web.Response:
    status = CODES[error.code].http_status if status is None else status
    body = msgspec.json.encode(error_object(error, status))
    return web.Response(body=body, status=status, content_type=JSON_TYPE, headers=retry_headers(error.retry_ms))


def usage_object(usage: Usage) -> dict[str, int]:
    """What was read from the cache is not part of `input_tokens` here."""
    return {
        "input_tokens": usage.prompt - usage.cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached,
        "output_tokens": usage.completion,
    }


def stop_members(ending: Ending) -> dict[str, Any]:
    """Why the message ends, and the stop string if that is why."""
    reason = STOP_REASONS[ending.finishes[0]]
    if reason == "end_turn" and ending.stop is not None:
        return {"stop_reason": "stop_sequence", "stop_sequence": ending.stop}
    return {"stop_reason": reason, "stop_sequence": None}


def message_object(head: Head, content: list[dict[str, Any]], usage: Usage) -> dict[str, Any]:
    """A message that has not ended."""
    return {
        "id": f"msg_{head.rid}",
        "type": "message",
        "role": "assistant",
        "model": head.model,
        "content": content,
        "stop_reason": None,
        "stop_sequence": None,
        "usage": usage_object(usage),
    }


def input_text(call: ToolCall) -> str:
    """A call's input as JSON text of an object, which it must be here; anything else becomes the member `input`."""
    try:
        read = msgspec.json.decode(call.arguments)
    except (msgspec.DecodeError, RecursionError):
        read = call.arguments
    return call.arguments if isinstance(read, dict) else msgspec.json.encode({"input": read}).decode()


class BlockList:
    """The blocks of an answer in one piece."""

    def __init__(self) -> None:
        self._blocks: list[dict[str, Any]] = []

    def add(self, piece: Piece) -> int:
        """About how many bytes it takes."""
        if isinstance(piece, ToolCall):
            text = input_text(piece)
            block = {"type": "tool_use", "id": piece.call_id, "name": piece.name, "input": msgspec.json.decode(text)}
            self._blocks.append(block)
            return len(text)
        if not piece.text:
            return 0
        kind, name = ("text", "text") if piece.channel == "content" else ("thinking", "thinking")
        if not self._blocks or self._blocks[-1]["type"] != kind:
            self._blocks.append({"type": kind, name: ""} | ({"signature": ""} if kind == "thinking" else {}))
        self._blocks[-1][name] += piece.text
        return len(piece.text)

    def to_content(self) -> list[dict[str, Any]]:
        return self._blocks


class BlockEvents:
    """The events of a streamed answer."""

    def __init__(self, head: Head, frame_bytes: int) -> None:
        self._head = head
        self._room = frame_bytes - CHUNK_OVERHEAD
        self._index = -1
        self._kind: str | None = None  # of the block that is open

    def first(self, num_prompt_tokens: int) -> bytes:
        message = message_object(self._head, [], Usage(num_prompt_tokens, 0, 0))
        return _event({"type": "message_start", "message": message}) + _event({"type": "ping"})

    def piece(self, piece: Piece) -> Iterator[bytes]:
        if isinstance(piece, ToolCall):
            yield self._end_block()
            yield self._begin_block({"type": "tool_use", "id": piece.call_id, "name": piece.name, "input": {}})
            for text in split_text(input_text(piece), self._room // 2):  # it is escaped once more
                yield self._delta({"type": "input_json_delta", "partial_json": text})
            yield self._end_block()
        elif piece.text:
            kind = "text" if piece.channel == "content" else "thinking"
            if self._kind != kind:
                yield self._end_block()
                yield self._begin_block({"type": kind, kind: ""} | ({"signature": ""} if kind == "thinking" else {}))
            for text in split_text(piece.text, self._room):
                yield self._delta({"type": f"{kind}_delta", kind: text})

    def last(self, ending: Ending) -> bytes:
        end = {"type": "message_delta", "delta": stop_members(ending), "usage": usage_object(ending.usage)}
        return self._end_block() + _event(end) + _event({"type": "message_stop"})

    def _begin_block(self, block: dict[str, Any]) -> bytes:
        self._index += 1
        self._kind = block["type"]
        return _event({"type": "content_block_start", "index": self._index, "content_block": block})

    def _delta(self, delta: dict[str, Any]) -> bytes:
        return _event({"type": "content_block_delta", "index": self._index, "delta": delta})

    def _end_block(self) -> bytes:
        if self._kind is None:
            return b""
        self._kind = None
        return _event({"type": "content_block_stop", "index": self._index})


def error_event(error: EdgeqwenError) -> bytes:
    return _event(error_object(error))


def _event(members: dict[str, Any]) -> bytes:
    return event(members, name=members["type"])
