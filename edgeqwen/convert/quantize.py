"""Rounding weights to 8 and 4 bits. Pure numpy; knows nothing of files or graphs.

Two forms, for the two kernels that are fast on a CPU:

* **Rows** (`quantize_rows`): one scale for each output channel, signed codes in [-127, 127] around 0. The kernel
  multiplies integers over the whole row, so there can be no finer scale: value = scale[n] * code[n, k].
* **Blocks** (`quantize_blocks`): one scale for each run of `block_size` inputs, unsigned codes around the zero point
  2^(bits-1): value = scale[n, b] * (code[n, k] - zero_point). The value of largest magnitude of a block is put on the
  code 0, the end of the grid that reaches furthest (-8 of [-8, 7] for 4 bits), so the scale may be negative.

Choosing that extreme exactly is not the best a 4-bit grid can do: most of the error comes from the many small values,
so `quantize_blocks` tries a few smaller and larger scales around it and keeps the one of least squared error for each
block.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from edgeqwen.convert.checkpoint import Float32Array, Uint8Array

TINY = 1e-12
SCALE_CANDIDATES = tuple(1.0 + 0.02 * step for step in range(-8, 9))


@dataclass(frozen=True, slots=True)
class RowWeights:
    """`codes` int8 `[rows, columns]`, `scales` float32 `[rows]`."""

    codes: NDArray[np.int8]
    scales: Float32Array


@dataclass(frozen=True, slots=True)
class BlockWeights:
    """`codes` uint8 `[rows, columns]` (one a byte), `scales` float32 `[rows, columns / block_size]`.

    `zero_points` uint8 `[rows, columns / block_size]` (one a byte); None: 2^(bits-1) for all.
    """

    codes: Uint8Array
    scales: Float32Array
    zero_points: Uint8Array | None = None


Form: TypeAlias = Literal["fp32", "rows8", "blocks4", "blocks8"]
"""How a layer's weights are stored: as they are, in rows of 8 bits, in blocks of 4 or 8 bits."""


@dataclass(frozen=True, slots=True)
class QuantizedTensor:
    """One linear layer of a checkpoint in one form; `weights` are `RowWeights` for `rows8`, `BlockWeights` else."""

    tensor: str
    form: Form
    weights: RowWeights | BlockWeights


def quantize_rows(weights: Float32Array) -> RowWeights:
    """Symmetric 8-bit codes with one scale a row of `weights` `[rows, columns]`."""
    scales = np.maximum(np.abs(weights).max(axis=1) / 127, TINY).astype(np.float32)
    codes = np.clip(np.rint(weights / scales[:, None]), -127, 127).astype(np.int8)
    return RowWeights(codes, scales)


def quantize_blocks(weights: Float32Array, *, bits: int, block_size: int, searches: bool = True) -> BlockWeights:
    """Codes of `bits` (4 or 8) with one scale a block; `columns` must be a multiple of `block_size`. Without `searches`
    the scale of 4-bit blocks is the plain one, in a tenth of the time.
    """
    rows, columns = weights.shape
    assert columns % block_size == 0, (columns, block_size)
    blocks = weights.reshape(rows, columns // block_size, block_size)
    zero_point = 1 << (bits - 1)
    extreme = np.take_along_axis(blocks, np.abs(blocks).argmax(-1, keepdims=True), -1)
    scales: Float32Array = extreme / np.float32(-zero_point)
    if bits == 4 and searches:
        scales = _search_scales(blocks, scales)
    return BlockWeights(_codes(blocks, scales, zero_point).reshape(rows, columns), scales[..., 0].astype(np.float32))


def pack_nibbles(codes: Uint8Array) -> Uint8Array:
    """Two 4-bit codes a byte along the last axis, the even one in the low half (the order of `MatMulNBits`)."""
    return np.ascontiguousarray(codes[..., 0::2] | (codes[..., 1::2] << 4))


def widen_codes(codes: Uint8Array) -> Uint8Array:
    """4-bit codes (zero point 8) as 8-bit codes (zero point 128) of the same scale: exact."""
    return np.add(codes, np.uint8(128 - 8))


def block_size_for(columns: int, *, preferred: int) -> int:
    """The largest power of two up to `preferred` that divides `columns` (at least 16, the kernel's smallest)."""
    size = preferred
    while size > 16 and columns % size:
        size //= 2
    return size


def _codes(blocks: Float32Array, scales: Float32Array, zero_point: int) -> Uint8Array:
    is_zero = np.abs(scales) < np.finfo(np.float32).tiny  # and what is so small that its inverse is not finite
    inverse = np.where(is_zero, 0, 1 / np.where(is_zero, 1, scales)).astype(np.float32)
    codes: Uint8Array = np.clip(np.rint(blocks * inverse) + zero_point, 0, 2 * zero_point - 1).astype(np.uint8)
    return codes


def _search_scales(blocks: Float32Array, scales: Float32Array) -> Float32Array:
    """For each block the candidate multiple of its scale `[.., 1]` with the least squared rounding error (4 bits)."""
    best = scales
    least = np.full(scales.shape, np.inf, np.float32)
    for factor in SCALE_CANDIDATES:
        candidate = (scales * np.float32(factor)).astype(np.float32)
        restored = (_codes(blocks, candidate, 8).astype(np.float32) - 8) * candidate
        error = np.square(restored - blocks).sum(axis=-1, keepdims=True)
        is_better = error < least
        best = np.where(is_better, candidate, best)
        least = np.where(is_better, error, least)
    return best.astype(np.float32)
