"""The table of sessions: owners, names, quotas, time, and turns under way."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from edgeqwen.errors import BadRequest, EdgeqwenError
from edgeqwen.sessions.session import Session, new_id
from edgeqwen.sessions.table import SessionTable

ALICE, BOB = "1000", "1001"


def make_table(per_owner: int = 8) -> SessionTable:
    numbers = iter(range(1 << 20))
    return SessionTable(per_owner=per_owner, random_bits=lambda num_bits: next(numbers))


def refusal(call: Callable[[], object]) -> str | None:
    """The code that `call` is refused with, None if it is not."""
    try:
        call()
    except EdgeqwenError as error:
        return error.code
    return None


def test_session_is_found_by_id_and_by_name_and_by_its_owner_only() -> None:
    table = make_table()
    session = table.create(ALICE, 0.0, ttl_s=10, name="notes")
    assert table.get(ALICE, session.id) == table.get(ALICE, "@notes") == session
    for owner, ref in [(BOB, session.id), (BOB, "@notes"), (ALICE, "notes"), (ALICE, "@"), (ALICE, "x" * 10_000)]:
        with pytest.raises(EdgeqwenError) as caught:
            table.get(owner, ref)
        assert (caught.value.code, caught.value.field) == ("not_found", "session")
        assert len(caught.value.message) < 100


def test_names_are_unique_to_an_owner_and_free_again_once_deleted() -> None:
    table = make_table()
    session = table.create(ALICE, 0.0, ttl_s=10, name="n")
    table.create(BOB, 0.0, ttl_s=10, name="n")
    assert refusal(lambda: table.create(ALICE, 0.0, ttl_s=10, name="n")) == "conflict"
    assert refusal(lambda: table.fork(session, 0.0, name="n")) == "conflict"
    table.remove(session)
    assert table.create(ALICE, 0.0, ttl_s=10, name="n").id != session.id


def test_name_that_is_none_is_refused() -> None:
    with pytest.raises(BadRequest):
        make_table().create(ALICE, 0.0, ttl_s=10, name="a\nb")


def test_quota_is_each_owners_own_and_none_is_dropped_for_it() -> None:
    table = make_table(per_owner=2)
    first = table.create(ALICE, 0.0, ttl_s=10)
    table.create(ALICE, 0.0, ttl_s=10)
    table.create(BOB, 0.0, ttl_s=10)
    assert refusal(lambda: table.create(ALICE, 0.0, ttl_s=10)) == "quota"
    assert refusal(lambda: table.fork(first, 0.0)) == "quota"
    assert len(table.of(ALICE)) == 2


def test_id_that_exists_is_not_given_again() -> None:
    bits = iter([5, 5, 6])
    table = SessionTable(per_owner=8, random_bits=lambda num_bits: next(bits))
    assert [table.create(ALICE, 0.0, ttl_s=10).id for _ in range(2)] == [new_id(5), new_id(6)]


def test_session_expires_after_its_time_unless_a_turn_is_under_way() -> None:
    table = make_table()
    kept, gone = (table.create(ALICE, 0.0, ttl_s=10) for _ in range(2))
    table.hold(kept, 1.0)
    assert table.sweep(9.9) == ()
    assert table.sweep(100.0) == (gone,)
    table.release(kept, 100.0)
    assert table.sweep(109.9) == ()
    assert [session.id for session in table.sweep(110.0)] == [kept.id]
    assert len(table) == 0


def test_one_turn_at_a_time() -> None:
    table = make_table()
    session = table.create(ALICE, 0.0, ttl_s=10)
    table.hold(session, 0.0)
    with pytest.raises(EdgeqwenError) as caught:
        table.hold(session, 0.0)
    assert (caught.value.code, caught.value.field) == ("session_busy", "session")
    table.release(session, 0.0)
    table.hold(session, 0.0)


def test_of_two_restored_sessions_with_one_name_the_later_has_it() -> None:
    early, late = (
        Session(id=new_id(bits), owner=ALICE, name="n", created_at=0.0, used_at=float(bits), ttl_s=10)
        for bits in (1, 2)
    )
    for order in ([early, late], [late, early]):
        table = make_table()
        table.restore(order)
        assert table.get(ALICE, "@n").id == late.id
        assert table.get(ALICE, early.id).name is None


@dataclass
class Known:
    """What the simple model knows of a session."""

    session_id: str
    owner: str
    name: str | None
    expires_at: float
    is_busy: bool = False


@dataclass
class Model:
    """The table as a list."""

    known: list[Known] = field(default_factory=list)

    def of(self, owner: str) -> list[Known]:
        return [each for each in self.known if each.owner == owner]


OWNERS = st.sampled_from([ALICE, BOB])
NAMES = st.sampled_from([None, "a", "b"])
MOST, TTL_S = 3, 10


class TableMachine(RuleBasedStateMachine):
    """Random operations on the table and on a list, which must agree after each."""

    def __init__(self) -> None:
        super().__init__()
        self.table = make_table(MOST)
        self.model = Model()
        self.now = 0.0

    @rule(seconds=st.integers(0, 15))
    def pass_time(self, seconds: int) -> None:
        self.now += seconds
        gone = {session.id for session in self.table.sweep(self.now)}
        due = {each.session_id for each in self.model.known if each.expires_at <= self.now and not each.is_busy}
        assert gone == due
        self.model.known = [each for each in self.model.known if each.session_id not in due]

    def _make(self, owner: str, name: str | None, make: Callable[[], Session]) -> None:
        """Make a session, if the model says that there may be one more of that name."""
        expected = "quota" if len(self.model.of(owner)) >= MOST else None
        if name is not None and any(each.name == name for each in self.model.of(owner)):
            expected = "conflict"
        before = {session.id for session in self.table.of(owner)}
        assert refusal(make) == expected
        for session in self.table.of(owner):
            if session.id not in before:
                self.model.known.append(Known(session.id, owner, name, self.now + TTL_S))

    @rule(owner=OWNERS, name=NAMES)
    def create(self, owner: str, name: str | None) -> None:
        self._make(owner, name, lambda: self.table.create(owner, self.now, ttl_s=TTL_S, name=name))

    def _pick(self, data: st.DataObject) -> Known:
        return data.draw(st.sampled_from(self.model.known))

    @precondition(lambda self: self.model.known)
    @rule(data=st.data(), name=NAMES)
    def fork(self, data: st.DataObject, name: str | None) -> None:
        parent = self._pick(data)
        session = self.table.get(parent.owner, parent.session_id)
        self._make(parent.owner, name, lambda: self.table.fork(session, self.now, name=name))

    @precondition(lambda self: self.model.known)
    @rule(data=st.data())
    def begin_or_end_a_turn(self, data: st.DataObject) -> None:
        known = self._pick(data)
        session = self.table.get(known.owner, known.session_id)
        if known.is_busy:
            self.table.release(session, self.now)
        else:
            self.table.hold(session, self.now)
        known.is_busy = not known.is_busy
        known.expires_at = self.now + TTL_S

    @precondition(lambda self: self.model.known)
    @rule(data=st.data())
    def delete(self, data: st.DataObject) -> None:
        known = self._pick(data)
        session = self.table.get(known.owner, known.session_id)
        assert refusal(lambda: self.table.check_idle(session)) == ("session_busy" if known.is_busy else None)
        if not known.is_busy:
            self.table.remove(session)
            self.model.known.remove(known)

    @invariant()
    def agree(self) -> None:
        assert len(self.table) == len(self.model.known)
        for owner in (ALICE, BOB):
            mine = {each.session_id: each for each in self.model.of(owner)}
            assert {session.id for session in self.table.of(owner)} == set(mine)
            for each in mine.values():
                session = self.table.get(owner, each.session_id)
                assert (session.name, session.expires_at) == (each.name, each.expires_at)
                assert self.table.is_busy(session) == each.is_busy
                assert self.table.find(BOB if owner == ALICE else ALICE, each.session_id) is None
            for name in ("a", "b"):
                found = self.table.find(owner, f"@{name}")
                assert (found.id if found else None) == next((i for i, each in mine.items() if each.name == name), None)


TestTableAgainstAList = TableMachine.TestCase
TestTableAgainstAList.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
