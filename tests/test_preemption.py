"""A sequence that makes place for another: it loses its slot, not its work."""

from __future__ import annotations

from typing import Any

import pytest

from edgeqwen.errors import EdgeqwenError
from edgeqwen.scheduler import pieces, transfers
from edgeqwen.scheduler.line import AGING_S, MIN_TOKENS
from edgeqwen.scheduler.sequence import Sequence
from tests.scheduling import CHUNK, TOKEN_BYTES, Desk, alone, text

LONG_ANSWER = 200


def busy(num: int = 3, **given: Any) -> Desk:
    """All slots taken by one owner, whose sequences may all be preempted but for the oldest."""
    desk = Desk(num_slots=num, capacity=1024)
    for number in range(num):
        desk.submit(f"old {number}", text(number, 100), LONG_ANSWER, owner="A", **given)
    desk.until(lambda: all(len(desk.drawn[f"old {number}"]) > MIN_TOKENS for number in range(num)))
    return desk


def check_answers(desk: Desk, num: int = 3) -> None:
    """Each has the answer of a fresh engine, and of no prompt a token was computed twice."""
    for number in range(num):
        assert desk.drawn[f"old {number}"] == alone(text(number, 100), LONG_ANSWER)
        assert desk.computed[f"old {number}"] == 100


def sequence_of(desk: Desk, rid: str) -> Sequence:
    return desk.scheduler._groups.live(rid)[0]


@pytest.mark.parametrize("given", [{"owner": "B"}, {"owner": "A", "priority": 1}], ids=["other owner", "urgent"])
def test_who_has_more_right_to_a_slot_gets_one_after_a_step_of_saving(given: dict[str, Any]) -> None:
    desk = busy()
    desk.submit("new", text(9, 30), 3, **given)
    num_plans = len(desk.plans)
    desk.until(lambda: bool(desk.drawn["new"]))
    plans = desk.plans[num_plans:]
    saving = [plan for plan in plans if plan.saves]
    assert len(saving) == 1
    assert plans.index(saving[0]) <= 2
    assert [rid for rid, _ in plans[plans.index(saving[0]) + 1].sequences] == ["new"]
    assert desk.scheduler.num_preempted == 1
    desk.finish()
    check_answers(desk)
    assert desk.drawn["new"] == alone(text(9, 30), 3)


def test_who_has_no_more_right_to_a_slot_waits() -> None:
    desk = busy()
    desk.submit("same owner", text(9, 30), 3, owner="A")
    desk.submit("not urgent", text(10, 30), 3, owner="B", priority=-1)
    desk.finish()
    assert desk.scheduler.num_preempted == 0
    assert desk.drawn["same owner"] == alone(text(9, 30), 3)


def test_an_owner_has_no_right_to_more_slots_than_the_other() -> None:
    desk = busy(4)
    for number in range(4):
        desk.submit(f"b{number}", text(10 + number, 30), 100, owner="B")
    desk.until(lambda: len(desk.drawn["b1"]) > 60)
    held = [sequence.request.owner for sequence in desk.scheduler._residents.running]
    assert sorted(held) == ["A", "A", "B", "B"]
    assert desk.scheduler.num_preempted == 2
    desk.finish()
    check_answers(desk, 4)


def test_the_oldest_and_those_that_have_just_begun_are_left_alone() -> None:
    desk = Desk(num_slots=2, capacity=1024)
    for number in range(2):
        desk.submit(f"old {number}", text(number, 100), LONG_ANSWER, owner="A")
    desk.until(lambda: len(desk.drawn["old 0"]) > MIN_TOKENS)
    num_drawn = len(desk.drawn["old 1"])
    assert num_drawn < MIN_TOKENS
    desk.submit("urgent", text(9, 30), 3, priority=1)
    desk.submit("more urgent", text(10, 30), 3, priority=1)
    desk.until(lambda: desk.scheduler.num_preempted > 0)
    assert len(desk.drawn["old 1"]) >= MIN_TOKENS
    assert sequence_of(desk, "old 0").slot is not None
    desk.until(lambda: bool(desk.drawn["urgent"]) and bool(desk.drawn["more urgent"]))
    assert ("old 0", 0) not in desk.ends
    assert sequence_of(desk, "old 0").num_since_begin == len(desk.drawn["old 0"]), "it never left its slot"
    desk.finish()
    check_answers(desk, 2)


