"""Stage one of an import with calibration: the layers one after another, rounded so that their outputs change least.

Calibration text runs through the model layer by layer (`forward`), twice side by side: through the model as it is, and
through the 4-bit blocks that have come out so far, with activations as these make them and as their kernel rounds them.
A layer's blocks are chosen for what reaches them, and its weights are first moved so that they make up for part of what
went wrong before (`correction`). Rows of 8 bits lose too little for that to matter; they are chosen for the inputs of
the model as it is. That one also says how uneven the inputs of `down` are (`smoothing`) and how large keys and values
get (`kv_scales`).

What a key or a value loses counts as often as it is looked at. Much of all attention goes to a window's first token, so
without that a 4-bit value projection would be the worst of all layers, with it it is among the best.

In memory are the calibration text's activations and one layer's weights; a layer's results are handed out before the
next is read.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final, TypeAlias

import numpy as np

from edgeqwen.convert.activations import round_blocks, round_rows
from edgeqwen.convert.attention import KVScales
from edgeqwen.convert.calibration import Windows
from edgeqwen.convert.checkpoint import Checkpoint, Float32Array
from edgeqwen.convert.correction import corrected
from edgeqwen.convert.forward import (
    Attended,
    LayerForward,
    Workers,
    embed,
    rms_norm,
)
from edgeqwen.convert.kv_scales import key_scales, value_scales
from edgeqwen.convert.quantize import Form, QuantizedTensor
from edgeqwen.convert.recipe import Recipe
from edgeqwen.convert.rounding import MatrixRounder, restored
from edgeqwen.convert.smoothing import channel_scales
from edgeqwen.core.tensor_names import FINAL_NORM, OUTPUT_TURN, STEP_TENSORS, StepName, layer_prefix

Progress: TypeAlias = Callable[[float], None]

BLOCK_FORMS: Final[frozenset[Form]] = frozenset({"blocks4", "blocks8"})
LOOKED_AT: Final = frozenset({"self_attn.k_proj.weight", "self_attn.v_proj.weight"})


@dataclass(slots=True)
class _Layer:
    """A layer as it is: weights of each step (`up` and `down` smoothed), their inputs, what their products are added to
    if anything, and each token's attention.
    """

    prefix: str
    weights: dict[StepName, Float32Array]
    inputs: dict[StepName, Float32Array]
    residuals: dict[StepName, Float32Array]
    shares: Float32Array


class LayerQuantizer:
    """Iterate over it once for the layers' tensors in every form of the recipe; then ask for the rest.

    `num_threads` None: as many as this process may use.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        recipe: Recipe,
        windows: Windows,
        *,
        num_threads: int | None = None,
        progress: Progress = lambda _: None,
    ) -> None:
        self._checkpoint = checkpoint
        self._recipe = recipe
        self._workers = Workers(num_threads or len(os.sched_getaffinity(0)), windows.shape[1])
        self._progress = progress
        self._plain = embed(checkpoint, windows)
        has_blocks = any(BLOCK_FORMS.intersection(forms) for forms in recipe.forms.values())
        self._blocks = self._plain if has_blocks else None
        self._cache: list[tuple[Float32Array, Float32Array]] = []

    def __iter__(self) -> Iterator[QuantizedTensor]:
        num_layers = self._checkpoint.spec.num_layers
        with self._workers:
            for index in range(num_layers):
                forward = LayerForward(self._checkpoint, index, self._workers)
                layer = self._run_plain(forward, layer_prefix(index))
                yield from self._rows(layer)
                if self._blocks is not None:
                    results: list[QuantizedTensor] = []
                    self._blocks = self._run_blocks(forward, layer, self._blocks, results)
                    yield from results
                self._progress((index + 1) / num_layers)

    def kv_scales(self) -> KVScales:
        """Scales for an 8-bit cache; all layers must have been iterated over."""
        assert len(self._cache) == self._checkpoint.spec.num_layers
        keys, values = zip(*self._cache, strict=True)
        return KVScales(np.stack(keys), np.stack(values))

    def output_rounder(self, block_size: int) -> MatrixRounder:
        """Rounds rows of the output matrix for what reaches it when decoding; to be asked for like `kv_scales`."""
        assert len(self._cache) == self._checkpoint.spec.num_layers
        last = self._plain if self._blocks is None else self._blocks
        final = rms_norm(last, self._checkpoint.read(FINAL_NORM), self._checkpoint.spec.rms_norm_eps)
        if OUTPUT_TURN in self._checkpoint.tensors:
            final = final @ self._checkpoint.read(OUTPUT_TURN).T
        return MatrixRounder(round_blocks(final, block_size), block_size)

    def _run_plain(self, forward: LayerForward, prefix: str) -> _Layer:
        weights: dict[StepName, Float32Array] = {
            step: np.concatenate([self._checkpoint.read(prefix + name) for name in names])
            for step, names in STEP_TENSORS.items()
        }
        layer = _Layer(prefix, weights, {}, {}, np.empty(0, np.float32))

        def multiply(step: StepName, activations: Float32Array, residual: Float32Array | None) -> Float32Array:
            layer.inputs[step] = activations
            if residual is not None:
                layer.residuals[step] = residual
            return np.asarray(activations @ weights[step].T)

        def on_attention(attended: Attended) -> None:
            self._cache.append((key_scales(attended.keys), value_scales(attended.values)))
            layer.shares = attended.shares

        self._plain = forward.run(self._plain, multiply, on_attention=on_attention)
        divisors = channel_scales(layer.inputs["down"])
        layer.inputs["down"] /= divisors
        weights["gate_up"][len(divisors) :] /= divisors[:, None]
        weights["down"] *= divisors
        return layer

    def _rows(self, layer: _Layer) -> Iterator[QuantizedTensor]:
        """What the recipe wants of a layer in rows."""
        for step, inputs in layer.inputs.items():
            matrices = [
                (name, matrix)
                for name, matrix in self._matrices(layer, step, layer.weights[step])
                if "rows8" in self._recipe.forms[name]
            ]
            if matrices:
                _, rounders = self._rounders(layer, step, self._workers.apply(round_rows, inputs))
                for name, matrix in matrices:
                    yield QuantizedTensor(name, "rows8", rounders[name].round(matrix, "rows8"))

    def _run_blocks(
        self, forward: LayerForward, layer: _Layer, x: Float32Array, results: list[QuantizedTensor]
    ) -> Float32Array:
        """The layer's output under its blocks, which are appended to `results`."""

        def multiply(step: StepName, activations: Float32Array, residual: Float32Array | None) -> Float32Array:
            size = self._recipe.block_size_of(activations.shape[1])
            inputs = self._workers.apply(lambda piece: round_blocks(piece, size), activations)
            alike, rounders = self._rounders(layer, step, inputs)
            missing = None if residual is None else layer.residuals[step] - residual
            weights = corrected(layer.weights[step], inputs, layer.inputs[step], missing, gram=alike.gram)
            values = []
            for name, matrix in self._matrices(layer, step, weights):
                (form,) = BLOCK_FORMS.intersection(self._recipe.forms[name])
                rounded = rounders[name].round(matrix, form)
                results.append(QuantizedTensor(name, form, rounded))
                values.append(restored(rounded, form))
            return np.asarray(inputs @ np.concatenate(values).T)

        return forward.run(x, multiply)

    def _rounders(
        self, layer: _Layer, step: StepName, inputs: Float32Array
    ) -> tuple[MatrixRounder, dict[str, MatrixRounder]]:
        """What rounds for these inputs with every token alike, and for each tensor of the step what rounds that."""
        size = self._recipe.block_size_of(inputs.shape[1])
        alike = MatrixRounder(inputs, size)
        by_shares = MatrixRounder(inputs, size, shares=layer.shares) if step == "qkv" else alike
        names = STEP_TENSORS[step]
        return alike, {layer.prefix + name: by_shares if name in LOOKED_AT else alike for name in names}

    def _matrices(self, layer: _Layer, step: StepName, weights: Float32Array) -> Iterator[tuple[str, Float32Array]]:
        """(name, its rows of a step's `weights`) of a step's tensors."""
        start = 0
        for short in STEP_TENSORS[step]:
            name = layer.prefix + short
            stop = start + self._checkpoint.tensors[name].shape[0]
            yield name, weights[start:stop]
            start = stop
