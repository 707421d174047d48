"""The two clocks of a connection: one that runs for a reason, and one that tells slow readers from dead ones."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any


class ReasonTimer:
    """At most one timer, started for a reason. Starting it again for the same reason leaves it running."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._handle: asyncio.TimerHandle | None = None
        self._reason: tuple[str, int] = ("", 0)

    def start(self, reason: tuple[str, int], delay_s: float, action: Callable[[], Any]) -> None:
        if self._handle is not None and self._reason == reason:
            return
        self.clear()
        self._reason = reason
        self._handle = self._loop.call_later(delay_s, action)

    def clear(self) -> None:
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None


class StallWatch:
    """While a transport's buffer is full: a client that reads slowly makes it smaller, one that does not is cut off."""

    def __init__(self, transport: asyncio.Transport, *, stall_s: float, on_stall: Callable[[], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._transport = transport
        self._stall_s = stall_s
        self._on_stall = on_stall
        self._num_bytes = 0
        self._handle: asyncio.TimerHandle | None = None

    def begin(self) -> None:
        self._num_bytes = self._transport.get_write_buffer_size()
        self._handle = self._loop.call_later(self._stall_s, self._check)

    def end(self) -> None:
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None

    def _check(self) -> None:
        if self._transport.get_write_buffer_size() >= self._num_bytes:
            self._on_stall()
        else:
            self.begin()
