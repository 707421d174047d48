"""Sessions as values: what a turn, a reset and a fork make of one, and what a request adds to it."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgeqwen.errors import BadRequest, EdgeqwenError
from edgeqwen.sessions.addition import read_addition
from edgeqwen.sessions.session import (
    ID_BITS,
    Session,
    answer_message,
    appended,
    check_rev,
    forked,
    is_id,
    is_name,
    new_id,
    reset,
    used,
)

SYSTEM = {"role": "system", "content": "Be brief."}


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def session_of(num_turns: int = 0, *, system: str | None = None, drops: tuple[int, ...] = ()) -> Session:
    """A session with turns `q1`, `a1` and so on; `drops` says how many each of the first turns drops."""
    session = Session(id=new_id(7), owner="1000", created_at=1.0, used_at=1.0, ttl_s=10, system=system)
    for number in range(1, num_turns + 1):
        session = appended(
            session,
            [user(f"q{number}"), assistant(f"a{number}")],
            system=system,
            num_dropped=drops[number - 1] if number <= len(drops) else 0,
            num_tokens=10 * number,
            model="m",
            now=1.0 + number,
        )
    return session


def texts(session: Session) -> list[str]:
    return [message["content"] for message in session.history()]


def test_turns_make_revisions_and_the_history() -> None:
    session = session_of(2, system="S")
    assert (session.rev, session.num_tokens, session.used_at, session.model) == (2, 20, 3.0, "m")
    assert texts(session) == ["S", "q1", "a1", "q2", "a2"]
    assert [message["content"] for message in session.history(num_dropped=1)] == ["S", "q2", "a2"]


def test_dropped_turns_are_gone_and_the_system_message_stays() -> None:
    session = session_of(4, system="S", drops=(0, 0, 2))
    assert texts(session) == ["S", "q3", "a3", "q4", "a4"]
    assert (session.rev, session.first_rev) == (4, 2)


@pytest.mark.parametrize(("at", "said"), [(0, []), (1, ["q1", "a1"]), (3, ["q1", "a1", "q2", "a2", "q3", "a3"])])
def test_fork_is_as_the_session_was_at_that_revision(at: int, said: list[str]) -> None:
    session = session_of(3)
    fork = forked(session, at=at, fork_id=new_id(8), name="n", now=9.0)
    assert (texts(fork), fork.rev, fork.name, fork.id, fork.created_at) == (said, at, "n", new_id(8), 9.0)
    assert texts(session) == ["q1", "a1", "q2", "a2", "q3", "a3"]


@pytest.mark.parametrize("at", [-1, 1, 3])
def test_fork_at_what_was_dropped_or_is_yet_to_come_is_refused_with_the_range(at: int) -> None:
    session = reset(session_of(1), keep_system=True, now=1.0)
    with pytest.raises(BadRequest, match="from 2 to 2") as caught:
        forked(session, at=at, fork_id=new_id(8), name=None, now=1.0)
    assert caught.value.field == "at"


@pytest.mark.parametrize(("keep_system", "said"), [(True, ["S"]), (False, [])])
def test_reset_is_a_revision_without_turns(keep_system: bool, said: list[str]) -> None:
    session = reset(session_of(2, system="S"), keep_system=keep_system, now=20.0)
    assert (session.rev, session.first_rev, session.used_at, texts(session)) == (3, 3, 20.0, said)


def test_time_of_a_session_does_not_go_back_with_the_clock() -> None:
    session = session_of(2)
    assert session.used_at == 3.0
    added = appended(session, [], system=None, num_dropped=0, num_tokens=0, model="", now=-5.0)
    for each in (used(session, -5.0), added, reset(session, keep_system=True, now=-5.0)):
        assert each.used_at == 3.0
    assert used(session, 4.0).used_at == 4.0


def test_other_revision_is_a_conflict_that_says_both() -> None:
    session = session_of(3)
    check_rev(session, None)
    check_rev(session, 3)
    with pytest.raises(EdgeqwenError, match=r"at revision 3, not at 1") as caught:
        check_rev(session, 1)
    assert (caught.value.code, caught.value.field) == ("conflict", "if_rev")


@pytest.mark.parametrize(
    ("content", "reasoning", "finish", "has_thought"),
    [("yes", "hm", "stop", True), ("yes", "hm", "length", True), ("", "hm", "stop", True), ("", "hm", "length", False)],
)
def test_thought_is_kept_unless_it_was_cut_off(content: str, reasoning: str, finish: Any, has_thought: bool) -> None:
    message = answer_message(content, reasoning, (), finish)
    assert ("reasoning_content" in message) == has_thought
    assert message["content"] == content


@given(st.integers(0, (1 << ID_BITS) - 1), st.integers(0, (1 << ID_BITS) - 1))
def test_ids_are_of_one_form_and_differ_as_their_bits_do(one: int, other: int) -> None:
    assert is_id(new_id(one))
    assert (new_id(one) == new_id(other)) == (one == other)


@pytest.mark.parametrize("name", ["", "x" * 65, "a\nb", "a\x00", "a\u202eb", "\u2028"])
def test_names_are_short_and_printable(name: str) -> None:
    assert not is_name(name)
    assert is_name("Küche 🫠 @home/../x")


# What a request adds.


def add(session: Session, *messages: dict[str, Any], may_repeat: bool = False) -> tuple[str | None, list[str], int]:
    found = read_addition(session, messages, may_repeat=may_repeat, most=4)
    return found.system, [message["content"] for message in found.messages], found.offset


def test_first_turns_system_message_becomes_the_sessions() -> None:
    assert add(session_of(), SYSTEM, user("q")) == ("Be brief.", ["q"], 1)


def test_same_system_message_is_skipped_and_another_is_refused() -> None:
    session = session_of(1, system="Be brief.")
    assert add(session, SYSTEM, user("q")) == ("Be brief.", ["q"], 1)
    with pytest.raises(BadRequest) as caught:
        add(session, user("q"), {"role": "system", "content": "Be long."})
    assert caught.value.field == "messages[1]"
    assert "long" not in caught.value.message


def test_system_message_after_the_first_turn_is_refused() -> None:
    with pytest.raises(BadRequest):
        add(session_of(1), SYSTEM, user("q"))
    emptied = reset(session_of(1, system="old"), keep_system=False, now=1.0)
    assert add(emptied, SYSTEM, user("q")) == ("Be brief.", ["q"], 1)


@pytest.mark.parametrize("messages", [(), (SYSTEM,)])
def test_request_without_anything_new_is_refused(messages: tuple[dict[str, Any], ...]) -> None:
    with pytest.raises(BadRequest, match="nothing new"):
        add(session_of(), *messages)
    with pytest.raises(BadRequest, match="nothing new"):
        add(session_of(1), user("q1"), assistant("a1"), may_repeat=True)


def test_more_new_messages_than_allowed_are_refused_and_repeated_ones_do_not_count() -> None:
    session = session_of(3)
    known = [dict(message) for message in session.history()]
    assert add(session, *known, user("q4"), may_repeat=True)[1] == ["q4"]
    with pytest.raises(BadRequest, match="at most 4"):
        add(session, *known, user("q4"))


def test_history_that_is_sent_again_is_not_added_again() -> None:
    session = session_of(2, system="S")
    whole = [{"role": "system", "content": "S"}, user("q1"), {**assistant("a1"), "reasoning_content": "hm"}, user("q2")]
    assert add(session, *whole, assistant("a2"), user("q3"), may_repeat=True) == ("S", ["q3"], 5)
    assert add(session, *whole[1:], assistant("a2"), user("q3"), may_repeat=True) == ("S", ["q3"], 4)


@pytest.mark.parametrize(
    "messages",
    [
        [user("q3")],
        [user("q1"), assistant("a1"), user("q3")],
        [user("q1"), assistant("edited"), user("q2"), user("q3")],
        [user("q1"), user("a1"), user("q2"), user("q3")],
    ],
)
def test_what_is_not_all_of_the_history_is_all_new(messages: list[dict[str, Any]]) -> None:
    assert add(session_of(2), *messages, may_repeat=True)[1] == [message["content"] for message in messages]
