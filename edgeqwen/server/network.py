"""The optional TCP port: its address, the socket, and connections on it, which speak HTTP only.

Who asks is told by a key (`http.access`), never by the address. End of input is a hang-up here: TCP does not tell one
from the other, and programs that go away are many, those that only stop sending few. What takes no time is answered
all the same.
"""

from __future__ import annotations

import asyncio
import ipaddress
import re
import socket
from dataclasses import dataclass
from http import HTTPStatus
from typing import Final

from edgeqwen.errors import CODES, ConfigInvalid, EdgeqwenError
from edgeqwen.protocol.frames import Wire
from edgeqwen.protocol.peer import Peer
from edgeqwen.protocol.replies import encode_frame, error_members
from edgeqwen.server.binding import BACKLOG
from edgeqwen.server.connection import Connection
from edgeqwen.server.peers import network_peer

HANG_UP_S: Final = 0.25
"""Between the end of input and the end of what still runs: no longer than a dead client of the socket takes to find."""

KEEPALIVE: Final = ((socket.TCP_KEEPIDLE, 60), (socket.TCP_KEEPINTVL, 10), (socket.TCP_KEEPCNT, 3))
"""A machine that went away without a word is noticed after a minute and a half."""

_ADDRESS: Final = re.compile(r"(?:\[(?P<v6>[^\[\]]+)\]|(?P<v4>[^:\[\]]+)):(?P<port>[0-9]{1,5})")


@dataclass(frozen=True, slots=True)
class NetworkAddress:
    """`host` is an IP address; `port` 0 lets the system choose."""

    host: ipaddress.IPv4Address | ipaddress.IPv6Address
    port: int

    def __str__(self) -> str:
        return f"{self.host_name}:{self.port}"

    @property
    def host_name(self) -> str:
        """As it stands in a URL and in `Host`."""
        return f"[{self.host}]" if self.host.version == 6 else str(self.host)


def parse_address(text: str) -> NetworkAddress:
    """`HOST:PORT`; HOST is an IP address (version 6 in brackets) or `localhost`. Raises `ConfigInvalid`."""
    match = _ADDRESS.fullmatch(text)
    host = None if match is None else match["v6"] or match["v4"]
    try:
        if match is None or host is None or int(match["port"]) > 0xFFFF:
            raise ValueError
        address = ipaddress.ip_address("127.0.0.1" if host.lower() == "localhost" else host)
        if (address.version == 6) != (match["v6"] is not None):
            raise ValueError
    except ValueError:
        example = "127.0.0.1:8080 or [::1]:8080"
        raise ConfigInvalid(f"http.listen: must be an address and a port, such as {example}") from None
    return NetworkAddress(address, int(match["port"]))


def check_keys(address: NetworkAddress, *, has_keys: bool) -> None:
    """Raise `ConfigInvalid` for an address that other machines reach while nobody needs a key."""
    if not address.host.is_loopback and not has_keys:
        message = "other machines reach this address: name the keys that they need in http.api_key_file"
        raise ConfigInvalid(f"http.listen: {address}: {message}")


def bind_network(address: NetworkAddress, *, has_keys: bool) -> socket.socket:
    """A listening socket. Raises `ConfigInvalid`, also what `check_keys` raises."""
    check_keys(address, has_keys=has_keys)
    family = socket.AF_INET6 if address.host.version == 6 else socket.AF_INET
    sock: socket.socket | None = None
    try:
        sock = socket.socket(family, socket.SOCK_STREAM)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in KEEPALIVE:
            sock.setsockopt(socket.IPPROTO_TCP, option, value)
        sock.bind((str(address.host), address.port))
        sock.listen(BACKLOG)
    except OSError as exc:
        if sock is not None:
            sock.close()
        raise ConfigInvalid(f"http.listen: {address}: cannot listen: {exc.strerror}") from exc
    sock.setblocking(False)
    return sock


def bound_address(sock: socket.socket) -> NetworkAddress:
    """Where a socket listens, with the port that it got."""
    host, port = sock.getsockname()[:2]
    return NetworkAddress(ipaddress.ip_address(host), port)


class NetworkConnection(Connection):
    """A connection of the port."""

    def _identify(self) -> Peer:
        return network_peer()

    def _turn_away(self, error: EdgeqwenError) -> None:
        """Before the first byte: a client of HTTP waits for its answer."""
        status = HTTPStatus(CODES[error.code].http_status)
        body = encode_frame(error_members(error), done=True)
        head = f"HTTP/1.1 {status.value} {status.phrase}\r\nContent-Type: application/json\r\n"
        retry = "" if error.retry_ms is None else f"Retry-After: {-(-error.retry_ms // 1000)}\r\n"
        head += f"{retry}Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
        self._transport.write(head.encode("ascii") + body)
        self.close()

    def _begin_lines(self, wire: Wire, data: bytes) -> None:
        message = "this port speaks HTTP only; JSON lines are for the Unix socket, or POST /eqp/<op>"
        self._transport.write(encode_frame(error_members(EdgeqwenError(message, code="forbidden")), done=True))
        self.close()

    def eof_received(self) -> bool:
        keeps_open = super().eof_received()
        if not self._is_over:
            asyncio.get_running_loop().call_later(HANG_UP_S, self._hang_up)
        return keeps_open

    def _hang_up(self) -> None:
        """What was said to the end goes out, whatever the client still reads of it; what still runs ends."""
        if not self._is_over and not self._transport.is_closing():
            self.abort()
