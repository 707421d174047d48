"""Which sequence computes what in the next step. Synchronous: no await, no clock, no runtime."""

from __future__ import annotations

from edgeqwen.scheduler.admission import Admission
from edgeqwen.scheduler.plan import (
    Outcome,
    RequestFailed,
    SchedulerEvent,
    SequenceEnded,
    SlotCopy,
    StepPlan,
    TokenDrawn,
)
from edgeqwen.scheduler.scheduler import Scheduler

__all__ = [
    "Admission",
    "Outcome",
    "RequestFailed",
    "Scheduler",
    "SchedulerEvent",
    "SequenceEnded",
    "SlotCopy",
    "StepPlan",
    "TokenDrawn",
]
