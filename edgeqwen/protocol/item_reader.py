"""Items out of a JSON text of any length, as its bytes come: in memory there is never more than one unfinished item.

Three forms are read, told apart by the first byte that is not blank:

    [{"prompt":"a"},{"prompt":"b"}]                              an array
    {"each":"chat","common":{...},"items":[{"prompt":"a"}]}      an object whose last member is `items`
    {"prompt":"a"}                                               JSON lines: objects one after another
    {"prompt":"b"}

An object is the second form if it has an array `items`, unless the caller knows that lines come.

ijson's events (yajl in C where the machine has it) are put together here and not by its own builder: that one keeps the
path of every value as text, which takes memory by the square of the depth, so that 64 KiB of brackets would be the end
of the process. yajl keeps a string that has begun until it is whole; how many bytes an item has is therefore counted
before they are parsed. It is counted at every `BLOCK_BYTES` of the input: however the bytes were cut on their way, the
same items come out, and the limit is exact to two blocks. yajl also reads a lone surrogate as a question mark;
`_Escapes` finds those first.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, Final, Literal, TypeAlias

from edgeqwen.errors import EdgeqwenError
from edgeqwen.protocol.frames import BLANK

BLOCK_BYTES: Final = 16 << 10
"""What is parsed in one go: some 2 ms of the worst input (numbers of one digit)."""

State: TypeAlias = Literal["start", "array", "head", "items", "tail", "values", "over"]


class ItemReader:
    """`feed` takes bytes, `finish` the end; both give the items that are complete. At the first thing that is wrong
    `error` is set (`bad_json`, `bad_utf8`, `too_large`), and nothing after it is read.

    `head` holds the members before `items` in the second form. `item_bytes` bounds an item, `nesting` its depth.
    """

    def __init__(self, *, item_bytes: int = 1 << 20, nesting: int = 32, is_lines: bool = False) -> None:
        from ijson import JSONError, basic_parse_coro
        from ijson.utils import sendable_list

        self._events: list[tuple[str, Any]] = sendable_list()
        self._parser = basic_parse_coro(self._events, use_float=True, multiple_values=True)
        self._json_error: type[Exception] = JSONError
        self._escapes = _Escapes()
        self._item_bytes = item_bytes
        self._nesting = nesting
        self._is_lines = is_lines
        self._state: State = "values" if is_lines else "start"
        self._stack: list[dict[str, Any] | list[Any]] = []
        self._keys: list[str] = [""]  # of each level of the stack, the member that comes next; first that of the head
        self._items: list[Any] = []
        self._is_blank = True
        self._num_bytes = 0
        self._num_values = 0
        self._counted = (0, 0)  # values and bytes when a value last ended
        self.head: dict[str, Any] = {}
        self.num_items = 0
        self.error: EdgeqwenError | None = None

    @property
    def has_begun(self) -> bool:
        """Whether the items have begun, so that `head` is complete."""
        return self._state not in {"start", "head"}

    def feed(self, data: bytes) -> list[Any]:
        """Parse; anything longer than `BLOCK_BYTES` takes that much longer (see `blocks`)."""
        for block in blocks(data, self._num_bytes):
            if self.error is not None:
                break
            self._parse(block)
            self._num_bytes += len(block)
            if self._num_bytes % BLOCK_BYTES == 0:
                self._count()
        return self._take()

    def finish(self) -> list[Any]:
        """The end of the input."""
        if self.error is None:
            self._finish()
        return self._take()

    def _take(self) -> list[Any]:
        items, self._items = self._items, []
        return items

    def _parse(self, block: bytes) -> None:
        self._is_blank = self._is_blank and not block.strip(BLANK)
        valid, is_wrong = self._escapes.take(block)
        if valid:  # nothing at all is the end of the input to the parser
            self._send(valid)
        if is_wrong and self.error is None:
            self._fail("a text holds half of a surrogate pair")

    def _send(self, data: bytes) -> None:
        try:
            self._parser.send(data)
        except (self._json_error, ValueError) as exc:  # UnicodeDecodeError and json's own errors are ValueErrors
            self._read_events()
            self._fail_by(exc)
        else:
            self._read_events()

    def _finish(self) -> None:
        if self._escapes.held:
            self._fail("the input ends inside a text")
            return
        if self._is_blank:
            if not self._is_lines:
                self._fail("there are no items: give an array, an object with items, or JSON lines")
            return
        try:
            self._parser.close()
        except (self._json_error, ValueError) as exc:
            self._read_events()
            self._fail_by(exc)
        else:
            self._read_events()
        if self.error is None and (self._stack or self._state in {"array", "head", "items", "tail"}):
            self._fail("the input ends before the JSON does")

    def _read_events(self) -> None:
        for event, value in self._events:
            if self.error is not None:
                break
            if self._stack:
                self._take_inside(event, value)
            else:
                self._take_between(event, value)
        self._events.clear()

    def _take_inside(self, event: str, value: Any) -> None:
        """An event of an item, or of a member of the head."""
        if event == "map_key":
            self._keys[-1] = value
            return
        if event in {"end_map", "end_array"}:
            done = self._stack.pop()
            self._keys.pop()
            if not self._stack:
                self._complete(done)
            return
        new = _opened(event)
        top = self._stack[-1]
        entry = value if new is None else new
        if isinstance(top, dict):
            top[self._keys[-1]] = entry
        else:
            top.append(entry)
        if new is not None:
            self._open(new)

    def _take_between(self, event: str, value: Any) -> None:
        """An event of what holds the items."""
        match self._state, event:
            case "start", "start_array":
                self._state = "array"
            case "start", "start_map":
                self._state = "head"
            case "array", "end_array":
                self._state = "over"
            case "items", "end_array":
                self._state = "tail"
            case (("head" | "tail"), "end_map"):
                self._end_object()
            case "head", "map_key":
                self._keys[0] = value
            case "head", "start_array" if self._keys[0] == "items":
                self._state = "items"
            case "tail", "map_key":
                self._fail("items must be the last member: each and common stand before it")
            case (("start" | "over"), _):
                self._fail("the input is neither an array, nor an object with items, nor JSON lines")
            case _:
                new = _opened(event)
                if new is None:
                    self._complete(value)
                else:
                    self._open(new)

    def _end_object(self) -> None:
        """An object without `items` was the first of JSON lines."""
        if self._state == "tail":
            self._state = "over"
            return
        self._state = "values"
        line, self.head = self.head, {}
        self._complete(line)

    def _open(self, new: dict[str, Any] | list[Any]) -> None:
        self._stack.append(new)
        self._keys.append("")
        if len(self._stack) > self._nesting:
            self._fail(f"it is nested deeper than {self._nesting}")

    def _complete(self, value: Any) -> None:
        self._num_values += 1
        if self._state == "head":
            self.head[self._keys[0]] = value
            return
        self._items.append(value)
        self.num_items += 1

    def _count(self) -> None:
        num_values, at = self._counted
        if num_values != self._num_values or self._state == "over":
            self._counted = (self._num_values, self._num_bytes)
        elif self._num_bytes - at > self._item_bytes and self.error is None:
            message = f"item {self.num_items} is longer than {self._item_bytes} bytes"
            self.error = EdgeqwenError(message, code="too_large")

    def _fail_by(self, exc: Exception) -> None:
        if self.error is not None:
            return
        if isinstance(exc, UnicodeDecodeError) or "utf" in str(exc).lower().partition("\n")[0]:
            self._fail("it is not UTF-8", code="bad_utf8")
        else:
            self._fail("it is not valid JSON")

    def _fail(self, reason: str, *, code: str = "bad_json") -> None:
        """The message must not repeat what was sent, which the library's own does."""
        self.error = EdgeqwenError(f"item {self.num_items} of the input: {reason}", code=code)


