"""Stage one of an import with calibration: the layers one after another, rounded so that their outputs change least.

Calibration text runs through the model in several *streams* at once, layer by layer (`forward`): one of the model as it
is, and one for each set of quantised weights (rows of 8 bits, blocks of 4 or 8), which sees activations as those
weights make them and as the kernels round them. A layer is quantised on what reaches it in its stream, so it makes up
for part of what went wrong before it. The stream of the model as it is says how uneven the inputs of `down` are
(`smoothing`) and how large keys and values get (`kv_scales`).

What a key or a value loses counts as often as it is looked at. Much of all attention goes to a window's first token, so
without that a 4-bit value projection would be the worst of all layers, with it it is among the best.

In memory are the calibration text's activations and one layer's weights; a layer's results are handed out before the
next is read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

import numpy as np

from edgeqwen.convert.activations import round_blocks, round_rows
from edgeqwen.convert.attention import KVScales
from edgeqwen.convert.calibration import Windows
from edgeqwen.convert.checkpoint import FINAL_NORM, Checkpoint, Float32Array
from edgeqwen.convert.forward import (
    STEP_TENSORS,
    Attended,
    LayerForward,
    StepInput,
    StepName,
    embed,
    layer_prefix,
    rms_norm,
)
from edgeqwen.convert.kv_scales import key_scales, value_scales
from edgeqwen.convert.quantize import Form, QuantizedTensor
from edgeqwen.convert.recipe import Recipe
from edgeqwen.convert.rounding import MatrixRounder, restored
from edgeqwen.convert.smoothing import channel_scales

Progress: TypeAlias = Callable[[float], None]
Kind: TypeAlias = Literal["rows", "blocks"]

KIND_FORMS: Final[dict[Kind, frozenset[Form]]] = {
    "rows": frozenset({"rows8"}),
    "blocks": frozenset({"blocks4", "blocks8"}),
}
LOOKED_AT: Final = frozenset({"self_attn.k_proj.weight", "self_attn.v_proj.weight"})


@dataclass(slots=True)
class _Stream:
    """Calibration text under one set of quantised weights: `x` is the residual `[tokens, hidden]` so far."""

    kind: Kind
    x: Float32Array


@dataclass(slots=True)
class _Layer:
    """A layer as it is: weights of each step (`up` and `down` smoothed), and the tokens' shares of attention."""

    prefix: str
    weights: dict[StepName, Float32Array]
    shares: Float32Array | None = None


class LayerQuantizer:
    """Iterate over it once for the layers' tensors in every form of the recipe; then ask for the rest."""

    def __init__(
        self, checkpoint: Checkpoint, recipe: Recipe, windows: Windows, *, progress: Progress = lambda _: None
    ) -> None:
        self._checkpoint = checkpoint
        self._recipe = recipe
        self._window_len = windows.shape[1]
        self._progress = progress
        wanted = {form for forms in recipe.forms.values() for form in forms}
        self._reference = embed(checkpoint, windows)
        self._streams = [_Stream(kind, self._reference) for kind, forms in KIND_FORMS.items() if forms & wanted]
        self._cache: list[tuple[Float32Array, Float32Array]] = []

    def __iter__(self) -> Iterator[QuantizedTensor]:
        num_layers = self._checkpoint.spec.num_layers
        for index in range(num_layers):
            forward = LayerForward(self._checkpoint, index, self._window_len)
            layer = self._run_reference(forward, layer_prefix(index))
            for turn, stream in enumerate(self._streams):
                yield from self._quantize_layer(forward, layer, stream)
                self._progress((index + (turn + 1) / len(self._streams)) / num_layers)

    def kv_scales(self) -> KVScales:
        """Scales for an 8-bit cache; all layers must have been iterated over."""
        assert len(self._cache) == self._checkpoint.spec.num_layers
        keys, values = zip(*self._cache, strict=True)
        return KVScales(np.stack(keys), np.stack(values))

    def output_rounder(self, block_size: int) -> MatrixRounder:
        """Rounds rows of the output matrix for what reaches it when decoding; to be asked for like `kv_scales`."""
        assert len(self._cache) == self._checkpoint.spec.num_layers
        spec = self._checkpoint.spec
        decoding = self._streams[-1]  # blocks, where there are any
        final = rms_norm(decoding.x, self._checkpoint.read(FINAL_NORM), spec.rms_norm_eps)
        return MatrixRounder(round_blocks(final, block_size), block_size)

    def _run_reference(self, forward: LayerForward, prefix: str) -> _Layer:
        weights: dict[StepName, Float32Array] = {
            step: np.concatenate([self._checkpoint.read(prefix + name) for name in names])
            for step, names in STEP_TENSORS.items()
        }
        layer = _Layer(prefix, weights)
        divisors = np.ones(self._checkpoint.spec.intermediate_size, np.float32)

        def multiply(step: StepName, given: StepInput) -> Float32Array:
            if step == "down":
                divisors[:] = channel_scales(given.activations)
            return np.asarray(given.activations @ weights[step].T)

        def on_attention(attended: Attended) -> None:
            self._cache.append((key_scales(attended.keys), value_scales(attended.values)))
            layer.shares = attended.shares

        self._reference = forward.run(self._reference, multiply, on_attention=on_attention)
        weights["gate_up"][len(divisors) :] /= divisors[:, None]
        weights["down"] *= divisors
        return layer

    def _quantize_layer(self, forward: LayerForward, layer: _Layer, stream: _Stream) -> list[QuantizedTensor]:
        """The layer's tensors in the stream's form, the stream led through them."""
        results: list[QuantizedTensor] = []

        def multiply(step: StepName, given: StepInput) -> Float32Array:
            size = self._recipe.block_size_of(given.activations.shape[1])
            x = round_rows(given.activations) if stream.kind == "rows" else round_blocks(given.activations, size)
            rounders: dict[str | None, MatrixRounder] = {None: MatrixRounder(x, size)}
            if step == "qkv":
                rounders["shares"] = MatrixRounder(x, size, shares=layer.shares)
            names = STEP_TENSORS[step]
            heights = np.cumsum([self._checkpoint.tensors[layer.prefix + name].shape[0] for name in names])
            products = []
            for name, rows in zip(names, np.split(layer.weights[step], heights[:-1]), strict=True):
                form = self._form(layer.prefix + name, stream.kind)
                rounder = rounders["shares" if name in LOOKED_AT else None]
                rounded = rounder.round(rows, form)
                results.append(QuantizedTensor(layer.prefix + name, form, rounded))
                products.append(x @ restored(rounded, form).T)
            return np.concatenate(products, axis=1)

        stream.x = forward.run(stream.x, multiply)
        return results

    def _form(self, name: str, kind: Kind) -> Form:
        (form,) = KIND_FORMS[kind].intersection(self._recipe.forms[name])
        return form
