"""Keeping sessions on disk without waiting for it for ever: whether a session was saved is told, never raised."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from typing import Any, Final

from edgeqwen.core.disk_thread import DiskThread
from edgeqwen.errors import EdgeqwenError
from edgeqwen.sessions.files import SessionFolder
from edgeqwen.sessions.session import Session

SAVE_TIMEOUT_S: Final = 30.0
"""An answer waits no longer than this for a disk that hangs."""

CLOSE_TIMEOUT_S: Final = 5.0

log = logging.getLogger(__name__)


class SessionStore:
    """The folder of sessions behind its own thread; without a folder nothing is saved, and sessions live in memory.

    `unsaved` holds the ids of the sessions whose last change is not on disk.
    """

    def __init__(self, folder: SessionFolder | None, *, save_timeout_s: float = SAVE_TIMEOUT_S) -> None:
        self._folder = folder
        self._disk = DiskThread("sessions")
        self._save_timeout_s = save_timeout_s
        self._jobs: set[asyncio.Task[bool]] = set()
        self.unsaved: set[str] = set()
        self.num_damaged = 0
        self.num_later = 0

    @property
    def has_folder(self) -> bool:
        return self._folder is not None

    def stats(self) -> dict[str, Any]:
        """Members of `stats`: whether sessions are kept on disk, how many are not, and what was found unreadable."""
        return {
            "on_disk": self.has_folder,
            "unsaved": len(self.unsaved),
            "damaged": self.num_damaged,
            "later_version": self.num_later,
        }

    def owner_stats(self, sessions: Iterable[Session]) -> dict[str, Any]:
        """The same to the owner of `sessions`, who is told of no others."""
        return {"on_disk": self.has_folder, "unsaved": sum(session.id in self.unsaved for session in sessions)}

    async def read_all(self) -> list[Session]:
        """What is on disk."""
        if self._folder is None:
            return []
        found = await self._disk.run(self._folder.read_all)
        self.num_damaged, self.num_later = found.num_damaged, found.num_later
        return found.sessions

    async def save(self, session: Session) -> bool:
        """Have `session` on disk; whether it is. Saved in the order of the calls."""
        folder = self._folder
        is_news = session.id not in self.unsaved
        self.unsaved.add(session.id)
        if folder is None:
            return False

        def on_written() -> None:
            self.unsaved.discard(session.id)

        is_saved = await self._do(lambda: folder.write(session), on_success=on_written, is_news=is_news)
        if not is_saved and is_news:
            log.warning("session %s is not saved: it goes on in memory, and each turn tries again", session.id)
        return is_saved

    async def remove(self, session: Session) -> bool:
        """Have `session` gone from the disk; whether it is not there."""
        folder = self._folder
        self.unsaved.discard(session.id)
        return folder is None or await self._do(lambda: folder.remove(session))

    async def _do(
        self, job: Callable[[], None], *, on_success: Callable[[], None] = lambda: None, is_news: bool = True
    ) -> bool:
        # A task of its own: a caller that goes away must not leave open what became of the file.
        task = asyncio.get_running_loop().create_task(self._attempt(job, on_success, is_news=is_news))
        self._jobs.add(task)
        task.add_done_callback(self._jobs.discard)
        await asyncio.wait({task}, timeout=self._save_timeout_s)
        if not task.done():
            log.warning("the disk does not answer: sessions are not saved")
        return task.done() and not task.cancelled() and task.result()

    async def _attempt(self, job: Callable[[], None], on_success: Callable[[], None], *, is_news: bool) -> bool:
        try:
            await self._disk.run(job)
        except EdgeqwenError as error:
            if is_news:
                log.warning("%s", error.message)
            return False
        except Exception as error:
            log.error("a session's file could not be written: %s", type(error).__name__)
            return False
        on_success()
        return True

    async def close(self, timeout_s: float = CLOSE_TIMEOUT_S) -> None:
        """Wait for what is being written, within `timeout_s`; who still waits then is told that it is not saved."""
        if self._jobs:
            await asyncio.wait(set(self._jobs), timeout=timeout_s)
        for task in tuple(self._jobs):
            task.cancel()
        self._disk.close()
        if self._folder is not None:
            self._folder.close()
            self._folder = None
