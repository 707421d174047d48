"""What SIGHUP means: the terminal that the daemon was started from has closed, so it ends; else that somebody wants the
configuration read again.

Who sent the signal cannot be asked afterwards, but whether there still is the terminal can. Some shells send it to what
runs in their background when they end, while the terminal is still there; so that is looked at a second time.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import Callable
from typing import Any, Final

from edgeqwen.errors import EdgeqwenError

LOOK_AGAIN_S: Final = 1.0
log = logging.getLogger(__name__)


def has_terminal() -> bool:
    """Whether this process belongs to a terminal that is there."""
    try:
        os.close(os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY | os.O_CLOEXEC | os.O_NONBLOCK))
    except OSError:  # ENXIO: there is none, or none any more
        return False
    return True


class Hangup:
    """`end` is called when the terminal has closed. A reload that is asked for before `begin` is made up for by it."""

    def __init__(self, end: Callable[[], None]) -> None:
        self._end = end
        self._had_terminal = has_terminal()
        self._reload: Callable[[str], dict[str, Any]] | None = None
        self._is_asked = False

    def begin(self, reload: Callable[[str], dict[str, Any]]) -> None:
        """From now on there is something to reload. `reload` says in the log what came of it."""
        self._reload = reload
        if self._is_asked:
            self.on_signal()

    def on_signal(self) -> None:
        if self._is_terminal_gone():
            self._end()
        elif self._reload is None:
            self._is_asked = True
        else:
            with contextlib.suppress(EdgeqwenError):
                self._reload("SIGHUP")
            if self._had_terminal:
                asyncio.get_running_loop().call_later(LOOK_AGAIN_S, self._look_again)

    def _look_again(self) -> None:
        if self._is_terminal_gone():
            self._end()

    def _is_terminal_gone(self) -> bool:
        return self._had_terminal and not has_terminal()
