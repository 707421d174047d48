"""The sockets that a daemon serves: its own, or those that a service manager hands over."""

from __future__ import annotations

import logging
import os
import socket
from dataclasses import dataclass
from pathlib import Path

from edgeqwen.config import Config
from edgeqwen.logs import Event
from edgeqwen.part_settings import socket_group, socket_mode
from edgeqwen.server import BoundSocket, SocketServer, bind_socket
from edgeqwen.server.network import bind_network, bound_address, check_keys, parse_address
from edgeqwen.service import Inheritance

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Doors:
    """Listening sockets: `unix` ones, and `network` ones for HTTP over TCP."""

    unix: tuple[BoundSocket, ...]
    network: tuple[socket.socket, ...]

    @classmethod
    def open(cls, config: Config, path: Path, inheritance: Inheritance) -> Doors:
        """Those that were handed over; the socket at `path` unless one of them is a Unix socket, and the TCP port of
        the configuration. Raises `ConfigInvalid`.
        """
        has_keys = bool(config.http.api_key_file)
        for sock in inheritance.network:
            check_keys(bound_address(sock), has_keys=has_keys)
        handed = tuple(BoundSocket(sock.dup(), os.fsdecode(sock.getsockname())) for sock in inheritance.unix)
        mode = socket_mode(config)
        if mode & 0o007 and not handed:
            log.warning("socket.mode: every user of this machine may connect")
        doors = cls(handed or (bind_socket(path, group=socket_group(config), mode=mode),), ())
        try:
            ports = tuple(sock.dup() for sock in inheritance.network)
            if config.http.listen:
                ports += (bind_network(parse_address(config.http.listen), has_keys=has_keys),)
        except BaseException:
            doors.close()
            raise
        return cls(doors.unix, ports)

    def close(self) -> None:
        for bound in self.unix:
            bound.close()
        for sock in self.network:
            sock.close()

    async def serve(self, server: SocketServer, *, has_keys: bool) -> None:
        """Accept connections, and say where."""
        for bound in self.unix:
            await server.start(bound)
            whose = None if bound.lock is not None else "manager"
            log.info(Event("listening", socket=bound.path, pid=os.getpid(), whose=whose))
        for sock in self.network:
            log.info(Event("listening", http=str(bound_address(sock)), keys="yes" if has_keys else "no"))
            await server.start_network(sock)
