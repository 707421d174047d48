"""Rounding a layer's weights so that its *outputs* change least, given what goes into it.

With X the inputs of a linear layer on calibration text and H = X^T X, replacing W by Q changes the outputs by
tr((W - Q) H (W - Q)^T), row by row of W. Choosing Q on its grid for least of that is a closest-vector problem; three
steps, each of which lowers what the one before left:

* **Nearest plane.** (Frantar et al., "GPTQ", 2022; Babai's nearest-plane algorithm for this lattice, as Chen et al.
  showed in 2025.) With H = A^T A, A lower triangular, the loss is the sum over columns of ((W - Q) A^T)^2, where column
  i depends only on the columns up to i. So each column is rounded after what the errors of all before it contribute is
  added to it. The columns with the largest inputs come first; later ones make up for them. A needs one Cholesky
  factorisation (of H turned round), no inverse.
* **Descent.** Each code is set once more to the best value given all the others.
* **Scales anew.** The codes given, the scales of a row's blocks that are best together solve a small linear system.

All rows of a matrix are done at once; columns in panels, whose influence on those to come is one matrix product.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from edgeqwen.convert.checkpoint import Float32Array

Doubles: TypeAlias = NDArray[np.float64]

PANEL: Final = 64
DAMPING: Final = 0.01
"""Share of H's mean diagonal that is added to it: inputs beyond the calibration text are not of exactly this kind."""
RIDGE: Final = 1e-4
"""The same for the scales' systems, towards the scales as they were."""


@dataclass(frozen=True, slots=True)
class Grid:
    """What values a weight can take: scale * (code - zero_point), low <= code <= high.

    `scales` and `zero_points` are float32 `[rows, blocks]`, a block being `columns / blocks` columns wide (one block:
    one scale a row).
    """

    scales: Float32Array
    zero_points: Float32Array
    low: int
    high: int


