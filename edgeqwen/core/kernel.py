"""The product by which a processor proves that it multiplies 8-bit weights rightly (see `runtime.kernel_check`)."""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

KERNEL_CHECK: Final = "kernel_check.onnx"
DEPTH: Final = 256
WIDTH: Final = 64


def check_weights() -> NDArray[np.int8]:
    """Weights of the check graph, int8 `[DEPTH, WIDTH]`: all of [-127, 127] and whole columns of the extremes."""
    index = np.arange(DEPTH * WIDTH).reshape(DEPTH, WIDTH)
    codes = (index * 37) % 255 - 127
    codes[:, ::4] = 127
    codes[:, 1::4] = -127
    return codes.astype(np.int8)
