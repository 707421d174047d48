"""A session: a conversation with its history, as a value. What changes one gives a new one; nothing here does I/O.

A *turn* is what one request appended and the answer that it got. Each turn that is kept makes a revision, and so does a
reset; a revision never goes back. `first_rev` is the earliest one that can still be gone back to: turns before it were
reset, or dropped because the context was full.

    rev        first_rev ..................... rev
    turns                | turn | turn | turn |
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Final, Literal, TypeAlias

import msgspec

from edgeqwen.core.request import FinishReason, ToolCall
from edgeqwen.errors import BadRequest, EdgeqwenError

Overflow: TypeAlias = Literal["error", "truncate"]
Message: TypeAlias = Mapping[str, Any]

MAX_TTL_S: Final = 90 * 86_400
MAX_NAME_LEN: Final = 64
ID_BITS: Final = 80
ID_PATTERN: Final = r"^s_[a-z0-9]{16}$"
OWNER_PATTERN: Final = r"^[a-z0-9]{1,64}$"
"""A uid as text, or `tcp`. It names a folder."""

_DIGITS: Final = "abcdefghijklmnopqrstuvwxyz234567"
_ID_LEN: Final = 16

Count = Annotated[int, msgspec.Meta(ge=0)]


class PastTurn(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A turn that was kept: the revision that it made, and its messages in the template's form, the answer last."""

    rev: Count
    messages: tuple[dict[str, Any], ...]


class Session(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A conversation. Times are seconds since 1970; `num_tokens` are those of prompt and answer of the last turn;
    `model` is who answered last.
    """

    id: Annotated[str, msgspec.Meta(pattern=ID_PATTERN)]
    owner: Annotated[str, msgspec.Meta(pattern=OWNER_PATTERN)]
    created_at: float
    used_at: float
    ttl_s: Annotated[int, msgspec.Meta(ge=1, le=MAX_TTL_S)]
    name: str | None = None
    system: str | None = None
    overflow: Overflow = "error"
    rev: Count = 0
    first_rev: Count = 0
    turns: tuple[PastTurn, ...] = ()
    num_tokens: Count = 0
    model: str = ""

    def __post_init__(self) -> None:
        """Raises `ValueError`, so that a file that holds no possible session is told from one that does."""
        if self.name is not None and not is_name(self.name):
            raise ValueError("no name")
        revs = [self.first_rev, *(turn.rev for turn in self.turns)]
        if any(late <= early for early, late in itertools.pairwise(revs)) or revs[-1] > self.rev:
            raise ValueError("revisions out of order")
        for message in (message for turn in self.turns for message in turn.messages):
            if not (isinstance(message.get("role"), str) and isinstance(message.get("content"), str)):
                raise ValueError("a message without role or content")

    @property
    def expires_at(self) -> float:
        return self.used_at + self.ttl_s

    def history(self, *, num_dropped: int = 0) -> tuple[Message, ...]:
        """The messages of a prompt, the system's first, without the oldest `num_dropped` turns."""
        system: list[Message] = [] if self.system is None else [{"role": "system", "content": self.system}]
        return (*system, *(message for turn in self.turns[num_dropped:] for message in turn.messages))


def new_id(bits: int) -> str:
    """The id that `ID_BITS` random bits make."""
    assert 0 <= bits < 1 << ID_BITS
    return "s_" + "".join(_DIGITS[bits >> 5 * place & 31] for place in range(_ID_LEN))


def is_id(text: str) -> bool:
    return re.fullmatch(ID_PATTERN[1:-1], text) is not None


def is_name(text: str) -> bool:
    return 1 <= len(text) <= MAX_NAME_LEN and text.isprintable()


def used(session: Session, now: float) -> Session:
    """The same, its time to live beginning anew.

    A device without a clock of its own starts somewhere in the past and is put right later: a session that is used
    meanwhile must not be taken for one of long ago, so its time does not go back.
    """
    return msgspec.structs.replace(session, used_at=max(session.used_at, now))


def nameless(session: Session) -> Session:
    """The same, to be found by its id only."""
    return msgspec.structs.replace(session, name=None)


def appended(
    session: Session,
    messages: Sequence[Message],
    *,
    system: str | None,
    num_dropped: int,
    num_tokens: int,
    model: str,
    now: float,
) -> Session:
    """With a turn more, `messages` being all of it, and without the oldest `num_dropped` turns."""
    rev = session.rev + 1
    dropped = session.turns[:num_dropped]
    turn = PastTurn(rev, tuple(dict(message) for message in messages))
    return msgspec.structs.replace(
        used(session, now),
        system=system,
        rev=rev,
        first_rev=dropped[-1].rev if dropped else session.first_rev,
        turns=(*session.turns[num_dropped:], turn),
        num_tokens=num_tokens,
        model=model,
    )


def reset(session: Session, *, keep_system: bool, now: float) -> Session:
    """Without turns, and without the system message unless that is kept."""
    rev = session.rev + 1
    system = session.system if keep_system else None
    return msgspec.structs.replace(used(session, now), system=system, rev=rev, first_rev=rev, turns=(), num_tokens=0)


def forked(session: Session, *, at: int | None, fork_id: str, name: str | None, now: float) -> Session:
    """A session of its own that begins as `session` was at revision `at` (None: as it is)."""
    at = session.rev if at is None else at
    if not session.first_rev <= at <= session.rev:
        message = f"at must be a revision from {session.first_rev} to {session.rev}"
        raise BadRequest(message, field="at")
    turns = tuple(turn for turn in session.turns if turn.rev <= at)
    return msgspec.structs.replace(
        session,
        id=fork_id,
        name=name,
        rev=at,
        turns=turns,
        num_tokens=session.num_tokens if turns == session.turns else 0,
        created_at=now,
        used_at=now,
    )


def answer_message(content: str, reasoning: str, calls: Sequence[ToolCall], finish: FinishReason) -> Message:
    """The assistant's message of a turn. A thought that was cut off is not carried into the turns to come."""
    message: dict[str, Any] = {"role": "assistant", "content": content}
    if reasoning and (content or finish in {"stop", "tool_calls"}):
        message["reasoning_content"] = reasoning
    if calls:
        message["tool_calls"] = [
            {"id": call.call_id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in calls
        ]
    return message


def check_rev(session: Session, if_rev: int | None) -> None:
    """Raises `conflict` unless the session is at the revision that the caller takes it to be at."""
    if if_rev is not None and if_rev != session.rev:
        raise EdgeqwenError(
            f"the session is at revision {session.rev}, not at {if_rev}; look what was said since",
            code="conflict",
            field="if_rev",
        )
