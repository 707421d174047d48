"""The decoder of the qwen3, qwen2 and llama families, written down as a graph.

One interface for every quant. Inputs of a step over B slots side by side, S columns of tokens (shorter rows padded):

    input_ids      int64 [B, S]     tokens; what stands right of a row's `query_seqlens` is ignored
    seqlens_k      int32 [B]        past + new tokens of the row, minus one
    query_seqlens  int32 [B]        new tokens of the row; 0 for a slot that sits this step out
    total_len      int32 []         the largest past + new of all rows
    logit_rows     int64 [R]        rows of the flattened [B * S] whose logits are wanted
    hidden_rows    int64 [H]        rows whose hidden states are
    past.L.key, past.L.value        [B, kv_heads, capacity, head_dim], bound to the same memory as present.L.*: float32,
                                    or int8 with a scale for each channel of a head (`KVScales`)
    -> logits      float32 [R, vocabulary]
    -> hidden      float32 [H, hidden]          what leaves the final norm

What follows the last layer's attention is computed for the wanted rows alone. Most steps want no hidden states, and
pay some nodes over nothing for them. A rotated model's are turned back. The matrix for that is the left factor of its
product: onnxruntime keeps a rearranged copy of right ones, and this one is to cost no memory until it is used. Row by
row it is multiplied because the last bits of a product of floats depend on the number of its columns.

The families differ in what `ModelSpec` says: qwen3 normalises q and k for each head, qwen2 adds biases to q, k and v.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from edgeqwen.convert.attention import Attention
from edgeqwen.convert.checkpoint import Checkpoint, Float32Array
from edgeqwen.convert.graph import MICROSOFT, GraphBuilder
from edgeqwen.convert.linear import WANTED, Linears, Product, scaled
from edgeqwen.core.tensor_names import FINAL_NORM, layer_prefix

NO_INPUT: Final = ""
WANTED_ROWS: Final = "wanted_rows"


class DecoderGraph:
    """Emits one decoder into a `GraphBuilder`; use `build` once. `hidden_turn` is as in `StoredWeights`."""

    def __init__(
        self,
        builder: GraphBuilder,
        checkpoint: Checkpoint,
        linears: Linears,
        *,
        attention: Attention,
        hidden_turn: str | None,
    ) -> None:
        self._builder = builder
        self._checkpoint = checkpoint
        self._linears = linears
        self._hidden_turn = hidden_turn
        self._attention = attention
        self._spec = checkpoint.spec

    def build(self) -> None:
        """Inputs, layers, logits and outputs."""
        self._attention.declare_inputs()
        wanted = {"logit_rows": "R", "hidden_rows": "H"}
        for name, size in wanted.items():
            self._builder.add_input(name, np.int64, [size])
        self._builder.node("Concat", list(wanted), WANTED_ROWS, axis=0)
        embedded = self._linears.embed("input_ids", "embedded")
        residual = self._builder.reshape(embedded, [-1, self._spec.hidden_size], "hidden.0")
        normed = self._norm(residual, _input_norm(0), "0.attention_input")
        for layer in range(self._spec.num_layers):
            residual, normed = self._layer(layer, residual, normed)
        self._outputs(normed)

    def _outputs(self, normed: str) -> None:
        """Logits of the first rows of what leaves the final norm, hidden states of the others."""
        build = self._builder
        sizes = [build.node("Shape", [name], f"{name}.count") for name in ("logit_rows", "hidden_rows")]
        split = build.node("Concat", sizes, "wanted.counts", axis=0)
        build.node_many("Split", [normed, split], ["logits.input", "hidden.input"], axis=0)
        self._linears.logits("logits.input", "logits")
        build.add_output("logits", np.float32, ["R", self._spec.vocab_size])
        if self._hidden_turn is None:
            build.node("Identity", ["hidden.input"], "hidden")
        else:
            last = build.constant("last_axis", [-1], np.int64)
            column = build.node("Unsqueeze", ["hidden.input", last], "hidden.column")
            turned = build.node("MatMul", [build.stored(self._hidden_turn), column], "hidden.turned")
            build.node("Squeeze", [turned, last], "hidden")
        build.add_output("hidden", np.float32, ["H", self._spec.hidden_size])

    def _layer(self, layer: int, residual: str, normed: str) -> tuple[str, str]:
        """The layer's output and what the next one's norm makes of it (after the last layer: the final norm)."""
        prefix = layer_prefix(layer)
        attended = self._attention.attend(layer, normed)
        label = str(layer)
        if layer == self._spec.num_layers - 1:
            label = f"{WANTED}.{layer}"
            attended = self._builder.node("Gather", [attended, WANTED_ROWS], f"{label}.attended", axis=0)
            residual = self._builder.node("Gather", [residual, WANTED_ROWS], f"{label}.residual", axis=0)
        output = self._linears.project(attended, prefix + "self_attn.o_proj.weight", f"{label}.o")
        residual, normed = self._add_norm(residual, output, prefix + "post_attention_layernorm.weight", f"{label}.mlp")
        gain = _input_norm(layer + 1) if layer < self._spec.num_layers - 1 else FINAL_NORM
        return self._add_norm(residual, self._mlp(layer, normed, label), gain, f"{label}.next")

    def _mlp(self, layer: int, x: str, label: str) -> Product:
        """down(silu(gate) * up). The row scale of `up` is carried into that of `down`."""
        prefix, build = layer_prefix(layer) + "mlp.", self._builder
        gate = scaled(build, self._linears.project(x, prefix + "gate_proj.weight", f"{label}.gate"))
        up = self._linears.project(x, prefix + "up_proj.weight", f"{label}.up")
        active = build.node("QuickGelu", [gate], f"{label}.silu", domain=MICROSOFT, alpha=1.0)
        inner = build.node("Mul", [active, up.name], f"{label}.inner")
        down = self._linears.project(inner, prefix + "down_proj.weight", f"{label}.down")
        if up.row_scale is None or down.row_scale is None:
            return down
        return Product(down.name, build.node("Mul", [up.row_scale, down.row_scale], f"{label}.down.row_scale"))

    def _add_norm(self, residual: str, product: Product, gain: str, label: str) -> tuple[str, str]:
        """(sum, normed sum)."""
        build = self._builder
        weight = build.tensor(gain, self._read(gain))
        build.node_many(
            "SkipSimplifiedLayerNormalization",
            [residual, scaled(build, product), weight],
            [f"{label}.normed", NO_INPUT, NO_INPUT, f"{label}.sum"],
            domain=MICROSOFT,
            epsilon=self._spec.rms_norm_eps,
        )
        return f"{label}.sum", f"{label}.normed"

    def _norm(self, x: str, weight: str, output: str) -> str:
        gain = self._builder.tensor(weight, self._read(weight))
        epsilon = self._spec.rms_norm_eps
        return self._builder.node("SimplifiedLayerNormalization", [x, gain], output, epsilon=epsilon, axis=-1)

    def _read(self, tensor: str) -> Float32Array:
        return self._checkpoint.read(tensor)


def _input_norm(layer: int) -> str:
    return layer_prefix(layer) + "input_layernorm.weight"
