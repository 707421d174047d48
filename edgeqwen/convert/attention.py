"""The attention of a decoder layer over the KV cache, as the fused operator computes it; and what both forms share.

`GroupedAttention` works for any number of sequences and rows, over a float32 cache or an int8 one. Over an int8 cache
it is the faster one for a few rows (a quarter of the bytes to read), and four times as slow for many: it unpacks the
cache for each row. `prefill_attention` is for those.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, Protocol

import numpy as np

from edgeqwen.convert.checkpoint import Checkpoint, Float32Array
from edgeqwen.convert.graph import MICROSOFT, GraphBuilder
from edgeqwen.convert.linear import Linears, Product, scaled
from edgeqwen.core.model import KV_KINDS, ModelSpec
from edgeqwen.core.rope import rotary_tables
from edgeqwen.core.tensor_names import layer_prefix

NO_INPUT: Final = ""


@dataclass(frozen=True, slots=True)
class KVScales:
    """Scales of an int8 cache: value = code * scale. `key` (after norm and rotary) and `value` are float32
    `[layers, kv_heads, head_dim]`; those of a key are equal within a rotary pair (i, i + head_dim / 2), so that
    dividing by them and turning may change places.
    """

    key: Float32Array
    value: Float32Array


class Attention(Protocol):
    """From normed activations to what the output projection takes; declares the graph's inputs for it."""

    def declare_inputs(self) -> None: ...

    def attend(self, layer: int, x: str) -> str:
        """`x` `[rows, hidden]` -> `[rows, heads * head_dim]`; keys and values are appended to the cache."""
        ...


class Heads:
    """Query, key and value rows of a layer: projected, normalised for each head or biased where the family does."""

    def __init__(self, builder: GraphBuilder, checkpoint: Checkpoint, linears: Linears) -> None:
        self.builder = builder
        self.spec: ModelSpec = checkpoint.spec
        self._checkpoint = checkpoint
        self._linears = linears

    def project(self, layer: int, which: str, x: str, *, column_scale: Float32Array | None = None) -> Product:
        """q, k or v before norm and bias, times a scale for each column."""
        tensor = f"{_prefix(layer, which)}_proj.weight"
        return self._linears.project(x, tensor, f"{layer}.{which}", column_scale=column_scale)

    def read(self, layer: int, which: str, part: str) -> Float32Array:
        """A small tensor of the layer, as `("q", "norm.weight")`."""
        return self._checkpoint.read(f"{_prefix(layer, which)}_{part}")

    def norm(self, rows: str, gain: str, name: str) -> str:
        """RMS norm over each head of `[rows, heads * head_dim]`, as `[1, rows * heads, head_dim]`. A row scale may be
        left out before it: it cancels (epsilon is negligible beside it).

        x + x through the fused skip norm is faster than the plain norm on short rows; with four times the epsilon it is
        the same function: 2x / sqrt(mean(4x^2) + 4e) = x / sqrt(mean(x^2) + e).
        """
        split = self.builder.reshape(rows, [1, -1, self.spec.head_dim], name + ".per_head")
        epsilon = 4 * self.spec.rms_norm_eps
        inputs = [split, split, gain]
        return self.builder.node(
            "SkipSimplifiedLayerNormalization", inputs, name + ".normed", domain=MICROSOFT, epsilon=epsilon
        )

    def biased(self, layer: int, which: str, rows: str, fold: Float32Array | None = None) -> str:
        """Rows plus the projection's bias (times `fold`, for each channel), where the family has one."""
        if not self.spec.has_qkv_bias:
            return rows
        bias = self.read(layer, which, "proj.bias")
        label = f"{_prefix(layer, which)}_proj.bias" + ("" if fold is None else ".folded")
        name = self.builder.tensor(label, bias if fold is None else bias * fold)
        return self.builder.node("Add", [rows, name], f"{layer}.{which}.biased")

    def cache(self, layer: int, dtype: type[np.generic], batch: int | str) -> tuple[list[str], list[str]]:
        """Inputs past.L.* and outputs present.L.* of a layer."""
        shape: list[int | str] = [batch, self.spec.num_kv_heads, "capacity", self.spec.head_dim]
        past = [self.builder.add_input(f"past.{layer}.{kind}", dtype, shape) for kind in KV_KINDS]
        present = [self.builder.add_output(f"present.{layer}.{kind}", dtype, shape) for kind in KV_KINDS]
        return past, present