def test_of_several_the_least_urgent_goes_then_the_last_that_came() -> None:
    desk = Desk(num_slots=4, capacity=1024)
    for number, priority in enumerate((0, -1, 0, 0)):
        desk.submit(f"old {number}", text(number, 100), LONG_ANSWER, owner="A", priority=priority)
    desk.until(lambda: all(len(desk.drawn[f"old {number}"]) > MIN_TOKENS for number in range(4)))
    for number in range(3):
        desk.submit(f"urgent {number}", text(10 + number, 30), 400, priority=1)
    away = []
    for num in range(1, 4):
        desk.until(lambda: desk.scheduler.num_preempted == num)  # noqa: B023 -- used at once
        away.append([number for number in range(4) if sequence_of(desk, f"old {number}").slot is None])
    assert away == [[1], [1, 3], [1, 2, 3]]
    desk.finish()
    check_answers(desk, 4)


def test_what_it_has_computed_is_kept_whatever_else_is_dropped() -> None:
    desk = Desk(num_slots=2, capacity=1024, budget=1300)
    for number in range(2):
        desk.submit(f"old {number}", text(number, 100), LONG_ANSWER, owner="A")
    desk.until(lambda: all(len(desk.drawn[f"old {number}"]) > MIN_TOKENS for number in range(2)))
    for number in range(8):
        desk.submit(f"urgent {number}", text(10 + number, 250), 20, priority=1)
    desk.finish()
    assert desk.scheduler.num_preempted == 1
    assert desk.store.stats().num_evicted > 10
    check_answers(desk, 2)


def test_without_room_for_what_it_has_computed_nobody_is_preempted() -> None:
    desk = Desk(num_slots=2, capacity=1024, budget=600)
    for number in range(2):
        desk.submit(f"old {number}", text(number, 100), LONG_ANSWER, owner="A")
    desk.until(lambda: all(len(desk.drawn[f"old {number}"]) > MIN_TOKENS for number in range(2)))
    desk.submit("urgent", text(9, 30), 3, priority=1)
    desk.finish()
    assert desk.scheduler.num_preempted == 0
    check_answers(desk, 2)


def test_one_that_keeps_nothing_is_not_preempted() -> None:
    desk = busy(may_cache=False)
    desk.submit("new", text(9, 30), 3, owner="B", priority=1)
    desk.finish()
    assert desk.scheduler.num_preempted == 0
    check_answers(desk)


def test_one_that_has_waited_long_makes_the_running_ones_take_turns() -> None:
    desk = busy(2)
    desk.submit("new", text(9, 30), 3, owner="A")
    desk.now += AGING_S
    desk.until(lambda: bool(desk.drawn["new"]))
    assert desk.scheduler.num_preempted == 1
    assert len(desk.drawn["old 0"]) < LONG_ANSWER
    desk.finish()
    check_answers(desk, 2)


def test_the_same_sequence_may_make_place_again_and_again() -> None:
    desk = busy(2)
    for number in range(4):
        desk.until(lambda: len(desk.drawn["old 1"]) > (number + 1) * (MIN_TOKENS + 2))  # noqa: B023 -- used at once
        desk.submit(f"new {number}", text(10 + number, 30), 3, priority=1)
        desk.until(lambda: desk.scheduler.num_preempted == number + 1)  # noqa: B023 -- as above
    desk.finish()
    check_answers(desk, 2)


def test_moving_out_and_in_takes_several_steps_and_others_go_on_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (pieces, transfers):
        monkeypatch.setattr(module, "MAX_BYTES", 64 * TOKEN_BYTES)
    desk = busy()
    desk.submit("new", text(9, 30), 3, priority=1)
    num_plans = len(desk.plans)
    desk.finish()
    plans = desk.plans[num_plans:]
    assert max(len(plan.loads) for plan in plans) == 1
    out = [plan for plan in plans if plan.saves][:3]
    assert all(plan.sequences for plan in out), "a step goes with each piece"
    assert sum(bool(plan.loads) for plan in plans) >= 3
    check_answers(desk)


def num_chosen(desk: Desk) -> str:
    return next(f"old {number}" for number in range(3) if sequence_of(desk, f"old {number}").slot is None)


