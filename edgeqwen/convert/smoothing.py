"""Making the inputs of `down` even, at no cost when running.

The inputs of a layer's last product, silu(gate) * up, are as uneven as activations get: in every token a few channels,
not always the same, are ten to twenty times the rest, and with one scale for a token the rest is left with a few steps.
Most of what 8-bit rows lose is lost here. But a channel of `up` may be divided by any number if its column of `down` is
multiplied by it (Xiao et al., "SmoothQuant", 2023, for other places). The square root of the channel's size shares the
unevenness between activations and weights; the weights' part, calibrated rounding then deals with.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from edgeqwen.convert.checkpoint import Float32Array

FLOOR: Final = 1e-3
"""Of the mean size: channels that calibration found silent must not become divisors of nothing."""


def channel_scales(inner: Float32Array) -> Float32Array:
    """Divisors `[channels]` for `up`, factors for `down`, from inputs `[tokens, channels]`; geometric mean 1."""
    mean_square = np.mean(np.square(inner), axis=0, dtype=np.float64)
    size = np.sqrt(mean_square)
    size = np.maximum(size, FLOOR * size.mean() + np.finfo(np.float64).tiny)
    logs = 0.5 * np.log(size)
    return np.asarray(np.exp(logs - logs.mean()), np.float32)
