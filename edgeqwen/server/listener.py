"""The server of a Unix socket and of a TCP port: accepts, counts connections, and hands each to a `Connection`."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import socket
from collections import Counter
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final

from edgeqwen.engine.inference import Inference
from edgeqwen.errors import EdgeqwenError
from edgeqwen.http.access import HttpAccess
from edgeqwen.protocol.limits import WireLimits
from edgeqwen.protocol.peer import Peer
from edgeqwen.server.binding import BACKLOG, BoundSocket
from edgeqwen.server.connection import Connection, HttpSession
from edgeqwen.server.exporter import Exporter
from edgeqwen.server.network import NetworkConnection
from edgeqwen.server.operations import OnReload, Operations
from edgeqwen.server.statistics import Statistics
from edgeqwen.sessions.sessions import Sessions

if TYPE_CHECKING:
    from edgeqwen.http.front import HttpFront

RETRY_MS: Final = 1000
KEPT_FOR_ADMIN: Final = 1


class SocketServer:
    """Serves `eqp/1` and HTTP on bound sockets, for one engine and the sessions on it.

    `start` may be called for several sockets. `on_shutdown(drain_s)` is called when an admin asks for the end,
    `on_reload(who)` when one has the configuration read again; both must return at once. `threads` is what `stats` says
    of the threads that compute, `access` who may use HTTP. `close` waits until the connections are gone.
    """

    def __init__(
        self,
        inference: Inference,
        sessions: Sessions,
        *,
        limits: WireLimits | None = None,
        on_shutdown: Callable[[float | None], None],
        on_reload: OnReload,
        threads: Mapping[str, Any] | None = None,
        access: HttpAccess | None = None,
    ) -> None:
        self.limits = limits or WireLimits()
        self.inference = inference
        self.sessions = sessions
        self._exporter = Exporter(
            inference,
            sessions,
            num_connections=lambda: len(self._connections),
            num_accepted=lambda: self._num_accepted,
        )
        self.operations = Operations(
            inference,
            sessions,
            limits=self.limits,
            statistics=Statistics(inference, sessions, num_connections=self._count_connections, threads=threads or {}),
            exporter=self._exporter,
            on_shutdown=on_shutdown,
            on_reload=on_reload,
        )
        self._connections: set[Connection] = set()
        self._per_uid: Counter[int] = Counter()
        self._servers: list[asyncio.AbstractServer] = []
        self._bound: list[BoundSocket] = []
        self._network: list[socket.socket] = []
        self._num_accepted = 0
        self._gone = asyncio.Event()
        self._http: HttpFront | None = None
        self.set_access(access or HttpAccess())

    def __repr__(self) -> str:
        return f"<SocketServer [{len(self._connections)} connections | {len(self._bound)} sockets]>"

    @property
    def connections(self) -> frozenset[Connection]:
        """Open connections that were admitted."""
        return frozenset(self._connections)

    def _count_connections(self, uid: int | None) -> int:
        return len(self._connections) if uid is None else self._per_uid[uid]

    async def start(self, bound: BoundSocket) -> None:
        """Accept connections of `bound`, which from now on belongs to the server."""
        self._bound.append(bound)
        await self._listen(bound.sock)

    async def start_network(self, sock: socket.socket) -> None:
        """Accept connections of a listening TCP socket, which from now on belongs to the server; they speak HTTP."""
        self._network.append(sock)
        await self._listen(sock)

    async def _listen(self, sock: socket.socket) -> None:
        """Loops close what they listen on; so they get a descriptor of their own."""
        loop = asyncio.get_running_loop()
        factory, own = self._factory(sock), sock.dup()
        if sock.family == socket.AF_UNIX:
            # Loops that know the parameter would otherwise remove a path, by a name that is not the one we bound it to.
            knows = "cleanup_socket" in inspect.signature(loop.create_unix_server).parameters
            options: dict[str, Any] = {"cleanup_socket": False} if knows else {}
            self._servers.append(await loop.create_unix_server(factory, sock=own, backlog=BACKLOG, **options))
        else:
            self._servers.append(await loop.create_server(factory, sock=own, backlog=BACKLOG))

    def _factory(self, sock: socket.socket) -> Callable[[], Connection]:
        """What makes the connections of a listening socket."""
        return lambda: (Connection if sock.family == socket.AF_UNIX else NetworkConnection)(self)

    async def leave(self) -> bool:
        """Accept no more connections, if there are none: whoever comes afterwards waits on the sockets for the next
        daemon. False, and all goes on, if somebody has come in time.
        """
        for server in self._servers:
            server.close()
        self._servers.clear()
        await asyncio.sleep(0)  # what the loop has accepted becomes a connection
        await asyncio.sleep(0)
        num_late = sum([await self._accept_late(sock) for sock in self._sockets])
        if not self._connections and not num_late:
            return True
        for sock in self._sockets:
            await self._listen(sock)
        return False

    @property
    def _sockets(self) -> tuple[socket.socket, ...]:
        return (*(bound.sock for bound in self._bound), *self._network)

    async def _accept_late(self, sock: socket.socket) -> int:
        """Accept all that wait on a socket that the loop does not listen on."""
        count = 0
        loop = asyncio.get_running_loop()
        with contextlib.suppress(OSError):  # BlockingIOError: nobody waits any more
            while True:
                accepted, _ = sock.accept()
                accepted.setblocking(False)
                await loop.connect_accepted_socket(self._factory(sock), accepted)
                count += 1
        return count

    @property
    def num_accepted(self) -> int:
        """Grows with every connection."""
        return self._num_accepted

    def set_limits(self, limits: WireLimits) -> None:
        """For what begins from now on, on connections that there are as well. None of them is closed, however many."""
        self.limits = limits
        self.operations.set_limits(limits)
        for connection in self._connections:
            connection.set_limits(limits)
        if self._http is not None:
            self._http.set_limits(limits)

    def set_access(self, access: HttpAccess) -> None:
        """For HTTP requests that come from now on; those that run for a key that is gone are cut off."""
        self._access = access
        self._exporter.is_for_all = access.has_open_metrics
        if self._http is not None:
            self._http.set_access(access)

    def stop_accepting(self) -> None:
        """Refuse new connections and close those that owe nothing; work in flight goes on."""
        for server in self._servers:
            server.close()
        self._servers.clear()
        for bound in self._bound:
            bound.close()
        self._bound.clear()
        for sock in self._network:
            sock.close()
        self._network.clear()
        for connection in tuple(self._connections):
            connection.close_if_idle()

    async def close(self, *, grace_s: float = 1.0) -> None:
        """Stop accepting, give the connections `grace_s` to send what was written, cut off the rest."""
        self.stop_accepting()
        try:
            async with asyncio.timeout(grace_s):
                await self._wait_until_empty()
        except TimeoutError:
            for connection in tuple(self._connections):
                connection.abort()
            await self._wait_until_empty()

    async def _wait_until_empty(self) -> None:
        while self._connections:
            self._gone.clear()
            await self._gone.wait()

    # What a connection calls.

    def admit(self, connection: Connection, peer: Peer) -> EdgeqwenError | None:
        """Count in. One connection beyond the limits of everybody else is kept for root and the daemon's own user."""
        self._num_accepted += 1
        refusal = self._refusal(peer)
        if refusal is not None:
            self._exporter.refused_connections[refusal.code] += 1
            return refusal
        self._connections.add(connection)
        self._per_uid[peer.uid] += 1
        return None

    def _refusal(self, peer: Peer) -> EdgeqwenError | None:
        kept = 0 if peer.is_admin else KEPT_FOR_ADMIN
        if len(self._connections) >= self.limits.connections - kept:
            return EdgeqwenError("too many connections", code="busy", retry_ms=RETRY_MS)
        extra = KEPT_FOR_ADMIN if peer.is_admin else 0
        if self._per_uid[peer.uid] >= self.limits.connections_per_uid + extra:
            return EdgeqwenError("too many connections of this user", code="quota", retry_ms=RETRY_MS)
        return None

    def forget(self, connection: Connection) -> None:
        if connection not in self._connections:
            return
        self._connections.discard(connection)
        self._per_uid -= Counter((connection.peer.uid,))  # without those that come to nothing
        self._gone.set()

    def open_http(self, transport: asyncio.Transport, peer: Peer) -> HttpSession:
        """The HTTP side of a connection; the library behind it is imported when it is first needed."""
        if self._http is None:
            from edgeqwen.http.front import HttpFront

            self._http = HttpFront(
                self.inference, self.operations, self.limits, sessions=self.sessions, access=self._access
            )
        return self._http.open(transport, peer)
