"""What the engine counts about itself."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

_MEMORY_S = 10.0


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
    """A snapshot. `queued` counts the requests that have not had a step, those being tokenised included.

    `tok_s`: `prefill` and `decode`, tokens a second while the engine was at it, 0 before the first step. `totals` since
    the start: `requests` accepted, `errors` (requests that failed after they were accepted), `tokens` generated.
    `speculation` since the start: `drafted` tokens, and those of them that were `accepted`. `kv_bytes` are all keys and
    values in memory. `kv`: the cache in numbers; `cached` and `computed` are tokens of prompts since the start.
    """

    running: int
    queued: int
    kv_bytes: int
    tok_s: Mapping[str, float]
    totals: Mapping[str, int]
    speculation: Mapping[str, int]
    kv: Mapping[str, int] = field(default_factory=dict)


def idle_stats(num_queued: int) -> EngineStats:
    """Of an engine that has not loaded its model."""
    return EngineStats(
        running=0,
        queued=num_queued,
        kv_bytes=0,
        tok_s={"prefill": 0.0, "decode": 0.0},
        totals={"requests": 0, "errors": 0, "tokens": 0},
        speculation={"drafted": 0, "accepted": 0},
    )
