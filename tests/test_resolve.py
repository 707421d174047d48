"""Every field's range, the order of defaults, and room in the context."""

from __future__ import annotations

import math
from typing import Any

import pytest

from edgeqwen.engine.defaults import SamplingDefaults, read_defaults
from edgeqwen.engine.generation import GenerationInput
from edgeqwen.engine.resolve import ResolveContext, Resolved, check_input, resolve
from edgeqwen.engine.settings import EngineLimits
from edgeqwen.errors import BadRequest, EdgeqwenError, ModelInvalid
from edgeqwen.text import Prompt

NUM_TOKENS = 1000
MODEL_FILE = {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95}


def check(**given: Any) -> None:
    has_template = given.pop("has_template", True)
    if not {"messages", "prompt", "tokens"} & set(given):
        given["prompt"] = "hi"
    check_input(
        GenerationInput(**given), limits=EngineLimits(messages=4), num_tokens=NUM_TOKENS, has_template=has_template
    )


def run(prompt_len: int = 10, config: dict[str, Any] | None = None, **given: Any) -> Resolved:
    check(**given)
    at = ResolveContext(
        limits=EngineLimits(),
        defaults=read_defaults(MODEL_FILE if config is None else config),
        context=100,
        num_tokens=NUM_TOKENS,
        rid="r1",
        owner="1000",
        seed=77,
        arrived_at=50.0,
    )
    return resolve(GenerationInput(**given), Prompt((1,) * prompt_len), at)


@pytest.mark.parametrize(
    ("field", "good", "bad"),
    [
        ("temperature", [0, 0.0, 1, 100], [-0.1, 100.1, math.nan, math.inf, True, "1"]),
        ("top_k", [0, 1, NUM_TOKENS], [-1, NUM_TOKENS + 1, 1.0, True, "1"]),
        ("top_p", [1e-9, 1, 1.0], [0, 0.0, -0.5, 1.01, math.nan, False]),
        ("min_p", [0, 0.5, 1], [-0.1, 1.1, math.nan]),
        ("presence_penalty", [-2, 0, 2], [-2.1, 2.1, math.nan, True]),
        ("frequency_penalty", [-2, 0, 2], [-2.1, 2.1, math.nan, True]),
        ("repetition_penalty", [0.01, 1, 10], [0, -1, 10.1, math.nan]),
        ("logit_bias", [{}, {"0": 100, "999": -100}, {5: 1.5}], [{"1000": 1}, {"-1": 1}, {"x": 1}, {"1": 100.5}]),
        ("logit_bias", [{str(i): 0.0 for i in range(1000)}], [{"1": math.nan}, {"1": True}, {"1": None}, {"²": 1}]),
        ("seed", [0, (1 << 63) - 1], [-1, 1 << 63, 1.0, True]),
        ("max_tokens", [1, 90], [0, -1, 1.5, True]),
        ("min_tokens", [0, 5], [-1, 2.0, True]),
        ("stop", [(), ("a",), ("é" * 32,), ("x",) * 8], [("",), ("é" * 33,), ("x",) * 9, (1,), "text"]),
        ("n", [1, 8], [0, 9, True, 1.0]),
        ("logprobs", [True, False], [1, "yes"]),
        ("deadline_ms", [1, 600_000], [0, 600_001, True, 1.5]),
        ("ignore_eos", [True, False], [0, 1]),
        ("echo", [True, False], [0]),
        ("wait", [True, False], ["no"]),
        ("prompt", ["a"], ["", 5]),
        ("tokens", [(0, 999), [5]], [(), (1000,), (-1,), (True,), (1.0,), ("1",)]),
    ],
)
def test_values_in_range_pass_and_others_name_their_field(field: str, good: list[Any], bad: list[Any]) -> None:
    beside = {"messages": ({"role": "user"},)} if field in {"prompt", "tokens"} else {}
    check(**{field: None}, **beside)
    for value in good:
        check(**{field: value})
    for value in bad:
        with pytest.raises(BadRequest, match=field) as caught:
            check(**{field: value})
        assert caught.value.field == field


def test_top_logprobs_go_with_logprobs() -> None:
    check(logprobs=True, top_logprobs=20)
    check(top_logprobs=0)
    bad: tuple[dict[str, Any], ...] = (
        {"logprobs": True, "top_logprobs": 21},
        {"top_logprobs": 1},
        {"logprobs": False, "top_logprobs": 1},
    )
    for given in bad:
        with pytest.raises(BadRequest) as caught:
            check(**given)
        assert caught.value.field == "top_logprobs"


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({"prompt": None}, "prompt"),
        ({"prompt": "a", "tokens": (1,)}, "tokens"),
        ({"messages": ({},), "prompt": "a"}, "prompt"),
        ({"messages": ()}, "messages"),
        ({"messages": ({},) * 5}, "messages"),
        ({"messages": ({},), "echo": True}, "echo"),
        ({"prompt": "a", "think": True}, "think"),
        ({"prompt": "a", "think": False}, "think"),
        ({"prompt": "a", "tools": ({"type": "function"},)}, "tools"),
        ({"tokens": (1,), "template_kwargs": {"x": 1}}, "template_kwargs"),
        ({"messages": ({},), "think": "yes"}, "think"),
    ],
)
def test_what_a_prompt_is_made_of_must_fit_together(given: dict[str, Any], field: str) -> None:
    with pytest.raises(BadRequest) as caught:
        check(**given)
    assert caught.value.field == field


