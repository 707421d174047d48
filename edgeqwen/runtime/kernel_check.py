"""Proof at load that this processor multiplies the package's integers rightly.

On x86 with AVX2 but without VNNI the kernel for signed weights adds products in 16 bits, which saturate: answers are
wrong by a fifth and nothing says so. A package therefore carries a tiny graph with one product of extreme values, in
the same weight form as its layers; here its result is compared with exact arithmetic before the real graph is loaded.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import numpy as np
import onnxruntime as ort

from edgeqwen.core.kernel import DEPTH, check_weights
from edgeqwen.core.model import WeightForm
from edgeqwen.errors import ModelInvalid

ROWS: Final = (1, 5, 64)


def check_kernel(path: Path, form: WeightForm, options: ort.SessionOptions) -> None:
    """Run the check graph for few and many rows; raises `ModelInvalid` if one result is not exact."""
    try:
        session: Any = ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    except Exception as error:  # onnxruntime raises its own types, RuntimeError and ValueError
        raise ModelInvalid(f"{path}: onnxruntime cannot load this graph") from error
    weights = check_weights().astype(np.int64)
    for rows in ROWS:
        codes = (255 - np.arange(rows * DEPTH) % 3).astype(np.uint8).reshape(rows, DEPTH)
        exact = (codes.astype(np.int64) - 128) @ weights
        (got,) = session.run(None, {"codes": codes})
        if not np.array_equal(got, exact.astype(np.float32)):
            raise ModelInvalid(
                f"{path.parent}: this processor multiplies the package's {form} 8-bit weights wrongly; "
                "import the model again with --target any"
            )
