"""What the engine counts about itself."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from edgeqwen.engine.tallies import Tally

_MEMORY_S = 10.0

_COUNTED = frozenset({
    "computed",
    "evicted",
    "lost",
    "preempted",
    "settled",
    "settled_tokens",
    "settling_given_up",
    "failed_writes",
})
"""Members of `EngineStats.kv` that one engine counts from its own beginning."""

_IN_MEMORY = frozenset({"reserved_bytes", "block_bytes", "spare_bytes", "blocks"})


class Rate:
    """Tokens a second over the last ten or so seconds of work; idle time does not count."""

    def __init__(self) -> None:
        self._num_tokens = 0.0
        self._duration_s = 0.0

    def add(self, num_tokens: int, duration_s: float) -> None:
        """`num_tokens` took `duration_s`."""
        fade = math.exp(-duration_s / _MEMORY_S)
        self._num_tokens = self._num_tokens * fade + num_tokens
        self._duration_s = self._duration_s * fade + duration_s

    @property
    def per_s(self) -> float:
        return self._num_tokens / self._duration_s if self._duration_s > 0 else 0.0


@dataclass(frozen=True, slots=True)
class EngineStats:
    """A snapshot. `slots` are the sequences that may be computed at once, 0 before the model is loaded; `used` of them
    are held by somebody. `queued` counts the requests that have not had a step, those being tokenised included.

    `tok_s`: `prefill` and `decode`, tokens a second while the engine was at it, 0 before the first step. `totals` since
    the start: `requests` accepted, `errors` (requests that failed after they were accepted), `tokens` generated.
    `speculation` since the start: `drafted` tokens, and those of them that were `accepted`. `kv_bytes` are all keys and
    values in memory. `kv`: the cache in numbers; `cached` and `computed` are tokens of prompts since the start.
    """

    slots: int
    used: int
    running: int
    queued: int
    kv_bytes: int
    tok_s: Mapping[str, float]
    totals: Mapping[str, int]
    speculation: Mapping[str, int]
    kv: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class OwnerStats:
    """The part of one owner. `kv_bytes` are what is kept in memory for requests to come, `totals` what came of the
    owner's requests since the start (of a daemon that not too many others have asked since), `kv` the budget that all
    owners share and what this one had of the cache.
    """

    running: int
    queued: int
    kv_bytes: int
    totals: Mapping[str, int]
    kv: Mapping[str, int] = field(default_factory=dict)


def continued(stats: EngineStats, past: EngineStats) -> EngineStats:
    """Of an engine that came after one whose last word was `past`: what is counted since the start goes on."""
    kv = {name: number + (past.kv.get(name, 0) if name in _COUNTED else 0) for name, number in stats.kv.items()}
    speculation = {name: number + past.speculation[name] for name, number in stats.speculation.items()}
    tok_s = {name: rate or past.tok_s[name] for name, rate in stats.tok_s.items()}
    return replace(stats, kv=kv, speculation=speculation, tok_s=tok_s)


def asleep_stats(past: EngineStats, num_queued: int) -> EngineStats:
    """Of an engine that is not in memory any more, and whose last word was `past`."""
    kv = {name: 0 if name in _IN_MEMORY else number for name, number in past.kv.items()}
    return replace(past, used=0, running=0, queued=num_queued, kv_bytes=0, kv=kv)


def totals_of(tally: Tally) -> Mapping[str, int]:
    """A tally as clients are shown it."""
    return {"requests": tally.num_requests, "errors": tally.num_failed, "tokens": tally.num_tokens}


def idle_stats(num_queued: int) -> EngineStats:
    """Of an engine that has not loaded its model."""
    return EngineStats(
        slots=0,
        used=0,
        running=0,
        queued=num_queued,
        kv_bytes=0,
        tok_s={"prefill": 0.0, "decode": 0.0},
        totals=totals_of(Tally()),
        speculation={"drafted": 0, "accepted": 0},
    )


def idle_owner_stats(num_queued: int, tally: Tally) -> OwnerStats:
    """Of an engine whose model is not loaded (any more), and an owner who has had that so far."""
    return OwnerStats(running=0, queued=num_queued, kv_bytes=0, totals=totals_of(tally))
