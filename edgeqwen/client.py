"""A small synchronous client of the daemon's socket, for the command line and for scripts.

One request is in flight at a time. A connection that breaks before a request's final frame is an error of its own
(`CutOff`), never an answer that merely looks short.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
from collections.abc import Iterator, Mapping
from types import TracebackType
from typing import Any, Final, Self

import msgspec

from edgeqwen.errors import CODES, EXIT_CUT_OFF, EXIT_NO_DAEMON, BadRequest, EdgeqwenError
from edgeqwen.protocol.address import check_length

READ_BYTES: Final = 64 << 10
RETRY_S: Final = 0.02


class NoDaemon(EdgeqwenError):
    """Nobody serves the socket (exit 69)."""

    @property
    def exit_code(self) -> int:
        return EXIT_NO_DAEMON


class CutOff(EdgeqwenError):
    """The connection ended, or something that is no frame came, before the final frame (exit 74)."""

    @property
    def exit_code(self) -> int:
        return EXIT_CUT_OFF


class SocketForbidden(EdgeqwenError):
    """The socket is there and this user may not connect to it (exit 77)."""

    code = "forbidden"


def _connect(sock: socket.socket, path: str, *, give_up_at: float) -> None:
    """A socket with a timeout does not wait while too many others wait to be accepted: it has to ask again."""
    while True:
        try:
            sock.connect(path)
            return
        except BlockingIOError:
            if time.monotonic() >= give_up_at:
                raise
        time.sleep(RETRY_S)


def error_of(frame: Mapping[str, Any]) -> EdgeqwenError:
    """The error that a final frame carries. A code that this client does not know counts as the daemon's fault."""
    error = frame["error"]
    code = error.get("code")
    return EdgeqwenError(
        str(error.get("message", code)),
        code=code if code in CODES else "engine",
        field=error.get("field"),
        retry_ms=error.get("retry_ms"),
    )


def _line(members: Mapping[str, Any]) -> bytes:
    """A request. Python's own encoder, since others silently make null of what is no finite number."""
    try:
        return json.dumps(members, ensure_ascii=False, allow_nan=False).encode() + b"\n"
    except ValueError as exc:  # UnicodeEncodeError is one too
        raise BadRequest("numbers must be finite, and text must not hold lone surrogates") from exc


class Client:
    """A connection. `request` waits for the final frame, `stream` gives all frames; both raise what the daemon answers.

    Errors: `EdgeqwenError` with the daemon's code, `CutOff`. After an error of the connection the client is of no use.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._buffer = bytearray()
        self._num_requests = 0
        self._current_id = 0

    @classmethod
    def connect(cls, path: str | os.PathLike[str], *, timeout_s: float = 5.0) -> Self:
        """Connect to the socket `path`. Raises `NoDaemon`, `SocketForbidden`, `ConfigInvalid` (path too long)."""
        shown = os.fspath(path)
        check_length(shown)
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.settimeout(timeout_s)
            _connect(sock, shown, give_up_at=time.monotonic() + timeout_s)
        except OSError as exc:
            sock.close()
            if isinstance(exc, PermissionError):
                raise SocketForbidden(f"{shown}: this user may not connect to the daemon") from exc
            reason = "does not answer" if isinstance(exc, TimeoutError | BlockingIOError) else "no daemon"
            raise NoDaemon(f"{shown}: {reason}; start one with: edgeqwen serve") from exc
        sock.settimeout(None)
        return cls(sock)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Hang up: whatever is in flight is cancelled by the daemon."""
        self._sock.close()

    def request(self, op: str, **members: Any) -> dict[str, Any]:
        """The final frame of `op`."""
        for frame in self.stream(op, **members):
            if frame["done"]:
                return frame
        raise AssertionError("a stream ends with a final frame or an error")

    def stream(self, op: str, **members: Any) -> Iterator[dict[str, Any]]:
        """The frames of `op` as they come, the final one included. Members that are None are left out.

        The request is sent at the first step of the iterator, which raises `BadRequest` if no frame can carry it.
        Leaving it early leaves frames unread: close the client.
        """
        self._num_requests += 1
        request_id = self._current_id = self._num_requests
        given = {name: value for name, value in members.items() if value is not None}
        self._send(_line({"op": op, "id": request_id, **given}))
        while True:
            frame = self._read_frame()
            if "error" in frame and frame["done"] and frame.get("id", request_id) == request_id:
                raise error_of(frame)
            if frame.get("id") != request_id:
                continue
            yield frame
            if frame["done"]:
                return

    def cancel(self) -> None:
        """Ask for the end of the request in flight; its final frame still comes."""
        self._num_requests += 1
        members = {"op": "cancel", "id": self._num_requests, "target": self._current_id}
        self._send(_line(members))

    def _send(self, data: bytes) -> None:
        # A daemon that turns a connection away closes at once; its reason is then still there to be read.
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self._sock.sendall(data)

    def _read_frame(self) -> dict[str, Any]:
        while (line := self._take_line()) is None:
            try:
                data = self._sock.recv(READ_BYTES)
            except ConnectionResetError:
                data = b""
            if not data:
                raise CutOff("the connection ended before the answer did")
            self._buffer += data
        try:
            frame = msgspec.json.decode(line)
        except msgspec.MsgspecError as exc:
            raise CutOff("the daemon sent something that is not a frame") from exc
        if not isinstance(frame, dict) or not isinstance(frame.get("done"), bool):
            raise CutOff("the daemon sent something that is not a frame")
        return frame

    def _take_line(self) -> bytes | None:
        """The next line that is not blank; blank ones say that the daemon is still there."""
        while (end := self._buffer.find(b"\n")) >= 0:
            line = bytes(self._buffer[:end]).strip()
            del self._buffer[: end + 1]
            if line:
                return line
        return None
