"""Connections that write and read at once, piece by piece."""

from __future__ import annotations

import contextlib
import fcntl
import random
import select
import socket
import struct
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

GUARD_S: Final = 60.0
READ_BYTES: Final = 64 << 10
SIOCOUTQ: Final = 0x5411
"""What was sent and not yet read by the other end (unix(7) has it as for tcp(7))."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where the daemon listens: a path, or a port of this machine."""

    path: Path
    port: int | None = None

    def connect(self) -> socket.socket:
        sock = socket.socket(socket.AF_UNIX if self.port is None else socket.AF_INET, socket.SOCK_STREAM)
        sock.settimeout(GUARD_S)
        sock.connect(str(self.path) if self.port is None else ("127.0.0.1", self.port))
        sock.setblocking(False)
        return sock


def exchange(place: Place, pieces: Iterable[bytes], *, waits: bool = False, ends: bool = True) -> bytes:
    """Send the pieces and, with `ends`, the end of input; all that comes back. `waits`: each piece has been read before
    the next.
    """
    got = bytearray()
    with place.connect() as sock:
        is_open = True
        for piece in pieces:
            is_open = is_open and _send(sock, piece, got)
            while waits and is_open and _unread(sock):
                is_open = _take(sock, got, 0.0)
        if ends:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_WR)
        give_up_at = time.monotonic() + GUARD_S
        while is_open:
            assert time.monotonic() < give_up_at, f"no end of the connection after {bytes(got[-300:])!r}"
            is_open = _take(sock, got, 1.0)
    return bytes(got)


def hang_up(place: Place, data: bytes, rng: random.Random) -> None:
    """Send, read a little or nothing, and go."""
    got = bytearray()
    with place.connect() as sock:
        if _send(sock, data, got) and rng.random() < 0.5:
            _take(sock, got, rng.random() / 50)


def _send(sock: socket.socket, data: bytes, got: bytearray) -> bool:
    """Whether the other end still takes it; what it says meanwhile is read."""
    give_up_at = time.monotonic() + GUARD_S
    while data:
        assert time.monotonic() < give_up_at, f"{len(data)} bytes are not read"
        readable, writable, _ = select.select([sock], [sock], [], 1.0)
        if readable and not _take(sock, got, 0.0):
            return False
        if writable:
            try:
                data = data[sock.send(data) :]
            except BlockingIOError:
                continue
            except OSError:  # gone: what it said before that is still to be read
                while _take(sock, got, 0.0):
                    pass
                return False
    return True


def _take(sock: socket.socket, got: bytearray, timeout_s: float) -> bool:
    """Read what is there; False at the end."""
    if not select.select([sock], [], [], timeout_s)[0]:
        return True
    try:
        data = sock.recv(READ_BYTES)
    except BlockingIOError:
        return True
    except OSError:
        return False
    got += data
    return bool(data)


def _unread(sock: socket.socket) -> int:
    held: int = struct.unpack("i", fcntl.ioctl(sock, SIOCOUTQ, b"\0\0\0\0"))[0]
    return held
