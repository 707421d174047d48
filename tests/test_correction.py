"""Weights that make up for what was lost before them."""

from __future__ import annotations

import numpy as np
import pytest

from edgeqwen.convert import correction
from edgeqwen.convert.checkpoint import Float32Array

TOKENS, WIDTH, OUT = 400, 24, 10


def normal(*shape: int, seed: int) -> Float32Array:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def corrected(
    weights: Float32Array, inputs: Float32Array, wanted: Float32Array, missing: Float32Array | None = None
) -> Float32Array:
    gram = inputs.T @ inputs / np.float32(len(inputs))
    return correction.corrected(weights, inputs, wanted, missing, gram=gram)


def mean_square(values: Float32Array) -> float:
    return float(np.square(values).mean())


def test_outputs_for_faulty_inputs_come_closer_to_what_they_should_be() -> None:
    weights, wanted = normal(OUT, WIDTH, seed=1), normal(TOKENS, WIDTH, seed=2)
    inputs = (wanted @ (np.eye(WIDTH, dtype=np.float32) * np.float32(0.7))).astype(np.float32)
    target = wanted @ weights.T
    lost = mean_square(inputs @ weights.T - target)
    assert mean_square(inputs @ corrected(weights, inputs, wanted).T - target) < 0.4 * lost


def test_what_the_residual_lacks_is_made_up_for_by_the_product_that_is_added_to_it() -> None:
    weights, inputs = normal(OUT, WIDTH, seed=1), normal(TOKENS, WIDTH, seed=2)
    missing = inputs @ normal(OUT, WIDTH, seed=3).T + np.float32(0.1) * normal(TOKENS, OUT, seed=4)
    product = inputs @ corrected(weights, inputs, inputs, missing).T
    assert mean_square(product - inputs @ weights.T - missing) < 0.4 * mean_square(missing)


def test_nothing_lost_leaves_the_weights_as_they_are() -> None:
    weights, inputs = normal(OUT, WIDTH, seed=1), normal(TOKENS, WIDTH, seed=2)
    assert np.array_equal(corrected(weights, inputs, inputs, np.zeros((TOKENS, OUT), np.float32)), weights)


@pytest.mark.parametrize("num_tokens", [1, WIDTH - 1])
def test_fewer_tokens_than_inputs_and_inputs_that_are_never_used_do_no_harm(num_tokens: int) -> None:
    weights, wanted = normal(OUT, WIDTH, seed=1), normal(num_tokens, WIDTH, seed=2)
    inputs = wanted.copy()
    inputs[:, 0] = 0
    moved = corrected(weights, inputs, wanted)
    assert np.isfinite(moved).all()
    assert np.array_equal(corrected(weights, np.zeros_like(wanted), wanted), weights)
