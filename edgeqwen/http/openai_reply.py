"""OpenAI's chat completion objects and chunks, out of the engine's events. Without I/O."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from edgeqwen.core.request import Channel, FinishReason, ToolCall, Usage
from edgeqwen.http.event_stream import event
from edgeqwen.http.generations import Ending, Head, Piece

FINISH: Final[dict[FinishReason, str]] = {
    "stop": "stop",
    "length": "length",
    "tool_calls": "tool_calls",
    "deadline": "length",
    "cancelled": "length",  # OpenAI has no word for it; what matters to a client is that the answer is cut short
}

LOGPROB_BYTES: Final = 100
"""About what a token with its log-probability takes in a reply, alternatives likewise."""

END: Final = b"data: [DONE]\n\n"


def _head_members(head: Head, kind: str) -> dict[str, Any]:
    return {"id": f"chatcmpl-{head.rid}", "object": kind, "created": head.created, "model": head.model}


def usage_object(usage: Usage) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.prompt,
        "completion_tokens": usage.completion,
        "total_tokens": usage.prompt + usage.completion,
        "prompt_tokens_details": {"cached_tokens": usage.cached},
        "completion_tokens_details": {"reasoning_tokens": usage.reasoning},
    }


class ChoiceText:
    """What one choice has said, for an answer in one piece."""

    def __init__(self) -> None:
        self._texts: dict[Channel, list[str]] = {"content": [], "reasoning": []}
        self._calls: list[ToolCall] = []
        self._logprobs: list[dict[str, Any]] = []

    def add(self, piece: Piece, logprobs: Sequence[dict[str, Any]]) -> int:
        """About how many bytes it takes."""
        if isinstance(piece, ToolCall):
            self._calls.append(piece)
            return len(piece.arguments)
        self._texts[piece.channel].append(piece.text)
        self._logprobs.extend(logprobs)
        return len(piece.text) + LOGPROB_BYTES * sum(1 + len(entry["top_logprobs"]) for entry in logprobs)

    def to_choice(
        self, index: int, finish: FinishReason, *, with_reasoning: bool, with_logprobs: bool
    ) -> dict[str, Any]:
        content = "".join(self._texts["content"])
        message: dict[str, Any] = {
            "role": "assistant",
            "content": None if self._calls and not content else content,
            "refusal": None,
        }
        if with_reasoning and (reasoning := "".join(self._texts["reasoning"])):
            message["reasoning_content"] = reasoning
        if self._calls:
            message["tool_calls"] = [call_object(call) for call in self._calls]
        logprobs = {"content": self._logprobs, "refusal": None} if with_logprobs else None
        return {"index": index, "message": message, "logprobs": logprobs, "finish_reason": FINISH[finish]}


def call_object(call: ToolCall) -> dict[str, Any]:
    return {"id": call.call_id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def completion(head: Head, choices: Sequence[dict[str, Any]], usage: Usage) -> dict[str, Any]:
    return {**_head_members(head, "chat.completion"), "choices": list(choices), "usage": usage_object(usage)}


@dataclass(frozen=True, slots=True)
class Chunks:
    """Makes the chunks of a streamed answer, each a server-sent event.

    With `with_usage_chunk` every chunk says `usage: null` and one more, without choices, has the numbers.
    """

    head: Head
    with_usage_chunk: bool

    def first(self, index: int) -> bytes:
        return self._chunk(index, {"role": "assistant", "content": ""})

    def text(self, index: int, channel: Channel, text: str, logprobs: Sequence[dict[str, Any]] = ()) -> bytes:
        return self._chunk(index, {"content" if channel == "content" else "reasoning_content": text}, logprobs=logprobs)

    def call(self, call: ToolCall) -> bytes:
        """The beginning of a call; its arguments follow in chunks of their own."""
        members = {"id": call.call_id, "type": "function", "function": {"name": call.name, "arguments": ""}}
        return self._chunk(call.choice, {"tool_calls": [{"index": call.index, **members}]})

    def arguments(self, call: ToolCall, text: str) -> bytes:
        return self._chunk(call.choice, {"tool_calls": [{"index": call.index, "function": {"arguments": text}}]})

    def last(self, ending: Ending) -> bytes:
        """The end of every choice, the usage if it is wanted, and the mark of the end."""
        events = [self._chunk(index, {}, finish=FINISH[finish]) for index, finish in enumerate(ending.finishes)]
        if self.with_usage_chunk:
            events.append(event({**self._members(), "choices": [], "usage": usage_object(ending.usage)}))
        return b"".join([*events, END])

    def _members(self) -> dict[str, Any]:
        return _head_members(self.head, "chat.completion.chunk")

    def _chunk(
        self, index: int, delta: dict[str, Any], *, finish: str | None = None, logprobs: Sequence[dict[str, Any]] = ()
    ) -> bytes:
        choice = {
            "index": index,
            "delta": delta,
            "logprobs": {"content": list(logprobs), "refusal": None} if logprobs else None,
            "finish_reason": finish,
        }
        usage = {"usage": None} if self.with_usage_chunk else {}
        return event({**self._members(), "choices": [choice], **usage})


def logprob_object(data: bytes, logprob: float, top: Sequence[tuple[bytes, float]] | None = None) -> dict[str, Any]:
    """A token by its bytes; `token` is text, so bytes that are no text become U+FFFD there."""
    members: dict[str, Any] = {"token": data.decode("utf-8", "replace"), "logprob": logprob, "bytes": list(data)}
    if top is not None:
        members["top_logprobs"] = [logprob_object(each, value) for each, value in top]
    return members
