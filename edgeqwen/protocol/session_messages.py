"""Operations on sessions. A session is named by its id, or as `@name` by a name that its owner gave it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from edgeqwen.protocol.operation import LaterOperation, Operation


class SessionOperation(LaterOperation, frozen=True, kw_only=True):
    """Base of the operations on the caller's own sessions."""


class SessionCreate(SessionOperation, frozen=True, kw_only=True):
    """Begin a session. `overflow` is `error` or `truncate`: what happens once the context is full."""

    name: str | None = None
    system: str | None = None
    ttl_s: int | None = None
    overflow: str | None = None


class SessionGet(SessionOperation, frozen=True, kw_only=True):
    """What a session is; with `messages` also what was said."""

    session: str
    messages: bool = False


class SessionList(SessionOperation, frozen=True, kw_only=True):
    """The caller's sessions, the one used last coming first."""


class SessionReset(SessionOperation, frozen=True, kw_only=True):
    """Forget the turns, and the system message too unless `keep_system`."""

    session: str
    keep_system: bool = True


class SessionFork(SessionOperation, frozen=True, kw_only=True):
    """Begin a session as another one was at revision `at` (not given: as it is)."""

    session: str
    at: int | None = None
    name: str | None = None


class SessionDelete(SessionOperation, frozen=True, kw_only=True):
    """Forget a session."""

    session: str


SESSION_OPERATIONS: Final[Mapping[str, type[Operation]]] = {
    "session.create": SessionCreate,
    "session.get": SessionGet,
    "session.list": SessionList,
    "session.reset": SessionReset,
    "session.fork": SessionFork,
    "session.delete": SessionDelete,
}
