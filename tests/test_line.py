"""Whose turn it is: by urgency, by what each owner has had, by lane, by arrival. Counted in plans."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgeqwen.core.request import PRIORITIES, Request, SamplingParams
from edgeqwen.scheduler import StepPlan
from edgeqwen.scheduler.line import AGING_S, Shares
from edgeqwen.scheduler.line import Line as SchedulerLine
from edgeqwen.scheduler.sequence import Sequence as Seq
from tests.scheduling import CHUNK, Desk, alone, pieces, text

LONG = 7000


def place(plans: Sequence[StepPlan], rid: str) -> int:
    """How many pieces of other prompts come before the first of `rid`."""
    return pieces(plans).index(rid)


@pytest.mark.parametrize("others", [1, 10])
def test_between_two_decode_steps_of_a_stream_there_is_one_piece_of_a_prompt(others: int) -> None:
    desk = Desk(num_slots=8)
    for rid in ("a", "b", "c"):
        desk.submit(rid, text(ord(rid), 30), 400, owner=rid)
    desk.until(lambda: all(len(desk.drawn[rid]) > 2 for rid in "abc"))
    num_plans = len(desk.plans)
    desk.submit("long", text(9, 3000), owner="d")
    for number in range(others):
        desk.step()
        desk.submit(f"other {number}", text(20 + number, 500), owner=f"e{number % 3}")
    desk.until(lambda: bool(desk.drawn["long"]))
    during = desk.plans[num_plans:]
    assert all(not (one.is_prefill and two.is_prefill) for one, two in pairwise(during))
    assert all({("a", 0), ("b", 0), ("c", 0)} <= set(plan.sequences) for plan in during if not plan.is_prefill)
    desk.finish()
    assert all(desk.drawn[rid] == alone(text(ord(rid), 30), 400) for rid in "abc")


def test_of_two_owners_each_has_every_second_piece_however_many_requests_it_has() -> None:
    desk = Desk(num_slots=4)
    for number in range(16):
        desk.submit(f"a{number}", text(number, 400), 1, owner="A")
    for _ in range(3):
        desk.step()
    num_plans = len(desk.plans)
    desk.submit("b", text(99, 10 * CHUNK), 1, owner="B")
    desk.until(lambda: bool(desk.drawn["b"]))
    order = pieces(desk.plans[num_plans:])
    assert order.count("b") == 10
    assert all("b" in pair for pair in pairwise(order))
    desk.finish()


def test_an_owner_that_comes_back_has_not_saved_up() -> None:
    desk = Desk(num_slots=4)
    desk.submit("early", text(1, 100), 1, owner="B")
    desk.finish()
    desk.submit("a", text(2, 3000), 1, owner="A")
    for _ in range(20):
        desk.step()
    num_plans = len(desk.plans)
    desk.submit("b", text(3, 1500), 1, owner="B")
    desk.finish()
    order = pieces(desk.plans[num_plans:])
    both = range(order.index("b"), len(order) - order[::-1].index("b"))
    assert all(abs(order[:stop].count("a") - order[:stop].count("b")) <= 1 for stop in both)


def test_decoding_counts_as_engine_time() -> None:
    """An owner whose sequences decode has had its share of these steps."""
    desk = Desk(num_slots=8)
    for number in range(4):
        desk.submit(f"a{number}", text(number, 20), 300, owner="A")
    desk.submit("b", text(8, 20), 2, owner="B", ignore_eos=True)
    desk.submit("b2", text(9, 20), 300, owner="B")
    desk.until(lambda: len(desk.drawn["a3"]) > 100)
    num_plans = len(desk.plans)
    desk.submit("next a", text(30, 300), 1, owner="A")
    desk.submit("next b", text(31, 300), 1, owner="B")
    desk.until(lambda: bool(desk.drawn["next b"]))
    assert "next a" not in pieces(desk.plans[num_plans:])
    desk.finish()


def test_a_short_prompt_waits_for_one_piece_of_a_long_one() -> None:
    desk = Desk()
    desk.submit("long", text(1, LONG), 1)
    for _ in range(4):
        desk.step()
    num_plans = len(desk.plans)
    plan = desk.begin()  # one is under way
    assert plan is not None
    desk.submit("short", text(2, 50), 1)
    desk.land(plan)
    desk.until(lambda: bool(desk.drawn["short"]))
    assert pieces(desk.plans[num_plans:]) == ["long", "short"]
    desk.finish()
    assert desk.drawn["long"] == alone(text(1, LONG), 1)


def test_a_long_prompt_goes_on_at_half_its_speed_when_short_ones_keep_coming() -> None:
    desk = Desk()
    desk.submit("long", text(1, LONG), 1)
    number = 0
    while not desk.drawn["long"]:
        if desk.scheduler.num_queued < 3:
            desk.submit(f"s{number}", text(2 + number, 50), 1)
            number += 1
        desk.step()
    order = pieces(desk.plans)
    while_long = order[: (LONG - 1000) // CHUNK]
    assert all("long" in pair for pair in pairwise(while_long))
    assert sum(rid != "long" for rid in while_long) >= len(while_long) // 2 - 1, "and so do the short ones"
    desk.finish()


def test_the_most_urgent_comes_first_and_among_equals_the_first_that_came() -> None:
    desk = Desk(num_slots=1)
    for rid, priority in (("l", -1), ("n1", 0), ("h1", 1), ("n2", 0), ("h2", 1)):
        desk.submit(rid, text(ord(rid[0]) + len(rid), 20), 1, priority=priority)
    desk.finish()
    assert pieces(desk.plans) == ["h1", "h2", "n1", "n2", "l"]


def test_an_urgent_request_goes_before_the_rest_of_a_prompt_that_is_being_computed() -> None:
    desk = Desk()
    desk.submit("n", text(1, 500), 1)
    desk.step()
    desk.submit("h", text(2, 2 * CHUNK), 1, priority=1)
    desk.finish()
    assert pieces(desk.plans)[:4] == ["n", "h", "h", "n"]


def test_a_request_that_is_not_urgent_is_served_though_urgent_ones_keep_coming() -> None:
    desk = Desk(num_slots=1)
    desk.submit("low", text(1, 20), 1, priority=-1)
    number = 0
    while not desk.drawn["low"]:
        for _ in range(2 - desk.scheduler.num_queued // 2):
            desk.submit(f"h{number}", text(2 + number, 200), 8, priority=1, may_cache=False)
            number += 1
        desk.step()
        assert desk.now < 4 * AGING_S
    assert desk.now >= 2 * AGING_S, "until then those that came first were more urgent"
    assert number > 100
    desk.finish()


@pytest.mark.parametrize("name", PRIORITIES)
def test_urgency_grows_by_one_with_each_span_of_waiting(name: str) -> None:
    line = SchedulerLine(lambda num_tokens: 0.0)

    def waiting(rid: str, priority: int, since: float, number: int) -> Seq:
        return Seq(Request(rid, "o", (1,), SamplingParams(), 1, priority=priority), 0, number=number, since=since)

    old = waiting("old", PRIORITIES[name], 0.0, 0)
    urgent = waiting("urgent", 1, 2 * AGING_S, 1)
    num_levels = 1 - PRIORITIES[name]
    assert line.order([urgent, old], num_levels * AGING_S - 0.001)[0] is (urgent if num_levels else old)
    assert line.order([urgent, old], num_levels * AGING_S)[0] is old


ROUNDING_S = 1e-9
"""Of sums of some dozen steps."""


@given(
    steps=st.lists(
        st.tuples(st.sets(st.sampled_from("abc"), min_size=1), st.sampled_from("abc"), st.floats(0.001, 2)),
        max_size=60,
    )
)
def test_owners_that_stay_are_never_further_apart_than_the_longest_step(
    steps: list[tuple[set[str], str, float]],
) -> None:
    """The one that had least is served each time; one that joins starts where the one that had least stands."""
    shares = Shares()
    for present, _, seconds in steps:
        shares.keep(present)
        had = {owner: shares.had_s(owner) for owner in present}
        assert max(had.values()) - min(had.values()) <= 2.0 + ROUNDING_S
        shares.charge(min(present, key=lambda owner: (shares.had_s(owner), owner)), seconds)


def test_an_owner_that_has_left_is_not_charged() -> None:
    shares = Shares()
    shares.keep("a")
    shares.charge("a", 1.0)
    shares.charge("gone", 5.0)
    shares.keep(["a", "gone"])
    assert (shares.had_s("a"), shares.had_s("gone")) == (1.0, 1.0)
