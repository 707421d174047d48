"""Proof at load that this processor multiplies the package's integers rightly.

On x86 with AVX2 but without VNNI the kernel for signed weights adds products in 16 bits, which saturate: answers are
wrong by a fifth and nothing says so. A package therefore carries a tiny graph with one product of extreme values, in
the same weight form as its layers; here its result is compared with exact arithmetic before the real graph is loaded.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any, Final

import numpy as np
import onnxruntime as ort

from edgeqwen.core.kernel import DEPTH, check_weights
from edgeqwen.core.model import WeightForm
from edgeqwen.errors import ModelInvalid
from edgeqwen.runtime.session import open_session, session_options

ROWS: Final = (1, 5, 64)

logger = logging.getLogger(__name__)


def needs_precise_kernel(path: Path, form: WeightForm) -> bool:
    """Whether the products of the check graph at `path` are exact only with onnxruntime's slow, exact kernel.

    Raises `ModelInvalid` if they are wrong with both.
    """
    if is_exact(path, session_options(1)):
        return False
    if not is_exact(path, session_options(1, is_precise=True)):
        raise ModelInvalid(
            f"{path.parent}: this processor multiplies the package's {form} 8-bit weights wrongly; "
            "import the model again with --target any"
        )
    logger.warning(
        "%s: made for a processor with VNNI, which this one is not: it is run exactly but slowly; "
        "import the model again with --target any",
        path.parent,
    )
    return True


def is_exact(path: Path, options: ort.SessionOptions) -> bool:
    """Whether the check graph, run for few and many rows, gives exact products under these options."""
    session: Any = open_session(path, options)
    weights = check_weights().astype(np.int64)
    for rows in ROWS:
        codes = (255 - np.arange(rows * DEPTH) % 3).astype(np.uint8).reshape(rows, DEPTH)
        exact = (codes.astype(np.int64) - 128) @ weights
        (got,) = session.run(None, {"codes": codes})
        if not np.array_equal(got, exact.astype(np.float32)):
            return False
    return True
