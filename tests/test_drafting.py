"""How wide a step is made: what steps cost is learnt as they come, and guesses are as many as pay."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgeqwen.core.request import Request, SamplingParams
from edgeqwen.core.step import Chunk, RuntimeSpec
from edgeqwen.sampling.speculation import Drafter
from edgeqwen.scheduler.costs import WIDTHS, StepCosts
from edgeqwen.scheduler.drafting import MAX_ROWS, Drafting
from edgeqwen.scheduler.sequence import Sequence

PHRASE = tuple(range(100, 180))


def ratio(costs: StepCosts, width: int, span: int = 1) -> float:
    return costs.ratios(span)[WIDTHS.index(width)]


def feed(costs: StepCosts, seconds: Callable[[int], float], widths: Iterable[int], *, noise: float = 0.0) -> None:
    rng = random.Random(1)
    for width in widths:
        costs.observe(1, width, seconds(width) * (1 + noise * rng.uniform(-1, 1)))


def test_without_any_knowledge_wide_steps_are_thought_a_little_dearer() -> None:
    ratios = StepCosts().ratios(1)
    assert ratios[0] == 1.0
    assert list(ratios) == sorted(ratios)
    assert 1.0 < ratios[1] < 1.2
    assert ratios[-1] < WIDTHS[-1] / 2


def test_what_the_runtime_timed_is_the_start() -> None:
    costs = StepCosts(((1, 0.010), (4, 0.016), (16, 0.040)))
    assert ratio(costs, 4) == pytest.approx(1.6)
    assert ratio(costs, 8) == pytest.approx(2.4)
    assert ratio(costs, 32) == pytest.approx(7.2), "further on the last line"
    assert ratio(costs, 4, span=4) == pytest.approx(2.5), "4 sequences of 4 rows beside 4 of 1"
    assert StepCosts(((2, 0.01),)).ratios(1) == (1.0,) * len(WIDTHS)
    assert StepCosts(((1, 0.02), (4, 0.01))).ratios(1)[-1] == 1.0, "a timing that falls is noise"


def test_costs_are_learnt_from_a_few_steps_and_through_noise() -> None:
    costs = StepCosts()
    feed(costs, lambda width: 0.030 + 0.006 * (width - 1), [1, 8, 1, 16, 8, 1, 16, 8, 16, 1] * 4, noise=0.2)
    assert ratio(costs, 8) == pytest.approx(2.4, rel=0.2)
    assert ratio(costs, 16) == pytest.approx(4.0, rel=0.2)
    assert 2.0 < ratio(costs, 12) < 4.2, "between its neighbours, though never seen"


def test_a_level_that_drifts_is_not_taken_for_the_cost_of_width() -> None:
    costs = StepCosts()
    feed(costs, lambda width: 0.03 if width == 1 else 0.045, [1, 8] * 20)
    for step in range(2000):  # the context grows, at one row a step
        costs.observe(1, 1, 0.03 * (1 + step / 1000))
    feed(costs, lambda width: 0.09 if width == 1 else 0.135, [1, 8] * 5)
    assert ratio(costs, 8) == pytest.approx(1.5, rel=0.15)


def test_one_strange_step_changes_little() -> None:
    costs = StepCosts()
    feed(costs, lambda width: 0.03 if width == 1 else 0.045, [1, 8] * 20)
    costs.observe(1, 8, 60.0)
    assert ratio(costs, 8) < 2.0
    costs.observe(1, 1, 0.0)


def test_what_was_dear_long_ago_is_tried_again() -> None:
    costs = StepCosts()
    feed(costs, lambda width: 0.03 if width == 1 else 0.3, [1, 8] * 6)
    assert ratio(costs, 8) > 4
    feed(costs, lambda _: 0.03, [1] * 3000)
    assert ratio(costs, 8) < 1.8


@given(st.lists(st.tuples(st.integers(1, 4), st.integers(1, 40), st.floats(1e-4, 10.0)), max_size=60))
def test_ratios_never_fall_and_begin_at_one(steps: list[tuple[int, int, float]]) -> None:
    costs = StepCosts()
    for span, width, duration_s in steps:
        costs.observe(span, width, duration_s)
        ratios = costs.ratios(span)
        assert ratios[0] == 1.0
        assert list(ratios) == sorted(ratios)


def sequence(slot: int, drawn: Iterable[int] = (), *, max_tokens: int = 500) -> Sequence:
    """A decoding sequence whose prompt is the phrase."""
    made = Sequence(Request("r", "o", PHRASE, SamplingParams(), max_tokens), 0, slot=slot)
    made.drafter = Drafter(PHRASE, num_tokens=1000)
    for token in drawn:
        made.generated.append(token)
        made.drafter.push(token)
    return made


def copying(slot: int, **given: int) -> Sequence:
    return sequence(slot, PHRASE[:20], **given)


def drafting(*, slope: float = 0.01, max_chunk: int = 256, is_on: bool = True) -> Drafting:
    """Where a row costs `slope` of what a step of one row costs; a few such steps have been seen."""
    costs = tuple((rows, 1.0 + slope * (rows - 1)) for rows in (1, 64))
    spec = RuntimeSpec(8, 512, 1000, 1000, 1, max_chunk, costs)
    made = Drafting(spec, eos_token_ids=frozenset(), is_on=is_on)
    for span in range(1, 9):
        narrow_steps(made, 3, span=span)
    return made


def narrow_steps(made: Drafting, number: int, *, span: int = 1) -> None:
    for _ in range(number):
        made.observe([Chunk(slot, 9, (1,)) for slot in range(span)], [1] * span, 1.0)


def lengths(made: Drafting, *sequences: Sequence) -> list[int]:
    return [len(draft) for draft in made.drafts(sequences)]


def test_a_copy_gets_wide_steps_where_rows_are_cheap_and_narrower_ones_where_they_are_not() -> None:
    cheap, medium, dear = (lengths(drafting(slope=slope), copying(0))[0] for slope in (0.001, 0.1, 2.0))
    assert cheap > medium > 0
    assert dear == 0
    assert drafting(slope=0.001).drafts([copying(0)])[0] == PHRASE[20 : 20 + cheap]


def test_a_step_has_one_width_that_pays_for_all_its_sequences() -> None:
    free = [sequence(slot, [900 + slot, 950]) for slot in (1, 2, 3)]
    assert lengths(drafting(slope=0.05), copying(0))[0] > 4
    alone = lengths(drafting(slope=0.3), copying(0))
    together = lengths(drafting(slope=0.3), copying(0), *free)
    assert alone[0] > 0
    assert together == [0, 0, 0, 0], "the others' idle rows would cost more than one gains"
    both = lengths(drafting(slope=0.05), copying(0), copying(1))
    assert both[0] == both[1] > 0


def test_steps_without_guesses_come_first_and_now_and_then_between() -> None:
    """A copy from the first token on would leave nothing to compare the wide steps with."""
    made = Drafting(RuntimeSpec(8, 512, 1000, 1000, 1, 256), eos_token_ids=frozenset(), is_on=True)
    assert lengths(made, copying(0)) == [0]
    narrow_steps(made, 3)
    num_wide = 0
    while draft := made.drafts([copying(0)])[0]:
        made.observe([Chunk(0, 9, (1, *draft))], [1 + len(draft)], 1.2)
        num_wide += 1
    assert num_wide == 64
    narrow_steps(made, 1)
    assert lengths(made, copying(0))[0] > 0


def test_guesses_keep_to_the_budget_and_to_the_rows_of_a_step() -> None:
    made = drafting(slope=0.0)
    assert lengths(made, copying(0, max_tokens=26)) == [5], "26, less 20, less the one that is drawn anyway"
    assert lengths(made, copying(0, max_tokens=21)) == [0]
    assert lengths(made, copying(0)) == [WIDTHS[-1] - 1]
    eight = lengths(made, *(copying(slot) for slot in range(8)))
    assert eight == [MAX_ROWS // 8 - 1] * 8
    assert lengths(drafting(slope=0.0, max_chunk=5), copying(0)) == [4]
    assert lengths(drafting(slope=0.0, max_chunk=1), copying(0)) == [0]


def test_guesses_that_are_hardly_ever_right_are_left_out_of_a_wide_step() -> None:
    wrong = sequence(1)
    for number in range(40):
        for token in (PHRASE[0], PHRASE[1], 500 + number):
            wrong.drafter.push(token)  # type: ignore[union-attr]  # it was given one
    wrong.drafter.push(PHRASE[0])  # type: ignore[union-attr]  # it was given one
    wrong.drafter.push(PHRASE[1])  # type: ignore[union-attr]  # it was given one
    first, second = lengths(drafting(slope=0.0), copying(0), wrong)
    assert first > 8
    assert second <= 1


def test_a_request_may_decline_and_the_engine_may_be_told_to_leave_it() -> None:
    for request, is_on, expected in [
        (Request("r", "o", PHRASE, SamplingParams(), 9), True, True),
        (Request("r", "o", PHRASE, SamplingParams(), 9), False, False),
        (Request("r", "o", PHRASE, SamplingParams(), 9, may_speculate=False), True, False),
        (Request("r", "o", PHRASE, SamplingParams(), 2), True, False),
    ]:
        made = Sequence(request, 0, slot=0)
        drafting(is_on=is_on).begin(made)
        assert (made.drafter is not None) == expected
        assert lengths(drafting(is_on=is_on), made) == [0]
