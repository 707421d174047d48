"""Who is at the other end of a connection, and whether they are still there.

The identity is what the kernel recorded when the peer connected (SO_PEERCRED and SO_PEERGROUPS, unix(7)); a connection
that was handed to another process keeps the identity of the one that made it. Decisions rest on the uid and the groups,
never on the pid.
"""

from __future__ import annotations

import functools
import grp
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

ADMIN_GROUP: Final = "edgeqwen-admin"
"""Its members may do what root and the daemon's own user may, where there is such a group."""

_UCRED: Final = struct.Struct("iII")  # pid_t, uid_t, gid_t
_SO_PEERGROUPS: Final = 59  # which the socket module has no name for
_GROUPS_BYTES: Final = 1024
"""As much as Python asks the kernel for at once: 256 groups. Who is in more is no admin by any of them."""


def peer_of(transport: BaseTransport) -> Peer | None:
    """The peer of a Unix socket connection; None if it is nobody in particular."""
    sock = transport.get_extra_info("socket")
    _, uid, gid = _UCRED.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))
    if uid in NOBODY:
        return None
    return Peer(uid, str(uid), is_admin=uid in {0, os.geteuid()} or _is_in_admin_group(sock, gid))


@functools.cache
def admin_gid() -> int | None:
    """The group whose members are admins, looked up once; None if there is none."""
    try:
        return grp.getgrnam(ADMIN_GROUP).gr_gid
    except KeyError:
        return None


def forget_admin_group() -> None:
    """Have it looked up again: it may have been made meanwhile."""
    admin_gid.cache_clear()


def _is_in_admin_group(sock: socket.socket, gid: int) -> bool:
    """Whether a peer with primary group `gid` was in the group when it connected."""
    wanted = admin_gid()
    if wanted is None:
        return False
    if gid == wanted:
        return True
    try:
        raw = sock.getsockopt(socket.SOL_SOCKET, _SO_PEERGROUPS, _GROUPS_BYTES)
    except OSError:
        return False
    return wanted in struct.unpack(f"{len(raw) // 4}I", raw)


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
