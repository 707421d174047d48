"""What a graph's products see of their activations: the rounding that happens in front of them, in numpy.

The same arithmetic as the nodes and kernels use, so that a layer quantised on it is quantised on what it will be given.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from edgeqwen.convert.checkpoint import Float32Array

LEVELS: Final = 127
TINY: Final = 1e-12


def round_rows(x: Float32Array) -> Float32Array:
    """`x` `[tokens, width]` with 8 bits and one scale a token (`linear.RowLinears`)."""
    return round_blocks(x, x.shape[1])


def round_blocks(x: Float32Array, size: int) -> Float32Array:
    """`x` with 8 bits and one scale for each `size` values of a token (`MatMulNBits` at accuracy level 4)."""
    blocks = x.reshape(len(x), -1, size)
    scales = np.maximum(blocks.max(axis=-1), -blocks.min(axis=-1))[..., None]
    scales = np.maximum(scales * np.float32(1 / LEVELS), np.float32(TINY))
    codes = blocks / scales
    np.rint(codes, out=codes)
    codes *= scales
    return np.asarray(codes.reshape(x.shape), np.float32)
