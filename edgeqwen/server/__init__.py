"""The Unix socket: binding it, who connects, lines and flow on a connection. HTTP is handed over by the first byte."""

from __future__ import annotations

from edgeqwen.server.binding import BoundSocket, bind_socket
from edgeqwen.server.listener import SocketServer

__all__ = ["BoundSocket", "SocketServer", "bind_socket"]
