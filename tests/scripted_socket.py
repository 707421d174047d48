"""A server that says what a test wants, whatever it is asked: what a client must bear and no daemon would send."""

from __future__ import annotations

import contextlib
import itertools
import json
import socket
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.daemons import HANG_GUARD_S

START = {"done": False, "event": "start", "rid": "r1", "queue": 0, "prompt_tokens": 3}
FINAL = {"done": True, "finish": "stop", "rid": "r1", "usage": {"prompt": 3, "cached": 0, "completion": 1}}


def line(*frames: dict[str, Any]) -> bytes:
    """Frames as the daemon writes them: no spaces, not more escapes than must be."""
    encoded = [json.dumps(frame, ensure_ascii=False, separators=(",", ":")).encode() for frame in frames]
    return b"".join(frame + b"\n" for frame in encoded)


def said(*texts: str) -> bytes:
    """A whole streamed answer that consists of these pieces."""
    return line(START, *({"done": False, "delta": text} for text in texts), FINAL)


Say = Callable[[socket.socket], None]


@dataclass(eq=False)
class ScriptedSocket:
    """`replies` are what connection after connection is answered (the last one for ever): bytes, or a function that
    writes to the connection itself. `requests` are what came before, without HTTP's headers.
    """

    path: Path
    replies: Sequence[bytes | Say]
    chunk_bytes: int | None = None
    reads_request: bool = True
    requests: list[bytes] = field(default_factory=list)
    faults: list[Exception] = field(default_factory=list)

    def request(self) -> dict[str, Any]:
        """The last request."""
        members: dict[str, Any] = json.loads(self.requests[-1])
        return members

    def serve(self, listener: socket.socket) -> None:
        """One connection after the other, until the listener is shut down."""
        for number in itertools.count():
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            with connection:
                try:
                    self._answer(connection, self.replies[min(number, len(self.replies) - 1)])
                except (BrokenPipeError, ConnectionResetError):
                    pass  # a client may hang up whenever it likes
                except Exception as exc:
                    self.faults.append(exc)

    def _answer(self, connection: socket.socket, reply: bytes | Say) -> None:
        connection.settimeout(HANG_GUARD_S)
        if self.reads_request:
            body, is_http = read_request(connection)
            if not body:
                return
            self.requests.append(body)
            if is_http:
                connection.sendall(b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n")
        if callable(reply):
            reply(connection)
            return
        size = self.chunk_bytes or len(reply) or 1
        for start in range(0, len(reply), size):
            connection.sendall(reply[start : start + size])


def read_request(connection: socket.socket) -> tuple[bytes, bool]:
    """The request line, or the body of an HTTP request, and whether it is that."""
    data = b""
    while True:
        head, blank, body = data.partition(b"\r\n\r\n")
        if data.startswith(b"POST"):
            if blank and len(body) >= content_length(head):
                return body, True
        elif b"\n" in data:
            return data, False
        got = connection.recv(1 << 16)
        if not got:
            return data, False
        data += got


def content_length(head: bytes) -> int:
    (length,) = (field for field in head.split(b"\r\n") if field.lower().startswith(b"content-length:"))
    return int(length.split(b":")[1])


@contextlib.contextmanager
def scripted_socket(*replies: bytes | Say, **settings: Any) -> Iterator[ScriptedSocket]:
    """Such a server on a socket of its own, in a folder that everybody may enter."""
    with tempfile.TemporaryDirectory(prefix="eq-") as name, socket.socket(socket.AF_UNIX) as listener:
        folder = Path(name)
        folder.chmod(0o755)
        server = ScriptedSocket(folder / "s", replies, **settings)
        listener.bind(str(server.path))
        listener.listen(16)
        thread = threading.Thread(target=server.serve, args=(listener,), daemon=True)
        thread.start()
        try:
            yield server
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join(HANG_GUARD_S)
        assert not server.faults, server.faults
