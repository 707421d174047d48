"""Prompts computed while there is nothing else to do: never in anybody's way, and never twice."""

from __future__ import annotations

import pytest

from edgeqwen.core.request import Request, SamplingParams
from edgeqwen.errors import EdgeqwenError
from edgeqwen.kvcache import SHARED
from edgeqwen.scheduler.background import MOST_WISHES, Background
from tests.scheduling import CHUNK, Desk, alone, text

PROMPT = text(1, 500)


def test_a_wish_is_computed_when_nothing_else_is_to_do() -> None:
    desk = Desk()
    desk.submit("a", text(2, 100), 20)
    desk.want("k", PROMPT)
    desk.until(lambda: ("a", 0) in desk.ends)
    assert desk.computed[""] == 0
    desk.finish()
    assert desk.computed[""] == 500
    background = desk.scheduler.background
    assert (background.num_done, background.num_tokens, len(background)) == (1, 500, 0)
    assert desk.run("b", (*PROMPT, 7)) == 1
    assert desk.drawn["b"] == alone((*PROMPT, 7), 4)


def test_it_is_given_up_at_the_end_of_its_piece_when_a_request_comes() -> None:
    desk = Desk(num_slots=1)
    desk.want("k", PROMPT)
    for _ in range(2):
        desk.step()
    plan = desk.begin()
    assert plan is not None
    assert plan.sequences == (("", 0),)
    desk.submit("a", text(2, 100), 3)
    desk.land(plan)
    num_plans = len(desk.plans)
    desk.until(lambda: bool(desk.drawn["a"]))
    with_work = [plan for plan in desk.plans[num_plans:] if plan.batch.chunks]
    assert [plan.sequences[0][0] for plan in with_work] == ["a", "a"], "nothing of the background any more"
    assert desk.computed[""] == 3 * CHUNK
    desk.finish()
    assert desk.computed[""] == 500, "and it has gone on from where it was"
    background = desk.scheduler.background
    assert (background.num_done, background.num_given_up) == (1, 1)


def test_it_makes_its_way_between_requests_however_often_it_is_given_up() -> None:
    desk = Desk()
    desk.want("k", PROMPT)
    number = 0
    while len(desk.scheduler.background):
        desk.step()
        desk.step()
        if len(desk.scheduler.background):
            desk.submit(f"a{number}", text(2 + number, 10), 2)
            desk.until(lambda: desk.scheduler.is_idle)
        number += 1
        assert number < 30
    desk.finish()
    assert desk.computed[""] == 500
    assert desk.scheduler.background.num_given_up >= 3


def test_a_request_for_the_very_prompt_goes_on_from_what_is_there() -> None:
    desk = Desk()
    desk.want("k", PROMPT)
    for _ in range(3):
        desk.step()
    assert desk.run("a", PROMPT) == 500 - 3 * CHUNK
    assert desk.computed[""] == 3 * CHUNK, "and the wish is fulfilled with it"
    assert desk.scheduler.background.num_done == 1


def test_what_is_known_is_not_computed() -> None:
    desk = Desk()
    desk.run("a", (*PROMPT, 1))
    num_plans = len(desk.plans)
    desk.want("k", PROMPT)
    desk.finish()
    assert len(desk.plans) == num_plans
    assert desk.scheduler.background.num_done == 1
    assert desk.scheduler.background.num_tokens == 0


def test_only_what_is_not_known_is_computed() -> None:
    desk = Desk()
    desk.run("a", PROMPT[:300])
    desk.want("k", PROMPT)
    desk.finish()
    assert desk.computed[""] == 200


def test_wishes_are_fulfilled_in_order_and_the_last_of_a_key_counts() -> None:
    desk = Desk()
    desk.want("k", text(2, 100))
    desk.want("l", text(3, 150))
    desk.want("k", text(4, 70))
    desk.finish()
    assert desk.computed[""] == 220
    assert desk.run("a", text(2, 100)) == 100
    assert desk.run("b", text(3, 150)) == 1
    assert desk.run("c", text(4, 70)) == 1


@pytest.mark.parametrize("num_steps", [0, 2])
def test_a_wish_that_is_forgotten_is_not_computed_further(num_steps: int) -> None:
    desk = Desk()
    desk.want("k", PROMPT)
    for _ in range(num_steps):
        desk.step()
    desk.scheduler.forget("k")
    desk.scheduler.forget("none")
    desk.scheduler.check()
    desk.finish()
    assert desk.computed[""] == num_steps * CHUNK
    assert len(desk.scheduler.background) == 0


def test_a_wish_may_be_forgotten_or_replaced_while_its_piece_is_computed() -> None:
    desk = Desk()
    desk.want("k", PROMPT)
    for replaces in (False, True):
        plan = desk.begin()
        assert plan is not None
        if replaces:
            desk.want("k", (*PROMPT[:400], 9, 9))
        else:
            desk.scheduler.forget("k")
        desk.land(plan)
        desk.want("k", PROMPT) if not replaces else None
    desk.finish()
    assert desk.computed[""] == 402
    assert desk.scheduler.background.num_done == 1


def test_a_step_that_fails_drops_the_wish() -> None:
    desk = Desk()
    desk.want("k", PROMPT)
    desk.step()
    plan = desk.begin()
    assert plan is not None
    assert desk.scheduler.fail(plan, EdgeqwenError("boom", code="engine"), now=desk.now) == []
    desk.scheduler.check()
    desk.finish()
    assert desk.computed[""] == CHUNK
    assert len(desk.scheduler.background) == 0
    assert desk.store.memory_bytes == 0, "what a slot holds after that is not believed"
    desk.want("k", PROMPT)
    desk.finish()
    assert desk.computed[""] == CHUNK + 500


def test_what_has_no_room_is_dropped_and_keeps_nobody_from_anything() -> None:
    desk = Desk(budget=400)
    desk.want("k", PROMPT)
    desk.want("too long for a slot", text(3, desk.capacity + 1))
    desk.want("l", text(2, 100))
    desk.finish()
    assert desk.computed[""] == 100
    assert len(desk.scheduler.background) == 0
    assert desk.run("a", text(2, 100)) == 1


def test_it_takes_the_place_of_what_is_less_worth() -> None:
    desk = Desk(budget=700)
    desk.run("a", text(2, 400))
    desk.want("k", text(3, 300))
    desk.finish()
    assert desk.run("b", (*text(3, 300), 4)) == 1


def test_no_more_wishes_are_kept_than_are_of_use() -> None:
    background = Background()
    for number in range(MOST_WISHES + 10):
        background.want(str(number), Request("", "o", (number,), SamplingParams(), 0))
    assert len(background) == MOST_WISHES
    sequence = background.next()
    assert sequence is not None
    assert sequence.request.prompt_ids == (10,), "the oldest are forgotten"
    assert background.next() is sequence


def test_a_pinned_prompt_gives_way_to_a_request_that_needs_all_the_room() -> None:
    """It was accepted because it fits the budget; so it runs, and what is kept for good comes back afterwards."""
    desk = Desk(budget=600)
    system = text(6, 200)
    desk.scheduler.keep_for_good(SHARED, system)
    desk.want("system", system, owner=SHARED)
    desk.finish()
    desk.submit("a", text(1, 500), 100)
    desk.finish()
    assert desk.drawn["a"] == alone(text(1, 500), 100)
    desk.run("b", text(2, 300), 100)
    desk.finish()
    assert desk.run("c", system + text(7, 10)) == 10
