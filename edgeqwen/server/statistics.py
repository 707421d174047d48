"""What `stats` tells whom.

An admin is told of everybody. Everybody else is told what is the daemon's own (since when it runs, how much memory it
has, how fast it computes, how many wait), and of requests, connections and sessions their own: how much somebody else
has said, and when, is nobody's business.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any, Final

from edgeqwen.engine.inference import Inference
from edgeqwen.metrics import resident_bytes
from edgeqwen.protocol.peer import Peer
from edgeqwen.sessions.sessions import Sessions

MOST_REQUESTS: Final = 64
"""That are shown one by one; the counts are of all."""


class Statistics:
    """The members of `stats`. `num_connections` counts open connections of a uid (None: of everybody), `threads` says
    what computes.
    """

    def __init__(
        self,
        inference: Inference,
        sessions: Sessions,
        *,
        num_connections: Callable[[int | None], int],
        threads: Mapping[str, Any],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._inference = inference
        self._sessions = sessions
        self._num_connections = num_connections
        self._threads = threads
        self._clock = clock
        self._started_at = clock()

    def members(self, peer: Peer) -> dict[str, Any]:
        """The final frame for `peer`."""
        return self._own_facts() | (self._of_all() if peer.is_admin else self._of(peer))

    def _own_facts(self) -> dict[str, Any]:
        """What is nobody's in particular."""
        stats = self._inference.stats()
        return {
            "uptime_s": int(self._clock() - self._started_at),
            "rss_bytes": resident_bytes(),
            "slots": stats.slots,
            "waiting": stats.queued,
            "tok_s": dict(stats.tok_s),
            "threads": dict(self._threads),
        }

    def _of_all(self) -> dict[str, Any]:
        stats = self._inference.stats()
        return {
            "scope": "all",
            "conns": self._num_connections(None),
            "running": stats.running,
            "queued": stats.queued,
            "sessions": self._sessions.num_sessions,
            "kv_bytes": stats.kv_bytes,
            "totals": dict(stats.totals),
            "speculation": dict(stats.speculation),
            "kv": dict(stats.kv),
            "session_files": self._sessions.stats(),
            "requests": self._inference.live_requests(None, MOST_REQUESTS),
        }

    def _of(self, peer: Peer) -> dict[str, Any]:
        stats = self._inference.owner_stats(peer.owner)
        members = {
            "scope": "own",
            "running": stats.running,
            "queued": stats.queued,
            "sessions": self._sessions.num_sessions_of(peer.owner),
            "kv_bytes": stats.kv_bytes,
            "totals": dict(stats.totals),
            "kv": dict(stats.kv),
            "session_files": self._sessions.owner_stats(peer.owner),
            "requests": self._inference.live_requests(peer.owner, MOST_REQUESTS),
        }
        # Over the network connections are nobody's: a key comes with a request.
        return members if peer.is_remote else members | {"conns": self._num_connections(peer.uid)}