class _Escapes:
    """Finds lone surrogates, and holds back an escape that is not complete."""

    # Possessive, so that a text is read once. A first half of a pair is good with the beginning of a second half.
    _GOOD: Final = re.compile(
        rb"(?:[^\\]++|\\[^u]|\\u[^dD]|\\u[dD][^89a-fA-F]|\\u[dD][89abAB]..\\u[dD][c-fC-F])*+", re.DOTALL
    )
    _PAIR_BYTES: Final = 10

    def __init__(self) -> None:
        self.held = b""

    def take(self, data: bytes) -> tuple[bytes, bool]:
        """What of the input may be parsed now, and whether a lone surrogate follows it."""
        if not self.held and b"\\" not in data:
            return data, False
        data = self.held + data
        match = self._GOOD.match(data)
        assert match is not None
        self.held = data[match.end() :]
        return data[: match.end()], len(self.held) >= self._PAIR_BYTES


def _opened(event: str) -> dict[str, Any] | list[Any] | None:
    """A new container, if the event begins one."""
    if event == "start_map":
        return {}
    return [] if event == "start_array" else None


def blocks(data: bytes, offset: int = 0) -> Iterator[bytes]:
    """`data`, which begins at `offset` of the input, cut where the input is at a multiple of `BLOCK_BYTES`."""
    start = 0
    while start < len(data):
        end = start + BLOCK_BYTES - (offset + start) % BLOCK_BYTES
        yield data[start:end]
        start = end
