"""What every runtime does with a batch: its ids checked, and rows of all chunks shared out among them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgeqwen.core.step import Chunk
from edgeqwen.errors import RuntimeFailed


def check_ids(chunks: Sequence[Chunk], vocab_size: int) -> None:
    """Raise `RuntimeFailed` for an id that no row of the embedding is for: it would be read without a check."""
    for chunk in chunks:
        if max(chunk.ids) >= vocab_size or min(chunk.ids) < 0:
            raise RuntimeFailed(f"a token id lies outside the vocabulary of {vocab_size}")


def split_rows(rows: NDArray[Any], counts: Sequence[int]) -> tuple[NDArray[Any], ...]:
    """`rows` `[sum of counts, ...]` as one array for each count."""
    return tuple(np.split(rows, np.cumsum(counts)[:-1]))
