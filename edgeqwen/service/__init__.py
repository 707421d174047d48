"""What a service manager and the daemon tell each other: sockets handed over, readiness, progress, proof of life."""

from edgeqwen.service.inheritance import Inheritance, turn_away
from edgeqwen.service.manager import Manager
from edgeqwen.service.notifier import Notifier
from edgeqwen.service.watchdog import Watchdog

__all__ = ["Inheritance", "Manager", "Notifier", "Watchdog", "turn_away"]
