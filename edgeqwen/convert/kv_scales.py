"""Scales of an 8-bit cache, one for each channel of keys and values, from what calibration put there.

Keys have a few channels far larger than the rest, the same in every token, so a scale a channel is what fits them. They
are taken behind the rotary embedding, which mixes channel i with i + head_dim / 2: the two get one scale, so that the
scale may as well be applied before it.

The largest value of all sets the scale, unless cutting it off errs less over the whole text; for text that has larger
values than this one a little is added.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from edgeqwen.convert.checkpoint import Float32Array

LEVELS: Final = 127
CUTS: Final = (1.0, 0.9, 0.8, 0.7, 0.6, 0.5)
MARGIN: Final = 1.05
TINY: Final = 1e-6
MOST_TOKENS: Final = 4096


def key_scales(keys: Float32Array) -> Float32Array:
    """`[kv_heads, head_dim]` for keys `[tokens, kv_heads, head_dim]`, equal within a rotary pair."""
    tokens, num_heads, head_dim = keys.shape
    pairs = keys.reshape(tokens, num_heads, 2, head_dim // 2).transpose(0, 2, 1, 3)
    return np.tile(_scales(pairs.reshape(2 * tokens, num_heads, -1)), (1, 2))


def value_scales(values: Float32Array) -> Float32Array:
    """`[kv_heads, head_dim]` for values `[tokens, kv_heads, head_dim]`."""
    return _scales(values)


def round_cache(x: Float32Array, scales: Float32Array) -> Float32Array:
    """What an 8-bit cache gives back of `x` `[tokens, kv_heads, head_dim]`."""
    codes = np.clip(np.rint(x / scales), -LEVELS - 1, LEVELS)
    return np.asarray(codes * scales, np.float32)


def _scales(x: Float32Array) -> Float32Array:
    largest = np.maximum(np.abs(x).max(axis=0) / LEVELS, TINY).astype(np.float32)
    x = x[:: -(-len(x) // MOST_TOKENS)]  # for the cuts, a sample does
    best, least = largest, np.full(largest.shape, np.inf)
    for cut in CUTS:
        scales = largest * np.float32(cut)
        loss = np.square(round_cache(x, scales) - x).sum(axis=0, dtype=np.float64)
        best = np.where(loss < least, scales, best)
        least = np.minimum(loss, least)
    return np.asarray(best * np.float32(MARGIN), np.float32)
