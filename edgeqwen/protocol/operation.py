"""What every operation of `eqp/1` is made from."""

from __future__ import annotations

import msgspec


class Operation(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of what a client can ask for; the members of the envelope are not part of it."""


class LaterOperation(Operation, frozen=True, kw_only=True):
    """Answered with one frame, never behind a generation, but not at once: another thread has a part in it."""
