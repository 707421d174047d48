"""Attention of a step's rows over the KV arenas, sequence by sequence, by torch's flash attention for CPUs.

A single new token sees all that its sequence holds, so its query heads stand in the place of positions: those that
share a key head become the rows of one product, and no mask is needed. Several new tokens get a mask, the same for all
layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional

from edgeqwen.core.model import KVType
from edgeqwen.core.step import Chunk
from edgeqwen.runtime.cache import Cache


@dataclass(frozen=True, slots=True)
class _Span:
    """Rows `[first, last)` of a step are the tokens `[start, stop)` of a slot."""

    first: int
    last: int
    slot: int
    start: int
    stop: int
    mask: Any


class CacheAttention:
    """`plan` a step, then call for each layer."""

    def __init__(self, cache: Cache, kv_type: KVType, dtype: Any) -> None:
        self.kv_type = kv_type
        self._layers = [(_tensor(keys, dtype), _tensor(values, dtype)) for keys, values in cache.views()]
        self._dtype = dtype
        self._spans: list[_Span] = []

    def plan(self, chunks: Sequence[Chunk]) -> None:
        """What the rows of the next calls are: the chunks' tokens, in order."""
        self._spans, first = [], 0
        for chunk in chunks:
            last = first + len(chunk.ids)
            mask = self._mask(chunk) if len(chunk.ids) > 1 else None
            self._spans.append(_Span(first, last, chunk.slot, chunk.start, chunk.stop, mask))
            first = last

    def __call__(self, query: Any, key: Any, value: Any, layer: int) -> Any:
        parts = []
        for span in self._spans:
            rows = slice(span.first, span.last)
            past = self._extended(span, key[rows], value[rows], layer)
            parts.append(_attend(span, query[rows].to(self._dtype), *past))
        return (parts[0] if len(parts) == 1 else torch.cat(parts)).to(query.dtype)

    def close(self) -> None:
        """Let go of the cache's memory."""
        self._layers, self._spans = [], []

    def _extended(self, span: _Span, key: Any, value: Any, layer: int) -> tuple[Any, Any]:
        """Append to a slot; its keys and values `[1, kv_heads, stop, head_dim]`."""
        keys, values = self._layers[layer]
        slot, start, stop = span.slot, span.start, span.stop
        keys[slot, :, start:stop] = key.transpose(0, 1)
        values[slot, :, start:stop] = value.transpose(0, 1)
        return keys[slot : slot + 1, :, :stop], values[slot : slot + 1, :, :stop]

    def _mask(self, chunk: Chunk) -> Any:
        """`[tokens, stop]`: 0 for what a token sees, minus infinity for what comes after it."""
        unseen = torch.full((len(chunk.ids), chunk.stop), float("-inf"), dtype=self._dtype)
        return unseen.triu_(chunk.start + 1)


def _attend(span: _Span, query: Any, keys: Any, values: Any) -> Any:
    """Rows `[tokens, heads, head_dim]` of queries -> `[tokens, heads * head_dim]`."""
    if span.mask is None:
        grouped = query.view(1, keys.shape[1], -1, query.shape[-1])
        return functional.scaled_dot_product_attention(grouped, keys, values).view(1, -1)
    heads = query.transpose(0, 1).unsqueeze(0)
    attended = functional.scaled_dot_product_attention(heads, keys, values, attn_mask=span.mask, enable_gqa=True)
    return attended[0].transpose(0, 1).reshape(len(query), -1)


def _tensor(array: Any, dtype: Any) -> Any:
    """The array's memory as a tensor."""
    return torch.from_numpy(array).view(dtype)
