"""Slots that were left stay as they are for a while: what a sequence needs may be there already."""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import given

from edgeqwen.kvcache import Spare, SpareSlots
from edgeqwen.kvcache.spares import SPARE_S
from tests.scheduling import TOKEN_BYTES, Desk

PROMPT = tuple(number % 190 for number in range(200))


def loaded_tokens(desk: Desk) -> int:
    """Tokens copied into slots since the last call."""
    total = sum(load.stop - load.start for plan in desk.plans for load in plan.loads)
    desk.plans.clear()
    return total


def next_turn(desk: Desk, rid: str, prompt: tuple[int, ...]) -> tuple[int, ...]:
    """The prompt, what was answered, and a few tokens more."""
    return (*prompt, *desk.drawn[rid], 7, 8, 9)


def test_a_turn_that_comes_back_to_its_slot_copies_the_end_alone_and_computes_what_is_new() -> None:
    desk = Desk()
    desk.run("a", PROMPT)
    loaded_tokens(desk)
    prompt = next_turn(desk, "a", PROMPT)
    num_known = len(PROMPT) + 3  # the last token drawn was never computed
    assert desk.run("b", prompt) == len(prompt) - num_known
    assert desk.cached["b"] == num_known
    assert loaded_tokens(desk) == num_known - 192, "the last block"


def test_other_owners_slots_give_nothing_but_their_pages() -> None:
    desk = Desk(num_slots=1)
    desk.run("a", PROMPT, owner="x")
    assert desk.run("b", PROMPT, owner="y") == len(PROMPT)
    assert desk.scheduler.take_releases() == ()


def test_a_slot_with_more_than_is_needed_is_released_first() -> None:
    desk = Desk(num_slots=1)
    desk.run("a", PROMPT)
    desk.submit("b", PROMPT[:20])
    plan = desk.scheduler.plan(desk.now)
    assert plan is not None
    assert desk.scheduler.take_releases() == (0,)
    assert not desk.store.spares.num_bytes


def test_empty_slots_are_taken_before_spare_ones_and_of_those_the_one_that_was_left_first() -> None:
    desk = Desk(num_slots=3)
    desk.run("a", PROMPT)
    desk.run("b", PROMPT[100:])
    assert set(desk.store.spares.slots) == {0, 1}
    desk.run("c", PROMPT[50:])
    assert set(desk.store.spares.slots) == {0, 1, 2}
    desk.submit("d", PROMPT[30:])
    plan = desk.begin()
    assert plan is not None
    assert plan.batch.chunks[0].slot == 0


def test_answers_are_those_of_a_fresh_scheduler() -> None:
    desk = Desk(num_slots=1)
    prompts = {"a": PROMPT, "b": PROMPT[:150], "c": (*PROMPT[:130], *range(50, 90)), "d": PROMPT[:128], "e": PROMPT}
    for rid, prompt in prompts.items():
        desk.run(rid, prompt, 8)
    for rid, prompt in prompts.items():
        fresh = Desk(num_slots=1)
        fresh.run(rid, prompt, 8)
        assert fresh.drawn[rid] == desk.drawn[rid], rid


def test_spare_slots_are_released_after_a_while_and_the_scheduler_says_when() -> None:
    desk = Desk()
    assert desk.scheduler.next_release_at is None
    desk.run("a", PROMPT)
    at = desk.scheduler.next_release_at
    assert at is not None
    assert desk.now < at <= desk.now + SPARE_S
    assert desk.scheduler.plan(at - 0.001) is None
    assert desk.scheduler.take_releases() == ()
    assert desk.scheduler.plan(at) is None
    assert desk.scheduler.take_releases() == (0,)
    assert desk.scheduler.next_release_at is None


def test_spare_slots_go_before_any_block_does() -> None:
    desk = Desk(budget=500)
    desk.run("a", PROMPT)
    desk.run("b", tuple(range(100, 199)))
    desk.store.check()
    assert desk.store.spares.num_bytes
    assert desk.store.make_room(150 * TOKEN_BYTES)
    assert not desk.store.spares.num_bytes
    assert desk.store.stats().num_evicted == 0
    assert len(desk.scheduler.take_releases()) >= 1


def test_a_sequence_may_have_the_slot_that_it_left_although_there_is_room_for_nothing_else() -> None:
    desk = Desk(num_slots=2, budget=420)
    desk.run("a", PROMPT)
    assert desk.store.spares.slots == (0,)
    loaded_tokens(desk)
    desk.run("b", next_turn(desk, "a", PROMPT), 2)
    assert loaded_tokens(desk) < 64
    assert desk.store.stats().num_evicted == 0


def test_what_is_discarded_leaves_its_slot_too() -> None:
    desk = Desk()
    desk.run("a", PROMPT)
    desk.store.discard("a", (*PROMPT, *desk.drawn["a"]))
    assert not desk.store.spares.slots
    assert desk.scheduler.take_releases() == (0,)


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 300), st.floats(0, 100)), max_size=30))
def test_the_sum_is_that_of_the_spare_slots(moves: list[tuple[int, int, float]]) -> None:
    spares, released, now = SpareSlots(), 0, 0.0
    for slot, num_tokens, seconds in moves:
        now += seconds
        spares.expire(now)
        spares.take(slot)
        spares.put(Spare(slot, "a", tuple(range(num_tokens)), num_tokens, now))
        spares.check()
        released += len(spares.take_releases())
    num_left = len(spares)
    while spares.give_up():
        spares.check()
    assert len(spares.take_releases()) == num_left
    assert spares.num_bytes == 0
    assert spares.next_expiry_at is None
