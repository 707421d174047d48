"""What is done when nobody has asked for anything for long: the model is put to sleep, and at last the daemon leaves.

It is looked at now and then, not told: what happens between two looks shows in a count, and a process that has nothing
to do wakes up twice a minute at most.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final

from edgeqwen.engine.inference import Inference
from edgeqwen.logs import Event
from edgeqwen.server import SocketServer
from edgeqwen.sessions.sessions import Sessions

LOOKS: Final = 10
"""In the time after which something is done; that is how exact it is."""

LONGEST_LOOK_S: Final = 30.0
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Sight:
    """What a look finds: whether nothing is to be done, and a count that grows with all that comes."""

    is_idle: bool
    num_events: int


class IdleClock:
    """How long nothing has happened, as far as two looks can tell."""

    def __init__(self) -> None:
        self._since: float | None = None
        self._num_events = 0

    def look(self, now: float, sight: Sight) -> float:
        """Seconds for which every look has found nothing to do, and nothing that came since the one before."""
        if self._since is None or not sight.is_idle or sight.num_events != self._num_events:
            self._since = now if sight.is_idle else None
            self._num_events = sight.num_events
        return 0.0 if self._since is None else now - self._since


class IdleTimer:
    """Calls `act` when `look` has found nothing to do for `after_s` (0: never), which may be changed at any time."""

    def __init__(
        self,
        after_s: float,
        *,
        look: Callable[[], Sight],
        act: Callable[[float], Awaitable[None]],
        clock: Callable[[], float],
    ) -> None:
        self._after_s = after_s
        self._look = look
        self._act = act
        self._clock = clock
        self._changed = asyncio.Event()

    def set_after(self, after_s: float) -> None:
        self._after_s = after_s
        self._changed.set()

    async def run(self) -> None:
        """Until cancelled. `act` is given the seconds; if it changes nothing it is called at the next look again."""
        idle = IdleClock()
        while True:
            await self._pause()
            idle_s = idle.look(self._clock(), self._look())
            if 0 < self._after_s <= idle_s:
                await self._act(idle_s)

    async def _pause(self) -> None:
        """Until the next look, or another setting."""
        self._changed.clear()
        look_s = min(self._after_s / LOOKS, LONGEST_LOOK_S) if self._after_s else None
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(look_s):
                await self._changed.wait()


def sleep_timer(inference: Inference, after_s: float, *, clock: Callable[[], float]) -> IdleTimer:
    """Puts the model to sleep."""

    async def fall_asleep(idle_s: float) -> None:
        if inference.fall_asleep():
            log.info(Event("asleep", idle_s=round(idle_s)))

    return IdleTimer(
        after_s, look=lambda: Sight(inference.is_idle, inference.num_arrivals), act=fall_asleep, clock=clock
    )


def exit_timer(
    inference: Inference,
    server: SocketServer,
    sessions: Sessions,
    after_s: float,
    *,
    leave: Callable[[], None],
    clock: Callable[[], float],
) -> IdleTimer:
    """Has the daemon leave, by calling `leave`, when nobody is connected, nothing is to be done, and no session would
    be lost. Somebody must hold the sockets meanwhile: whoever comes then is served by the next daemon.
    """

    def look() -> Sight:
        is_idle = inference.is_idle and not server.connections and not sessions.num_unsaved
        return Sight(is_idle, inference.num_arrivals + server.num_accepted)

    async def try_to_leave(idle_s: float) -> None:
        if await server.leave():
            log.info(Event("leaving", idle_s=round(idle_s)))
            leave()
            await asyncio.Event().wait()  # it is done

    return IdleTimer(after_s, look=look, act=try_to_leave, clock=clock)
