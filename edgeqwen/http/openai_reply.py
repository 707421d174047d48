"""OpenAI's chat completion objects and chunks, out of the engine's events. Without I/O."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from edgeqwen.core.request import Channel, Done, FinishReason, Usage

FINISH: Final[dict[FinishReason, str]] = {
    "stop": "stop",
    "length": "length",
    "deadline": "length",
    "cancelled": "length",  # OpenAI has no word for it; what matters to a client is that the answer is cut short
}


@dataclass(frozen=True, slots=True)
class Head:
    """What every object of one answer repeats. `created` is in seconds since 1970."""

    rid: str
    model: str
    created: int

    def members(self, kind: str) -> dict[str, Any]:
        return {"id": f"chatcmpl-{self.rid}", "object": kind, "created": self.created, "model": self.model}


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
        self._logprobs: list[dict[str, Any]] = []

    def add(self, channel: Channel, text: str, logprobs: Sequence[dict[str, Any]]) -> None:
        self._texts[channel].append(text)
        self._logprobs.extend(logprobs)

    def to_choice(
        self, index: int, finish: FinishReason, *, with_reasoning: bool, with_logprobs: bool
    ) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": "".join(self._texts["content"]), "refusal": None}
        if with_reasoning and (reasoning := "".join(self._texts["reasoning"])):
            message["reasoning_content"] = reasoning
        logprobs = {"content": self._logprobs, "refusal": None} if with_logprobs else None
        return {"index": index, "message": message, "logprobs": logprobs, "finish_reason": FINISH[finish]}


def completion(head: Head, choices: Sequence[dict[str, Any]], done: Done) -> dict[str, Any]:
    return {**head.members("chat.completion"), "choices": list(choices), "usage": usage_object(done.usage)}


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

    def last(self, done: Done) -> bytes:
        """The end of every choice, the usage if it is wanted, and the mark of the end."""
        events = [self._chunk(index, {}, finish=FINISH[finish]) for index, finish in enumerate(done.finishes)]
        if self.with_usage_chunk:
            events.append(event({**self._members(), "choices": [], "usage": usage_object(done.usage)}))
        return b"".join([*events, END])

    def _members(self) -> dict[str, Any]:
        return self.head.members("chat.completion.chunk")

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


END: Final = b"data: [DONE]\n\n"


def event(members: dict[str, Any]) -> bytes:
    """A server-sent event; JSON holds no line break, so it is one line."""
    return b"data: " + msgspec.json.encode(members) + b"\n\n"


def logprob_object(data: bytes, logprob: float, top: Sequence[tuple[bytes, float]] | None = None) -> dict[str, Any]:
    """A token by its bytes; `token` is text, so bytes that are no text become U+FFFD there."""
    members: dict[str, Any] = {"token": data.decode("utf-8", "replace"), "logprob": logprob, "bytes": list(data)}
    if top is not None:
        members["top_logprobs"] = [logprob_object(each, value) for each, value in top]
    return members
