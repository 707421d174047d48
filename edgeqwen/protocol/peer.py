"""Who asks, whichever front the question came through."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Peer:
    """`owner` keys all that belongs to the caller; an admin may stop the daemon and cancel for everybody."""

    uid: int
    owner: str
    is_admin: bool
