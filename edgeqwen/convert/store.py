"""The weights of a package, written once and used by every graph of it.

Tensors of `EXTERNAL_FROM_BYTES` and more go to `weights.bin`, page-aligned, so that onnxruntime can map them instead of
reading them into memory; smaller ones stand in each graph that uses them. A tensor may be written in pieces (rows), so
the importer never holds a large one. Two tensors of different shape may share one range of the file (a tied
embedding), and so do the graphs of a package: they differ in how they compute, not in what they read.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Final

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from edgeqwen.core.package import WEIGHTS

ALIGNMENT: Final = 4096
EXTERNAL_FROM_BYTES: Final = 16384

TYPES: Final = {
    np.dtype(np.float32): TensorProto.FLOAT,
    np.dtype(np.uint8): TensorProto.UINT8,
    np.dtype(np.int8): TensorProto.INT8,
    np.dtype(np.int32): TensorProto.INT32,
    np.dtype(np.int64): TensorProto.INT64,
}


class TensorStore:
    """Named tensors of one package; use as a context manager around the writing of its graphs."""

    def __init__(self, folder: Path) -> None:
        self._file = (folder / WEIGHTS).open("wb")
        self._size = 0
        self._tensors: dict[str, onnx.TensorProto] = {}

    def __enter__(self) -> TensorStore:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def __getitem__(self, name: str) -> onnx.TensorProto:
        """The tensor as a graph's initializer."""
        return self._tensors[name]

    def add(self, name: str, array: NDArray[Any]) -> str:
        """Keep a tensor under a new name, which is returned."""
        if array.nbytes >= EXTERNAL_FROM_BYTES:
            return self.stream(name, [array], dtype=array.dtype, shape=array.shape)
        assert name not in self._tensors, name
        self._tensors[name] = numpy_helper.from_array(np.ascontiguousarray(array), name)
        return name

    def stream(self, name: str, pieces: Iterable[NDArray[Any]], *, dtype: np.dtype[Any], shape: Sequence[int]) -> str:
        """Keep a tensor of `shape` whose bytes come piece by piece."""
        assert name not in self._tensors, name
        offset, length = self._append(pieces)
        expected = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        assert length == expected, f"{name}: wrote {length} bytes of {expected}"
        self._tensors[name] = _external(name, dtype, shape, offset=offset, length=length)
        return name

    def alias(self, name: str, existing: str, shape: Sequence[int]) -> str:
        """A tensor of another shape over the same bytes as `existing`."""
        tensor = self._tensors[existing]
        dtype = np.dtype(helper.tensor_dtype_to_np_dtype(tensor.data_type))
        place = external_range(tensor)
        if place is not None:
            copy = _external(name, dtype, shape, offset=place[0], length=place[1])
        else:
            copy = numpy_helper.from_array(numpy_helper.to_array(tensor).reshape(shape), name)
        self._tensors[name] = copy
        return name

    def _append(self, pieces: Iterable[NDArray[Any]]) -> tuple[int, int]:
        """Write the pieces one after another from an aligned offset on; returns (offset, length) in bytes."""
        padding = -self._size % ALIGNMENT
        self._file.write(bytes(padding))
        offset = self._size + padding
        length = 0
        for piece in pieces:
            length += self._file.write(np.ascontiguousarray(piece).data)
        self._size = offset + length
        return offset, length


def external_range(tensor: onnx.TensorProto) -> tuple[int, int] | None:
    """(offset, length) of a graph's initializer in the weights file; None if it stands in the graph."""
    place = {entry.key: entry.value for entry in tensor.external_data}
    return (int(place["offset"]), int(place["length"])) if place else None


def _external(name: str, dtype: np.dtype[Any], shape: Sequence[int], *, offset: int, length: int) -> onnx.TensorProto:
    tensor = onnx.TensorProto(name=name, data_type=TYPES[dtype], dims=list(shape), data_location=TensorProto.EXTERNAL)
    for key, value in (("location", WEIGHTS), ("offset", offset), ("length", length)):
        entry = tensor.external_data.add()
        entry.key, entry.value = key, str(value)
    return tensor
