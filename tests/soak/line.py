"""A client that takes nothing for granted: each frame must be one that it waits for."""

from __future__ import annotations

import contextlib
import json
import socket
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

GUARD_S: Final = 600.0
READ_BYTES: Final = 64 << 10


class Ended(Exception):
    """The connection ended before the frame that was waited for."""


def ignore(_: dict[str, Any]) -> None:
    """For frames that are of no interest."""


class Line:
    """A connection of `eqp/1` with one request at a time. `Ended` is raised where it breaks."""

    def __init__(self, path: Path) -> None:
        self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._sock.settimeout(GUARD_S)
        self._buffer = bytearray()
        self._num_sent = 0
        try:
            self._sock.connect(str(path))
        except OSError as error:
            self._sock.close()
            raise Ended("nobody listens") from error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Hang up."""
        self._sock.close()

    def write(self, data: bytes) -> None:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # what was said before is still there to read
            self._sock.sendall(data)

    def send(self, op: str, **members: Any) -> int:
        """Send a request; returns its id."""
        self._num_sent += 1
        self.write(json.dumps({"op": op, "id": self._num_sent} | members).encode() + b"\n")
        return self._num_sent

    def read(self) -> dict[str, Any]:
        """The next frame."""
        while True:
            end = self._buffer.find(b"\n")
            if end < 0:
                self._buffer += self._receive()
                continue
            line = bytes(self._buffer[:end])
            del self._buffer[: end + 1]
            if line.strip():
                frame: dict[str, Any] = json.loads(line)
                return frame

    def _receive(self) -> bytes:
        try:
            data = self._sock.recv(READ_BYTES)
        except ConnectionResetError:
            data = b""
        if not data:
            raise Ended("the connection ended")
        return data

    def rest(self) -> bytes:
        """All that comes until the connection ends."""
        with contextlib.suppress(Ended):
            while True:
                self._buffer += self._receive()
        return bytes(self._buffer)

    def final(self, request_id: int, on_frame: Callable[[dict[str, Any]], None] = ignore) -> dict[str, Any]:
        """The last frame of a request, which may be an error; the frames before it go to `on_frame`."""
        while True:
            frame = self.read()
            assert frame.get("id") == request_id, f"a frame of {frame.get('id')} while {request_id} is answered"
            if frame["done"]:
                return frame
            on_frame(frame)

    def ask(self, op: str, **members: Any) -> dict[str, Any]:
        """A request's last frame."""
        return self.final(self.send(op, **members))

    def must(self, op: str, **members: Any) -> dict[str, Any]:
        """As `ask`, of a request that must not fail."""
        frame = self.ask(op, **members)
        assert "error" not in frame, frame["error"]
        return frame

    def check_silence(self) -> None:
        """Nothing has come that belongs to an earlier request: each had one last frame."""
        self.must("health")
        assert not self._buffer
