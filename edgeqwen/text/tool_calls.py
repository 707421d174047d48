"""Calls of tools, told from the text of an answer.

The form is that of Qwen3 and the Hermes models, which its template teaches them:

    some text
    <tool_call>
    {"name": "get_weather", "arguments": {"city": "Kyiv"}}
    </tool_call>

Text is passed on as soon as it cannot be the start of a call; white space before a call and between calls goes with
them. What stands between the markers and is no such object stays text, markers and white space before them included,
and so does a call that the answer's end cuts off, unless its object is complete. A closing marker inside a JSON string
is part of that.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import msgspec

CALL_OPEN: Final = "<tool_call>"
CALL_CLOSE: Final = "</tool_call>"
_STRINGS: Final = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"', re.DOTALL)


@dataclass(frozen=True, slots=True)
class Call:
    """`arguments` is JSON text."""

    name: str
    arguments: str


Piece: TypeAlias = "str | Call"


class CallFinder:
    """Cuts the content of one choice into text and calls, as it comes. `num_calls` counts those found."""

    def __init__(self) -> None:
        self._held = ""  # white space, and what may become a marker; inside a call all of it
        self._is_inside = False
        self._blank = ""  # white space before the call
        self._num_searched = 0  # of what is held inside a call: no marker that ends it begins there
        self.num_calls = 0

    def push(self, text: str) -> list[Piece]:
        """Take the next piece of the content; what is certain of it and of what was held back."""
        self._held += text
        return _joined(self._pieces())

    def finish(self) -> list[Piece]:
        """There is no more: what was held back."""
        held, self._held = self._held, ""
        if not self._is_inside:
            return [] if self.num_calls and not held.strip() else _joined(iter((held,)))
        self._is_inside = False
        return _joined(iter((self._call(held) or self._blank + CALL_OPEN + held,)))

    def _pieces(self) -> Iterator[Piece]:
        while True:
            at = self._closing() if self._is_inside else self._held.find(CALL_OPEN)
            if at < 0:
                break
            before, after = self._held[:at], self._held[at + len(CALL_CLOSE if self._is_inside else CALL_OPEN) :]
            self._held, self._num_searched = after, 0
            if self._is_inside:
                yield self._call(before) or self._blank + CALL_OPEN + before + CALL_CLOSE
            else:
                text = before.rstrip()
                self._blank = before[len(text) :]
                yield text
            self._is_inside = not self._is_inside
        if not self._is_inside:
            kept = self._num_free()
            text, self._held = self._held[:kept], self._held[kept:]
            yield text

    def _closing(self) -> int:
        """Where the marker begins that ends the call; -1 while there is none."""
        while (at := self._held.find(CALL_CLOSE, self._num_searched)) >= 0:
            if '"' not in _STRINGS.sub("", self._held[:at]):
                return at
            self._num_searched = at + 1
        self._num_searched = max(self._num_searched, len(self._held) - len(CALL_CLOSE) + 1)
        return -1

    def _num_free(self) -> int:
        """How much of what is held is text whatever comes next: neither white space at the end nor a marker's start."""
        held = self._held
        end = next((len(held) - n for n in range(len(CALL_OPEN) - 1, 0, -1) if held.endswith(CALL_OPEN[:n])), len(held))
        return len(held[:end].rstrip())

    def _call(self, text: str) -> Call | None:
        call = read_call(text)
        self.num_calls += call is not None
        return call


def read_call(text: str) -> Call | None:
    """The call that an object between the markers means; None if it means none."""
    try:
        read: Any = msgspec.json.decode(text.strip())
    except (msgspec.DecodeError, RecursionError):
        return None
    if not isinstance(read, dict) or not isinstance(read.get("name"), str) or not read["name"]:
        return None
    arguments = read.get("arguments", read.get("parameters", {}))
    if isinstance(arguments, str):  # some models write the object as a text
        return Call(read["name"], arguments)
    return Call(read["name"], msgspec.json.encode(arguments).decode())


def _joined(pieces: Iterator[Piece]) -> list[Piece]:
    """Texts that follow each other are one, empty ones are none."""
    joined: list[Piece] = []
    for piece in pieces:
        if isinstance(piece, str) and joined and isinstance(joined[-1], str):
            joined[-1] += piece
        elif piece:
            joined.append(piece)
    return joined