def test_chat_needs_a_template() -> None:
    with pytest.raises(BadRequest, match="use generate") as caught:
        check(messages=({"role": "user", "content": "x"},), has_template=False)
    assert caught.value.field == "messages"
    check(has_template=False)


def test_the_request_wins_over_the_models_file_and_zero_is_zero() -> None:
    sampling = run().request.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.6, 0.95, 20)
    for zero in (0, 0.0):
        assert run(temperature=zero).request.sampling.is_greedy
    assert run(temperature=None).request.sampling.temperature == 0.6
    assert run(top_p=1).request.sampling.top_p == 1.0
    assert run(top_k=0).request.sampling.top_k == 0
    assert run(config={"repetition_penalty": 1.1}).request.sampling.repetition_penalty == 1.1
    assert run(config={"repetition_penalty": 1.1}, repetition_penalty=1).request.sampling.repetition_penalty == 1.0
    with pytest.raises(BadRequest, match="top_k"):
        run(top_k=-1)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, SamplingDefaults(temperature=0.7, top_k=40, top_p=0.95)),
        ({"do_sample": None, "temperature": None}, SamplingDefaults(temperature=0.7, top_k=40, top_p=0.95)),
        ({"do_sample": False, "temperature": 0.6}, SamplingDefaults(temperature=0.0, top_k=0)),
        ({"do_sample": True}, SamplingDefaults(temperature=1.0, top_k=50, top_p=1.0)),
        ({"temperature": 0}, SamplingDefaults(temperature=0.0)),
        ({"top_p": 0.8, "min_p": 0.05}, SamplingDefaults(top_p=0.8, min_p=0.05)),
        (
            {"do_sample": False, "repetition_penalty": 1.2},
            SamplingDefaults(temperature=0.0, top_k=0, repetition_penalty=1.2),
        ),
        (
            {"eos_token_id": [1, 2], "transformers_version": "4.51.0"},
            SamplingDefaults(temperature=0.7, top_k=40, top_p=0.95),
        ),
    ],
    ids=str,
)
def test_a_models_file_is_read_as_its_authors_mean_it(config: dict[str, Any], expected: SamplingDefaults) -> None:
    assert read_defaults(config) == expected


@pytest.mark.parametrize("key", ["temperature", "top_k", "top_p", "min_p", "repetition_penalty"])
def test_a_models_file_out_of_range_is_named_with_its_key(key: str) -> None:
    with pytest.raises(ModelInvalid, match=f"generation_config.json: {key}"):
        read_defaults({key: -1})


def test_the_budget_is_by_default_what_there_is_room_for() -> None:
    assert run(prompt_len=30).request.max_tokens == 70
    assert run(prompt_len=99).request.max_tokens == 1
    assert run(max_tokens=90).request.max_tokens == 90
    with pytest.raises(EdgeqwenError, match="5 more than fit: the context is 100") as caught:
        run(prompt_len=104)
    assert caught.value.code == "too_long"
    with pytest.raises(EdgeqwenError, match="max_tokens 95 is 5 more") as caught:
        run(max_tokens=95)
    assert (caught.value.code, caught.value.field) == ("too_long", "max_tokens")


def test_min_tokens_is_at_most_the_budget() -> None:
    assert run(min_tokens=7, max_tokens=7).request.min_tokens == 7
    with pytest.raises(BadRequest, match="min_tokens"):
        run(min_tokens=8, max_tokens=7)


def test_a_prompt_of_ids_without_a_text_is_refused() -> None:
    at = ResolveContext(
        limits=EngineLimits(),
        defaults=read_defaults({}),
        context=100,
        num_tokens=50,
        rid="r",
        owner="o",
        seed=0,
        arrived_at=0.0,
    )
    with pytest.raises(BadRequest, match="below 50"):
        resolve(GenerationInput(tokens=(50,)), Prompt((50,)), at)
    with pytest.raises(BadRequest, match="no tokens"):
        resolve(GenerationInput(prompt="x"), Prompt(()), at)


def test_the_request_carries_what_was_asked_and_the_params_show_it() -> None:
    resolved = run(
        seed=5,
        stop=("a", "b"),
        n=2,
        logprobs=True,
        top_logprobs=3,
        deadline_ms=1500,
        logit_bias={"7": 1, "3": -2},
        ignore_eos=True,
        max_tokens=9,
    )
    request = resolved.request
    assert (request.rid, request.owner, request.prompt_ids) == ("r1", "1000", (1,) * 10)
    assert (request.stop, request.n, request.logprobs, request.ignore_eos) == (("a", "b"), 2, 3, True)
    assert (request.arrived_at, request.deadline_at) == (50.0, 51.5)
    assert request.sampling.logit_bias == ((3, -2.0), (7, 1.0))
    assert resolved.params == {
        "temperature": 0.6,
        "top_k": 20,
        "top_p": 0.95,
        "min_p": 0.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "repetition_penalty": 1.0,
        "logit_bias": {"3": -2.0, "7": 1.0},
        "seed": 5,
        "max_tokens": 9,
        "min_tokens": 0,
        "stop": ["a", "b"],
        "n": 2,
        "ignore_eos": True,
        "logprobs": True,
        "top_logprobs": 3,
        "deadline_ms": 1500,
    }


def test_a_seed_that_was_not_given_is_drawn_and_reported() -> None:
    assert run().params["seed"] == run().request.sampling.seed == 77
    assert run(seed=0).params["seed"] == 0
    assert run().request.logprobs is None
    assert run(logprobs=True).request.logprobs == 0
