"""The decoder of the qwen3, qwen2 and llama families, written down as a graph.

One interface for every quant. Inputs of a step over B slots side by side, S columns of tokens (shorter rows padded):

    input_ids      int64 [B, S]     tokens; what stands right of a row's `query_seqlens` is ignored
    seqlens_k      int32 [B]        past + new tokens of the row, minus one
    query_seqlens  int32 [B]        new tokens of the row; 0 for a slot that sits this step out
    total_len      int32 []         the largest past + new of all rows
    logit_rows     int64 [R]        rows of the flattened [B * S] whose logits are wanted
    past.L.key, past.L.value        float32 [B, kv_heads, capacity, head_dim], bound to the same memory as present.L.*
    -> logits      float32 [R, vocabulary]

The families differ in what `ModelSpec` says: qwen3 normalises q and k for each head, qwen2 adds biases to q, k and v.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import numpy as np

from edgeqwen.convert.checkpoint import FINAL_NORM, Checkpoint, Float32Array
from edgeqwen.convert.graph import MICROSOFT, GraphBuilder
from edgeqwen.convert.linear import Linears, Product
from edgeqwen.convert.rope import rotary_tables

NO_INPUT: Final = ""


class DecoderGraph:
    """Emits one decoder into a `GraphBuilder`; use `build` once."""

    def __init__(
        self,
        builder: GraphBuilder,
        checkpoint: Checkpoint,
        linears: Linears,
        *,
        progress: Callable[[float], None] = lambda _: None,
    ) -> None:
        self._progress = progress
        self._builder = builder
        self._checkpoint = checkpoint
        self._linears = linears
        self._spec = checkpoint.spec

    def build(self) -> None:
        """Inputs, layers, logits and outputs."""
        self._declare_inputs()
        embedded = self._linears.embed("input_ids", "embedded")
        residual = self._reshape(embedded, [-1, self._spec.hidden_size], "hidden.0")
        for layer in range(self._spec.num_layers):
            residual = self._layer(layer, residual)
            self._progress((layer + 1) / (self._spec.num_layers + 1))
        wanted = self._builder.node("Gather", [residual, "logit_rows"], "wanted", axis=0)
        self._linears.logits(self._norm(wanted, FINAL_NORM, "final"), "logits")
        self._builder.add_output("logits", np.float32, ["R", self._spec.vocab_size])

    def _declare_inputs(self) -> None:
        build = self._builder
        build.add_input("input_ids", np.int64, ["B", "S"])
        build.add_input("seqlens_k", np.int32, ["B"])
        build.add_input("query_seqlens", np.int32, ["B"])
        build.add_input("total_len", np.int32, [])
        build.add_input("logit_rows", np.int64, ["R"])
        cosines, sines = rotary_tables(self._spec)
        build.tensor("rotary.cos", cosines)
        build.tensor("rotary.sin", sines)
        build.node("Shape", ["input_ids"], "batch_shape")

    def _layer(self, layer: int, residual: str) -> str:
        prefix = f"model.layers.{layer}."
        normed = self._norm(residual, prefix + "input_layernorm.weight", f"{layer}.attention_input")
        attended = self._attention(layer, normed)
        output = self._linears.project(attended, prefix + "self_attn.o_proj.weight", f"{layer}.o")
        residual = self._add(residual, output, f"{layer}.middle")
        normed = self._norm(residual, prefix + "post_attention_layernorm.weight", f"{layer}.mlp_input")
        return self._add(residual, self._mlp(layer, normed), f"hidden.{layer + 1}")

    def _attention(self, layer: int, x: str) -> str:
        spec, build = self._spec, self._builder
        query = self._heads(layer, "q", x, spec.num_heads)
        key = self._heads(layer, "k", x, spec.num_kv_heads)
        value = self._heads(layer, "v", x, spec.num_kv_heads)
        shape: list[int | str] = ["B", spec.num_kv_heads, "capacity", spec.head_dim]
        past = [build.add_input(f"past.{layer}.{kind}", np.float32, shape) for kind in ("key", "value")]
        present = [build.add_output(f"present.{layer}.{kind}", np.float32, shape) for kind in ("key", "value")]
        lengths = ["seqlens_k", "total_len", "rotary.cos", "rotary.sin"]
        omitted = [NO_INPUT] * 7  # position ids, bias, sink, two cache scales, two norm weights
        attended = build.node_many(
            "GroupQueryAttention",
            [query, key, value, *past, *lengths, *omitted, "query_seqlens"],
            [f"{layer}.attended", *present],
            domain=MICROSOFT,
            num_heads=spec.num_heads,
            kv_num_heads=spec.num_kv_heads,
            do_rotary=1,
        )[0]
        return self._reshape(attended, [-1, spec.num_heads * spec.head_dim], f"{layer}.attended.rows")

    def _heads(self, layer: int, which: str, x: str, num_heads: int) -> str:
        """q, k or v as `[B, S, heads * head_dim]`: normalised for each head or biased where the family does."""
        prefix = f"model.layers.{layer}.self_attn.{which}"
        name = f"{layer}.{which}"
        product = self._linears.project(x, f"{prefix}_proj.weight", name)
        if self._spec.has_qk_norm and which != "v":
            rows = self._head_norm(product, f"{prefix}_norm.weight", name)
        else:
            rows = self._scaled(product)
            if self._spec.has_qkv_bias:
                bias = self._builder.tensor(f"{prefix}_proj.bias", self._read(f"{prefix}_proj.bias"))
                rows = self._builder.node("Add", [rows, bias], name + ".biased")
        width = num_heads * self._spec.head_dim
        shape_name = f"batch_shape.{width}"
        if not self._builder.has_value(shape_name):
            size = self._builder.constant(f"width.{width}", [width], np.int64)
            self._builder.node("Concat", ["batch_shape", size], shape_name, axis=0)
        return self._builder.node("Reshape", [rows, shape_name], name + ".heads")

    def _head_norm(self, product: Product, weight: str, name: str) -> str:
        """RMS norm over each head. The row scale is left out: it cancels (epsilon is negligible beside it).

        x + x through the fused skip norm is faster than the plain norm on short rows; with four times the epsilon it is
        the same function: 2x / sqrt(mean(4x^2) + 4e) = x / sqrt(mean(x^2) + e).
        """
        rows = self._reshape(product.name, [1, -1, self._spec.head_dim], name + ".per_head")
        gain = self._builder.tensor(weight, self._read(weight))
        epsilon = 4 * self._spec.rms_norm_eps
        return self._builder.node(
            "SkipSimplifiedLayerNormalization", [rows, rows, gain], name + ".normed", domain=MICROSOFT, epsilon=epsilon
        )

    def _mlp(self, layer: int, x: str) -> Product:
        """down(silu(gate) * up). The row scale of `up` is carried into that of `down`."""
        prefix, build = f"model.layers.{layer}.mlp.", self._builder
        gate = self._scaled(self._linears.project(x, prefix + "gate_proj.weight", f"{layer}.gate"))
        up = self._linears.project(x, prefix + "up_proj.weight", f"{layer}.up")
        active = build.node("QuickGelu", [gate], f"{layer}.silu", domain=MICROSOFT, alpha=1.0)
        inner = build.node("Mul", [active, up.name], f"{layer}.inner")
        down = self._linears.project(inner, prefix + "down_proj.weight", f"{layer}.down")
        if up.row_scale is None or down.row_scale is None:
            return down
        return Product(down.name, build.node("Mul", [up.row_scale, down.row_scale], f"{layer}.down.row_scale"))

    def _scaled(self, product: Product) -> str:
        if product.row_scale is None:
            return product.name
        return self._builder.node("Mul", [product.name, product.row_scale], product.name + ".scaled")

    def _add(self, residual: str, product: Product, output: str) -> str:
        if product.row_scale is None:
            return self._builder.node("Add", [residual, product.name], output)
        return self._builder.node("GatedAdd", [residual, product.name, product.row_scale], output, domain=MICROSOFT)

    def _norm(self, x: str, weight: str, output: str) -> str:
        gain = self._builder.tensor(weight, self._read(weight))
        epsilon = self._spec.rms_norm_eps
        return self._builder.node("SimplifiedLayerNormalization", [x, gain], output, epsilon=epsilon, axis=-1)

    def _reshape(self, x: str, shape: list[int], output: str) -> str:
        name = "shape." + ".".join(map(str, shape))
        return self._builder.node("Reshape", [x, self._builder.constant(name, shape, np.int64)], output)

    def _read(self, tensor: str) -> Float32Array:
        return self._checkpoint.read(tensor)
