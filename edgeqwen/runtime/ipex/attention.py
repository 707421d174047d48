"""IPEX's paged attention over the KV arenas: one call for all sequences of a step, however many tokens each has.

It takes a cache in pages and a table of each sequence's. A slot is one page here, as long as the capacity, so the
arenas `[slots, kv_heads, capacity, head_dim]` are its cache as they lie.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate
from typing import Any, Final

import torch

from edgeqwen.core.step import Chunk
from edgeqwen.runtime.torch.attention import CacheAttention

IS_CAUSAL: Final = True
NO_WINDOW: Final = -1
NO_CAP: Final = -1.0
AS_IS: Final = ("auto", 1.0, 1.0)
"""Type and scales of a cache that is not quantised."""


class PagedAttention(CacheAttention):
    """`plan` a step, then call for each layer."""

    def plan(self, chunks: Sequence[Chunk]) -> None:
        """What the rows of the next calls are: the chunks' tokens, in order."""
        capacity = self._layers[0][0].shape[2]
        stops = [chunk.stop for chunk in chunks]
        counts = [len(chunk.ids) for chunk in chunks]
        self._places = _integers(
            chunk.slot * capacity + position for chunk in chunks for position in range(chunk.start, chunk.stop)
        )
        self._query_ends = _integers([0, *accumulate(counts)])
        self._key_ends = _integers([0, *accumulate(stops)])
        self._pages = _integers(chunk.slot for chunk in chunks).unsqueeze(1)
        self._longest = max(counts), max(stops)

    def __call__(self, query: Any, key: Any, value: Any, layer: int) -> Any:
        keys, values = self._layers[layer]
        query, key, value = (rows.to(keys.dtype).contiguous() for rows in (query, key, value))
        torch.ops.torch_ipex.reshape_and_cache(key, value, keys, values, self._places, *AS_IS)
        attended = torch.empty_like(query)
        torch.ops.torch_ipex.flash_attn_varlen_func(
            attended,
            query,
            keys,
            values,
            self._query_ends,
            self._key_ends,
            *self._longest,
            1 / math.sqrt(query.shape[-1]),
            IS_CAUSAL,
            self._pages,
            None,
            NO_WINDOW,
            NO_WINDOW,
            *AS_IS,
            NO_CAP,
        )
        return attended.flatten(1)


def _integers(values: Any) -> Any:
    return torch.tensor(list(values), dtype=torch.int32)
