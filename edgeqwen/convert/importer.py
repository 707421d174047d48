"""From an opened checkpoint to a package folder: weights, graph, side files, manifest, and a check of it all.

`staging` sees to it that nothing half-written is ever found: a daemon that has the old package open keeps reading the
old files, which are unlinked, never written to.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import msgspec
import onnx

from edgeqwen import __version__
from edgeqwen.convert.checkpoint import Checkpoint
from edgeqwen.convert.decoder import DecoderGraph
from edgeqwen.convert.graph import GraphBuilder, WeightsFile
from edgeqwen.convert.kernel_graph import write_kernel_check
from edgeqwen.convert.linear import make_linears
from edgeqwen.convert.sources import open_checkpoint
from edgeqwen.convert.staging import publish, staging
from edgeqwen.core.model import Manifest, Quant, Source, WeightForm
from edgeqwen.core.package import GENERATION_CONFIG, GRAPH, MANIFEST, TEMPLATE, TOKENIZER, WEIGHTS, open_package
from edgeqwen.errors import ModelInvalid

Target = Literal["any", "vnni", "arm"]
Progress = Callable[[float], None]

WEIGHT_FORMS: dict[Target, WeightForm] = {"any": "unsigned", "vnni": "signed", "arm": "signed"}
"""Signed weights are right and fast only where the processor sums products in 32 bits; unsigned ones are right
anywhere.
"""


def import_model(
    path: Path,
    out: Path,
    *,
    quant: Quant,
    target: Target,
    name: str,
    source: Source | None = None,
    progress: Progress = lambda _: None,
) -> Manifest:
    """Write the package of the checkpoint at `path` to the folder `out`, replacing a package that is there.

    `source` overrides what the reader knows (a hub's id and revision). `progress` is called with 0 to 1. Raises
    `ModelMissing`, `ModelInvalid` or `CannotWrite`; nothing is left in `out` then that was not there before.
    """
    checkpoint = open_checkpoint(path)
    try:
        with staging(out) as folder:
            _write_graph(checkpoint, folder, quant=quant, form=WEIGHT_FORMS[target], progress=progress)
            _write_side_files(checkpoint, folder)
            manifest = _manifest(checkpoint, folder, quant=quant, target=target, name=name, source=source)
            (folder / MANIFEST).write_bytes(msgspec.json.format(msgspec.json.encode(manifest)) + b"\n")
            _check(folder)
            publish(folder, out)
    finally:
        checkpoint.close()
    progress(1.0)
    return manifest


def _write_graph(checkpoint: Checkpoint, folder: Path, *, quant: Quant, form: WeightForm, progress: Progress) -> None:
    with WeightsFile(folder / WEIGHTS) as weights:
        builder = GraphBuilder(weights)
        linears = make_linears(quant, builder, checkpoint, weight_form=form)
        DecoderGraph(builder, checkpoint, linears, progress=progress).build()
        builder.save(folder / GRAPH)
    write_kernel_check(folder)


def _write_side_files(checkpoint: Checkpoint, folder: Path) -> None:
    side = checkpoint.side_files
    (folder / TOKENIZER).write_bytes(side.tokenizer_json)
    (folder / TEMPLATE).write_text(side.chat_template, encoding="utf-8")
    (folder / GENERATION_CONFIG).write_bytes(msgspec.json.encode(side.generation_config))


def _manifest(
    checkpoint: Checkpoint, folder: Path, *, quant: Quant, target: Target, name: str, source: Source | None
) -> Manifest:
    files = sorted(path for path in folder.iterdir() if path.is_file())
    return Manifest(
        name=name,
        spec=checkpoint.spec,
        quant=quant,
        target=target,
        weight_form=WEIGHT_FORMS[target],
        source=source or checkpoint.source,
        builder_version=__version__,
        sizes={path.name: path.stat().st_size for path in files},
        digests={path.name: _digest(path) for path in files},
        notes=checkpoint.side_files.notes,
    )


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return "sha256:" + hashlib.file_digest(file, "sha256").hexdigest()


def _check(folder: Path) -> None:
    """Open what was written as a daemon would, and see that each external tensor lies inside the weights file."""
    package = open_package(folder)
    size = package.manifest.sizes[WEIGHTS]
    graph = onnx.load(str(package.graph_path), load_external_data=False)
    for tensor in graph.graph.initializer:
        place = {entry.key: entry.value for entry in tensor.external_data}
        if place and int(place["offset"]) + int(place["length"]) > size:
            raise ModelInvalid(f"{folder / WEIGHTS}: tensor {tensor.name} lies outside the file")
