"""Attention in 8-bit integers over an int8 cache, for a chunk of many rows of one sequence.

The fused operator spends most of a long prompt's time on float products and on unpacking an int8 cache. Here both
products are integer ones (`MatMulIntegerToFloat`, ten times as fast), on codes that go into the cache as they are:

    k, v   -> codes with the cache's scales, appended in place          [kv_heads, T, head_dim]   T = past + S
    q      -> codes with a scale for each row and head
    scores  = q k^T                                                      float32 [kv_heads, G * S, T]
    p       = softmax(mask + scores * scale of the row)                  GatedAdd: one pass for both
    p       -> codes, scale for each row its largest value / 255
    result  = p v, times the row's scale

Rows of the G = heads / kv_heads query heads that share a key head are stacked, so there is one product for each key
head. The cache's key scales are folded into q (they differ between channels, so no product could take them out
afterwards): scale(k) q . code(k). They are equal within a rotary pair, which lets them pass through the rotation into
the norm's gain or the projection's scale. The scale of a row of x cancels in a norm, and else goes into the row's own
scale, so it is never multiplied in.

`past.*` and `present.*` are one buffer: `TensorScatter` writes into it. Batch is 1. The other inputs:

    input_ids      int64 [1, S]        start          int64 [1]   tokens in the cache
    logit_rows     int64 [R]           hidden_rows    int64 [H]
"""

from __future__ import annotations

import math
from typing import Final

import numpy as np

from edgeqwen.convert.attention import Heads, KVScales, store_cache_scales, store_rotary_tables
from edgeqwen.convert.checkpoint import Float32Array
from edgeqwen.convert.graph import MICROSOFT
from edgeqwen.convert.linear import Product, scaled

SCATTER_OPSET: Final = 24  # the first with TensorScatter
MASKED: Final = -1e9


