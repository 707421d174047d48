"""The clocks of a connection: one that runs for a reason, one that tells slow readers from dead ones, and one that
looks after a peer that is not read from.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Final

from edgeqwen.server.peers import is_hung_up

TICK_S: Final = 0.001
"""A sign that would be due sooner than this is given now."""


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


class PeerWatch:
    """While nothing is read: has the peer gone, and must it be told that we have not?

    Looks every `period_s` from `begin` on, for as long as `is_needed`. While `needs_sign`, `give_sign` is called
    whenever `period_s` passed without one: socat, for one, gives up 0.5 s after its own end of input if nothing comes.
    """

    def __init__(
        self,
        transport: asyncio.Transport,
        *,
        period_s: float,
        is_needed: Callable[[], bool],
        needs_sign: Callable[[], bool],
        give_sign: Callable[[], None],
        on_gone: Callable[[], None],
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._transport = transport
        self._period_s = period_s
        self._is_needed = is_needed
        self._needs_sign = needs_sign
        self._give_sign = give_sign
        self._on_gone = on_gone
        self._signed_at = self._loop.time()
        self._handle: asyncio.TimerHandle | None = None

    def begin(self) -> None:
        if self._handle is None:
            self._handle = self._loop.call_later(self._period_s, self._look)

    def end(self) -> None:
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None

    def note_sign(self) -> None:
        """Output of any kind is a sign."""
        self._signed_at = self._loop.time()

    def _look(self) -> None:
        self._handle = None
        if not self._is_needed():
            return
        if is_hung_up(self._transport):
            self._on_gone()
            return
        due_s = self._period_s
        if self._needs_sign():
            due_s = self._signed_at + self._period_s - self._loop.time()
            if due_s <= TICK_S:
                self._give_sign()
                due_s = self._period_s
        self._handle = self._loop.call_later(due_s, self._look)
