"""Why and how the daemon ends."""

from __future__ import annotations

import asyncio
import logging
import os
import signal

from edgeqwen.errors import EXIT_INTERRUPTED, EdgeqwenError
from edgeqwen.hangup import has_terminal
from edgeqwen.logs import Event

log = logging.getLogger(__name__)


class StopRequest:
    """`ask` and `fail` may be called any number of times; the first call decides."""

    def __init__(self, drain_s: float) -> None:
        self.drain_s = drain_s
        self.exit_code = 0
        self.error: EdgeqwenError | None = None
        self.asked = asyncio.Event()
        self.hurried = asyncio.Event()

    def check_running(self) -> None:
        """Raise `draining` if the end has begun."""
        if self.asked.is_set():
            raise EdgeqwenError("the daemon is shutting down", code="draining")

    def ask(self, drain_s: float | None = None) -> None:
        """End after running answers, within `drain_s` (None: what it was made with)."""
        if not self.asked.is_set():
            if drain_s is not None:
                self.drain_s = drain_s
            self.asked.set()

    def fail(self, error: EdgeqwenError) -> None:
        """End at once, with the exit code of `error`."""
        if not self.asked.is_set():
            self.error, self.drain_s = error, 0.0
            self.asked.set()

    def on_signal(self, number: signal.Signals) -> None:
        """First: drain. Second: cut off. Third: end without ceremony."""
        log.info(Event("stopping", signal=number.name))
        if self.hurried.is_set():
            os._exit(128 + number)
        if self.asked.is_set():
            self.hurried.set()
        elif number is signal.SIGINT and has_terminal():
            self.exit_code = EXIT_INTERRUPTED  # whoever pressed Ctrl-C; a service manager may use it to stop a service
        self.ask()
