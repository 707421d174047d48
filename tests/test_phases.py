"""Thoughts and forms, token by token: what may come, what is forced, what is drawn for it."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from edgeqwen.core.request import Request, SamplingParams, Thinking
from edgeqwen.sampling import Sampler

NUM_TOKENS = 20
EOS, OPEN, CLOSE, NEWLINE, EMPTY_LINE = 0, 1, 2, 3, 4
CLOSING = (NEWLINE, CLOSE, EMPTY_LINE)
THINKING = Thinking(OPEN, CLOSE, CLOSING)


@dataclass
class Spelling:
    """A form: exactly these tokens, one after another; an end token at the end."""

    tokens: tuple[int, ...]
    taken: list[int] = field(default_factory=list)

    def begin(self) -> Spelling:
        return Spelling(self.tokens)

    @property
    def is_over(self) -> bool:
        return len(self.taken) == len(self.tokens)

    def prepare(self) -> None:
        pass

    def mask(self, row: NDArray[np.float32]) -> None:
        wanted = EOS if self.is_over else self.tokens[len(self.taken)]
        kept = row[wanted]
        row.fill(-np.inf)
        row[wanted] = kept

    def take(self, token: int) -> None:
        assert token == self.tokens[len(self.taken)]
        self.taken.append(token)


def sampler(
    *,
    spelt: tuple[int, ...] | None = None,
    budget: int | None = None,
    starts: bool = False,
    may_open: bool = True,
    has_markers: bool = True,
    min_tokens: int = 0,
    temperature: float = 0.0,
) -> Sampler:
    thinking = Thinking(OPEN, CLOSE, CLOSING, budget, may_open) if has_markers else None
    request = Request(
        rid="r",
        owner="1000",
        prompt_ids=(5,),
        sampling=SamplingParams(temperature=temperature, seed=7),
        max_tokens=100,
        min_tokens=min_tokens,
        splits_reasoning=has_markers,
        starts_in_reasoning=starts,
        constraint=None if spelt is None else Spelling(spelt),
        thinking=thinking,
    )
    return Sampler(request, choice=0, num_tokens=NUM_TOKENS, eos_token_ids=(EOS,))


def wish(*tokens: int) -> NDArray[np.float32]:
    """Logits of a model that likes these best, in this order."""
    row = np.zeros(NUM_TOKENS, np.float32)
    for rank, token in enumerate(tokens):
        row[token] = 10.0 - rank
    return row


def said(chooser: Sampler, *wishes: NDArray[np.float32]) -> list[int]:
    """What is drawn, until it is over."""
    tokens = []
    for row in wishes:
        before = row.copy()
        sampled = chooser.sample(row)
        assert (row == before).all(), "logits are left as they were"
        tokens.append(sampled.token)
        if sampled.is_last:
            break
    return tokens


def test_a_form_begins_at_once_where_there_are_no_thoughts() -> None:
    chooser = sampler(spelt=(8, 9), has_markers=False)
    assert said(chooser, *[wish(OPEN, EOS)] * 5) == [8, 9]


def test_a_model_may_think_before_the_form_begins() -> None:
    chooser = sampler(spelt=(8, 9))
    wishes = [wish(OPEN), wish(10), wish(EOS, 11), wish(CLOSE), *[wish(10)] * 5]
    assert said(chooser, *wishes) == [OPEN, 10, 11, CLOSE, EMPTY_LINE, 8, 9]


def test_a_model_thinks_only_at_the_very_start() -> None:
    assert said(sampler(spelt=(8, 9)), wish(8), wish(OPEN), wish(OPEN)) == [8, 9]


def test_no_thought_is_opened_where_there_is_to_be_none() -> None:
    assert said(sampler(spelt=(8,), may_open=False), wish(OPEN)) == [8]


def test_a_prompt_that_opens_a_thought_has_the_form_begin_behind_it() -> None:
    chooser = sampler(spelt=(8,), starts=True)
    assert said(chooser, wish(EOS, 10), wish(CLOSE), wish(10), wish(10)) == [10, CLOSE, EMPTY_LINE, 8]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(("budget", "thought"), [(0, []), (1, [10]), (3, [10, 10, 10])])
def test_a_thought_is_closed_when_its_budget_is_spent(budget: int, thought: list[int], temperature: float) -> None:
    chooser = sampler(budget=budget, starts=True, temperature=temperature)
    wishes = [100 * wish(10)] * (budget + 4)
    assert said(chooser, *wishes) == [*thought, *CLOSING, 10]


def test_a_thought_that_the_model_opens_has_a_budget_too() -> None:
    chooser = sampler(budget=2)
    assert said(chooser, wish(OPEN), *[wish(10)] * 6) == [OPEN, 10, 10, *CLOSING, 10]


def test_a_thought_that_ends_by_itself_is_not_closed_again() -> None:
    chooser = sampler(budget=2, starts=True)
    assert said(chooser, wish(10), wish(CLOSE), *[wish(10)] * 4) == [10, CLOSE, 10, 10, 10, 10]


def test_thoughts_of_an_answer_share_its_budget() -> None:
    chooser = sampler(budget=2, starts=True)
    wishes = [wish(10), wish(CLOSE), wish(11), wish(OPEN), *[wish(10)] * 5]
    assert said(chooser, *wishes) == [10, CLOSE, 11, OPEN, 10, *CLOSING, 10]


def test_a_budget_means_nothing_where_there_is_no_thought() -> None:
    assert said(sampler(budget=0), wish(10), wish(11), wish(EOS)) == [10, 11, EOS]


def test_the_form_follows_a_thought_that_was_closed() -> None:
    chooser = sampler(spelt=(8, 9), budget=1, starts=True)
    assert said(chooser, *[wish(10)] * 8) == [10, *CLOSING, 8, 9]


def test_a_thought_has_no_end_token_when_an_answer_must_follow() -> None:
    assert said(sampler(budget=9, starts=True), wish(EOS, 10)) == [10]
    assert said(sampler(spelt=(8,), starts=True), wish(EOS, 10)) == [10]
    assert said(sampler(starts=True), wish(EOS, 10)) == [EOS], "as ever where nothing was asked for"


def test_an_answer_complete_in_its_form_ends_before_its_least_tokens() -> None:
    assert said(sampler(spelt=(8,), has_markers=False, min_tokens=10), *[wish(10)] * 5) == [8]
    chooser = sampler(spelt=(), has_markers=False, min_tokens=10)
    assert chooser.sample(wish(10)).token == EOS, "nothing else may come"


@given(
    budget=st.integers(0, 6),
    wishes=st.lists(st.integers(1, NUM_TOKENS - 1), min_size=40, max_size=40),
    starts=st.booleans(),
    spelt=st.none() | st.lists(st.integers(5, 19), min_size=1, max_size=4),
)
def test_no_wish_makes_a_thought_longer_or_breaks_the_form(
    budget: int, wishes: list[int], starts: bool, spelt: list[int] | None
) -> None:
    tokens = said(
        sampler(spelt=None if spelt is None else tuple(spelt), budget=budget, starts=starts), *map(wish, wishes)
    )
    is_inside, num_inside = starts, 0
    for place, token in enumerate(tokens[:-1]):  # the last may be the beginning of what closes a thought
        if token in (OPEN, CLOSE):
            is_inside = token == OPEN
        else:
            is_closing = tuple(tokens[place : place + 2]) == CLOSING[:2] and num_inside >= budget
            num_inside += is_inside and not is_closing
    assert num_inside <= budget
    if spelt is not None:
        assert tokens[-len(spelt) :] == spelt


@given(seed=st.integers(0, 1 << 30), budget=st.integers(0, 3))
def test_what_is_forced_uses_up_no_chance(seed: int, budget: int) -> None:
    rng = np.random.default_rng(seed)
    rows = [rng.standard_normal(NUM_TOKENS).astype(np.float32) for _ in range(30)]
    chooser, free = sampler(budget=budget, starts=True, temperature=1.0), sampler(has_markers=False, temperature=1.0)
    for row in rows:
        row[[EOS, OPEN, CLOSE]] = -np.inf
    forced = said(chooser, *rows[: budget + 3])
    assert tuple(forced[budget:]) == CLOSING
    drawn = said(free, *rows[:budget], *rows[budget + 3 :])
    assert forced[:budget] + said(chooser, *rows[budget + 3 :]) == drawn
