"""A folder of the hub as a checkpoint: `config.json`, `tokenizer.json`, a safetensors file or several with an index."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Final

import msgspec
import numpy as np

from edgeqwen.convert.checkpoint import BlockTensor, Float32Array, SideFiles, TensorInfo
from edgeqwen.convert.config_json import read_spec, read_text_files
from edgeqwen.convert.embedding_model import with_base_names
from edgeqwen.convert.files import DataFile, Fields, read_json
from edgeqwen.convert.rows import PIECE_ELEMENTS, decode_plain, read_rows
from edgeqwen.convert.safetensors_header import StoredTensor, read_header
from edgeqwen.convert.side_files import require
from edgeqwen.convert.strict import check_tensors
from edgeqwen.core.model import ModelSpec, Source
from edgeqwen.core.tensor_names import EMBEDDING, OUTPUT
from edgeqwen.errors import ModelInvalid, ModelMissing

SINGLE: Final = "model.safetensors"
INDEX: Final = "model.safetensors.index.json"
IGNORED_SUFFIX: Final = ".rotary_emb.inv_freq"
"""A buffer that older versions of transformers saved; it follows from the configuration."""


def open_safetensors(folder: Path, source: Source | None = None) -> SafetensorsCheckpoint:
    """Open and validate a folder; raises `ModelMissing` naming the first missing file, or `ModelInvalid`."""
    config_path = folder / "config.json"
    require(config_path)
    require(folder / "tokenizer.json")
    weights = _weight_files(folder)
    config = Fields(config_path, read_json(config_path))
    files: list[DataFile] = []
    try:
        stored = with_base_names(_read_headers(weights, files))
        text = read_text_files(folder, config)
        spec = read_spec(config, {name: tensor.shape for name, tensor in stored.items()}, text=text)
        if text.side_files.pooling is not None and OUTPUT not in stored:  # nothing is generated, so any matrix will do
            spec = msgspec.structs.replace(spec, tie_embeddings=True)
        _settle_output(folder, spec, stored)
        check_tensors(folder, spec, {name: tensor.shape for name, tensor in stored.items()})
        return SafetensorsCheckpoint(
            files,
            spec=spec,
            stored=stored,
            side_files=text.side_files,
            source=source or Source("safetensors", folder.name, path=str(folder.resolve())),
        )
    except BaseException:
        for file in files:
            file.close()
        raise


class SafetensorsCheckpoint:
    """See `checkpoint.Checkpoint`."""

    def __init__(
        self,
        files: list[DataFile],
        *,
        spec: ModelSpec,
        stored: Mapping[str, StoredTensor],
        side_files: SideFiles,
        source: Source,
    ) -> None:
        self._files = files
        self.spec = spec
        self._stored = stored
        self.side_files = side_files
        self.source = source
        self.tensors: Mapping[str, TensorInfo] = {
            name: TensorInfo(tensor.shape, tensor.dtype) for name, tensor in stored.items()
        }

    def read(self, name: str, start: int = 0, stop: int | None = None) -> Float32Array:
        tensor = self._stored[name]
        shape, path = tensor.shape, tensor.file.path
        return read_rows(shape, start, stop, lambda first, last: _decode(tensor, first, last), path=path, name=name)

    def read_blocks(self, name: str, start: int = 0, stop: int | None = None) -> BlockTensor | None:
        return None

    def close(self) -> None:
        for file in self._files:
            file.close()


def _decode(tensor: StoredTensor, start: int, stop: int) -> Float32Array:
    raw = tensor.file.read(tensor.offset + start * tensor.row_bytes, (stop - start) * tensor.row_bytes)
    return decode_plain(raw, tensor.dtype)


def _weight_files(folder: Path) -> dict[Path, set[str] | None]:
    """The files that hold the weights and, by the index, the names in each (None without an index)."""
    if (folder / SINGLE).exists():
        return {folder / SINGLE: None}
    index_path = folder / INDEX
    if not index_path.exists():
        pickles = any(folder.glob("*.bin")) or any(folder.glob("*.pt*"))
        advice = ": pickled weights are never read, convert them to safetensors" if pickles else ""
        raise ModelMissing(f"{folder} holds neither {SINGLE} nor {INDEX}{advice}")
    index = Fields(index_path, read_json(index_path))
    shards: dict[Path, set[str] | None] = {}
    weight_map = index.table("weight_map")
    for name, file_name in (weight_map.members() if weight_map else {}).items():
        names = shards.setdefault(folder / _inside(index, file_name), set())
        assert names is not None
        names.add(name)
    if not shards:
        raise index.error("weight_map", "is missing or empty")
    for path in shards:
        if not path.exists():
            raise ModelMissing(f"{path} does not exist, but {index_path.name} names it: fetch the missing part")
    return shards


def _inside(index: Fields, file_name: object) -> str:
    """A shard's path, which must stay inside the folder (links are followed: the hub's cache is made of them)."""
    parts = PurePosixPath(file_name).parts if isinstance(file_name, str) else ()
    if not parts or parts[0] == "/" or ".." in parts or "\\" in str(file_name) or "\0" in str(file_name):
        raise index.error("weight_map", f"names a file outside of the folder: {str(file_name)[:80]!r}")
    if not str(file_name).endswith(".safetensors"):
        raise index.error("weight_map", f"names {str(file_name)[:80]!r}, which is no safetensors file")
    return str(file_name)


def _read_headers(weights: Mapping[Path, set[str] | None], files: list[DataFile]) -> dict[str, StoredTensor]:
    """Tensors of all files; opened ones are added to `files`, for the caller to close."""
    stored: dict[str, StoredTensor] = {}
    for path, names in weights.items():
        file = DataFile(path)
        files.append(file)
        tensors = read_header(file)
        for name in sorted((names or set()) - tensors.keys()):
            raise ModelInvalid(f"{path}: tensor '{name}' is missing, but {INDEX} puts it there")
        for name, tensor in tensors.items():
            if name in stored:
                raise ModelInvalid(f"{path}: tensor '{name}' is also in {stored[name].file.path.name}")
            if not name.endswith(IGNORED_SUFFIX):
                stored[name] = tensor
    return stored


def _settle_output(folder: Path, spec: ModelSpec, stored: dict[str, StoredTensor]) -> None:
    """Drop an output matrix that a tied model stored a second time; refuse one that differs, or is lacking."""
    has_output = OUTPUT in stored
    if not has_output and not spec.tie_embeddings:
        raise ModelInvalid(
            f"{folder}: tensor '{OUTPUT}' is missing, and config.json does not tie it to the embedding "
            "('tie_word_embeddings' is false)"
        )
    if not (has_output and spec.tie_embeddings and EMBEDDING in stored):
        return
    if not _are_equal(stored[OUTPUT], stored[EMBEDDING]):
        raise ModelInvalid(
            f"{folder}: tensor '{OUTPUT}' differs from '{EMBEDDING}', but config.json ties them "
            "('tie_word_embeddings' is true): one of the two is wrong"
        )
    del stored[OUTPUT]


def _are_equal(left: StoredTensor, right: StoredTensor) -> bool:
    if left.shape != right.shape:
        return False
    num_rows = left.shape[0]
    step = max(1, PIECE_ELEMENTS * 2 // left.row_bytes)
    return all(
        np.array_equal(
            _decode(left, first, min(first + step, num_rows)), _decode(right, first, min(first + step, num_rows))
        )
        for first in range(0, num_rows, step)
    )
