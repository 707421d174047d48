"""`Sessions`: what the fronts know of them. Operations, turns, numbers; all on the event loop."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from edgeqwen.engine.inference import Inference
from edgeqwen.errors import BadRequest
from edgeqwen.protocol.session_messages import (
    SessionCreate,
    SessionDelete,
    SessionFork,
    SessionGet,
    SessionList,
    SessionOperation,
    SessionReset,
)
from edgeqwen.sessions.keeper import Keeper
from edgeqwen.sessions.session import MAX_TTL_S, Overflow, Session, reset
from edgeqwen.sessions.store import SessionStore
from edgeqwen.sessions.table import SessionTable
from edgeqwen.sessions.tokens import SessionTokens
from edgeqwen.sessions.turns import Turn, TurnRequest, TurnRules

OVERFLOWS: Final[dict[str | None, Overflow]] = {None: "error", "error": "error", "truncate": "truncate"}

MOST_READ: Final = 32
"""Sessions of a list whose tokens are read if they are not at hand: a thousand would take the text thread seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionLimits:
    """How many sessions an owner may have, and how long one lives after its last use if it does not say."""

    per_owner: int = 1024
    ttl_s: int = 7 * 86_400


class Sessions:
    """Serves the operations and makes turns. `load` must be called once; until then everybody waits.

    `clock` gives seconds since 1970, `random_bits(n)` what nobody can guess. Sessions live in memory alone if `store`
    has no folder.
    """

    def __init__(
        self,
        inference: Inference,
        store: SessionStore,
        *,
        random_bits: Callable[[int], int],
        limits: SessionLimits | None = None,
        default_max_tokens: int = 2048,
        clock: Callable[[], float] = time.time,
    ) -> None:
        limits = limits or SessionLimits()
        self._inference = inference
        self._store = store
        self._table = SessionTable(per_owner=limits.per_owner, random_bits=random_bits)
        self._tokens = SessionTokens(inference, self._is_current)
        self._keeper = Keeper(self._table, store, clock=clock, on_forgotten=self._tokens.forget)
        self.set_limits(limits, default_max_tokens=default_max_tokens)

    def set_limits(self, limits: SessionLimits, *, default_max_tokens: int) -> None:
        """For sessions and turns that begin from now on, with the limits that the engine has now. Sessions that there
        are stay, however many, and keep their time to live.
        """
        self.limits = limits
        self._table.per_owner = limits.per_owner
        self._rules = TurnRules(
            default_max_tokens=default_max_tokens,
            ttl_s=limits.ttl_s,
            max_messages=self._inference.limits.messages,
        )

    def _is_current(self, session: Session) -> bool:
        """Whether nothing has come of it since, a turn or its end."""
        found = self._table.find(session.owner, session.id)
        return found is not None and found.rev == session.rev

    @property
    def num_sessions(self) -> int:
        """Those of all owners."""
        return len(self._table)

    def num_sessions_of(self, owner: str) -> int:
        return self._table.count_of(owner)

    @property
    def num_unsaved(self) -> int:
        """Those that would be lost with this process."""
        return len(self._store.unsaved)

    async def load(self) -> None:
        """Take in the sessions that are on disk."""
        await self._keeper.load()

    async def close(self) -> None:
        """End what is being written. Every turn whose generation is over has its last event then."""
        await self._keeper.close()

    def stats(self) -> dict[str, Any]:
        """Whether sessions are kept on disk, how many are not, and what was found unreadable."""
        return self._store.stats()

    def owner_stats(self, owner: str) -> dict[str, Any]:
        """Whether sessions are kept on disk, and how many of this owner's are not."""
        return self._store.owner_stats(self._table.of(owner))

    def turn(self, request: TurnRequest) -> Turn:
        """A turn that is not yet begun. Raises `BadRequest`."""
        return Turn(self._inference, self._keeper, self._tokens, request, self._rules)

    async def answer(self, message: SessionOperation, owner: str) -> dict[str, Any]:
        """The final frame of an operation of `owner`. Raises `EdgeqwenError`."""
        await self._keeper.until_loaded()
        self._keeper.sweep()
        match message:
            case SessionCreate():
                return await self._create(message, owner)
            case SessionGet():
                return await self._get(message, owner)
            case SessionList():
                return await self._list(owner)
            case SessionReset():
                return await self._reset(message, owner)
            case SessionFork():
                return await self._fork(message, owner)
            case SessionDelete():
                return await self._delete(message, owner)
        raise AssertionError(f"{type(message).__name__} is no operation on sessions")

    async def _create(self, message: SessionCreate, owner: str) -> dict[str, Any]:
        ttl_s = self.limits.ttl_s if message.ttl_s is None else message.ttl_s
        if not 1 <= ttl_s <= MAX_TTL_S:
            raise BadRequest(f"ttl_s must be between 1 and {MAX_TTL_S}", field="ttl_s")
        if message.overflow not in OVERFLOWS:
            raise BadRequest("overflow must be error or truncate", field="overflow")
        session = self._table.create(
            owner,
            self._keeper.clock(),
            ttl_s=ttl_s,
            name=message.name,
            system=message.system,
            overflow=OVERFLOWS[message.overflow],
        )
        return _head(session) | _expiry(session) | await self._save(session)

    async def _get(self, message: SessionGet, owner: str) -> dict[str, Any]:
        session = self._table.get(owner, message.session)
        members = await self._row(session)
        members |= {"ttl_s": session.ttl_s, "overflow": session.overflow}
        if session.system is not None:
            members["system"] = session.system
        if message.messages:
            members["messages"] = [said for turn in session.turns for said in turn.messages]
        return members

    async def _list(self, owner: str) -> dict[str, Any]:
        rows: list[dict[str, Any]] = []
        for place, session in enumerate(self._table.of(owner)):
            rows.append(await self._row(session, may_read=place < MOST_READ))
            await asyncio.sleep(0)  # others are not kept waiting for a thousand look-ups
        return {"sessions": rows, "quota": {"sessions": self.limits.per_owner, "kv_bytes": self._kv_budget()}}

    def _kv_budget(self) -> int:
        """Bytes of keys and values that there may be in memory, of all users together."""
        return self._inference.stats().kv.get("budget_bytes", 0)

    async def _row(self, session: Session, *, may_read: bool = True) -> dict[str, Any]:
        num_tokens, kv_bytes = await self._tokens.sizes(session, may_read=may_read)
        return {
            **_head(session),
            "turns": len(session.turns),
            "tokens": num_tokens,
            "kv_bytes": kv_bytes,
            "idle_s": max(0, int(self._keeper.clock() - session.used_at)),
            "busy": self._table.is_busy(session),
            **_expiry(session),
        }

    async def _reset(self, message: SessionReset, owner: str) -> dict[str, Any]:
        session = self._table.get(owner, message.session)
        self._table.check_idle(session)
        emptied = reset(session, keep_system=message.keep_system, now=self._keeper.clock())
        self._table.replace(emptied)
        saved = await self._save(emptied)
        await self._tokens.discard(session)
        return _head(emptied) | saved

    async def _fork(self, message: SessionFork, owner: str) -> dict[str, Any]:
        session = self._table.get(owner, message.session)
        fork = self._table.fork(session, self._keeper.clock(), at=message.at, name=message.name)
        return _head(fork) | {"from": session.id} | _expiry(fork) | await self._save(fork)

    async def _delete(self, message: SessionDelete, owner: str) -> dict[str, Any]:
        session = self._table.get(owner, message.session)
        self._table.check_idle(session)
        self._table.remove(session)
        is_removed = await self._store.remove(session)
        await self._tokens.discard(session)
        return {"session": session.id, "deleted": 1} | ({} if is_removed else {"saved": False})

    async def _save(self, session: Session) -> dict[str, Any]:
        return {} if await self._store.save(session) else {"saved": False}


def _head(session: Session) -> dict[str, Any]:
    members: dict[str, Any] = {"session": session.id}
    if session.name is not None:
        members["name"] = session.name
    return members | {"rev": session.rev}


def _expiry(session: Session) -> dict[str, Any]:
    return {"expires": math.ceil(session.expires_at)}
