"""Putting the model to sleep when nobody has asked it anything for long.

It is looked at now and then, not told: what happens between two looks shows in the count of requests, and a process
that has nothing to do wakes up twice a minute at most.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Final

from edgeqwen.engine.inference import Inference

LOOKS: Final = 10
"""In the time after which the model sleeps; that is how exact it is."""

LONGEST_LOOK_S: Final = 30.0
log = logging.getLogger(__name__)


class IdleClock:
    """How long nothing has happened, as far as two looks can tell."""

    def __init__(self) -> None:
        self._since: float | None = None
        self._num_arrivals = 0

    def look(self, now: float, *, is_idle: bool, num_arrivals: int) -> float:
        """Seconds for which every look has found nothing to do, and no request that came since the one before."""
        if self._since is None or not is_idle or num_arrivals != self._num_arrivals:
            self._since = now if is_idle else None
            self._num_arrivals = num_arrivals
        return 0.0 if self._since is None else now - self._since


class Sleeper:
    """Has `inference` fall asleep when it has been idle for `after_s` (0: never), which may be changed at any time."""

    def __init__(self, inference: Inference, after_s: float, *, clock: Callable[[], float]) -> None:
        self._inference = inference
        self._after_s = after_s
        self._clock = clock
        self._changed = asyncio.Event()

    def set_after(self, after_s: float) -> None:
        self._after_s = after_s
        self._changed.set()

    async def run(self) -> None:
        """For ever."""
        idle = IdleClock()
        while True:
            await self._pause()
            inference = self._inference
            idle_s = idle.look(self._clock(), is_idle=inference.is_idle, num_arrivals=inference.num_arrivals)
            if 0 < self._after_s <= idle_s and inference.fall_asleep():
                log.info("asleep idle_s=%d", idle_s)

    async def _pause(self) -> None:
        """Until the next look, or another setting."""
        self._changed.clear()
        look_s = min(self._after_s / LOOKS, LONGEST_LOOK_S) if self._after_s else None
        try:
            async with asyncio.timeout(look_s):
                await self._changed.wait()
        except TimeoutError:
            pass
