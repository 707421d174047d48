"""OpenAI's older completion objects, streamed or not: texts, and log-probabilities as lists side by side."""

from __future__ import annotations

import codecs
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from edgeqwen.core.request import FinishReason, Usage
from edgeqwen.http.event_stream import event
from edgeqwen.http.generations import Ending, Head
from edgeqwen.http.openai_reply import END, FINISH, LOGPROB_BYTES, usage_object

OBJECT: Final = "text_completion"


def token_name(data: bytes) -> str:
    """A token as this format writes it: its text, or its bytes if they are none."""
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


@dataclass(frozen=True, slots=True)
class TokenEntry:
    """A token with its log-probability and alternatives (it is one itself), and where it stands in the text."""

    token: str
    logprob: float
    top: Mapping[str, float]
    offset: int


class TokenList:
    """Log-probabilities of one choice, in parts if it is streamed. Offsets count characters of the choice's text."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._offset = 0
        self._entries: list[TokenEntry] = []

    def add(self, data: bytes, logprob: float, top: Sequence[tuple[bytes, float]]) -> None:
        """The next token and its alternatives; it is always among them."""
        name = token_name(data)
        alternatives = {name: logprob} | {token_name(each): value for each, value in top}
        self._entries.append(TokenEntry(name, logprob, alternatives, self._offset))
        self._offset += len(self._decoder.decode(data))

    def take(self) -> list[TokenEntry]:
        """What was added since it was last taken."""
        taken, self._entries = self._entries, []
        return taken


def lists_of(entries: Sequence[TokenEntry]) -> dict[str, list[Any]] | None:
    """The members of `logprobs`; None for no tokens."""
    if not entries:
        return None
    return {
        "tokens": [entry.token for entry in entries],
        "token_logprobs": [entry.logprob for entry in entries],
        "top_logprobs": [entry.top for entry in entries],
        "text_offset": [entry.offset for entry in entries],
    }


class CompletionText:
    """What one choice has said, for an answer in one piece."""

    def __init__(self) -> None:
        self._texts: list[str] = []
        self.tokens = TokenList()

    def add(self, text: str, num_logprobs: int) -> int:
        """About how many bytes it takes."""
        self._texts.append(text)
        return len(text) + LOGPROB_BYTES * num_logprobs

    def to_choice(self, index: int, finish: FinishReason) -> dict[str, Any]:
        return choice_object(index, "".join(self._texts), self.tokens.take(), FINISH[finish])


def choice_object(
    index: int, text: str, tokens: Sequence[TokenEntry] = (), finish: str | None = None
) -> dict[str, Any]:
    return {"text": text, "index": index, "logprobs": lists_of(tokens), "finish_reason": finish}


def completion_object(head: Head, choices: Sequence[dict[str, Any]], usage: Usage | None = None) -> dict[str, Any]:
    """The whole answer, or without `usage` a part of it."""
    members = {"id": f"cmpl-{head.rid}", "object": OBJECT, "created": head.created, "model": head.model}
    return {**members, "choices": list(choices)} | ({} if usage is None else {"usage": usage_object(usage)})


def last_events(head: Head, ending: Ending, *, with_usage: bool) -> bytes:
    """The end of every choice, the usage if it is wanted, and the mark of the end."""
    events = [
        part_event(head, choice_object(index, "", finish=FINISH[finish]), with_usage=with_usage)
        for index, finish in enumerate(ending.finishes)
    ]
    if with_usage:
        events.append(event(completion_object(head, [], ending.usage)))
    return b"".join([*events, END])


def part_event(head: Head, choice: dict[str, Any], *, with_usage: bool) -> bytes:
    """A part of a streamed answer; if the usage comes at the end, it says that it is not here."""
    return event(completion_object(head, [choice]) | ({"usage": None} if with_usage else {}))
