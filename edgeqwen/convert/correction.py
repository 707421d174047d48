"""Weights moved, before they are rounded, towards outputs as they should be for inputs that are not.

What has been quantised so far gives a layer inputs X' instead of X, and leaves on the residual R' instead of R. A
matrix W that is to be rounded anyway can take some of that back: the D of least

    | X' (W + D)^T  -  (X W^T + R - R') |^2  +  damping |D|^2

solves (X'^T X' + damping) D^T = X'^T ((X - X') W^T + R - R'). Only half of it is taken, with strong damping: what fits
the calibration text better than that fits other text worse.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from edgeqwen.convert.checkpoint import Float32Array

SHARE: Final = 0.5
DAMPING: Final = 0.1
"""Share of the mean square input that is added to each input's."""


def corrected(
    weights: Float32Array,
    inputs: Float32Array,
    wanted: Float32Array,
    missing: Float32Array | None = None,
    *,
    gram: Float32Array,
) -> Float32Array:
    """`weights` `[out, width]` for `inputs` `[tokens, width]` where the model as it is has the `wanted` ones, and what
    its residual has more, `missing` `[tokens, out]`, where the product is added to the residual. `gram` is the mean
    outer product of the inputs.
    """
    num_tokens = np.float32(len(inputs))
    system = gram.copy()
    diagonal = np.einsum("ii->i", system)
    diagonal += np.float32(DAMPING) * diagonal.mean() + np.finfo(np.float32).tiny
    lost = (inputs.T @ (wanted - inputs)) @ weights.T
    if missing is not None:
        lost += inputs.T @ missing
    moved = np.linalg.solve(system, lost / num_tokens).T
    return np.asarray(weights + np.float32(SHARE) * moved, np.float32)