@pytest.mark.parametrize("when", ["while it is saved", "while it is away", "while it is loaded"])
def test_a_preempted_sequence_may_be_cancelled_at_any_time(when: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (pieces, transfers):
        monkeypatch.setattr(module, "MAX_BYTES", 64 * TOKEN_BYTES)
    desk = busy()
    desk.submit("new", text(9, 30), 60, priority=1)
    desk.until(lambda: desk.scheduler.num_preempted == 1)
    victim = num_chosen(desk)
    sequence = sequence_of(desk, victim)
    if when != "while it is saved":
        desk.until(lambda: not sequence.is_parking)
        assert sequence.pins
    if when == "while it is loaded":
        desk.until(lambda: sequence.slot is not None)
        assert sequence.loads
    desk.cancel(victim)
    assert not sequence.is_parking
    desk.finish()
    assert desk.ends[victim, 0] == "cancelled"
    assert sequence.pins == []
    num_drawn = len(desk.drawn[victim])
    number = int(victim.split()[1])
    again = (*text(number, 100), *desk.drawn[victim])
    desk.run("again", again, 2, owner="A")
    assert desk.computed["again"] <= CHUNK if when == "while it is saved" else desk.computed["again"] <= 2
    assert desk.drawn[victim] + desk.drawn["again"] == alone(text(number, 100), num_drawn + 2)
    everything = desk.store.budget_bytes // TOKEN_BYTES - 1
    assert desk.store.reserve(everything * TOKEN_BYTES), "nothing of it is pinned any more"


def test_a_deadline_that_comes_while_it_is_away_ends_it() -> None:
    desk = busy(deadline_at=500.0)
    desk.submit("new", text(9, 30), 200, priority=1)
    desk.until(lambda: desk.scheduler.num_preempted == 1)
    victim = num_chosen(desk)
    desk.now = 500.0
    desk.take(desk.scheduler.expire(desk.now))
    assert desk.ends[victim, 0] == "deadline"
    desk.finish()
    assert desk.drawn["new"] == alone(text(9, 30), 200)


def test_a_step_that_fails_while_one_is_saved_ends_those_of_the_step_alone() -> None:
    desk = busy()
    desk.submit("new", text(9, 30), 3, priority=1)
    desk.until(lambda: desk.scheduler.num_preempted == 1)
    victim = num_chosen(desk)
    plan = desk.begin()
    assert plan is not None
    assert plan.saves
    desk.take(desk.scheduler.fail(plan, EdgeqwenError("boom", code="engine"), now=desk.now))
    desk.scheduler.check()
    desk.finish()
    assert victim not in desk.failed
    assert desk.drawn[victim] == alone(text(int(victim.split()[1]), 100), LONG_ANSWER), "what was lost is computed"


# Room in the budget.


def test_a_request_beyond_the_whole_budget_is_refused_with_both_numbers() -> None:
    desk = Desk(budget=500)
    with pytest.raises(EdgeqwenError, match=r"400 .* 101 take 2004 bytes .* 2000 \(kv.memory_mb\)") as caught:
        desk.submit("a", text(1, 400), 101)
    assert caught.value.code == "too_long"
    desk.submit("b", text(1, 400), 100)
    desk.finish()


def test_requests_that_do_not_fit_together_run_one_after_another() -> None:
    desk = Desk(budget=500)
    prompts = {str(number): text(number, 250) for number in range(6)}
    for rid, prompt in prompts.items():
        desk.submit(rid, prompt, 30, owner=rid)
    desk.finish()
    assert all(desk.drawn[rid] == alone(prompt, 30) for rid, prompt in prompts.items())
    assert all(len(plan.sequences) <= 1 for plan in desk.plans)


def test_room_that_ends_with_several_at_once_goes_to_one_that_fits() -> None:
    """The bound is looked at in every step by the desk."""
    desk = Desk(budget=700, num_slots=8)
    for number in range(20):
        desk.submit(str(number), text(number % 7, 60 + 29 * number % 400), 5 + 11 * number % 100, owner=str(number % 3))
    desk.finish()
    assert len(desk.ends) == 20
    for number in range(20):
        answer = alone(text(number % 7, 60 + 29 * number % 400), 5 + 11 * number % 100)
        assert desk.drawn[str(number)] == answer


def test_what_is_kept_for_one_that_waits_goes_when_it_keeps_all_from_running() -> None:
    desk = Desk(num_slots=2, capacity=1024, budget=900)
    desk.submit("old", text(0, 100), 100)
    desk.submit("away", text(1, 100), 150)
    desk.until(lambda: len(desk.drawn["away"]) > MIN_TOKENS)
    desk.submit("short", text(2, 30), 3, priority=1)
    desk.until(lambda: desk.scheduler.num_preempted == 1)
    desk.submit("urgent", text(3, 800), 90, priority=1)
    desk.finish()
    assert desk.drawn["urgent"] == alone(text(3, 800), 90)
    assert desk.drawn["away"] == alone(text(1, 100), 150), "of this one something was computed twice"
    assert list(desk.ends) == [("short", 0), ("old", 0), ("urgent", 0), ("away", 0)]


def test_small_requests_do_not_overtake_a_large_one_for_ever() -> None:
    desk = Desk(budget=1000)
    for number in range(3):
        desk.submit(f"s{number}", text(number, 100), 40 + 20 * number, owner="A")
    desk.until(lambda: bool(desk.drawn["s2"]))
    desk.submit("large", text(50, 700), 100, owner="A")
    number = 3
    while not desk.drawn["large"]:
        if desk.scheduler.num_queued < 3:
            desk.submit(f"s{number}", text(number, 100), 60, owner="A")
            number += 1
        assert desk.step() is not None
        assert number < 20, "it is starved"
    assert not desk.drawn["s3"]
    desk.finish()