class GroupedAttention:
    """`GroupQueryAttention`. `scales` None means a float32 cache."""

    def __init__(self, heads: Heads, scales: KVScales | None) -> None:
        self._heads = heads
        self._scales = scales

    def declare_inputs(self) -> None:
        build = self._heads.builder
        build.add_input("input_ids", np.int64, ["B", "S"])
        build.add_input("seqlens_k", np.int32, ["B"])
        build.add_input("query_seqlens", np.int32, ["B"])
        build.add_input("total_len", np.int32, [])
        store_rotary_tables(build, self._heads.spec)
        build.node("Shape", ["input_ids"], "batch_shape")

    def attend(self, layer: int, x: str) -> str:
        spec, build = self._heads.spec, self._heads.builder
        query, key, value = (self._batched(layer, which, x) for which in "qkv")
        dtype: type[np.generic] = np.float32 if self._scales is None else np.int8
        past, present = self._heads.cache(layer, dtype, "B")
        lengths = ["seqlens_k", "total_len", "rotary.cos", "rotary.sin"]
        scales, types = self._cache_scales(layer)
        omitted = [NO_INPUT] * 3  # position ids, bias, sink
        attended = build.node_many(
            "GroupQueryAttention",
            [query, key, value, *past, *lengths, *omitted, *scales, NO_INPUT, NO_INPUT, "query_seqlens"],
            [f"{layer}.attended", *present],
            domain=MICROSOFT,
            num_heads=spec.num_heads,
            kv_num_heads=spec.num_kv_heads,
            do_rotary=1,
            **types,
        )[0]
        return build.reshape(attended, [-1, spec.num_heads * spec.head_dim], f"{layer}.attended.rows")

    def _batched(self, layer: int, which: str, x: str) -> str:
        """q, k or v as `[B, S, heads * head_dim]`."""
        heads, build, name = self._heads, self._heads.builder, f"{layer}.{which}"
        product = heads.project(layer, which, x)
        if heads.spec.has_qk_norm and which != "v":
            gain = build.tensor(f"{_prefix(layer, which)}_norm.weight", heads.read(layer, which, "norm.weight"))
            rows = heads.norm(product.name, gain, name)
        else:
            rows = heads.biased(layer, which, scaled(build, product))
        width = (heads.spec.num_heads if which == "q" else heads.spec.num_kv_heads) * heads.spec.head_dim
        shape = f"batch_shape.{width}"
        if not build.has_value(shape):
            size = build.constant(f"width.{width}", [width], np.int64)
            build.node("Concat", ["batch_shape", size], shape, axis=0)
        return build.node("Reshape", [rows, shape], name + ".heads")

    def _cache_scales(self, layer: int) -> tuple[list[str], dict[str, Any]]:
        """The two scale inputs of the attention, and the attributes that go with them."""
        if self._scales is None:
            return [NO_INPUT, NO_INPUT], {}
        names = store_cache_scales(self._heads.builder, self._scales, layer)
        return names, {"k_quant_type": "PER_CHANNEL", "v_quant_type": "PER_CHANNEL", "kv_cache_bit_width": 8}


def store_cache_scales(build: GraphBuilder, scales: KVScales, layer: int) -> list[str]:
    """Names of a layer's scales of keys and values, float32 `[kv_heads * head_dim]`."""
    kinds = {"key": scales.key, "value": scales.value}
    return [build.tensor(f"{layer}.{kind}.scales", each[layer].ravel()) for kind, each in kinds.items()]


def store_rotary_tables(build: GraphBuilder, spec: ModelSpec) -> None:
    """`rotary.cos` and `rotary.sin`, made once for all graphs of a package."""
    names = ("rotary.cos", "rotary.sin")
    if not build.is_stored(names[0]):
        for name, table in zip(names, rotary_tables(spec), strict=True):
            build.tensor(name, table)
    for name in names:
        build.stored(name)


def _prefix(layer: int, which: str) -> str:
    return f"{layer_prefix(layer)}self_attn.{which}"
