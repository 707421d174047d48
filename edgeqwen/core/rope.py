"""Rotary tables: cosine and sine of position times inverse frequency, float32 `[positions, head_dim / 2]`.

Computed in the order and precision that transformers uses (inverse frequencies in float32, their product with the
position in float32), because that is what the checkpoints were trained and are judged with. The scalings are those of
transformers' `modeling_rope_utils`: `linear` divides all frequencies, `llama3` only the low ones, with a smooth passage
between the two wavelengths that its factors name.
"""

from __future__ import annotations

import math
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from edgeqwen.core.model import ModelSpec, RopeScaling

Float32Array: TypeAlias = NDArray[np.float32]


def inverse_frequencies(spec: ModelSpec) -> Float32Array:
    """Float32 `[head_dim / 2]`, scaled as the spec says."""
    exponents = np.arange(0, spec.head_dim, 2, dtype=np.float32) / np.float32(spec.head_dim)
    inverse: Float32Array = np.float32(1.0) / np.power(np.float32(spec.rope_theta), exponents)
    if spec.rope_scaling is None:
        return inverse
    if spec.rope_scaling.rope_type == "linear":
        return np.asarray(inverse / np.float32(spec.rope_scaling.factor), np.float32)
    return _llama3(inverse, spec.rope_scaling)


def rotary_tables(spec: ModelSpec, num_positions: int = 0) -> tuple[Float32Array, Float32Array]:
    """(cosines, sines) for the first `num_positions` positions; 0: for every position that the model knows."""
    positions = np.arange(num_positions or spec.max_position, dtype=np.float32)
    angles = positions[:, None] * inverse_frequencies(spec)[None, :]
    return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)


def _llama3(inverse: Float32Array, scaling: RopeScaling) -> Float32Array:
    wavelengths = 2 * math.pi / inverse
    low_wavelength = scaling.original_max_position / scaling.low_freq_factor
    high_wavelength = scaling.original_max_position / scaling.high_freq_factor
    smooth = (scaling.original_max_position / wavelengths - scaling.low_freq_factor) / (
        scaling.high_freq_factor - scaling.low_freq_factor
    )
    slowed = inverse / scaling.factor
    blended = (1 - smooth) * slowed + smooth * inverse
    scaled = np.where(wavelengths > low_wavelength, slowed, inverse)
    is_between = (wavelengths <= low_wavelength) & (wavelengths >= high_wavelength)
    return np.where(is_between, blended, scaled).astype(np.float32)
