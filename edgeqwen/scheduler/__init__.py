"""Which sequence computes what in the next step. Synchronous: no await, no clock, no runtime."""

from __future__ import annotations

from edgeqwen.scheduler.admission import Admission
from edgeqwen.scheduler.entry import Fetch
from edgeqwen.scheduler.plan import (
    Begun,
    Outcome,
    RequestFailed,
    SchedulerEvent,
    SequenceEnded,
    SlotCopy,
    SlotLoad,
    SlotSave,
    StepPlan,
    TokenDrawn,
)
from edgeqwen.scheduler.scheduler import Scheduler

__all__ = [
    "Admission",
    "Begun",
    "Fetch",
    "Outcome",
    "RequestFailed",
    "Scheduler",
    "SchedulerEvent",
    "SequenceEnded",
    "SlotCopy",
    "SlotLoad",
    "SlotSave",
    "StepPlan",
    "TokenDrawn",
]
