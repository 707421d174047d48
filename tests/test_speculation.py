"""Guesses from what stands before: where they are found, how far they are trusted, and what they never hold."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgeqwen.sampling.speculation import MAX_PAST, Drafter, LookupIndex

A, B, C, D, E, F, G, H, X, Y = range(10, 20)
SOURCE = tuple(range(100, 160))


def drafter(prompt: Sequence[int], *, num_tokens: int = 1000, never: frozenset[int] = frozenset()) -> Drafter:
    return Drafter(prompt, num_tokens=num_tokens, never=never)


def told(prompt: Sequence[int], tokens: Sequence[int]) -> Drafter:
    """A drafter after `tokens` were drawn."""
    made = drafter(prompt)
    for token in tokens:
        made.push(token)
    return made


def past_at(tokens: Sequence[int], place: int) -> int:
    """By definition: how many tokens before `place` equal those at the end."""
    past = 0
    while past < min(place, MAX_PAST) and tokens[place - 1 - past] == tokens[-1 - past]:
        past += 1
    return past


@given(st.lists(st.integers(1, 6), max_size=40))
def test_the_place_found_has_the_longest_common_past_and_is_the_latest_of_equals(tokens: list[int]) -> None:
    found = LookupIndex(tokens).longest()
    places = [(past_at(tokens, place), place) for place in range(2, len(tokens))]
    longest, place = max([each for each in places if each[0] >= 2], default=(0, 0))
    if sum(past >= 2 for past, _ in places) <= 16:
        assert found == (place, longest)


@given(st.lists(st.integers(1, 4), max_size=60), st.integers(0, 60))
def test_an_index_that_grew_finds_what_one_made_at_once_finds(tokens: list[int], split: int) -> None:
    grown = LookupIndex(tokens[:split])
    for token in tokens[split:]:
        grown.append(token)
    assert grown.longest() == LookupIndex(tokens).longest()
    assert grown.tokens == tokens


def test_what_followed_the_last_tokens_before_is_guessed() -> None:
    assert told((A, B, C, D, E, X), (A, B)).draft(3) == (C, D, E)


def test_the_longer_common_past_wins_over_the_later() -> None:
    assert told((A, B, C, D, X, B, C, E, Y), (A, B, C)).draft(1) == (D,)


def test_of_equal_pasts_the_later_wins() -> None:
    assert told((A, B, C, X, A, B, D, Y), (A, B)).draft(1) == (D,)


def test_a_place_that_proves_right_is_followed_though_the_same_pair_came_later() -> None:
    made = told((A, B, C, D, E, F, X, D, E, G), (A, B, C, D, E))
    assert made.draft(1) == (F,)


def test_nothing_is_guessed_where_nothing_repeats() -> None:
    made = told(SOURCE, (X, Y, A))
    assert made.draft(4) == ()
    assert made.chances(4, least=0.0) == []


def test_a_copy_that_departs_from_its_source_by_one_token_is_guessed_on_at_once() -> None:
    copied = SOURCE[:8]
    assert told(SOURCE, (*copied, X)).draft(3) == SOURCE[9:12], "one token replaced"
    assert told(SOURCE, (*copied, SOURCE[9])).draft(2) == SOURCE[10:12], "one left out"
    assert told(SOURCE, (*copied, X, SOURCE[8])).draft(2) == SOURCE[9:11], "one put in"
    assert told(SOURCE, (*copied, X, Y, A, SOURCE[9])).draft(2) == SOURCE[10:12], "one replaced by three"


def test_a_source_is_forgotten_when_the_text_goes_elsewhere() -> None:
    made = told(SOURCE, (*SOURCE[:8], *range(200, 210), SOURCE[9]))
    assert made.draft(2) == ()


def test_a_text_that_goes_round_is_guessed_round_and_round() -> None:
    assert told((X,), (A, B, C, A, B)).draft(7) == (C, A, B, C, A, B, C)
    assert told((X, A), (A, A)).draft(4) == (A, A, A, A)


def test_no_guess_holds_an_end_token_or_one_without_a_text() -> None:
    def push(made: Drafter) -> Drafter:
        made.push(A)
        made.push(B)
        return made

    prompt = (A, B, C, D, E, X)
    assert push(drafter(prompt, never=frozenset({E}))).draft(4) == (C, D)
    assert push(drafter(prompt, never=frozenset({C}))).draft(4) == ()
    assert push(drafter((A, B, C, 1000, E, X))).draft(4) == (C,)


def test_guesses_are_trusted_the_more_the_longer_the_past_was_the_same() -> None:
    short, long = told(SOURCE, SOURCE[:2]), told(SOURCE, SOURCE[:30])
    assert long.chances(1, least=0.0)[0] > short.chances(1, least=0.0)[0]
    assert len(long.chances(31, least=0.05)) > len(short.chances(31, least=0.05))


def test_trust_is_lost_by_wrong_places_and_won_back_by_right_ones_with_nothing_guessed() -> None:
    made = drafter((X, *([A, B, C] * 30)))
    made.push(X)
    start = told((A, B, C), (A, B)).chances(1, least=0.0)[0]
    for number in range(30):
        for token in (300 + number, A, B):
            made.push(token)
    lost = made.chances(1, least=0.0)[0]
    assert lost < 0.3 * start
    for number in range(30):
        for token in (C, 400 + number, A, B):
            made.push(token)
    assert made.chances(1, least=0.0)[0] > start


@given(
    prompt=st.lists(st.integers(0, 6), min_size=1, max_size=30),
    tokens=st.lists(st.integers(0, 6), max_size=60),
    most=st.integers(0, 40),
)
def test_guesses_are_well_formed_whatever_was_drawn(prompt: list[int], tokens: list[int], most: int) -> None:
    made = drafter(prompt, num_tokens=6, never=frozenset({5}))
    for token in tokens:
        made.push(token)
        draft, chances = made.draft(most), made.chances(most, least=0.01)
        assert len(draft) <= most
        assert len(chances) <= most
        assert not {5, 6} & set(draft)
        assert all(0.01 <= chance < 1 for chance in chances)
        assert chances == sorted(chances, reverse=True)
        assert draft == made.draft(most), "asking changes nothing"


@pytest.mark.parametrize("prompt", [(), (A,), (A, B)])
def test_short_prompts_have_no_places(prompt: tuple[int, ...]) -> None:
    assert LookupIndex(prompt).longest() == (0, 0)
    assert drafter(prompt).draft(3) == ()
