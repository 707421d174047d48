"""A GGUF file as a checkpoint: names, shapes and rows as the importer wants them.

Llama-family files store the rows of q and k for interleaved rotation. With `D = head_dim` the row of head h, pair i,
half s stands at `h D + 2 i + s` there and at `h D + s D/2 + i` in the canonical, half-split order; reading undoes it.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from edgeqwen.convert.checkpoint import BlockTensor, Float32Array, SideFiles, TensorInfo
from edgeqwen.convert.embedding_model import gguf_pooling
from edgeqwen.convert.files import DataFile, Fields
from edgeqwen.convert.gguf_header import GgufTensor, read_header
from edgeqwen.convert.gguf_spec import canonical_names, check_architecture, read_spec, stored_name, with_tokens
from edgeqwen.convert.gguf_tokenizer import read_side_files
from edgeqwen.convert.rows import decode_plain, not_finite, read_rows
from edgeqwen.convert.strict import check_tensors
from edgeqwen.core.model import ModelSpec, Source

PLAIN_TYPES = frozenset({"F32", "F16", "BF16"})


def open_gguf(path: Path, source: Source | None = None) -> GgufCheckpoint:
    """Open and validate a GGUF file; raises `ModelMissing` or `ModelInvalid`."""
    file = DataFile(path)
    try:
        header = read_header(file)
        check_architecture(path, header)
        spec = read_spec(file, header)
        names = canonical_names(path, header, spec)
        stored = {name: header.tensors[name_there] for name, name_there in names.items()}
        shapes = {name: tensor.shape for name, tensor in stored.items()}
        check_tensors(path, spec, shapes, stored_name=stored_name)
        pooling = gguf_pooling(Fields(path, header.metadata, prefix=f"{spec.family}."))
        text = read_side_files(path, header, pooling=pooling)  # last: it takes longest
        return GgufCheckpoint(
            file,
            spec=with_tokens(path, spec, text),
            stored=stored,
            side_files=text.side_files,
            source=source or Source("gguf", path.name, path=str(path.resolve())),
        )
    except BaseException:
        file.close()
        raise


class GgufCheckpoint:
    """See `checkpoint.Checkpoint`."""

    def __init__(
        self,
        file: DataFile,
        *,
        spec: ModelSpec,
        stored: Mapping[str, GgufTensor],
        side_files: SideFiles,
        source: Source,
    ) -> None:
        self._file = file
        self.spec = spec
        self._stored = stored
        self.side_files = side_files
        self.source = source
        self.tensors: Mapping[str, TensorInfo] = {
            name: TensorInfo(tensor.shape, tensor.type.name) for name, tensor in stored.items()
        }

    def read(self, name: str, start: int = 0, stop: int | None = None) -> Float32Array:
        shape, path = self._stored[name].shape, self._file.path
        return read_rows(shape, start, stop, lambda first, last: self._decode(name, first, last), path=path, name=name)

    def read_blocks(self, name: str, start: int = 0, stop: int | None = None) -> BlockTensor | None:
        tensor = self._stored[name]
        stop = tensor.shape[0] if stop is None else stop
        if len(tensor.shape) != 2 or tensor.type.name not in ("Q4_0", "Q8_0"):
            return None
        assert 0 <= start <= stop <= tensor.shape[0], (start, stop, tensor.shape)
        blocks = self._raw_rows(name, start, stop).reshape(stop - start, -1, tensor.type.block_bytes)
        scales = np.ascontiguousarray(blocks[:, :, :2]).view("<f2").astype(np.float32)[:, :, 0]
        is_bad = ~np.isfinite(scales).all(axis=1)
        if is_bad.any():
            raise not_finite(self._file.path, name, start + int(np.argmax(is_bad)))
        shape = (stop - start, tensor.row_len)
        if tensor.type.name == "Q8_0":
            codes = (blocks[:, :, 2:] ^ np.uint8(0x80)).reshape(shape)  # two's complement byte + 128
            return BlockTensor(8, codes, scales, zero_point=128)
        packed = blocks[:, :, 2:]  # byte j holds element j in its low and element j + 16 in its high nibble
        return BlockTensor(4, np.concatenate([packed & 15, packed >> 4], axis=2).reshape(shape), scales, zero_point=8)

    def close(self) -> None:
        self._file.close()

    def _decode(self, name: str, start: int, stop: int) -> Float32Array:
        tensor = self._stored[name]
        raw = self._raw_rows(name, start, stop)
        if tensor.type.name in PLAIN_TYPES:
            return decode_plain(raw.reshape(-1), tensor.type.name)
        return dequantise(raw, tensor.type.name)

    def _raw_rows(self, name: str, start: int, stop: int) -> NDArray[np.uint8]:
        """Bytes `[rows, bytes a row]` of canonical rows `[start, stop)`."""
        tensor = self._stored[name]
        num_rows = tensor.shape[0]
        row_bytes = tensor.num_bytes // num_rows
        if not self._is_permuted(name):
            raw = self._file.read(tensor.offset + start * row_bytes, (stop - start) * row_bytes)
            return raw.reshape(stop - start, row_bytes)
        head_dim = self.spec.head_dim
        first, last = start // head_dim * head_dim, -(-stop // head_dim) * head_dim
        raw = self._file.read(tensor.offset + first * row_bytes, (last - first) * row_bytes)
        row = np.arange(start, stop)
        half, pair = np.divmod(row % head_dim, head_dim // 2)
        stored_row = row // head_dim * head_dim + 2 * pair + half
        rows: NDArray[np.uint8] = raw.reshape(last - first, row_bytes)[stored_row - first]
        return rows

    def _is_permuted(self, name: str) -> bool:
        return self.spec.family == "llama" and (".q_proj." in name or ".k_proj." in name)


def dequantise(raw: NDArray[np.uint8], type_name: str) -> Float32Array:
    """Rows of blocks `[rows, bytes a row]` as float32 `[rows, row_len]`."""
    from gguf import GGMLQuantizationType, quants

    with np.errstate(all="ignore"):  # a damaged scale gives NaN or infinity, which the caller looks for
        rows = quants.dequantize(raw, GGMLQuantizationType[type_name])
    return np.asarray(rows, np.float32)
