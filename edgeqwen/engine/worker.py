"""The engine thread: callables in, results out on the event loop.

Only this thread touches the runtime. A result whose waiter is gone is dropped; a thread that hangs inside the runtime
does not keep the process from ending.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, TypeAlias, TypeVar

T = TypeVar("T")
_Job: TypeAlias = "tuple[asyncio.Future[Any], Callable[[], Any]] | None"


class EngineThread:
    """One thread that runs jobs in order. `run` is called on the event loop that the thread was started from."""

    def __init__(self, name: str = "engine") -> None:
        self._jobs: SimpleQueue[_Job] = SimpleQueue()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)

    def start(self) -> None:
        """Start the thread, for the running event loop."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    def run(self, job: Callable[[], T]) -> asyncio.Future[T]:
        """A future for what `job` returns or raises once it has run on the thread."""
        assert self._loop is not None, "the thread has not been started"
        future: asyncio.Future[T] = self._loop.create_future()
        self._jobs.put((future, job))
        return future

    def stop(self) -> None:
        """Let the thread end after the jobs that were given to it."""
        self._jobs.put(None)

    def join(self, timeout_s: float) -> bool:
        """Wait for the end of the thread; False if it is still at work."""
        if self._thread.ident is None:
            return True
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _work(self) -> None:
        assert self._loop is not None
        while (item := self._jobs.get()) is not None:
            future, job = item
            if future.cancelled():
                continue
            result, error = None, None
            try:
                result = job()
            except BaseException as caught:  # whatever it is belongs to the one who waits for the job
                error = caught
            with contextlib.suppress(RuntimeError):  # the loop was closed: nobody waits any more
                self._loop.call_soon_threadsafe(_settle, future, result, error)
            del future, job, item, result, error


def _settle(future: asyncio.Future[Any], result: Any, error: BaseException | None) -> None:
    if future.done():
        return
    if error is None:
        future.set_result(result)
    elif isinstance(error, Exception) and not isinstance(error, StopIteration):
        future.set_exception(error)
    else:  # a future refuses StopIteration, and the thread's SystemExit must not end the event loop
        future.set_exception(RuntimeError(f"{type(error).__name__} on the engine thread"))
