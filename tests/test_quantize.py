"""Rounding to 8 and 4 bits: error bounds, exact cases, layouts."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from edgeqwen.convert.checkpoint import Float32Array
from edgeqwen.convert.quantize import (
    BlockWeights,
    block_size_for,
    pack_nibbles,
    quantize_blocks,
    quantize_rows,
    widen_codes,
)

weights = hnp.arrays(np.float32, (3, 64), elements=st.floats(-100, 100, width=32))


def restored(blocks: BlockWeights, *, bits: int, block_size: int) -> Float32Array:
    scales = np.repeat(blocks.scales, block_size, axis=1)
    values: Float32Array = (blocks.codes.astype(np.float32) - (1 << (bits - 1))) * scales
    return values


@given(weights)
def test_rows_are_within_half_a_step_of_the_weights(values: Float32Array) -> None:
    rows = quantize_rows(values)
    error = np.abs(rows.codes * rows.scales[:, None] - values)
    assert (error <= rows.scales[:, None] * 0.501).all()
    assert np.abs(rows.codes.astype(int)).max() <= 127


@given(weights, st.sampled_from([4, 8]), st.sampled_from([16, 32]))
@settings(deadline=None)
def test_blocks_are_never_worse_than_the_plain_grid(values: Float32Array, bits: int, block_size: int) -> None:
    blocks = quantize_blocks(values, bits=bits, block_size=block_size)
    extremes = np.abs(values.reshape(3, -1, block_size)).max(axis=-1)
    step = extremes / (1 << (bits - 1))
    error = np.square(restored(blocks, bits=bits, block_size=block_size) - values)
    plain = block_size * np.square(np.maximum(step, 1e-30))  # a whole step: the grid's short end cuts the largest value
    assert (error.reshape(3, -1, block_size).sum(axis=-1) <= plain * 1.001).all()


def test_searching_the_scale_lowers_the_error_of_4_bit_blocks() -> None:
    values = np.random.default_rng(0).standard_normal((64, 256)).astype(np.float32)
    found = restored(quantize_blocks(values, bits=4, block_size=32), bits=4, block_size=32)
    grouped = values.reshape(64, 8, 32)
    extreme = np.take_along_axis(grouped, np.abs(grouped).argmax(-1, keepdims=True), -1)
    scales = extreme / -8
    plain = (np.clip(np.rint(grouped / scales), -8, 7) * scales).reshape(64, 256)
    assert np.square(found - values).mean() < 0.95 * np.square(plain - values).mean()


def test_values_on_the_grid_come_back_exactly() -> None:
    codes = np.random.default_rng(0).integers(0, 16, (4, 64)).astype(np.uint8)
    codes[:, ::32] = 0  # each block reaches the end of the grid
    values = (codes.astype(np.float32) - 8) * 0.25
    blocks = quantize_blocks(values, bits=4, block_size=32)
    assert np.array_equal(blocks.codes, codes)
    assert np.array_equal(blocks.scales, np.full((4, 2), 0.25, np.float32))


def test_a_block_of_zeros_has_finite_codes_and_scales() -> None:
    blocks = quantize_blocks(np.zeros((1, 32), np.float32), bits=4, block_size=32)
    assert np.array_equal(restored(blocks, bits=4, block_size=32), np.zeros((1, 32)))


def test_nibbles_are_packed_low_half_first() -> None:
    assert pack_nibbles(np.array([[1, 2, 15, 0]], np.uint8)).tolist() == [[0x21, 0x0F]]


def test_widened_codes_mean_the_same_value() -> None:
    codes = np.arange(16, dtype=np.uint8)
    assert np.array_equal(widen_codes(codes).astype(int) - 128, codes.astype(int) - 8)


@pytest.mark.parametrize(("columns", "expected"), [(576, 32), (1024, 32), (48, 16), (40, 16)])
def test_the_block_size_divides_the_columns_where_it_can(columns: int, expected: int) -> None:
    assert block_size_for(columns, preferred=32) == expected
