"""Requests to bytes and bytes to frames, for both clients. Lines may be of any length."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from edgeqwen.client.failures import CutOff
from edgeqwen.errors import BadRequest


def encode_request(op: str, request_id: int, members: Mapping[str, Any]) -> bytes:
    """One line; members that are None are left out. Raises `BadRequest` if no frame can carry it."""
    given = {name: value for name, value in members.items() if value is not None}
    try:
        # Python's own encoder, since others silently make null of what is no finite number.
        return json.dumps({"op": op, "id": request_id, **given}, ensure_ascii=False, allow_nan=False).encode() + b"\n"
    except ValueError as exc:  # UnicodeEncodeError is one too
        raise BadRequest("numbers must be finite, and text must not hold lone surrogates") from exc


class FrameBuffer:
    """`feed` takes bytes as they come, `take` gives the next frame or None."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._searched = 0

    def feed(self, data: bytes) -> None:
        self._buffer += data

    def take(self) -> dict[str, Any] | None:
        """Raises `CutOff` for what is no frame."""
        line = self._take_line()
        return None if line is None else decode_frame(line)

    def _take_line(self) -> bytes | None:
        """The next line that is not blank; blank ones say that the daemon is still there."""
        while (end := self._buffer.find(b"\n", self._searched)) >= 0:
            line = bytes(self._buffer[:end]).strip()
            del self._buffer[: end + 1]
            self._searched = 0
            if line:
                return line
        self._searched = len(self._buffer)
        return None


def decode_frame(line: bytes) -> dict[str, Any]:
    """Raises `CutOff` for what is no frame."""
    import msgspec

    try:
        frame = msgspec.json.decode(line)
    except msgspec.MsgspecError as exc:
        raise CutOff("the daemon sent something that is not a frame") from exc
    if not isinstance(frame, dict) or not isinstance(frame.get("done"), bool):
        raise CutOff("the daemon sent something that is not a frame")
    return frame
