"""Rows of stored tensors as float32, decoded piece by piece so that only the result and one piece are in memory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from edgeqwen.convert.checkpoint import Float32Array
from edgeqwen.errors import ModelInvalid

PIECE_ELEMENTS = 1 << 21


def decode_plain(raw: NDArray[np.uint8], stored_type: str) -> Float32Array:
    """Little-endian F32, F16 or BF16 bytes as float32, exactly; bfloat16 is the upper half of a float32."""
    if stored_type == "F32":
        return raw.view("<f4").astype(np.float32, copy=False)
    if stored_type == "F16":
        return raw.view("<f2").astype(np.float32)
    assert stored_type == "BF16", stored_type
    return (raw.view("<u2").astype(np.uint32) << 16).view(np.float32)


def read_rows(
    shape: tuple[int, ...],
    start: int,
    stop: int | None,
    decode: Callable[[int, int], Float32Array],
    *,
    path: Path,
    name: str,
) -> Float32Array:
    """Rows `[start, stop)` (None: to the end) from `decode(first, last)`, which gives a few at a time in any shape.

    `path` and `name` are the file and the tensor that `ModelInvalid` names if there is NaN or infinity in them.
    """
    stop = shape[0] if stop is None else stop
    assert 0 <= start <= stop <= shape[0], (start, stop, shape)
    row_len = int(np.prod(shape[1:], dtype=np.int64))
    rows = np.empty((stop - start, row_len), np.float32)
    step = max(1, PIECE_ELEMENTS // row_len)
    for first in range(start, stop, step):
        last = min(first + step, stop)
        piece = rows[first - start : last - start]
        piece[...] = decode(first, last).reshape(piece.shape)
        is_bad = ~np.isfinite(piece).all(axis=1)
        if is_bad.any():
            raise not_finite(path, name, first + int(np.argmax(is_bad)))
    return rows.reshape(stop - start, *shape[1:])


def not_finite(path: Path, name: str, row: int) -> ModelInvalid:
    """The error for a bad row of a tensor."""
    return ModelInvalid(f"{path}: tensor '{name}' holds NaN or infinity (row {row}): the file is damaged")
