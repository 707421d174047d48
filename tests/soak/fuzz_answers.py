"""What must hold of all that came back on a connection, whatever was sent on it."""

from __future__ import annotations

import contextlib
import json
import re
from collections import Counter
from dataclasses import dataclass
from typing import Any, Final

from edgeqwen.errors import CODES

BLANK: Final = b" \t\r\n"
FRAME_BYTES: Final = 32 << 10
FATAL: Final = frozenset(name for name, code in CODES.items() if code.is_fatal)
NEVER: Final = frozenset({"engine", "loading", "draining"})
"""Codes that nothing a client sends may bring about in a daemon that is well."""

LATEST_STATUS: Final = 500
_LINE_NUMBER: Final = re.compile(r"^line (\d+) ")
_STATUS_LINE: Final = re.compile(rb"HTTP/\d\.\d (\d{3})[^\r\n]*")


@dataclass(frozen=True, slots=True)
class Sent:
    """One line as it was sent: its id as it will be echoed (None: none that could be), whether it is the last taken."""

    request_id: str | int | None
    closes: bool
    is_read: bool  # whether we could make sense of it at all


def read_line(line: bytes) -> Sent:
    """Leniently: whether the daemon takes the line shows in what it says of it."""
    with contextlib.suppress(ValueError, RecursionError):
        value = json.loads(line.decode("utf-8", "surrogateescape"))
        if isinstance(value, dict):
            return Sent(_valid_id(value.get("id")), value.get("close") is True, is_read=True)
    return Sent(None, closes=False, is_read=False)


def _valid_id(value: Any) -> str | int | None:
    if isinstance(value, bool):
        return None
    if isinstance(value, int):
        return value if 0 <= value < 1 << 53 else None
    is_text = isinstance(value, str) and 1 <= len(value) <= 64 and value.isascii() and value.isprintable()
    return value if is_text else None


def check_lines(sent: bytes, got: bytes) -> Counter[str]:
    """Each line that was taken has one last frame, with its id; a fatal error is the end. Returns the codes."""
    frames = [_frame(line) for line in got.split(b"\n") if line]
    assert not got or got.endswith(b"\n"), "the last frame is not whole"
    finals: Counter[str | int | None] = Counter(frame.get("id") for frame in frames if frame["done"])
    codes = Counter(frame["error"]["code"] if "error" in frame else "well" for frame in frames if frame["done"])
    assert not NEVER & codes.keys(), frames
    lines = sent.lstrip(BLANK).split(b"\n")
    last = frames[-1] if frames else {}
    if fatal := FATAL & codes.keys():
        assert "id" not in last, frames
        assert last.get("error", {}).get("code") in fatal, frames
        number = int(_number(last["error"]["message"]))
        _check_counts(lines[: number - 1], finals - Counter([None]), is_complete=False)
    else:
        _check_counts(lines, finals, is_complete=True)
    _check_order(frames)
    return codes


def _number(message: str) -> str:
    found = _LINE_NUMBER.match(message)
    assert found is not None, message
    return found[1]


def _frame(line: bytes) -> dict[str, Any]:
    frame: dict[str, Any] = json.loads(line)
    names = list(frame)
    assert names[:2] == ["id", "done"] or names[:1] == ["done"], line
    assert frame["done"] or len(line) < FRAME_BYTES, len(line)
    return frame


def _check_counts(lines: list[bytes], finals: Counter[str | int | None], *, is_complete: bool) -> None:
    taken: list[Sent] = []
    for line in lines:
        if line.strip(BLANK):
            taken.append(read_line(line))
            if taken[-1].closes:
                break
    expected = Counter(sent.request_id for sent in taken)
    if not is_complete:
        assert not finals - expected or not all(sent.is_read for sent in taken), (expected, finals)
    elif all(sent.is_read for sent in taken):
        assert finals == expected, (expected, finals)
    else:
        assert finals.total() == len(taken), (expected, finals)


def _check_order(frames: list[dict[str, Any]]) -> None:
    """Frames before the last one of an id; an id may be used again, so only what is left over at the end is wrong."""
    open_ids: set[str | int | None] = set()
    for frame in frames:
        (open_ids.discard if frame["done"] else open_ids.add)(frame.get("id"))
    fatal = frames and "error" in frames[-1] and frames[-1]["error"]["code"] in FATAL
    assert fatal or not open_ids, (open_ids, frames)


@dataclass(frozen=True, slots=True)
class Response:
    status: int
    headers: dict[str, str]
    body: bytes
    is_head: bool = False


def read_responses(got: bytes, *, may_be_head: bool = False) -> list[Response]:
    """All responses; each must be whole. Those to HEAD have no body, whatever they say of one."""
    found: list[Response] = []
    while got:
        head, end, got = got.partition(b"\r\n\r\n")
        assert end, f"a torn head: {head[:200]!r}"
        first, *fields = head.split(b"\r\n")
        match = _STATUS_LINE.fullmatch(first)
        assert match is not None, first
        status = int(match[1])
        headers = {name.lower(): value for name, _, value in (field.decode().partition(": ") for field in fields)}
        if status == 100:
            continue
        is_head = may_be_head and (not got or got.startswith(b"HTTP/"))
        if is_head or status in (204, 304):
            body = b""
        elif headers.get("transfer-encoding") == "chunked":
            body, got = _chunked(got)
        elif "content-length" in headers:
            size = int(headers["content-length"])
            assert len(got) >= size, f"a torn body: {head!r}"
            body, got = got[:size], got[size:]
        else:
            body, got = got, b""
        assert status < LATEST_STATUS, (head, body)
        found.append(Response(status, headers, body, is_head))
    return found


def _chunked(got: bytes) -> tuple[bytes, bytes]:
    body = b""
    while True:
        length, end, got = got.partition(b"\r\n")
        assert end, f"a torn chunk behind {body[-200:]!r}"
        size = int(length, 16)
        assert len(got) >= size + 2, f"a torn chunk: {got[:200]!r}"
        body, got = body + got[:size], got[size + 2 :]
        if size == 0:
            return body, got


def check_response(response: Response) -> str:
    """The form that its type says. Returns what was answered."""
    kind = response.headers.get("content-type", "").partition(";")[0]
    if response.is_head:
        assert not response.body, response
    elif kind == "application/x-ndjson":
        frames = [_frame(line) for line in response.body.splitlines() if line]
        assert [frame["done"] for frame in frames] == [False] * (len(frames) - 1) + [True], frames
        assert frames[-1].get("error", {}).get("code") not in NEVER, frames
    elif kind == "text/event-stream":
        assert response.body.endswith(b"\n\n"), response
        last = response.body.removesuffix(b"\n\n").rpartition(b"\n\n")[2]
        assert last == b"data: [DONE]" or b"message_stop" in last or b'"error"' in last, response
    elif kind == "application/json":
        json.loads(response.body)
    else:
        assert response.status == 204 or not response.body, response
    return f"http {response.status}"
