"""Who asks, whichever front the question came through."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Peer:
    """`owner` keys all that belongs to the caller; an admin may stop the daemon and cancel for everybody. A caller that
    `is_remote` came over the network: what else it may do, it may not cancel by rid.
    """

    uid: int
    owner: str
    is_admin: bool
    is_remote: bool = False
