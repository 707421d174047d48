"""From a folder that optimum has exported to a package: its graph as it is, its weights in a file of ours.

Such a folder has `config.json`, a tokenizer and `model.onnx`, with its weights inside or beside it. Nothing of the
graph is changed but where its weights lie, so what it computes, and how fast, is what its exporter made it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import onnx
from onnx import TensorProto

from edgeqwen import __version__
from edgeqwen.convert.checkpoint import SideFiles
from edgeqwen.convert.config_json import read_spec, read_text_files
from edgeqwen.convert.exported_layout import HOW, Layout, check_against, read_layout
from edgeqwen.convert.files import Fields, read_json
from edgeqwen.convert.kernel_graph import write_kernel_check
from edgeqwen.convert.manifest import describe_files, write_manifest
from edgeqwen.convert.onnx_file import DataRange, OnnxFile
from edgeqwen.convert.side_files import require, write_side_files
from edgeqwen.convert.sources import graph_files
from edgeqwen.convert.staging import publish, staging
from edgeqwen.convert.store import ALIGNMENT
from edgeqwen.core.model import Manifest, ModelSpec, Source
from edgeqwen.core.package import GRAPH, TOKENIZER, WEIGHTS, open_package
from edgeqwen.core.tensor_names import layer_prefix
from edgeqwen.errors import ModelInvalid, ModelMissing

OLD_PAIR: Final = ("decoder_model.onnx", "decoder_with_past_model.onnx")
PIECE_BYTES: Final = 4 << 20

Progress = Callable[[float], None]
Trial = Callable[[Path], None]


def import_exported(path: Path, out: Path, *, name: str, trial: Trial, progress: Progress = lambda _: None) -> Manifest:
    """Write the package of the graph at `path` (a folder, or the file itself) to the folder `out`, replacing a package
    that is there.

    `trial` is called with the finished folder and is to raise if its graph cannot be run. `progress` is called with 0
    to 1. Raises `ModelMissing`, `ModelInvalid` or `CannotWrite`; nothing is left in `out` then that was not there
    before.
    """
    graph_path = _graph_path(path)
    folder = _side_folder(graph_path)
    config = Fields(folder / "config.json", read_json(folder / "config.json"))
    with contextlib.closing(OnnxFile(graph_path)) as opened:
        layout = read_layout(graph_path, opened.model, config)
        check_against(graph_path, layout, config)
        side, spec = _read_model(folder, config, layout)
        with staging(out) as package:
            _write_weights(opened, package / WEIGHTS, progress)
            onnx.save(opened.model, str(package / GRAPH))
            if layout.multiplies_integers:
                write_kernel_check(package)
            write_side_files(package, side)
            source, notes = Source("optimum", folder.resolve().name), (*side.notes, _note(opened.model))
            manifest = _described(package, layout, name=name, spec=spec, source=source, notes=notes)
            write_manifest(package, manifest)
            open_package(package)
            trial(package)
            publish(package, out)
    progress(1.0)
    return manifest


def _described(package: Path, layout: Layout, **facts: Any) -> Manifest:
    """The manifest of the files in `package`; `facts` are those of its members that neither says."""
    files = describe_files(package)
    return Manifest(
        quant=layout.quant,
        target="any",
        weight_form="unsigned",
        builder_version=__version__,
        sizes=files.sizes,
        digests=files.digests,
        kv_types=(layout.kv_type,),
        graph="optimum",
        **facts,
    )


def _graph_path(path: Path) -> Path:
    """The one graph that is meant by `path`."""
    if path.suffix == ".onnx" and not path.is_dir():
        return path
    paths = graph_files(path)
    names = {each.name for each in paths}
    if any(name.startswith("encoder_model") for name in names):
        raise ModelInvalid(f"{path}: holds an encoder ({', '.join(sorted(names))}); only models of decoders are run")
    if names.issuperset(OLD_PAIR):
        raise ModelInvalid(
            f"{path}: holds a decoder as two graphs ({', '.join(OLD_PAIR)}), as old exporters did; {HOW}"
        )
    if len(paths) != 1:
        raise ModelInvalid(f"{path}: holds {len(paths)} graphs ({', '.join(sorted(names))}): give one of these files")
    return paths[0]


def _side_folder(graph_path: Path) -> Path:
    """Where the configuration is. Raises `ModelMissing` naming the first file that is not there."""
    folder = graph_path.parent
    if folder.name == "onnx" and not (folder / "config.json").exists():
        folder = folder.parent
    for name in ("config.json", TOKENIZER):
        try:
            require(folder / name)
        except ModelMissing as error:
            raise ModelMissing(f"{error.message}; optimum writes it beside the graph: {HOW}") from error
    return folder


def _read_model(folder: Path, config: Fields, layout: Layout) -> tuple[SideFiles, ModelSpec]:
    text = read_text_files(folder, config)
    if text.side_files.pooling is not None:
        raise ModelInvalid(
            f"{folder}: an embedding model; a graph for text generation has no hidden states, so import the model's "
            "safetensors folder"
        )
    num_heads = config.integer("num_attention_heads")
    head_dim = layout.head_dim or config.integer("head_dim", max(1, config.integer("hidden_size") // num_heads))
    num_kv_heads = layout.num_kv_heads or config.integer("num_key_value_heads", num_heads)
    prefix = layer_prefix(0) + "self_attn."
    shapes = {
        f"{prefix}q_proj.weight": (num_heads * head_dim,),
        f"{prefix}k_proj.weight": (num_kv_heads * head_dim,),
    }
    return text.side_files, read_spec(config, shapes, text=text)


def _write_weights(opened: OnnxFile, path: Path, progress: Progress) -> None:
    """Copy what lies outside of the graph into one file, each range once, and have the graph say where."""
    total = sum(place.length for place in opened.ranges.values())
    written: dict[tuple[Path, int, int], int] = {}
    size = done = 0
    with path.open("wb") as sink:
        for tensor in opened.model.graph.initializer:
            place = opened.ranges.get(tensor.name)
            if place is None:
                continue
            key = (place.file.path, place.offset, place.length)
            if key not in written:
                written[key] = size + -size % ALIGNMENT
                sink.write(bytes(written[key] - size))
                _copy(place, sink)
                size = written[key] + place.length
            _point(tensor, offset=written[key], length=place.length)
            done += place.length
            progress(0.8 * done / total)


def _copy(place: DataRange, sink: Any) -> None:
    for start in range(0, place.length, PIECE_BYTES):
        piece = place.file.read(place.offset + start, min(PIECE_BYTES, place.length - start))
        sink.write(piece.data)


def _point(tensor: onnx.TensorProto, *, offset: int, length: int) -> None:
    tensor.data_location = TensorProto.EXTERNAL
    del tensor.external_data[:]
    for key, value in (("location", WEIGHTS), ("offset", offset), ("length", length)):
        entry = tensor.external_data.add()
        entry.key, entry.value = key, str(value)


def _note(model: onnx.ModelProto) -> str:
    opset = max((each.version for each in model.opset_import if not each.domain), default=0)
    producer = f"{model.producer_name} {model.producer_version}".strip() or "another tool"
    return f"the graph is the one that {producer} made (opset {opset}): its speed and its memory are that one's"
