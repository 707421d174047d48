"""Sampling against a slow reference in double precision, and what a client may rely on."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from edgeqwen.core.request import Request, SamplingParams
from edgeqwen.errors import RuntimeFailed
from edgeqwen.sampling import Sampler
from edgeqwen.sampling.filters import candidates, draw, top_ids
from edgeqwen.sampling.history import History

Row = NDArray[np.float32]


def make(*, choice: int = 0, num_tokens: int = 1 << 20, eos: tuple[int, ...] = (), **given: Any) -> Sampler:
    """A sampler; sampling parameters and request fields mixed."""
    fields = {name: given.pop(name) for name in ("prompt_ids", "min_tokens", "logprobs", "ignore_eos") if name in given}
    request = Request("r1", "1000", fields.pop("prompt_ids", (0,)), SamplingParams(**given), 100, **fields)
    return Sampler(request, choice=choice, num_tokens=num_tokens, eos_token_ids=eos)


def row(*values: float) -> Row:
    return np.asarray(values, np.float32)


def reference(logits: Row, params: SamplingParams) -> dict[int, float]:
    """Probabilities after temperature, top-k, top-p and min-p, the naive way: sort everything, in double precision."""
    order = sorted(range(len(logits)), key=lambda i: (-logits[i], i))
    weights = {i: math.exp((float(logits[i]) - float(logits[order[0]])) / params.temperature) for i in order}
    kept = order[: params.top_k or len(order)]
    if params.top_p < 1:
        total, so_far, nucleus = sum(weights[i] for i in kept), 0.0, []
        for i in kept:
            nucleus.append(i)
            so_far += weights[i]
            if so_far >= params.top_p * total * (1 - 1e-13):
                break
        kept = nucleus
    if params.min_p > 0:
        kept = [i for i in kept if weights[i] >= params.min_p * (1 - 1e-9)]
    total = sum(weights[i] for i in kept)
    return {i: weights[i] / total for i in kept}


def near_a_bound(logits: Row, params: SamplingParams) -> bool:
    """Whether rounding alone could decide if a token stays."""
    weights = np.sort(np.exp((logits.astype(float) - logits.max()) / params.temperature))[::-1]
    ahead = weights[: params.top_k or len(weights)]
    sums = np.cumsum(ahead) / ahead.sum()
    is_near_top_p = params.top_p < 1 and bool((abs(sums - params.top_p) < 5e-7).any())
    return is_near_top_p or (params.min_p > 0 and bool((abs(weights - params.min_p) < 1e-9 * params.min_p).any()))


floats = st.floats(-30, 30, width=32)
temperatures = st.floats(0.1, 20)
distributions = st.builds(
    SamplingParams,
    temperature=temperatures,
    top_k=st.integers(0, 12),
    top_p=st.one_of(st.just(1.0), st.floats(0.05, 1.0)),
    min_p=st.one_of(st.just(0.0), st.floats(0.0, 1.0)),
)


@given(st.lists(floats, min_size=1, max_size=40), distributions)
@example([1.0] * 30, SamplingParams(temperature=1.0, top_k=3))
@example([1.0] * 30, SamplingParams(temperature=1.0, top_p=0.5))
@example([0.0, 5.0], SamplingParams(temperature=1.0, min_p=1.0))
@settings(max_examples=300)
def test_filters_keep_what_the_reference_keeps(values: list[float], params: SamplingParams) -> None:
    logits = row(*values)
    assume(not near_a_bound(logits, params))
    ids, weights = candidates(logits, params)
    expected = reference(logits, params)
    assert sorted(ids.tolist()) == sorted(expected)
    for token, weight in zip(ids.tolist(), (weights / weights.sum()).tolist(), strict=True):
        assert weight == pytest.approx(expected[token], rel=1e-9, abs=1e-300)


@given(
    st.integers(1, 3000).flatmap(lambda size: st.tuples(st.just(size), st.integers(0, size - 1))),
    st.floats(0, 1, exclude_max=True),
    st.sampled_from([{}, {"top_p": 0.9}, {"min_p": 0.2}]),
)
def test_a_draw_is_where_the_running_sum_passes_the_share(
    place: tuple[int, int], share: float, given: dict[str, float]
) -> None:
    size, peak = place
    logits = np.full(size, -np.inf, np.float32)
    logits[peak // 2 : peak + 1] = np.random.default_rng(size).standard_normal(peak + 1 - peak // 2)
    params = SamplingParams(temperature=0.8, **given)  # type: ignore[arg-type]  # floats by name
    expected = reference(logits[peak // 2 : peak + 1], params)
    token = draw(logits, params, share)
    assert token - peak // 2 in expected
    if not given:
        sums = np.cumsum([expected[i] for i in sorted(expected)])
        before, after = np.append(0.0, sums)[token - peak // 2], sums[token - peak // 2]
        assert before - 1e-6 <= share <= after + 1e-6


@pytest.mark.parametrize("temperature", [0.3, 1.0, 3.0, 50.0])
@pytest.mark.parametrize("params", [{"top_p": 0.9}, {"top_p": 0.999, "min_p": 0.01}, {"top_k": 700, "top_p": 0.5}, {}])
def test_filters_agree_with_the_reference_on_a_large_vocabulary(temperature: float, params: dict[str, Any]) -> None:
    logits = (np.random.default_rng(4).standard_normal(5000) * 4).astype(np.float32)
    sampling = SamplingParams(temperature=temperature, **params)
    assert not near_a_bound(logits, sampling)
    ids, _ = candidates(logits, sampling)
    assert sorted(ids.tolist()) == sorted(reference(logits, sampling))


@given(st.lists(st.integers(-5, 5).map(float), min_size=1, max_size=60), st.integers(1, 70))
def test_top_ids_ranks_by_value_and_then_by_id(values: list[float], k: int) -> None:
    expected = sorted(range(len(values)), key=lambda i: (-values[i], i))[:k]
    assert top_ids(row(*values), k).tolist() == expected


@pytest.mark.parametrize("k", [1, 7, 300, 512, 513, 4000, 9000])
@pytest.mark.parametrize("num_values", [2, 40, 1 << 20])
def test_top_ids_of_a_large_row_are_those_of_a_full_sort(k: int, num_values: int) -> None:
    """Many equal values, values at the very end, and forbidden ones."""
    rng = np.random.default_rng(k)
    values = rng.integers(0, num_values, 9001).astype(np.float32)
    values[-3:] = num_values
    values[rng.integers(0, 9001, 50)] = -np.inf
    expected = sorted(range(values.size), key=lambda i: (-values[i], i))[:k]
    assert top_ids(values, k).tolist() == expected


def test_greedy_takes_the_lowest_id_of_equals() -> None:
    sampler = make()
    assert [sampler.sample(row(0, 3, 1, 3)).token for _ in range(3)] == [1, 1, 1]
    assert make(temperature=9e-6).sample(row(0, 3, 3.1)).token == 2, "below the bound of greedy"


def test_ids_without_a_text_are_never_drawn() -> None:
    logits = row(0, 1, 0, 50, 60)
    assert make(num_tokens=3).sample(logits).token == 1
    for seed in range(50):
        assert make(num_tokens=3, temperature=5.0, seed=seed).sample(logits).token < 3
        assert make(num_tokens=3, temperature=5.0, seed=seed, top_p=0.9).sample(logits).token < 3


def test_end_tokens_are_masked_until_min_tokens() -> None:
    sampler = make(min_tokens=2, eos=(1, 3))
    assert [sampler.sample(row(0, 9, 1, 8)).token for _ in range(4)] == [2, 2, 1, 1]
    ignoring = make(min_tokens=1, eos=(1,), ignore_eos=True)
    assert [ignoring.sample(row(0, 9)).token for _ in range(2)] == [0, 1], "ignored end tokens may be drawn afterwards"


def test_an_end_token_beyond_the_real_ids_is_no_trouble() -> None:
    assert make(min_tokens=1, eos=(7,), num_tokens=3).sample(row(0, 2, 1, 9, 9, 9, 9, 9)).token == 1


def test_logit_bias_is_added_before_anything_else() -> None:
    assert make(logit_bias=((2, 10.0),)).sample(row(0, 3, 1)).token == 2
    assert make(logit_bias=((1, -100.0),)).sample(row(0, 3, 1)).token == 2
    biased = make(logit_bias=((0, -4.0),), repetition_penalty=2.0, prompt_ids=(0,))
    assert biased.sample(row(3, -1.5)).token == 1, "3 - 4 is negative, so the penalty makes it -2"


def test_the_logits_that_were_given_are_left_alone() -> None:
    logits = row(1, 2, 3)
    before = logits.copy()
    make(logit_bias=((0, 5.0),), presence_penalty=1.0, temperature=1.0, min_tokens=1, eos=(2,)).sample(logits)
    assert (logits == before).all()


@given(
    st.lists(floats, min_size=8, max_size=8),
    st.lists(st.integers(0, 7), min_size=1, max_size=10),
    st.lists(st.integers(0, 7), max_size=30),
    st.floats(0.1, 10),
    st.floats(-2, 2),
    st.floats(-2, 2),
)
def test_penalties_match_their_formulas(
    values: list[float], prompt: list[int], output: list[int], repetition: float, presence: float, frequency: float
) -> None:
    params = SamplingParams(repetition_penalty=repetition, presence_penalty=presence, frequency_penalty=frequency)
    history = History(prompt)
    for token in output:
        history.add(token)
    logits = row(*values)
    history.penalise(logits, params)
    for token, value in enumerate(row(*values).tolist()):
        expected = value
        if token in prompt or token in output:
            expected = expected / repetition if expected > 0 else expected * repetition
        expected -= frequency * output.count(token) + presence * (token in output)
        assert float(logits[token]) == pytest.approx(expected, rel=1e-5, abs=1e-4)


def test_history_grows_with_what_is_generated() -> None:
    history = History((5,))
    for token in range(1000):
        history.add(token)
        history.add(token)
    logits = np.zeros(1001, np.float32)
    history.penalise(logits, SamplingParams(frequency_penalty=1.0))
    assert logits.tolist() == [-2.0] * 1000 + [0.0]


def test_presence_penalty_changes_what_greedy_repeats() -> None:
    plain, penalised = make(), make(presence_penalty=1.5)
    logits = row(0.4, 2.0, 1.0)
    assert [plain.sample(logits).token for _ in range(3)] == [1, 1, 1]
    assert [penalised.sample(logits).token for _ in range(3)] == [1, 2, 1]


@pytest.mark.parametrize(
    "params",
    [{}, {"top_k": 5}, {"top_p": 0.9}, {"min_p": 0.05}, {"top_k": 8, "top_p": 0.8, "min_p": 0.02}],
    ids=str,
)
def test_draws_follow_the_distribution(params: dict[str, Any]) -> None:
    logits = (np.random.default_rng(1).standard_normal(20) * 2).astype(np.float32)
    sampling = SamplingParams(temperature=1.3, **params)
    expected = reference(logits, sampling)
    num_draws = 4000
    sampler = make(temperature=1.3, seed=11, **params)
    counts = np.bincount([sampler.sample(logits).token for _ in range(num_draws)], minlength=20)
    assert set(np.flatnonzero(counts).tolist()) <= set(expected)
    wanted = np.array([expected[i] * num_draws for i in sorted(expected)])
    got = counts[sorted(expected)]
    statistic = float(((got - wanted) ** 2 / wanted).sum())
    # Wilson and Hilferty: the cube root of chi-square over its degrees of freedom is close to normal; 4 deviations.
    degrees = max(1, len(wanted) - 1)
    bound = degrees * (1 - 2 / (9 * degrees) + 4 * math.sqrt(2 / (9 * degrees))) ** 3
    assert statistic < bound


def test_a_seed_gives_the_same_tokens_and_choices_differ() -> None:
    logits = np.zeros(1000, np.float32)

    def tokens(**given: Any) -> list[int]:
        sampler = make(temperature=1.0, **given)
        return [sampler.sample(logits).token for _ in range(8)]

    assert tokens(seed=5) == tokens(seed=5)
    assert tokens(seed=(1 << 63) - 1) == tokens(seed=(1 << 63) - 1)
    different = [tokens(seed=5), tokens(seed=6), tokens(seed=5, choice=1), tokens(seed=0)]
    assert len({tuple(drawn) for drawn in different}) == 4


@pytest.mark.parametrize(
    "params", [{}, {"temperature": 1.0}, {"temperature": 1.0, "top_k": 2, "presence_penalty": 1.0}]
)
@pytest.mark.parametrize("bad", [[0, math.nan, 1], [-math.inf] * 3, [0, math.inf, 1]], ids=str)
def test_logits_that_are_not_numbers_fail(params: dict[str, Any], bad: list[float]) -> None:
    with pytest.raises(RuntimeFailed, match="not numbers"):
        make(**params).sample(row(*bad))


def test_single_impossible_tokens_are_no_failure() -> None:
    assert make(temperature=1.0, top_p=0.9).sample(row(-math.inf, 1, -math.inf)).token == 1


def test_logprobs_are_of_the_raw_logits_over_the_real_ids() -> None:
    logits = row(1, 3, 2, 99)
    sampler = make(num_tokens=3, logprobs=2, logit_bias=((0, 50.0),), temperature=1.0, top_k=1)
    sampled = sampler.sample(logits)
    total = math.log(sum(math.exp(x) for x in (1, 3, 2)))
    assert sampled.token == 0
    assert sampled.logprob == pytest.approx(1 - total, abs=1e-6)
    assert [token for token, _ in sampled.top] == [1, 2]
    assert [value for _, value in sampled.top] == pytest.approx([3 - total, 2 - total], abs=1e-6)


def test_logprobs_come_only_if_asked_for() -> None:
    assert make().sample(row(1, 2)).logprob is None
    alone = make(logprobs=0).sample(row(1, 2))
    assert alone.logprob is not None
    assert alone.top == ()


@pytest.mark.parametrize("penalty", [5e-324, 1e-300, 1e-39, 1e-38, 1e-10])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_smallest_repetition_penalties_still_give_a_token(penalty: float, temperature: float) -> None:
    sampler = make(repetition_penalty=penalty, temperature=temperature, top_p=0.9, min_p=0.1, prompt_ids=(0, 1, 2))
    assert sampler.sample(row(-3.0, 0.0, 30.0, 40.0)).token == 2


def test_penalties_hide_no_fault_of_the_model() -> None:
    with pytest.raises(RuntimeFailed):
        make(repetition_penalty=2.0, prompt_ids=(0, 1)).sample(row(math.inf, 1.0))
