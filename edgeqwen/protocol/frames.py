"""Bytes to lines: the framing of `eqp/1`, without I/O.

A frame is one JSON object in one line. `FrameDecoder` takes bytes as they come and gives whole lines back; it holds at
most one line of `line_bytes` beyond what it was fed at once. Rules:

* A line ends with LF; one CR before it and blank lines are ignored. At the end of input an unterminated line counts.
* A line that is too long, not UTF-8, nested too deep or not a JSON object raises an error whose code is fatal. What
  comes after it must not be looked at: a peer that sent one bad line may be speaking another protocol.
* The first byte that is not blank tells the protocol: `{` is this one, `A` to `Z` is HTTP, anything else is an error.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import accumulate
from typing import Any, Final, Literal, TypeAlias

import msgspec

from edgeqwen.errors import EdgeqwenError

Wire: TypeAlias = Literal["json", "http", "unknown"]

BLANK: Final = b" \t\r\n"
# Strings are cut out before brackets are counted; the pattern has no nested repetition, so it is linear in the line.
_STRINGS: Final = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"', re.DOTALL)
_NOT_BLANK: Final = re.compile(rb"[^ \t\r\n]")
_NOT_BRACKETS: Final = bytes(byte for byte in range(256) if byte not in b"[]{}")
_STEP: Final = {ord("["): 1, ord("{"): 1, ord("]"): -1, ord("}"): -1}


def sniff(data: bytes) -> Wire | None:
    """The protocol that `data`, the first bytes of a connection, belongs to; None while all of it is blank."""
    head = data.lstrip(BLANK)[:1]
    if not head:
        return None
    if head == b"{":
        return "json"
    return "http" if b"A" <= head <= b"Z" else "unknown"


def not_an_object(number: int) -> EdgeqwenError:
    return EdgeqwenError(f"line {number} is not a JSON object", code="bad_json")


def is_nested_deeper(line: bytes, max_nesting: int) -> bool:
    """Whether brackets outside strings go deeper than `max_nesting`. `line` need not be valid JSON."""
    if line.count(b"[") + line.count(b"{") <= max_nesting:
        return False
    brackets = _STRINGS.sub(b"", line).translate(None, _NOT_BRACKETS)
    return any(depth > max_nesting for depth in accumulate(_STEP[byte] for byte in brackets))


def decode_object(line: bytes, *, number: int = 1, max_nesting: int = 32) -> dict[str, Any]:
    """The JSON object in `line`; `number` is for the message. Duplicate names: the last one counts.

    Raises `bad_utf8` or `bad_json`: NaN, numbers beyond a double, lone surrogates, a byte order mark and raw control
    characters are errors as well. The message never repeats what was sent.
    """
    try:
        line.decode("utf-8")
    except UnicodeDecodeError as exc:
        raise EdgeqwenError(f"line {number} is not UTF-8", code="bad_utf8") from exc
    if is_nested_deeper(line, max_nesting):
        raise EdgeqwenError(f"line {number} is nested deeper than {max_nesting}", code="bad_json")
    try:
        value = msgspec.json.decode(line)
    except (msgspec.MsgspecError, ValueError, RecursionError) as exc:
        raise not_an_object(number) from exc
    if not isinstance(value, dict):
        raise not_an_object(number)
    return value


class FrameDecoder:
    """Cuts a stream of bytes into lines. `feed` and `feed_eof` take input; iteration gives lines that are not blank.

    Iteration may be stopped and taken up again at any line. After an error the decoder must not be used any more.
    """

    def __init__(self, *, max_line: int = 1 << 20) -> None:
        self._max_line = max_line
        self._next_max_line = max_line
        self._buffer = bytearray()
        self._searched = 0  # no LF stands before this offset of the buffer
        self._is_eof = False
        self.num_lines = 0

    def set_max_line(self, max_line: int) -> None:
        """Let lines be so long. One that has begun may still be as long as it might have been."""
        self._next_max_line = max_line
        self._max_line = max(self._max_line, max_line) if self.is_partial else max_line

    def feed(self, data: bytes) -> None:
        assert not self._is_eof, "bytes after the end of input"
        self._buffer += data

    def feed_eof(self) -> None:
        self._is_eof = True

    def discard(self) -> None:
        """Forget what was fed: nobody will ask for it, and its holder may live until garbage is collected."""
        self._buffer = bytearray()
        self._searched = 0

    @property
    def is_partial(self) -> bool:
        """Whether bytes of a line are waiting for its end. True as well while whole lines wait to be taken."""
        return _NOT_BLANK.search(self._buffer) is not None

    def __iter__(self) -> Iterator[bytes]:
        return self

    def __next__(self) -> bytes:
        """The next line, without its end and the blanks around it. Raises `too_large` for a line over the limit."""
        while (line := self._take()) is not None:
            self.num_lines += 1
            if line.strip(BLANK):
                return line.strip(BLANK)
        raise StopIteration

    def _take(self) -> bytes | None:
        end = self._buffer.find(b"\n", self._searched)
        if end < 0:
            self._searched = len(self._buffer)
            # One byte over the limit may still turn out to be the CR of the line's end.
            if len(self._buffer) > self._max_line + self._buffer.endswith(b"\r"):
                raise self._too_large()
            if not self._is_eof or not self._buffer:
                return None
            end = len(self._buffer)
        line = bytes(self._buffer[:end])
        del self._buffer[: end + 1]
        self._searched = 0
        if len(line) - line.endswith(b"\r") > self._max_line:
            raise self._too_large()
        self._max_line = self._next_max_line
        return line

    def _too_large(self) -> EdgeqwenError:
        message = f"line {self.num_lines + 1} is longer than {self._max_line} bytes"
        return EdgeqwenError(message, code="too_large")
