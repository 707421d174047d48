"""The service manager that started this process, as far as its environment tells; or that there is none."""

from __future__ import annotations

import time
from collections.abc import MutableMapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from edgeqwen.service.inheritance import Inheritance
from edgeqwen.service.notifier import Notifier
from edgeqwen.service.progress import LoadReport, LoadSigns
from edgeqwen.service.watchdog import DEFAULT_INTERVAL_S, LOOKS, Watchdog, watchdog_interval_s

if TYPE_CHECKING:
    from edgeqwen.engine.inference import Inference

VARIABLES: Final = ("NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID")


@dataclass(frozen=True, slots=True)
class Manager:
    """`watchdog_s` is how often it wants to hear of us, None if it does not."""

    notifier: Notifier
    inheritance: Inheritance = field(default_factory=Inheritance)
    watchdog_s: float | None = None

    @classmethod
    def take(cls, environ: MutableMapping[str, str], pid: int, inheritance: Inheritance) -> Manager:
        """What the environment of process `pid`, which this one is, says. A child is not to find it there."""
        manager = cls(Notifier(environ), inheritance, watchdog_interval_s(environ, pid))
        for name in VARIABLES:
            environ.pop(name, None)
        return manager

    @property
    def longest_step_s(self) -> float | None:
        """What a step may take so that the engine thread answers in time."""
        return None if self.watchdog_s is None else self.watchdog_s / LOOKS

    def watchdog(self, inference: Inference) -> Watchdog:
        """Proves to the manager that `inference` works. Without a manager it still shows in the log when it hangs."""
        return Watchdog(
            self.notifier,
            self.watchdog_s or DEFAULT_INTERVAL_S,
            ask=inference.answer,
            read_signs=lambda: LoadSigns.read(inference.progress) if inference.state == "loading" else None,
            clock=time.monotonic,
        )

    def report(self, inference: Inference) -> LoadReport:
        """Tells the manager how the loading goes on."""
        return LoadReport(self.notifier, lambda: LoadSigns.read(inference.progress))
