"""One thread for files, so that a slow or hanging disk never stops the event loop. Jobs run in order of arrival."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from edgeqwen.errors import EdgeqwenError

T = TypeVar("T")


class DiskThread:
    """Runs jobs one after another. A job that was begun or waits is carried out even if nobody waits for it any more,
    so what is given later never overtakes what was given before.
    """

    def __init__(self, name: str = "disk") -> None:
        self._executor = ThreadPoolExecutor(1, thread_name_prefix=name)
        self._is_closed = False

    async def run(self, job: Callable[[], T]) -> T:
        """The job's result; raises what it raises, and `draining` once the thread is closed."""
        if self._is_closed:
            raise EdgeqwenError("the daemon is shutting down", code="draining")
        # Shielded: cancelling the future of a job that waits would take the job back.
        return await asyncio.shield(asyncio.get_running_loop().run_in_executor(self._executor, job))

    def close(self) -> None:
        """Take no more jobs; those that were given are still carried out."""
        self._is_closed = True
        self._executor.shutdown(wait=False)
