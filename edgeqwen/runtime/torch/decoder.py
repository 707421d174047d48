"""The decoder of the family on torch: pre-norm layers of grouped attention and SwiGLU (Qwen3, Qwen2, Llama).

One function is every layer; eager execution calls it, compiled execution calls what inductor made of it once. Rows are
the tokens of all chunks of a step, one below the other: only attention knows which sequence a row is of. The residual
stream, norms and rotations are fp32; what is multiplied is bf16 or fp32 (`dtype`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, NamedTuple

import torch
from torch.nn import functional

from edgeqwen.core.model import ModelSpec
from edgeqwen.core.tensor_names import (
    EMBEDDING,
    FINAL_NORM,
    HIDDEN_TURN,
    OUTPUT,
    OUTPUT_TURN,
    STEP_TENSORS,
    layer_prefix,
)
from edgeqwen.runtime.torch import operators
from edgeqwen.runtime.torch.attention import CacheAttention
from edgeqwen.runtime.torch.compiler import Compiler
from edgeqwen.runtime.torch.options import WeightType
from edgeqwen.runtime.torch.weights import (
    Matrix,
    WeightSource,
    gathered,
    make_matrix,
    quantized_matrix,
    quantized_rows,
    vector,
)

QKV, OUT, GATE_UP, DOWN = range(len(STEP_TENSORS))
"""Products of a layer by number, in the order of `STEP_TENSORS`: operators take no names."""

NUM_REFINED: Final = 32


class LayerVectors(NamedTuple):
    """Gains of a layer's norms and the bias of its queries, keys and values; None where the family has none."""

    input_norm: Any
    post_norm: Any
    query_norm: Any
    key_norm: Any
    bias: Any


LayerFunction = Callable[..., Any]
"""(rows, cosines, sines, layer number, vectors...) -> rows."""


def layer_function(spec: ModelSpec, weight_type: WeightType, dtype: Any) -> LayerFunction:
    """The layer of a model; matrices and cache are found through `operators`."""
    heads, kv_heads, head_dim, eps = spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.rms_norm_eps
    query_width, kv_width = heads * head_dim, kv_heads * head_dim
    widths = {
        QKV: query_width + 2 * kv_width,
        OUT: spec.hidden_size,
        GATE_UP: 2 * spec.intermediate_size,
        DOWN: spec.hidden_size,
    }

    def norm(rows: Any, gain: Any) -> Any:
        return functional.rms_norm(rows.float(), (rows.shape[-1],), gain, eps)

    def linear(rows: Any, layer: Any, part: int) -> Any:
        if weight_type != "int8":
            return operators.product(rows.to(dtype), layer, part, widths[part], dtype)
        codes, scales = quantized_rows(rows)
        return operators.product(codes, layer, part, widths[part], dtype) * scales

    def function(rows: Any, cosines: Any, sines: Any, layer: Any, vectors: LayerVectors) -> Any:
        mixed = linear(norm(rows, vectors.input_norm), layer, QKV)
        if vectors.bias is not None:
            mixed = mixed + vectors.bias
        query, key, value = mixed.split((query_width, kv_width, kv_width), -1)
        query, key = query.unflatten(-1, (heads, head_dim)), key.unflatten(-1, (kv_heads, head_dim))
        if vectors.query_norm is not None:
            query, key = norm(query, vectors.query_norm), norm(key, vectors.key_norm)
        query, key = rotated(query, cosines, sines).to(dtype), rotated(key, cosines, sines).to(dtype)
        attended = operators.attend(query, key, value.unflatten(-1, (kv_heads, head_dim)), layer)
        rows = rows + linear(attended, layer, OUT)
        gate, up = linear(norm(rows, vectors.post_norm), layer, GATE_UP).chunk(2, -1)
        return rows + linear(functional.silu(gate.float()) * up.float(), layer, DOWN)

    return function


def rotated(heads: Any, cosines: Any, sines: Any) -> Any:
    """Rotary position embedding of `[rows, heads, head_dim]`, halves of a head turned against each other."""
    first, second = heads.float().chunk(2, -1)
    return torch.cat((first * cosines - second * sines, second * cosines + first * sines), -1)


