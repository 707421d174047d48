"""From a matrix and its inputs to stored codes: the grids, the rounding and the forms put together."""

from __future__ import annotations

from typing import Literal

import numpy as np

from edgeqwen.convert.checkpoint import Float32Array
from edgeqwen.convert.gptq import Rounder
from edgeqwen.convert.grids import block_grid, row_grid
from edgeqwen.convert.quantize import BlockWeights, Form, RowWeights


class MatrixRounder:
    """Rounds matrices `[rows, width]` that multiply the inputs `[tokens, width]`, some rows at a time if need be.

    `shares` `[tokens]` says how much each token's outcome counts; None: all the same. `gram` `[width, width]` is the
    inputs' mean outer product.
    """

    def __init__(self, inputs: Float32Array, block_size: int, *, shares: Float32Array | None = None) -> None:
        if shares is not None:
            inputs = inputs * np.sqrt(shares)[:, None]
        self.gram: Float32Array = inputs.T @ inputs / np.float32(len(inputs))
        self._importance = np.diagonal(self.gram)
        self._rounder = Rounder(self.gram.astype(np.float64))
        self.block_size = block_size

    def round(self, weights: Float32Array, form: Form) -> RowWeights | BlockWeights:
        """In form `rows8`, `blocks4` or `blocks8`."""
        if form == "rows8":
            codes, scales = self._rounder.round(weights, row_grid(weights, self._importance), sweeps=0)
            return RowWeights(codes.astype(np.int8), scales[:, 0])
        return self.round_blocks(weights, 4 if form == "blocks4" else 8)

    def round_blocks(self, weights: Float32Array, bits: Literal[4, 8]) -> BlockWeights:
        """In blocks."""
        grid = block_grid(weights, self._importance, bits=bits, block_size=self.block_size)
        codes, scales = self._rounder.round(weights, grid, sweeps=1 if bits == 4 else 0)
        zero_points = grid.zero_points.astype(np.uint8) if bits == 4 else None
        return BlockWeights(codes.astype(np.uint8), scales, zero_points)

    def loss(self, difference: Float32Array) -> float:
        """Mean square of what a change of the weights changes in an output, over all outputs together."""
        return float(self._rounder.loss(difference).sum())


def restored(weights: RowWeights | BlockWeights, form: Form) -> Float32Array:
    """The matrix that codes stand for, float32 `[rows, columns]`."""
    if isinstance(weights, RowWeights):
        return weights.codes * weights.scales[:, None]
    rows, columns = weights.codes.shape
    zero_points = weights.zero_points
    if zero_points is None:
        zero_points = np.full(weights.scales.shape, 8 if form == "blocks4" else 128, np.uint8)
    steps = weights.codes.reshape(*weights.scales.shape, -1).astype(np.float32) - zero_points[..., None]
    return (steps * weights.scales[..., None]).reshape(rows, columns)
