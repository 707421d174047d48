"""Sockets that a service manager has made and hands over (sd_listen_fds(3)).

$LISTEN_FDS descriptors from 3 on are meant for the process $LISTEN_PID, and for no other: what stands in the
environment of a child is none of its business. They stay the manager's: their paths are neither removed nor changed,
and they are never shut down, for the next daemon gets the same ones, with the connections that came meanwhile.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import time
from collections.abc import MutableMapping, Sequence
from dataclasses import dataclass
from typing import Final

from edgeqwen.errors import ConfigInvalid, EdgeqwenError
from edgeqwen.protocol.replies import encode_frame, error_members

FIRST_FD: Final = 3
MOST_FDS: Final = 64
"""More than any unit has; a wrong number must not make us open all that there are."""

VARIABLES: Final = ("LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES")
TURN_AWAY_S: Final = 0.5


@dataclass(frozen=True, slots=True)
class Inheritance:
    """Listening stream sockets: `unix` ones, and `network` ones of TCP."""

    unix: tuple[socket.socket, ...] = ()
    network: tuple[socket.socket, ...] = ()

    @classmethod
    def take(cls, environ: MutableMapping[str, str], pid: int) -> Inheritance:
        """What is meant for process `pid`, which this one is. The variables are removed for the sake of children.

        Raises `ConfigInvalid` for a descriptor that is not a listening stream socket.
        """
        values = {name: environ.pop(name, "") for name in VARIABLES}
        count = values["LISTEN_FDS"]
        if values["LISTEN_PID"] != str(pid) or not count.isdecimal():
            return cls()
        if not int(count) <= MOST_FDS:
            raise ConfigInvalid(f"LISTEN_FDS: {count} sockets are more than the {MOST_FDS} that may be handed over")
        names = values["LISTEN_FDNAMES"].split(":")
        names += [""] * (int(count) - len(names))
        sockets = [_adopted(FIRST_FD + number, names[number]) for number in range(int(count))]
        unix = tuple(sock for sock in sockets if sock.family == socket.AF_UNIX)
        return cls(unix, tuple(sock for sock in sockets if sock.family != socket.AF_UNIX))

    def __bool__(self) -> bool:
        return bool(self.unix or self.network)

    @property
    def sockets(self) -> tuple[socket.socket, ...]:
        return (*self.unix, *self.network)


def _adopted(fd: int, name: str) -> socket.socket:
    who = f"socket {fd} of the service manager" + (f" ({name})" if name else "")
    try:
        os.set_inheritable(fd, False)
        sock = socket.socket(fileno=fd)
    except OSError as exc:
        raise ConfigInvalid(f"{who}: is not a socket: {exc.strerror}; see ListenStream= of the socket unit") from exc
    is_listening = sock.type == socket.SOCK_STREAM and sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
    if sock.family not in {socket.AF_UNIX, socket.AF_INET, socket.AF_INET6} or not is_listening:
        sock.detach()
        raise ConfigInvalid(f"{who}: is not a stream socket that listens; use ListenStream= and Accept=no")
    sock.setblocking(False)
    return sock


def turn_away(sockets: Sequence[socket.socket], error: EdgeqwenError, *, within_s: float = TURN_AWAY_S) -> int:
    """Tell everybody who has connected to `sockets` that there will be no daemon, and why; how many they were.

    The manager starts a daemon for as long as somebody waits on its socket, and would do so for ever.
    """
    give_up_at = time.monotonic() + within_s
    return sum(_turn_away(sock, error, give_up_at) for sock in sockets)


def _turn_away(sock: socket.socket, error: EdgeqwenError, give_up_at: float) -> int:
    count = 0
    with contextlib.suppress(OSError):  # BlockingIOError: nobody is left
        while True:
            connection, _ = sock.accept()
            count += 1
            with contextlib.suppress(OSError), connection:
                _tell(connection, error, give_up_at)
    return count


def _tell(connection: socket.socket, error: EdgeqwenError, give_up_at: float) -> None:
    """In the protocol that the client has begun with; who has not begun is told in ours."""
    connection.setblocking(False)
    select.select([connection], [], [], max(0.0, min(0.1, give_up_at - time.monotonic())))
    first = b""
    with contextlib.suppress(BlockingIOError):
        first = connection.recv(65_536)
    frame = encode_frame(error_members(error), done=True)
    if first[:1].isalpha():
        head = "HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\nConnection: close\r\n"
        frame = f"{head}Content-Length: {len(frame)}\r\n\r\n".encode() + frame
    connection.send(frame)
    connection.shutdown(socket.SHUT_WR)