class Int8Attention:
    """See the header. The linears must be able to fold a scale into their columns (rows of 8 bits)."""

    def __init__(self, heads: Heads, scales: KVScales) -> None:
        self._heads = heads
        self._build = heads.builder
        self._spec = heads.spec
        self._scales = scales
        self._group = heads.spec.num_heads // heads.spec.num_kv_heads

    def declare_inputs(self) -> None:
        build = self._build
        build.add_input("input_ids", np.int64, [1, "S"])
        build.add_input("start", np.int64, [1])
        store_rotary_tables(build, self._spec)
        count = build.node("Shape", ["input_ids"], "count", start=1, end=2)
        build.node("Add", ["start", count], "stop")
        zero, one = build.constant("zero_index", 0, np.int64), build.constant("one_index", 1, np.int64)
        scalar = build.constant("scalar", [], np.int64)
        bounds = [build.node("Reshape", [name, scalar], f"{name}.scalar") for name in ("start", "stop")]
        positions = build.node("Range", [*bounds, one], "positions.flat")
        build.reshape(positions, [1, -1], "positions")
        self._mask(positions, build.node("Range", [zero, bounds[1], one], "key_positions"))
        tails = {"scores": [self._spec.num_kv_heads, -1], "weights": [-1]}
        for name, head in tails.items():  # [kv_heads, G * S, T] and [kv_heads * G * S, T]
            build.node("Concat", [build.constant(f"{name}.head", head, np.int64), "stop"], f"{name}.shape", axis=0)

    def _mask(self, positions: str, key_positions: str) -> None:
        """float32 `[kv_heads, G * S, T]`: 0 where a row may look, else a large negative number."""
        build = self._build
        column = build.reshape(positions, [-1, 1], "positions.column")
        is_hidden = build.node("Greater", [key_positions, column], "mask.hidden")
        values = [build.constant("masked", MASKED), build.constant("shown", 0.0)]
        plane = build.node("Where", [is_hidden, *values], "mask.plane")
        repeats = build.constant("mask.repeats", [self._spec.num_kv_heads, self._group, 1], np.int64)
        lifted = build.node("Unsqueeze", [plane, build.constant("first_axis", [0], np.int64)], "mask.lifted")
        build.node("Tile", [lifted, repeats], "mask")

    def attend(self, layer: int, x: str) -> str:
        past, present = self._heads.cache(layer, np.int8, 1)
        key_scale, value_scale = (each[layer] for each in (self._scales.key, self._scales.value))
        query = self._rows(layer, "q", x, np.repeat(key_scale, self._group, axis=0))
        key = self._rows(layer, "k", x, 1 / key_scale)
        value = self._rows(layer, "v", x, 1 / value_scale)
        self._append(f"{layer}.k", self._turned(f"{layer}.k", key), past[0], present[0])
        self._append(f"{layer}.v", value, past[1], present[1])
        codes, scale = self._query_codes(f"{layer}.q", self._turned(f"{layer}.q", query))
        scores = self._multiply(f"{layer}.scores", codes, self._cached(present[0], is_turned=True), zero_point=128)
        weights, weight_scale = self._weights(f"{layer}.weights", scores, scale)
        store_cache_scales(self._build, self._scales, layer)
        shape = [self._spec.num_kv_heads, 1, self._spec.head_dim]
        channel_scale = self._build.alias(f"{layer}.value.column_scales", f"{layer}.value.scales", shape)
        result = self._multiply(
            f"{layer}.result", weights, self._cached(present[1], is_turned=False), scale=channel_scale, zero_point=0
        )
        return self._unstacked(layer, self._build.node("Mul", [result, weight_scale], f"{layer}.attended"))

    def _rows(self, layer: int, which: str, x: str, fold: Float32Array) -> Product:
        """q, k or v times `fold` `[heads, head_dim]`, and the row scale that is not multiplied in."""
        heads, flat = self._heads, fold.ravel()
        if self._spec.has_qk_norm and which != "v":
            product = heads.project(layer, which, x)
            assert np.array_equal(fold, np.broadcast_to(fold[0], fold.shape)), "one norm serves all heads"
            gain = heads.read(layer, which, "norm.weight") * fold[0]
            name = self._build.tensor(f"{layer}.{which}.folded_norm", gain.astype(np.float32))
            return Product(heads.norm(product.name, name, f"{layer}.{which}"))
        product = heads.project(layer, which, x, column_scale=flat)
        if self._spec.has_qkv_bias:
            return Product(heads.biased(layer, which, scaled(self._build, product), flat))
        return product

    def _turned(self, label: str, rows: Product) -> Product:
        """Rows after the rotation, which a row scale may wait through."""
        num_heads = self._spec.num_heads if label.endswith("q") else self._spec.num_kv_heads
        batched = self._build.reshape(rows.name, [1, -1, num_heads * self._spec.head_dim], f"{label}.batched")
        inputs = [batched, "positions", "rotary.cos", "rotary.sin"]
        turned = self._build.node("RotaryEmbedding", inputs, f"{label}.turned", domain=MICROSOFT, num_heads=num_heads)
        return Product(turned, rows.row_scale)

    def _append(self, label: str, rows: Product, past: str, present: str) -> None:
        """Codes of new keys or values into the cache. A row scale r goes in as 1 / r, which codes are divided by."""
        build, spec = self._build, self._spec
        flat = build.reshape(rows.name, [-1, spec.num_kv_heads * spec.head_dim], f"{label}.flat")
        if rows.row_scale is None:
            scale, zero = build.constant("one", 1.0), build.constant("zero_code", 0, np.int8)
            codes = build.node("QuantizeLinear", [flat, scale, zero], f"{label}.codes")
        else:
            inputs = [flat, *self._inverse(rows.row_scale)]
            codes = build.node("QuantizeLinear", inputs, f"{label}.codes", axis=0)
        split = build.reshape(codes, [1, -1, spec.num_kv_heads, spec.head_dim], f"{label}.split")
        moved = build.node("Transpose", [split], f"{label}.moved", perm=[0, 2, 1, 3])
        build.node("TensorScatter", [past, moved, "start"], present, axis=2, mode="linear")

    def _inverse(self, row_scale: str) -> tuple[str, str]:
        """(1 / scale, zero codes int8) of each row, both `[S]`, emitted once for each scale."""
        build, inverse = self._build, f"{row_scale}.inverse"
        if not build.has_value(inverse):
            build.reshape(build.node("Reciprocal", [row_scale], f"{inverse}.column"), [-1], inverse)
        if not build.has_value("zero_codes"):
            build.filled("zero_codes", "count", np.int8(0))
        return inverse, "zero_codes"

    def _cached(self, present: str, *, is_turned: bool) -> str:
        """What the cache holds up to the chunk's end: `[kv_heads, T, head_dim]`, or with the last two turned."""
        build, spec = self._build, self._spec
        bounds = [build.constant("from_zero", [0], np.int64), "stop", build.constant("third_axis", [2], np.int64)]
        held = build.node("Slice", [present, *bounds], f"{present}.held")
        if not is_turned:
            return build.reshape(held, [spec.num_kv_heads, -1, spec.head_dim], f"{present}.matrix")
        turned = build.node("Transpose", [held], f"{present}.turned", perm=[0, 1, 3, 2])
        return build.reshape(turned, [spec.num_kv_heads, spec.head_dim, -1], f"{present}.matrix")

    def _query_codes(self, label: str, rows: Product) -> tuple[str, str]:
        """(codes uint8 `[kv_heads, G * S, head_dim]`, the factor `[kv_heads, G * S, 1]` of their scores)."""
        build, spec = self._build, self._spec
        vectors = build.reshape(rows.name, [-1, spec.head_dim], f"{label}.vectors")
        last = build.constant("last_axis", [-1], np.int64)
        peak = build.node("ReduceMax", [build.node("Abs", [vectors], f"{label}.abs"), last], f"{label}.max", keepdims=0)
        positive = build.node("Max", [peak, build.constant("tiny", 1e-12)], f"{label}.peak")
        scale = build.node("Mul", [positive, build.constant("per_127", 1 / 127)], f"{label}.scale")
        if not build.has_value("query.zero_points"):
            count = build.node("Shape", [scale], "query.count")
            build.filled("query.zero_points", count, np.uint8(128))
        codes = build.node("QuantizeLinear", [vectors, scale, "query.zero_points"], f"{label}.codes", axis=0)
        root = build.constant("per_root_head_dim", 1 / math.sqrt(spec.head_dim))
        factor = build.node("Mul", [scale, root], f"{label}.factor")
        by_row = build.reshape(factor, [-1, spec.num_heads], f"{label}.factor.rows")
        if rows.row_scale is not None:
            by_row = build.node("Mul", [by_row, rows.row_scale], f"{label}.factor.scaled")
        return self._stacked(codes, spec.head_dim), self._stacked(by_row, 1)

    def _stacked(self, rows: str, width: int) -> str:
        """`[S * heads, width]` -> `[kv_heads, G * S, width]`."""
        build, spec = self._build, self._spec
        split = build.reshape(rows, [-1, spec.num_heads, width], f"{rows}.split")
        moved = build.node("Transpose", [split], f"{rows}.moved", perm=[1, 0, 2])
        return build.reshape(moved, [spec.num_kv_heads, -1, width], f"{rows}.stacked")

    def _multiply(self, name: str, codes: str, matrix: str, *, zero_point: int, scale: str = "") -> str:
        build = self._build
        one = build.constant("one", 1.0)
        zero = build.constant("zero_point" if zero_point else "no_offset", zero_point, np.uint8)
        inputs = [codes, matrix, one, scale or one, zero]
        return build.node("MatMulIntegerToFloat", inputs, name, domain=MICROSOFT)

    def _weights(self, label: str, scores: str, factor: str) -> tuple[str, str]:
        """(codes uint8 `[kv_heads, G * S, T]`, their scales `[kv_heads, G * S, 1]`) of the softmax."""
        build = self._build
        masked = build.node("GatedAdd", ["mask", scores, factor], f"{label}.masked", domain=MICROSOFT)
        weights = build.node("Softmax", [masked], label, axis=-1)
        last = build.constant("last_axis", [-1], np.int64)
        peak = build.node("ReduceMax", [weights, last], f"{label}.max", keepdims=1)
        scale = build.node("Mul", [peak, build.constant("per_255", 1 / 255)], f"{label}.scale")
        rows = build.node("Reshape", [weights, "weights.shape"], f"{label}.rows")
        codes = build.node(
            "QuantizeLinear", [rows, build.reshape(scale, [-1], f"{label}.scales")], f"{label}.codes", axis=0
        )
        return build.node("Reshape", [codes, "scores.shape"], f"{label}.stacked"), scale

    def _unstacked(self, layer: int, result: str) -> str:
        """`[kv_heads, G * S, head_dim]` -> `[S, heads * head_dim]`."""
        build, spec = self._build, self._spec
        split = build.reshape(result, [spec.num_heads, -1, spec.head_dim], f"{layer}.attended.split")
        moved = build.node("Transpose", [split], f"{layer}.attended.moved", perm=[1, 0, 2])
        return build.reshape(moved, [-1, spec.num_heads * spec.head_dim], f"{layer}.attended.rows")
