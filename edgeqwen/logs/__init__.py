"""What the daemon says of itself: events with fields, to the journal, a terminal or a file."""

from edgeqwen.logs.event import Event
from edgeqwen.logs.output import set_up

__all__ = ["Event", "set_up"]
