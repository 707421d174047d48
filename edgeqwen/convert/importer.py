"""From an opened checkpoint to a package folder: weights, graph, side files, manifest, and a check of it all.

`staging` sees to it that nothing half-written is ever found: a daemon that has the old package open keeps reading the
old files, which are unlinked, never written to.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Literal

import numpy as np
import onnx

from edgeqwen import __version__
from edgeqwen.convert.attention import Attention, GroupedAttention, Heads, KVScales
from edgeqwen.convert.calibrated import LayerQuantizer
from edgeqwen.convert.calibration import calibration_windows, num_windows
from edgeqwen.convert.checkpoint import Checkpoint, expected_tensors
from edgeqwen.convert.decoder import DecoderGraph
from edgeqwen.convert.graph import OPSET, GraphBuilder
from edgeqwen.convert.kernel_graph import write_kernel_check
from edgeqwen.convert.linear import LinearForm, make_linears
from edgeqwen.convert.manifest import describe_files, write_manifest
from edgeqwen.convert.prefill_attention import SCATTER_OPSET, Int8Attention
from edgeqwen.convert.quantize import Form, block_size_for
from edgeqwen.convert.recipe import uniform_recipe
from edgeqwen.convert.rotation import RotatedCheckpoint
from edgeqwen.convert.side_files import write_side_files
from edgeqwen.convert.sources import open_checkpoint
from edgeqwen.convert.staging import publish, staging
from edgeqwen.convert.store import TensorStore, external_range
from edgeqwen.convert.weights import COARSE_BLOCK, StoredWeights, WeightWriter, is_repackable, layer_tensors
from edgeqwen.core.model import KVType, Manifest, ModelSpec, Quant, Source, Stage, WeightForm
from edgeqwen.core.package import WEIGHTS, graph_file, open_package
from edgeqwen.errors import ModelInvalid

Target = Literal["any", "vnni", "arm"]
Progress = Callable[[float], None]

WEIGHT_FORMS: dict[Target, WeightForm] = {"any": "unsigned", "vnni": "signed", "arm": "signed"}
"""Signed weights are right and fast only where the processor sums products in 32 bits; unsigned ones are right
anywhere.
"""

LAYER_FORMS: dict[Quant, tuple[Form, ...]] = {
    "fp32": ("fp32",),
    "int8": ("rows8",),
    "int4": ("blocks4",),
    "hybrid": ("rows8", "blocks4"),
}
GRAPH_FORMS: dict[Quant, dict[Stage, LinearForm]] = {
    "fp32": {"decode": "fp32"},
    "int8": {"decode": "rows"},
    "int4": {"decode": "blocks"},
    "hybrid": {"decode": "blocks", "prefill": "rows"},
}
"""A few rows are fastest in blocks, many in rows; a quant with one graph uses it for both."""

DEFAULT_KV_TYPES: dict[Quant, tuple[KVType, ...]] = {
    "fp32": ("fp32", "int8"),
    "int8": ("fp32", "int8"),
    "int4": ("int8", "fp32"),
    "hybrid": ("int8", "fp32"),
}


def import_model(
    path: Path,
    out: Path,
    *,
    quant: Quant,
    target: Target,
    name: str,
    source: Source | None = None,
    calibrates: bool = False,
    progress: Progress = lambda _: None,
) -> Manifest:
    """Write the package of the checkpoint at `path` to the folder `out`, replacing a package that is there.

    With `calibrates` the weights are rounded for what calibration text sends through them, on a rotated copy of the
    model, and the package gets graphs over an int8 cache; without, each weight goes to its nearest code. `source`
    overrides what the reader knows (a hub's id and revision). `progress` is called with 0 to 1. Raises `ModelMissing`,
    `ModelInvalid` or `CannotWrite`; nothing is left in `out` then that was not there before.
    """
    opened = open_checkpoint(path)
    try:
        checkpoint = _rotated(opened, quant) if calibrates else opened
        with staging(out) as folder:
            form = WEIGHT_FORMS[target]
            with TensorStore(folder) as store:
                writer = WeightWriter(store, checkpoint, form)
                kv_scales = _write_weights(writer, checkpoint, quant, calibrates=calibrates, progress=progress)
                _write_graphs(store, checkpoint, folder, stored=writer.stored, quant=quant, kv_scales=kv_scales)
            write_kernel_check(folder)
            write_side_files(folder, checkpoint.side_files)
            files = describe_files(folder)
            manifest = Manifest(
                name=name,
                spec=checkpoint.spec,
                quant=quant,
                target=target,
                weight_form=form,
                source=source or checkpoint.source,
                builder_version=__version__,
                sizes=files.sizes,
                digests=files.digests,
                kv_types=default_kv_types(quant, form) if kv_scales else ("fp32",),
                notes=checkpoint.side_files.notes,
                pooling=checkpoint.side_files.pooling,
            )
            write_manifest(folder, manifest)
            _check(folder)
            publish(folder, out)
    finally:
        opened.close()
    progress(1.0)
    return manifest


def default_kv_types(quant: Quant, form: WeightForm) -> tuple[KVType, ...]:
    """Types of cache of a package with scales for one, the faster first.

    What takes unsigned weights multiplies int8 activations wrongly, so a prefill graph of integer attention is not used
    there, and the one over a float32 cache is much faster than the decode graph.
    """
    kv_types = DEFAULT_KV_TYPES[quant]
    return ("fp32", "int8") if form == "unsigned" and "prefill" in GRAPH_FORMS[quant] else kv_types


def _rotated(checkpoint: Checkpoint, quant: Quant) -> Checkpoint:
    """The same function off the axes that outliers lie on; not where the file's own blocks can be kept exactly."""
    is_kept = "blocks4" in LAYER_FORMS[quant] and any(
        is_repackable(checkpoint, tensor, bits=4) for tensor in layer_tensors(checkpoint.tensors)
    )
    return checkpoint if quant == "fp32" or is_kept else RotatedCheckpoint(checkpoint)


def _write_weights(
    writer: WeightWriter, checkpoint: Checkpoint, quant: Quant, *, calibrates: bool, progress: Progress
) -> KVScales | None:
    """Stage one: everything that is large, into the weights file. Calibration gives the cache's scales too."""
    writer.write_matrices(is_quantized=quant != "fp32")
    tensors = layer_tensors(expected_tensors(checkpoint.spec))
    left = {(tensor, form) for tensor in tensors for form in LAYER_FORMS[quant]}
    quantizer = _write_calibrated(writer, checkpoint, quant, left, progress) if calibrates else None
    if quant != "fp32" and writer.has_coarse_output:
        block_size = block_size_for(checkpoint.spec.hidden_size, preferred=COARSE_BLOCK)
        writer.write_coarse_output(quantizer.output_rounder(block_size) if quantizer else None)
    for index, tensor in enumerate(tensors):
        for form in LAYER_FORMS[quant]:
            if (tensor, form) in left:
                writer.write_layer(tensor, form)
        if not calibrates:
            progress((index + 1) / (len(tensors) + 1))
    return _cache_scales(quantizer, checkpoint.spec) if quantizer else None


def _write_calibrated(
    writer: WeightWriter, checkpoint: Checkpoint, quant: Quant, left: set[tuple[str, Form]], progress: Progress
) -> LayerQuantizer:
    """The layers rounded by calibration, taken out of what is `left`; what the file has in blocks already stays."""
    recipe = uniform_recipe(checkpoint, LAYER_FORMS[quant])
    windows = calibration_windows(checkpoint, most_windows=num_windows(checkpoint.spec))
    quantizer = LayerQuantizer(checkpoint, recipe, windows, progress=progress)
    for quantized in quantizer:
        if quantized.form != "blocks4" or not is_repackable(checkpoint, quantized.tensor, bits=4):
            writer.write_quantized(quantized)
            left.remove((quantized.tensor, quantized.form))
    return quantizer


def _cache_scales(quantizer: LayerQuantizer, spec: ModelSpec) -> KVScales:
    """Where keys are normalised, all heads of a layer share the largest scale: one gain of the norm takes it along."""
    scales = quantizer.kv_scales()
    if not spec.has_qk_norm:
        return scales
    shared = np.broadcast_to(scales.key.max(axis=1, keepdims=True), scales.key.shape)
    return KVScales(np.ascontiguousarray(shared), scales.value)


def _write_graphs(
    store: TensorStore,
    checkpoint: Checkpoint,
    folder: Path,
    *,
    stored: StoredWeights,
    quant: Quant,
    kv_scales: KVScales | None,
) -> None:
    """Stage two: the graphs, which are small; each stage over each type of cache."""
    for stage, form in GRAPH_FORMS[quant].items():
        for scales in (None, kv_scales) if kv_scales else (None,):
            integer = scales if stage == "prefill" else None
            builder = GraphBuilder(store, opset=OPSET if integer is None else SCATTER_OPSET)
            linears = make_linears(form, builder, stored)
            heads = Heads(builder, checkpoint, linears)
            attention: Attention
            attention = GroupedAttention(heads, scales) if integer is None else Int8Attention(heads, integer)
            DecoderGraph(builder, checkpoint, linears, attention=attention, hidden_turn=stored.hidden_turn).build()
            builder.save(folder / graph_file(stage, "int8" if scales else "fp32"))


def _check(folder: Path) -> None:
    """Open what was written as a daemon would, and see that each external tensor lies inside the weights file."""
    package = open_package(folder)
    size = package.manifest.sizes[WEIGHTS]
    for path in sorted(folder.glob("*.onnx")):
        for tensor in onnx.load(str(path), load_external_data=False).graph.initializer:
            place = external_range(tensor)
            if place is not None and sum(place) > size:
                raise ModelInvalid(f"{folder / WEIGHTS}: tensor {tensor.name} lies outside the file")
