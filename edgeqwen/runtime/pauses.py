"""Noticing that there has been no work for a while, without anybody who would have to ask."""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Final

PAUSE_S: Final = 3.0
"""Longer than a client that goes on at once needs for its next request."""


class Pauses:
    """Calls `at_pause` once when `after_s` have passed since the last `work` ended, if `expect` was called before.

    The call comes from a thread of its own, never inside of `work`, which waits until it is over. `at_pause` is a
    method, whose object is not kept alive for it; it must not raise, nor do any work here.
    """

    def __init__(self, at_pause: Callable[[], None], *, after_s: float) -> None:
        self._at_pause = weakref.WeakMethod(at_pause)
        self._after_s = after_s
        self._lock = threading.Lock()
        self._ended_at = 0.0
        self._timer: threading.Timer | None = None

    @contextlib.contextmanager
    def work(self) -> Iterator[None]:
        """There is work inside."""
        with self._lock:
            try:
                yield
            finally:
                self._ended_at = time.monotonic()

    def expect(self) -> None:
        """The next pause is to be noticed. To be called inside of `work`."""
        if self._timer is None:
            self._start(self._after_s)

    def close(self) -> None:
        """No call comes afterwards."""
        with self._lock:
            if self._timer is not None:
                self._timer.cancel()
            self._timer = None

    def _start(self, delay_s: float) -> None:
        self._timer = threading.Timer(delay_s, self._look)
        self._timer.daemon = True
        self._timer.start()

    def _look(self) -> None:
        with self._lock:
            if self._timer is not threading.current_thread():  # closed in the meantime
                return
            left_s = self._ended_at + self._after_s - time.monotonic()
            if left_s > 0:
                self._start(left_s)
                return
            self._timer = None
            if (call := self._at_pause()) is not None:
                call()
