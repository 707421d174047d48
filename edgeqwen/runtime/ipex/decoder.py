"""A decoder layer of IPEX's fused operators, and the runtime that has it.

As in `runtime.torch` the residual stream, norms and rotations are fp32, and what is multiplied is bf16 or fp32.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

from edgeqwen.runtime.ipex.attention import PagedAttention
from edgeqwen.runtime.ipex.matrices import CodedMatrix, PackedMatrix, make_matrix
from edgeqwen.runtime.torch.decoder import DOWN, GATE_UP, OUT, QKV, Decoder, LayerFunction, LayerVectors, refine
from edgeqwen.runtime.torch.runtime import TorchRuntime


class IpexDecoder(Decoder):
    """A model's weights, packed for IPEX, and what runs rows through its layers."""

    make_matrix = staticmethod(make_matrix)

    def _make_layer(self) -> LayerFunction:
        return self._computed_layer

    def _computed_layer(self, rows: Any, cosines: Any, sines: Any, layer: Any, vectors: LayerVectors) -> Any:
        number = int(layer)
        mixed = self.product(self._norm(rows, vectors.input_norm).to(self.dtype), number, QKV).float()
        if vectors.bias is not None:
            mixed = mixed + vectors.bias
        attended = self.attend(*self._heads(mixed, cosines, sines, vectors), number)
        rows = rows + self.product(attended.to(self.dtype), number, OUT)
        both = self.product(self._norm(rows, vectors.post_norm).to(self.dtype), number, GATE_UP)
        gate, up = both.float().chunk(2, -1)
        return rows + self.product(functional.silu(gate).mul_(up).to(self.dtype), number, DOWN)

    def _heads(self, mixed: Any, cosines: Any, sines: Any, vectors: LayerVectors) -> tuple[Any, Any, Any]:
        """Queries, keys and values `[rows, heads, head_dim]`, the first two normed (if the family does) and rotated."""
        heads, kv_heads, head_dim = self.spec.num_heads, self.spec.num_kv_heads, self.spec.head_dim
        tables = torch.cat((sines, cosines), -1).squeeze(1)
        query, key, value = mixed.unflatten(-1, (-1, head_dim)).split((heads, kv_heads, kv_heads), 1)
        if vectors.query_norm is not None:
            query, key = self._norm(query, vectors.query_norm), self._norm(key, vectors.key_norm)
        return _rotated(query, tables), _rotated(key, tables), value

    def _normed(self, rows: Any) -> Any:
        return self._norm(rows, self._final_norm)

    def _norm(self, rows: Any, gain: Any) -> Any:
        return torch.ops.torch_ipex.rmsnorm(rows, gain, self.spec.rms_norm_eps)

    def _scored(self, normed: Any) -> Any:
        """Products with codes have their results in what they are given, fp32; those in bf16 are to be refined."""
        if isinstance(self._head, CodedMatrix):
            return self._head(normed)
        logits = self._head(normed.to(self.dtype)).float()
        if isinstance(self._head, PackedMatrix) and self.spec.tie_embeddings:
            refine(logits, normed, self._embedding.table)
        return logits


def _rotated(heads: Any, tables: Any) -> Any:
    """Rotary position embedding of `[rows, heads, head_dim]`; `tables` `[rows, head_dim]` has a row's sines, then its
    cosines.
    """
    count, num_heads, head_dim = heads.shape
    positions = torch.arange(count).unsqueeze(0)
    rotate = torch.ops.torch_ipex.rotary_position_embedding
    return rotate(heads.unsqueeze(0), tables, positions, num_heads, head_dim, head_dim // 2, head_dim)[0].squeeze(0)


class IpexRuntime(TorchRuntime):
    """Implements `core.step.Runtime` on IPEX."""

    decoder_type = IpexDecoder
    attention_type = PagedAttention
