"""Proof of life: the engine thread answers a question between two steps, and the event loop is not behind.

A manager that wants to hear of the daemon every WATCHDOG_USEC hears of it twice as often at least, as long as both
hold. A timer that only fires would be heard of a daemon whose engine hangs, and a thread of its own of one whose event
loop does. Loading is one long step; while the model is loaded what it reads and keeps stands for an answer.

Whatever hangs is shown in the log, where each thread stands, once for each time that it hangs; without a manager too.
"""

from __future__ import annotations

import asyncio
import faulthandler
import logging
import sys
from collections.abc import Awaitable, Callable, Mapping
from typing import Final

from edgeqwen.logs import Event
from edgeqwen.service.notifier import Notifier
from edgeqwen.service.progress import LoadSigns

LOOKS: Final = 4
"""In an interval."""

LONGEST_LAG_S: Final = 1.0
DEFAULT_INTERVAL_S: Final = 120.0
"""When nobody wants to hear of us."""

log = logging.getLogger(__name__)


def watchdog_interval_s(environ: Mapping[str, str], pid: int) -> float | None:
    """How often process `pid` is to be heard of (sd_watchdog_enabled(3)); None if nobody listens for it."""
    usec, meant = environ.get("WATCHDOG_USEC", ""), environ.get("WATCHDOG_PID", "")
    if not usec.isdecimal() or not int(usec) or meant not in {"", str(pid)}:
        return None
    return int(usec) / 1e6


def dump_threads() -> None:
    """Where every thread stands, to standard error: files, lines and names of functions, no values."""
    faulthandler.dump_traceback(file=sys.__stderr__ or sys.stderr, all_threads=True)


class Watchdog:
    """Says every quarter of `interval_s` that the daemon is alive, if it is.

    `ask` puts a question to the engine thread and returns with its answer; `read_signs` tells how far loading is, and
    None when nothing is loaded. `dump` shows the threads.
    """

    def __init__(
        self,
        notifier: Notifier,
        interval_s: float,
        *,
        ask: Callable[[], Awaitable[None]],
        read_signs: Callable[[], LoadSigns | None],
        clock: Callable[[], float],
        dump: Callable[[], None] = dump_threads,
    ) -> None:
        self._notifier = notifier
        self._interval_s = interval_s
        self._ask = ask
        self._read_signs = read_signs
        self._clock = clock
        self._dump = dump
        self._question: asyncio.Task[None] | None = None
        self._alive_at = clock()
        self._signs: LoadSigns | None = None
        self._is_shown = False

    @property
    def look_s(self) -> float:
        return self._interval_s / LOOKS

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            due_at = self._clock() + self.look_s
            self._put_question()
            await asyncio.sleep(self.look_s)
            self._look(lag_s=self._clock() - due_at)

    def _put_question(self) -> None:
        if self._question is None:
            self._question = asyncio.ensure_future(self._ask())

    def _look(self, *, lag_s: float) -> None:
        now = self._clock()
        if self._has_answer() or self._has_loaded_more():
            self._alive_at = now
            self._is_shown = False
            if lag_s <= min(LONGEST_LAG_S, self.look_s):
                self._notifier.alive()
            return
        silent_s = now - self._alive_at
        if silent_s >= self._interval_s / 2 and not self._is_shown:
            self._is_shown = True
            self._show(silent_s)
        if silent_s >= self._interval_s:
            self._notifier.hangs()

    def _has_answer(self) -> bool:
        """Whether the engine thread has answered since it was last seen to."""
        question = self._question
        if question is None or not question.done():
            return False
        self._question = None
        return question.cancelled() or question.exception() is None

    def _has_loaded_more(self) -> bool:
        before, self._signs = self._signs, self._read_signs()
        return self._signs is not None and (before is None or self._signs.differs_from(before))

    def _show(self, silent_s: float) -> None:
        status = f"the engine has not answered for {silent_s:.0f} s"
        log.error(Event("hang", silent_s=round(silent_s, 1)))
        self._notifier.status(status)
        self._dump()
