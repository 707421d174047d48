"""Who is at the other end of a connection, and whether they are still there.

The identity is what the kernel recorded when the peer connected (SO_PEERCRED, unix(7)); a connection that was handed to
another process keeps the identity of the one that made it. Decisions rest on the uid, never on the pid.
"""

from __future__ import annotations

import os
import select
import socket
import struct
from asyncio import BaseTransport
from typing import Final

from edgeqwen.http.access import NETWORK_OWNER
from edgeqwen.protocol.peer import Peer

NOBODY: Final = frozenset({65534, 0xFFFFFFFF})
"""The overflow uid (a user that this user namespace does not map) and -1: nobody in particular, so not served."""

NETWORK_UID: Final = -1
"""In place of a uid, where connections are counted by it."""

_UCRED: Final = struct.Struct("iII")  # pid_t, uid_t, gid_t


def peer_of(transport: BaseTransport) -> Peer | None:
    """The peer of a Unix socket connection; None if it is nobody in particular."""
    raw = transport.get_extra_info("socket").getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
    _, uid, _ = _UCRED.unpack(raw)
    if uid in NOBODY:
        return None
    return Peer(uid, str(uid), is_admin=uid in {0, os.geteuid()})


def network_peer() -> Peer:
    """A client of the network, before its key is known: never an admin, and all of them count as one user."""
    return Peer(NETWORK_UID, NETWORK_OWNER, is_admin=False, is_remote=True)


def is_hung_up(transport: BaseTransport) -> bool:
    """Whether the peer closed both directions. A peer that only shut down its sending side has not hung up."""
    fd = transport.get_extra_info("socket").fileno()
    if fd < 0:
        return True
    poll = select.poll()
    poll.register(fd, 0)  # POLLHUP and POLLERR are always reported
    return any(events & (select.POLLHUP | select.POLLERR) for _, events in poll.poll(0))
