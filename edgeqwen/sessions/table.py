"""Which sessions there are: whose, under which names, until when, and which have a turn under way.

All of it is synchronous; time and randomness are arguments. Another owner's session is not found, like one that never
was. What has a turn under way stays, whatever the time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

from edgeqwen.errors import BadRequest, EdgeqwenError
from edgeqwen.sessions.session import (
    ID_BITS,
    MAX_NAME_LEN,
    Overflow,
    Session,
    forked,
    is_name,
    nameless,
    new_id,
    used,
)


class SessionTable:
    """The sessions of all owners, at most `per_owner` each. `random_bits(n)` makes ids that nobody can guess."""

    def __init__(self, *, per_owner: int, random_bits: Callable[[int], int]) -> None:
        self.per_owner = per_owner
        self._random_bits = random_bits
        self._sessions: dict[str, dict[str, Session]] = {}  # owner to id to session
        self._names: dict[tuple[str, str], str] = {}  # owner and name to id
        self._busy: set[str] = set()
        self._first_expiry = math.inf  # nothing expires before

    def __len__(self) -> int:
        return sum(len(sessions) for sessions in self._sessions.values())

    def find(self, owner: str, ref: str) -> Session | None:
        """The session that `ref`, an id or `@name`, means to `owner`."""
        session_id = self._names.get((owner, ref[1:]), "") if ref.startswith("@") else ref
        return self._sessions.get(owner, {}).get(session_id)

    def get(self, owner: str, ref: str) -> Session:
        """As `find`; raises `not_found`."""
        session = self.find(owner, ref)
        if session is None:
            raise EdgeqwenError("no such session", code="not_found", field="session")
        return session

    def of(self, owner: str) -> tuple[Session, ...]:
        """All sessions of `owner`, the one used last coming first."""
        return tuple(sorted(self._sessions.get(owner, {}).values(), key=lambda session: -session.used_at))

    def count_of(self, owner: str) -> int:
        return len(self._sessions.get(owner, ()))

    def create(
        self,
        owner: str,
        now: float,
        *,
        ttl_s: int,
        name: str | None = None,
        system: str | None = None,
        overflow: Overflow = "error",
    ) -> Session:
        """A new session. Raises `BadRequest` (name), `conflict` (name taken) or `quota`."""
        self._check_room(owner, name)
        session = Session(
            id=self._new_id(owner),
            owner=owner,
            name=name,
            system=system,
            overflow=overflow,
            ttl_s=ttl_s,
            created_at=now,
            used_at=now,
        )
        self._put(session)
        return session

    def fork(self, session: Session, now: float, *, at: int | None = None, name: str | None = None) -> Session:
        """A copy of `session` as it was at revision `at`. Raises what `create` raises, and `BadRequest` (at)."""
        self._check_room(session.owner, name)
        fork = forked(session, at=at, fork_id=self._new_id(session.owner), name=name, now=now)
        self._put(fork)
        return fork

    def restore(self, sessions: Iterable[Session]) -> None:
        """Put in what was kept. Of two with one name, which only a copied file can bring about, the later has it."""
        for session in sorted(sessions, key=lambda session: session.used_at):
            if session.name is not None and (earlier := self.find(session.owner, f"@{session.name}")) is not None:
                self._put(nameless(earlier))
            self._put(session)

    def replace(self, session: Session) -> None:
        """The next state of a session that is in the table."""
        assert session.id in self._sessions[session.owner]
        self._put(session)

    def remove(self, session: Session) -> None:
        """Forget the session of this id."""
        sessions = self._sessions[session.owner]
        del sessions[session.id]
        if not sessions:
            del self._sessions[session.owner]
        self._busy.discard(session.id)
        if session.name is not None and self._names.get((session.owner, session.name)) == session.id:
            del self._names[session.owner, session.name]

    def is_busy(self, session: Session) -> bool:
        """Whether a turn is under way."""
        return session.id in self._busy

    def check_idle(self, session: Session) -> None:
        """Raises `session_busy` while a turn is under way."""
        if self.is_busy(session):
            raise EdgeqwenError("a turn of this session is under way", code="session_busy", field="session")

    def hold(self, session: Session, now: float) -> None:
        """A turn begins."""
        self.check_idle(session)
        self._busy.add(session.id)
        self._put(used(session, now))

    def release(self, session: Session, now: float) -> None:
        """The turn is over; the time to live begins anew."""
        self._busy.remove(session.id)
        self._put(used(self._sessions[session.owner][session.id], now))

    def sweep(self, now: float) -> tuple[Session, ...]:
        """Forget what has expired; returns it."""
        if now < self._first_expiry:
            return ()
        everything = [session for sessions in self._sessions.values() for session in sessions.values()]
        expired = tuple(s for s in everything if s.expires_at <= now and s.id not in self._busy)
        for session in expired:
            self.remove(session)
        idle = (s.expires_at for sessions in self._sessions.values() for s in sessions.values() if s.expires_at > now)
        # What is busy and past its time is given a new one when its turn ends.
        self._first_expiry = min(idle, default=math.inf)
        return expired

    def _put(self, session: Session) -> None:
        self._sessions.setdefault(session.owner, {})[session.id] = session
        if session.name is not None:
            self._names[session.owner, session.name] = session.id
        self._first_expiry = min(self._first_expiry, session.expires_at)

    def _check_room(self, owner: str, name: str | None) -> None:
        if name is not None:
            if not is_name(name) or name.startswith("@"):  # @ says before a name that it is one, and no id
                message = f"a session's name must be 1 to {MAX_NAME_LEN} printable characters, the first of them not @"
                raise BadRequest(message, field="name")
            if (there := self._names.get((owner, name))) is not None:
                message = f"there is a session of this name, {there}; choose another name, or delete that one first"
                raise EdgeqwenError(message, code="conflict", field="name")
        if self.count_of(owner) >= self.per_owner:
            message = f"you have {self.per_owner} sessions, which is the most; delete one"
            raise EdgeqwenError(message, code="quota")

    def _new_id(self, owner: str) -> str:
        while True:
            session_id = new_id(self._random_bits(ID_BITS))
            if session_id not in self._sessions.get(owner, ()):
                return session_id
