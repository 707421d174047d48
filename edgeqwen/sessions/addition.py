"""What a request adds to a session: its messages, told from the system's and from those that the session has."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from edgeqwen.errors import BadRequest
from edgeqwen.sessions.session import Message, Session


@dataclass(frozen=True, slots=True)
class Addition:
    """`messages` are new; `system` is the session's from this turn on. `offset` of the request's messages precede the
    first new one.
    """

    system: str | None
    messages: tuple[Message, ...]
    offset: int = 0


def read_addition(session: Session, messages: Sequence[Message], *, may_repeat: bool, most: int) -> Addition:
    """What `messages` add. A system message is the session's if it has none and no turns, and skipped if it says what
    the session's does. With `may_repeat` the messages may begin with all that was said so far.

    Raises `BadRequest` for another system message, for nothing new, and for more than `most` new ones.
    """
    system = session.system
    new: list[Message] = []
    for index, message in enumerate(messages):
        if message["role"] != "system":
            new.append(message)
        elif system is None and not session.turns:
            system = message["content"]
        elif message["content"] != system:
            raise BadRequest(
                f"messages[{index}] is not the session's system message, which stays; reset or begin a session for it",
                field=f"messages[{index}]",
            )
    offset = len(messages) - len(new)
    if may_repeat and (num_known := _num_repeated(session, new)):
        del new[:num_known]
        offset += num_known
    if not new:
        raise BadRequest("messages holds nothing new for this session", field="messages")
    if len(new) > most:
        raise BadRequest(f"messages must hold at most {most} new messages, not {len(new)}", field="messages")
    return Addition(system, tuple(new), offset)


def _num_repeated(session: Session, messages: Sequence[Message]) -> int:
    """How many of `messages` are the history, if they begin with all of it; else 0."""
    known = [message for turn in session.turns for message in turn.messages]
    begin = messages[: len(known)]
    is_same = len(begin) == len(known) and all(_say_the_same(*pair) for pair in zip(known, begin, strict=True))
    return len(known) if is_same else 0


def _say_the_same(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    # Thoughts are seldom sent back, and calls come back in other forms: role and content decide.
    return bool(one["role"] == other["role"] and one["content"] == other["content"])
