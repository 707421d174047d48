"""The grids that calibrated rounding starts from: for each row or block the scale of least weighted squared error.

`importance` is the mean square of each input: an error in a weight that multiplies large inputs costs more. 4-bit
blocks have a zero point of their own, so that their sixteen values lie where the block's weights do; `MatMulNBits`
takes zero points as integers, and they cost it nothing (its sums are corrected for one in any case). 8-bit blocks do
without.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, Literal

import numpy as np

from edgeqwen.convert.checkpoint import Float32Array
from edgeqwen.convert.gptq import Grid

TINY: Final = 1e-12
ROW_SHRINKS: Final = (1.0, 0.97, 0.94, 0.91)
BLOCK_SHRINKS: Final = (1.05, 1.0, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7)


def row_grid(weights: Float32Array, importance: Float32Array) -> Grid:
    """8 bits around 0, one scale a row of `weights` `[rows, columns]`."""
    return _symmetric(weights, importance, blocks=1, half=127, low=-127)


def block_grid(weights: Float32Array, importance: Float32Array, *, bits: Literal[4, 8], block_size: int) -> Grid:
    """One scale for each `block_size` columns; with 4 bits a zero point each as well."""
    blocks = weights.shape[1] // block_size
    if bits == 8:
        return _symmetric(weights, importance, blocks=blocks, half=127, low=-128, zero_point=128)
    return _asymmetric(weights, importance, blocks=blocks, high=(1 << bits) - 1)


def _symmetric(
    weights: Float32Array, importance: Float32Array, *, blocks: int, half: int, low: int, zero_point: int = 0
) -> Grid:
    split = weights.reshape(len(weights), blocks, -1)
    widest = np.maximum(np.abs(split).max(axis=-1, keepdims=True) / half, TINY).astype(np.float32)
    zero_points = np.zeros_like(widest)
    scales, _ = _best(
        split, importance, ((widest * np.float32(shrink), zero_points) for shrink in ROW_SHRINKS), low=low, high=half
    )
    return Grid(scales, np.full(scales.shape, zero_point, np.float32), low + zero_point, half + zero_point)


def _asymmetric(weights: Float32Array, importance: Float32Array, *, blocks: int, high: int) -> Grid:
    split = weights.reshape(len(weights), blocks, -1)
    top = split.max(axis=-1, keepdims=True)
    bottom = split.min(axis=-1, keepdims=True)
    widest = np.maximum((top - bottom) / high, TINY).astype(np.float32)
    middle = (top + bottom) / 2

    def candidates() -> Iterable[tuple[Float32Array, Float32Array]]:
        for shrink in BLOCK_SHRINKS:
            scales = widest * np.float32(shrink)
            yield scales, np.clip(np.rint(np.float32(high / 2) - middle / scales), 0, high)

    return Grid(*_best(split, importance, candidates(), low=0, high=high), 0, high)


def _best(
    blocks: Float32Array,
    importance: Float32Array,
    candidates: Iterable[tuple[Float32Array, Float32Array]],
    *,
    low: int,
    high: int,
) -> tuple[Float32Array, Float32Array]:
    """(scales, zero points) `[rows, blocks]`, of the candidates `[rows, blocks, 1]` the best for each block."""
    weight = importance.reshape(1, blocks.shape[1], -1)
    best: tuple[Float32Array, Float32Array] | None = None
    least = np.full((*blocks.shape[:2], 1), np.inf, np.float32)
    for scales, zero_points in candidates:
        error = blocks / scales
        np.rint(error, out=error)
        np.clip(error, low - zero_points, high - zero_points, out=error)
        error *= scales
        error -= blocks
        np.square(error, out=error)
        cost = np.einsum("rbc,xbc->rb", error, weight)[..., None]
        if best is None:
            best = scales.copy(), zero_points.copy()
        is_better = cost < least
        for kept, candidate in zip(best, (scales, zero_points), strict=True):
            np.copyto(kept, candidate, where=is_better)
        np.minimum(least, cost, out=least)
    assert best is not None
    return best[0][..., 0], best[1][..., 0]
