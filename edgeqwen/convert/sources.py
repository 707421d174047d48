"""One entrance to checkpoints of every format."""

from __future__ import annotations

from pathlib import Path

from edgeqwen.convert.checkpoint import Checkpoint
from edgeqwen.convert.gguf_checkpoint import open_gguf
from edgeqwen.convert.safetensors_checkpoint import open_safetensors
from edgeqwen.core.model import Source
from edgeqwen.core.package import is_package
from edgeqwen.errors import ModelInvalid, ModelMissing

WEIGHTS = ("model.safetensors", "model.safetensors.index.json")


def is_exported(path: Path) -> bool:
    """Whether a graph is meant by `path`: an ONNX file, or a folder with one and without a checkpoint."""
    if path.suffix == ".onnx":
        return path.is_file()
    if not path.is_dir() or any(any(path.glob(each)) for each in ("*.safetensors", "*.gguf")):
        return False
    return bool(graph_files(path))


def graph_files(folder: Path) -> list[Path]:
    """ONNX files of a folder, or, as some of the hub have it, of its folder `onnx`."""
    return sorted(folder.glob("*.onnx")) or sorted(folder.glob("onnx/*.onnx"))


def open_checkpoint(path: Path, source: Source | None = None) -> Checkpoint:
    """Open and validate a checkpoint: a GGUF file, a folder that holds one, or a folder of safetensors.

    `source` is what the package will say of its origin (a hub's id and revision); by default the path's own name.
    Raises `ModelMissing` or `ModelInvalid`, naming the file or tensor at fault.
    """
    if not path.exists():
        raise ModelMissing(f"{path} does not exist: give a GGUF file or a folder with a model")
    if not path.is_dir():
        if path.suffix == ".safetensors":
            raise ModelInvalid(f"{path}: give the folder that holds it, with config.json and tokenizer.json")
        return open_gguf(path, source)
    if is_package(path):
        raise ModelInvalid(f"{path} is a model package already: serve it, or import the checkpoint that it was made of")
    files = sorted(path.glob("*.gguf"))
    if not files or any((path / name).exists() for name in WEIGHTS):
        return open_safetensors(path, source)
    if len(files) > 1:
        raise ModelInvalid(
            f"{path} holds {len(files)} GGUF files ({files[0].name}, {files[1].name}, ...): give one of them"
        )
    return open_gguf(files[0], source)
