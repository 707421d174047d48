"""The table of sessions and their files together: read at the start, swept as time goes by, closed at the end."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any, Final

from edgeqwen.sessions.session import Session
from edgeqwen.sessions.store import SessionStore
from edgeqwen.sessions.table import SessionTable

SWEEP_S: Final = 60.0

log = logging.getLogger(__name__)


class Keeper:
    """`clock` gives seconds since 1970. `on_forgotten` is told of each session that expired."""

    def __init__(
        self,
        table: SessionTable,
        store: SessionStore,
        *,
        clock: Callable[[], float],
        on_forgotten: Callable[[Session], None],
    ) -> None:
        self.table = table
        self.store = store
        self.clock = clock
        self._on_forgotten = on_forgotten
        self._loaded = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._sweeper: asyncio.Task[None] | None = None

    async def load(self) -> None:
        """Take in what is on disk; what expired while the daemon was off goes. From then on, sweep now and then."""
        try:
            self.table.restore(await self.store.read_all())
        except Exception as error:  # sessions that begin now work all the same
            log.error("the sessions of before could not be read: %s", type(error).__name__)
        self._loaded.set()
        self.sweep()
        self._sweeper = asyncio.get_running_loop().create_task(self._sweep_for_ever())

    async def until_loaded(self) -> None:
        """Nobody's session is said to be unknown before all files were read."""
        await self._loaded.wait()

    def sweep(self) -> None:
        """Forget what has expired by now."""
        for session in self.table.sweep(self.clock()):
            self._on_forgotten(session)
            self.spawn(self._remove(session))

    async def _remove(self, session: Session) -> None:
        await self.store.remove(session)

    async def _sweep_for_ever(self) -> None:
        while True:
            await asyncio.sleep(SWEEP_S)
            self.sweep()

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Have `work` done; `close` waits for it."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._end)

    def _end(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("work for a session failed", exc_info=error)

    async def close(self) -> None:
        """Have what is being written written, or given up; everybody who waits for it is answered then."""
        self._loaded.set()
        if self._sweeper is not None:
            self._sweeper.cancel()
        await self.store.close()
        if self._tasks:
            await asyncio.wait(set(self._tasks))