class Decoder:
    """A model's weights, and what runs rows through its layers. `dtype` is what is computed in.

    `runtime.ipex` has one with matrices, layers and an output of its own.
    """

    make_matrix = staticmethod(make_matrix)

    def __init__(
        self,
        source: WeightSource,
        *,
        weight_type: WeightType,
        dtype: Any,
        attention: CacheAttention,
        progress: Callable[[float], None],
    ) -> None:
        spec = source.spec
        self.spec, self.dtype, self.weight_type = spec, dtype, weight_type
        self._attention = attention
        self._matrices: list[dict[int, Matrix]] = []
        self._vectors: list[LayerVectors] = []
        self._numbers = [torch.tensor(layer) for layer in range(spec.num_layers)]
        for layer in range(spec.num_layers):
            prefix = layer_prefix(layer)
            self._matrices.append({
                part: self.make_matrix(source, [prefix + name for name in names], weight_type, dtype)
                for part, names in enumerate(STEP_TENSORS.values())
            })
            self._vectors.append(_layer_vectors(source, prefix))
            progress((layer + 1) / (spec.num_layers + 4))
        self._final_norm = vector(source, [FINAL_NORM])
        self._output_turn, self._hidden_turn = (_turn(source, name) for name in (OUTPUT_TURN, HIDDEN_TURN))
        output = EMBEDDING if spec.tie_embeddings else OUTPUT
        self._head = self.make_matrix(source, [output], weight_type, dtype)
        self._embedding = Embedding(source, weight_type, dtype)
        self._layer = self._make_layer()

    def _make_layer(self) -> LayerFunction:
        """What every layer is computed by."""
        return layer_function(self.spec, self.weight_type, self.dtype)

    def compile(self, compiler: Compiler, tables: tuple[Any, Any], progress: Callable[[float], None]) -> None:
        """Have the layers compiled. `tables` are cosines and sines by position."""

        def arguments(count: int) -> tuple[Any, ...]:
            rows = torch.zeros(count, self.spec.hidden_size)
            turns = [table[torch.zeros(count, dtype=torch.int64)].unsqueeze(1) for table in tables]
            return rows, *turns, self._numbers[0], self._vectors[0]

        with operators.executing(_Shapes(self)):
            self._layer = compiler.compile(self._layer, arguments, progress)

    def run(self, ids: Any, cosines: Any, sines: Any) -> Any:
        """Rows `[tokens, hidden]` that leave the last layer, for `ids` `[tokens]`; the cache gets theirs."""
        rows = self._embedding(ids).float()
        with operators.executing(self):
            for number, vectors in zip(self._numbers, self._vectors, strict=True):
                rows = self._layer(rows, cosines, sines, number, vectors)
        return rows

    def hidden(self, rows: Any) -> Any:
        """What leaves the model's last norm, in the basis that the model was published in."""
        normed = self._normed(rows)
        return normed if self._hidden_turn is None else normed @ self._hidden_turn.T

    def logits(self, rows: Any) -> Any:
        """`[rows, vocabulary]` of rows that left the last layer."""
        normed = self._normed(rows)
        if self._output_turn is not None:
            normed = normed @ self._output_turn.T
        return self._scored(normed)

    def _scored(self, normed: Any) -> Any:
        if self.weight_type == "int8":
            codes, scales = quantized_rows(normed)
            return self._head(codes).float() * scales
        logits = self._head(normed.to(self.dtype)).float()
        if self.weight_type == "bf16" and self.spec.tie_embeddings:
            refine(logits, normed, self._embedding.table)
        return logits

    def _normed(self, rows: Any) -> Any:
        return functional.rms_norm(rows, (self.spec.hidden_size,), self._final_norm, self.spec.rms_norm_eps)

    def product(self, rows: Any, layer: int, part: int) -> Any:
        """See `operators.Executor`."""
        return self._matrices[layer][part](rows)

    def attend(self, query: Any, key: Any, value: Any, layer: int) -> Any:
        """See `operators.Executor`."""
        return self._attention(query, key, value, layer)


def refine(logits: Any, normed: Any, table: Any) -> None:
    """Compute the highest of each row of `logits` `[rows, vocabulary]` once more, in fp32 and in place, from what they
    are products of: `normed` `[rows, hidden]` and `table` `[vocabulary, hidden]`.

    A product in bf16 rounds its results to 8 bits, which makes the likeliest tokens equal or swaps them.
    """
    highest = logits.topk(min(NUM_REFINED, logits.shape[1]), sorted=False).indices
    finer = torch.bmm(table[highest].float(), normed.unsqueeze(2)).squeeze(2)
    logits.scatter_(1, highest, finer)


class _Shapes:
    """Stands in for a decoder when compiled code is tried: no cache is touched."""

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder

    def product(self, rows: Any, layer: int, part: int) -> Any:
        return self._decoder.product(rows, layer, part)

    def attend(self, query: Any, key: Any, value: Any, layer: int) -> Any:
        return query.flatten(1).clone()


class Embedding:
    """Rows of the embedding; as codes and scales where the matrices are so."""

    def __init__(self, source: WeightSource, weight_type: WeightType, dtype: Any) -> None:
        self._dtype = dtype
        self._scales: Any = None
        if weight_type in {"int8", "woq8"}:
            self.table, self._scales = quantized_matrix(source, [EMBEDDING])
        else:
            self.table = gathered(source, [EMBEDDING], dtype)

    def __call__(self, ids: Any) -> Any:
        rows = self.table[ids]
        return rows if self._scales is None else (rows * self._scales[ids, None]).to(self._dtype)


def _turn(source: WeightSource, name: str) -> Any:
    return torch.from_numpy(source.read(name)) if name in source.tensors else None


def _layer_vectors(source: WeightSource, prefix: str) -> LayerVectors:
    spec = source.spec

    def one(name: str) -> Any:
        return vector(source, [f"{prefix}{name}.weight"])

    biases = [prefix + name.replace(".weight", ".bias") for name in STEP_TENSORS["qkv"]]
    return LayerVectors(
        input_norm=one("input_layernorm"),
        post_norm=one("post_attention_layernorm"),
        query_norm=one("self_attn.q_norm") if spec.has_qk_norm else None,
        key_norm=one("self_attn.k_norm") if spec.has_qk_norm else None,
        bias=vector(source, biases) if spec.has_qkv_bias else None,
    )