class Rounder:
    """Rounds matrices of one input: the factorisation of H `[columns, columns]` is made once."""

    def __init__(self, hessian: Doubles) -> None:
        damped = hessian.copy()
        diagonal = np.einsum("ii->i", damped)
        is_dead = diagonal <= 0
        diagonal += DAMPING * float(diagonal.mean()) + float(is_dead.all())
        self._hessian = damped.astype(np.float32)
        self._order = np.argsort(-diagonal, kind="stable")
        turned = damped[np.ix_(self._order[::-1], self._order[::-1])]
        factor = np.linalg.cholesky(turned)[::-1, ::-1].T  # A with A^T A = H in the order of rounding
        self._feedback = (factor / np.diagonal(factor)[:, None]).astype(np.float32)

    def round(self, weights: Float32Array, grid: Grid, *, sweeps: int = 1) -> tuple[Float32Array, Float32Array]:
        """(codes, scales) for `weights` `[rows, columns]` on the grid, whose scales are only where it starts."""
        steps = self._nearest_plane(weights, grid)
        for _ in range(sweeps):
            steps = self._descend(weights, steps, grid)
        scales = self._fit_scales(weights, steps, grid.scales)
        return steps + _spread(grid.zero_points, weights.shape[1]), scales

    def loss(self, difference: Float32Array) -> Doubles:
        """What a change of the weights `[rows, columns]` costs in each row."""
        return np.asarray(np.einsum("rc,rc->r", difference @ self._hessian, difference, dtype=np.float64))

    def _nearest_plane(self, weights: Float32Array, grid: Grid) -> Float32Array:
        """Codes less zero point, `[rows, columns]`. Transposed inside: a column of all rows lies in one piece."""
        rows, columns = weights.shape
        target = np.ascontiguousarray(weights[:, self._order].T)
        lattice = _Columns(grid, columns, self._order)
        steps = np.empty((columns, rows), np.float32)
        errors = np.empty((columns, rows), np.float32)
        for start in range(0, columns, PANEL):
            stop = min(start + PANEL, columns)
            panel = target[start:stop] + self._feedback[start:stop, :start] @ errors[:start]
            for column in range(start, stop):
                wanted = panel[column - start] + self._feedback[column, start:column] @ errors[start:column]
                steps[column], value = lattice.nearest(wanted, column)
                errors[column] = target[column] - value
        return _unpermuted(steps, self._order)

    def _descend(self, weights: Float32Array, steps: Float32Array, grid: Grid) -> Float32Array:
        """One sweep over the columns in the order of rounding."""
        columns = weights.shape[1]
        hessian = self._hessian[np.ix_(self._order, self._order)]
        lattice = _Columns(grid, columns, self._order)
        values = steps * _spread(grid.scales, columns)
        slope = np.ascontiguousarray(((values - weights) @ self._hessian)[:, self._order].T)
        values = np.ascontiguousarray(values[:, self._order].T)
        chosen = np.empty_like(values)
        moves = np.empty_like(values)
        for start in range(0, columns, PANEL):
            stop = min(start + PANEL, columns)
            panel = slope[start:stop] + hessian[start:stop, :start] @ moves[:start]
            for column in range(start, stop):
                here = panel[column - start] + hessian[column, start:column] @ moves[start:column]
                chosen[column], value = lattice.nearest(values[column] - here / hessian[column, column], column)
                moves[column] = value - values[column]
        return _unpermuted(chosen, self._order)

    def _fit_scales(self, weights: Float32Array, steps: Float32Array, scales: Float32Array) -> Float32Array:
        """The scales `[rows, blocks]` of least loss for codes less zero point; one linear system for each row."""
        rows, columns = weights.shape
        blocks = scales.shape[1]
        width = columns // blocks
        right = ((weights @ self._hessian) * steps).reshape(rows, blocks, width).sum(-1, dtype=np.float64)
        system = np.empty((rows, blocks, blocks), np.float64)
        for block in range(blocks):
            piece = slice(block * width, (block + 1) * width)
            reach = steps[:, piece] @ self._hessian[piece]
            reach *= steps
            system[:, block] = reach.reshape(rows, blocks, width).sum(-1)
        diagonal = np.einsum("rbb->rb", system)
        ridge = RIDGE * diagonal.mean(1, keepdims=True) + np.finfo(np.float64).tiny
        right += ridge * scales
        diagonal += ridge
        fitted = np.linalg.solve(system, right[..., None])[..., 0]
        return np.asarray(fitted, np.float32)


class _Columns:
    """A grid, column by column in some order, over all rows."""

    def __init__(self, grid: Grid, columns: int, order: NDArray[np.intp]) -> None:
        self._low, self._high = np.float32(grid.low), np.float32(grid.high)
        self._block = order // (columns // grid.scales.shape[1])
        self._scales = np.ascontiguousarray(grid.scales.T)
        self._zero_points = np.ascontiguousarray(grid.zero_points.T)
        is_flat = np.abs(self._scales) < np.finfo(np.float32).tiny
        self._inverse = np.where(is_flat, 0, 1 / np.where(is_flat, 1, self._scales)).astype(np.float32)

    def nearest(self, wanted: Float32Array, column: int) -> tuple[Float32Array, Float32Array]:
        """(code less zero point, value) nearest to what is wanted in a column."""
        block = self._block[column]
        zero_points = self._zero_points[block]
        steps = np.rint(wanted * self._inverse[block])
        np.clip(steps, self._low - zero_points, self._high - zero_points, out=steps)
        return steps, steps * self._scales[block]


def _spread(blocks: Float32Array, columns: int) -> Float32Array:
    """`[rows, blocks]` as `[rows, columns]`."""
    return np.repeat(blocks, columns // blocks.shape[1], axis=1)


def _unpermuted(columns: Float32Array, order: NDArray[np.intp]) -> Float32Array:
    """`[columns, rows]` in `order` as `[rows, columns]` in the matrix's own."""
    result = np.empty_like(columns.T, order="C")
    result[:, order] = columns.T
    return result
