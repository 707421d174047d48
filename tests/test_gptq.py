"""Calibrated rounding: less output error than rounding to nearest, and what must hold whatever the numbers are."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from edgeqwen.convert.gptq import Grid, Rounder
from edgeqwen.convert.grids import block_grid, row_grid
from edgeqwen.convert.quantize import BlockWeights, Form, QuantizedTensor, RowWeights, quantize_blocks, quantize_rows
from edgeqwen.convert.rounding import MatrixRounder, restored

Array = NDArray[np.float32]


def correlated(rng: np.random.Generator, tokens: int, width: int) -> Array:
    """Inputs as layers have them: a few directions large, most small."""
    mix = rng.standard_normal((width, width)) * np.exp(-np.arange(width) / (width / 6))
    return (rng.standard_normal((tokens, width)) @ mix.T).astype(np.float32)


def output_error(inputs: Array, weights: Array, rounded: Array) -> float:
    return float(np.square(inputs @ (rounded - weights).T).sum())


@pytest.mark.parametrize("form", ["rows8", "blocks4", "blocks8"])
def test_outputs_change_less_than_by_rounding_to_nearest(form: Form) -> None:
    rng = np.random.default_rng(0)
    inputs = correlated(rng, 600, 96)
    weights = rng.standard_normal((40, 96)).astype(np.float32)
    calibrated = restored(MatrixRounder(inputs, 32).round(weights, form), form)
    nearest: RowWeights | BlockWeights
    if form == "rows8":
        nearest = quantize_rows(weights)
    else:
        nearest = quantize_blocks(weights, bits=4 if form == "blocks4" else 8, block_size=32)
    assert output_error(inputs, weights, calibrated) < 0.7 * output_error(inputs, weights, restored(nearest, form))


def test_it_holds_on_inputs_that_it_has_not_seen() -> None:
    rng = np.random.default_rng(1)
    both = correlated(rng, 1200, 64)
    weights = rng.standard_normal((30, 64)).astype(np.float32)
    calibrated = restored(MatrixRounder(both[:600], 32).round(weights, "blocks4"), "blocks4")
    nearest = restored(quantize_blocks(weights, bits=4, block_size=32), "blocks4")
    assert output_error(both[600:], weights, calibrated) < 0.7 * output_error(both[600:], weights, nearest)


def test_with_uncorrelated_inputs_each_weight_goes_to_the_nearest_value() -> None:
    rng = np.random.default_rng(2)
    weights = rng.standard_normal((8, 32)).astype(np.float32)
    grid = row_grid(weights, np.ones(32, np.float32))
    codes, _ = Rounder(np.eye(32)).round(weights, grid, sweeps=0)
    np.testing.assert_array_equal(codes, np.clip(np.rint(weights / grid.scales), -127, 127))


def test_going_over_the_codes_again_lowers_the_loss() -> None:
    rng = np.random.default_rng(3)
    inputs = correlated(rng, 500, 64)
    weights = rng.standard_normal((20, 64)).astype(np.float32)
    rounder = Rounder((inputs.T @ inputs / 500).astype(np.float64))
    grid = block_grid(weights, np.square(inputs).mean(0), bits=4, block_size=32)
    losses = []
    for sweeps in range(4):
        codes, scales = rounder.round(weights, grid, sweeps=sweeps)
        values = (codes - np.repeat(grid.zero_points, 32, 1)) * np.repeat(scales, 32, 1)
        losses.append(rounder.loss(values - weights).sum())
    assert max(losses[1:]) < losses[0]


def test_the_nearest_plane_is_the_best_of_all_codes_where_these_can_be_tried() -> None:
    """Two columns, strongly correlated: the second makes up for what the first loses."""
    hessian = np.array([[1.0, 0.95], [0.95, 1.0]])
    weights = np.array([[0.4, 0.4]], np.float32)
    grid = Grid(np.ones((1, 1), np.float32), np.zeros((1, 1), np.float32), -2, 2)
    rounder = Rounder(hessian)
    codes, scales = rounder.round(weights, grid, sweeps=0)
    found = rounder.loss(codes * scales - weights)[0]
    tried = [
        rounder.loss(np.array([pair], np.float32) - weights)[0] for pair in itertools.product(range(-2, 3), repeat=2)
    ]
    assert found <= min(tried) + 1e-9
    assert codes.tolist() != [[0.0, 0.0]]


def test_rows_do_not_depend_on_each_other() -> None:
    rng = np.random.default_rng(4)
    rounder = MatrixRounder(correlated(rng, 300, 64), 32)
    weights = rng.standard_normal((12, 64)).astype(np.float32)
    whole, part = rounder.round(weights, "blocks4"), rounder.round(weights[3:7], "blocks4")
    difference = restored(whole, "blocks4")[3:7] - restored(part, "blocks4")
    assert np.square(difference).mean() < 1e-4


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    rows=st.integers(1, 9),
    blocks=st.integers(1, 5),
    log_scale=st.floats(-30, 30),
    num_silent=st.integers(0, 16),
    form=st.sampled_from(["rows8", "blocks4", "blocks8"]),
)
def test_any_matrix_and_inputs_give_codes_in_range_and_finite_scales(
    seed: int, rows: int, blocks: int, log_scale: float, num_silent: int, form: Form
) -> None:
    rng = np.random.default_rng(seed)
    inputs = rng.standard_normal((20, 16 * blocks)).astype(np.float32)
    inputs[:, :num_silent] = 0  # channels that calibration never saw
    weights = (rng.standard_normal((rows, 16 * blocks)) * np.exp(log_scale / 3)).astype(np.float32)
    weights[0] = 0
    rounded = MatrixRounder(inputs, 16).round(weights, form)
    assert np.isfinite(rounded.scales).all()
    if isinstance(rounded, RowWeights):
        assert np.abs(rounded.codes.astype(int)).max() <= 127
    elif form == "blocks4":
        assert rounded.codes.max() <= 15
        assert rounded.zero_points is not None
        assert rounded.zero_points.max() <= 15
    values = restored(rounded, form)
    assert np.isfinite(values).all()
    np.testing.assert_array_equal(values[0], 0)


def test_a_form_says_what_its_codes_stand_for() -> None:
    codes = np.array([[0, 15, 8, 9]], np.uint8)
    scales = np.array([[2.0, 0.5]], np.float32)
    plain = QuantizedTensor("t", "blocks4", BlockWeights(codes, scales))
    assert restored(plain.weights, "blocks4").tolist() == [[-16.0, 14.0, 0.0, 0.5]]
    shifted = BlockWeights(codes, scales, np.array([[0, 9]], np.uint8))
    assert restored(shifted, "blocks4").tolist() == [[0.0, 30.0, -0.5, 0.0]]
