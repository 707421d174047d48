"""From the hidden states of a text to its vector.

`last`: the state of the last token, which has seen all others. `mean`: the sum of all states over their number. Either
is scaled to length 1, so that the product of two vectors is the cosine between them.

States are added up one by one in double precision, so a vector does not depend on the pieces that its text came in.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from edgeqwen.core.model import Pooling
from edgeqwen.core.step import Hidden
from edgeqwen.errors import RuntimeFailed


class Pooler:
    """The vector of one text in the making. The engine thread pushes; `vector` is for whoever comes after it."""

    def __init__(self, pooling: Pooling) -> None:
        self._pooling = pooling
        self._total: NDArray[np.float64] | None = None

    def push(self, rows: Hidden) -> None:
        """The next states `[rows, hidden_size]`. Raises `RuntimeFailed` if they hold what is no number."""
        if not np.isfinite(rows).all():
            raise RuntimeFailed("the model's hidden states are not finite")
        if self._pooling == "last" and len(rows):
            self._total = rows[-1].astype(np.float64)
            return
        for row in rows:
            self._total = row.astype(np.float64) if self._total is None else self._total + row

    def vector(self) -> NDArray[np.float32]:
        """float32 `[hidden_size]` of length 1 (zeros stay zeros). All states must have been pushed."""
        assert self._total is not None
        length = float(np.linalg.norm(self._total))
        return np.asarray(self._total / length if length else self._total, np.float32)
