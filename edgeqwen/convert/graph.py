"""Emitting an ONNX graph node by node, weights streamed to an external data file as they come.

Small constants live inside the graph; tensors of `EXTERNAL_FROM_BYTES` and more go to `weights.bin`, page-aligned, so
that onnxruntime can map them instead of reading them into memory. A tensor may be written in pieces (rows), so the
importer never holds a large one; two initializers of different shape may share one range of the file (a tied
embedding).
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

MICROSOFT: Final = "com.microsoft"
OPSET: Final = 21
MICROSOFT_OPSET: Final = 1
IR_VERSION: Final = 10
ALIGNMENT: Final = 4096
EXTERNAL_FROM_BYTES: Final = 16384

_TYPES: Final = {
    np.dtype(np.float32): TensorProto.FLOAT,
    np.dtype(np.uint8): TensorProto.UINT8,
    np.dtype(np.int8): TensorProto.INT8,
    np.dtype(np.int32): TensorProto.INT32,
    np.dtype(np.int64): TensorProto.INT64,
}


class WeightsFile:
    """The external data file: aligned ranges, appended in order. Use as a context manager."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("wb")
        self._size = 0

    def __enter__(self) -> WeightsFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def append(self, pieces: Iterable[NDArray[Any]]) -> tuple[int, int]:
        """Write the pieces one after another from an aligned offset on; returns (offset, length) in bytes."""
        padding = -self._size % ALIGNMENT
        self._file.write(bytes(padding))
        offset = self._size + padding
        length = 0
        for piece in pieces:
            length += self._file.write(np.ascontiguousarray(piece).data)
        self._size = offset + length
        return offset, length


class GraphBuilder:
    """Collects nodes, initializers, inputs and outputs of one graph; every name is a plain string."""

    def __init__(self, weights: WeightsFile) -> None:
        self._weights = weights
        self._nodes: list[onnx.NodeProto] = []
        self._initializers: dict[str, onnx.TensorProto] = {}
        self._inputs: list[onnx.ValueInfoProto] = []
        self._outputs: list[onnx.ValueInfoProto] = []
        self._values: set[str] = set()

    def node(self, op: str, inputs: Sequence[str], output: str, *, domain: str = "", **attributes: Any) -> str:
        """A node with one output, which is returned; an empty input name is an omitted one."""
        return self.node_many(op, inputs, [output], domain=domain, **attributes)[0]

    def node_many(
        self, op: str, inputs: Sequence[str], outputs: Sequence[str], *, domain: str = "", **attributes: Any
    ) -> list[str]:
        """A node with several outputs (an empty name is an output not wanted)."""
        name = next(output for output in outputs if output)
        self._nodes.append(helper.make_node(op, list(inputs), list(outputs), name=name, domain=domain, **attributes))
        self._values.update(outputs)
        return list(outputs)

    def has_value(self, name: str) -> bool:
        """Whether a node of this name was emitted."""
        return name in self._values

    def constant(self, name: str, value: Any, dtype: type[np.generic] = np.float32) -> str:
        """An initializer from a Python value or array; the same name twice must mean the same value."""
        if name not in self._initializers:
            self.tensor(name, np.asarray(value, dtype))
        return name

    def tensor(self, name: str, array: NDArray[Any]) -> str:
        """An initializer from an array, external if it is large."""
        if array.nbytes < EXTERNAL_FROM_BYTES:
            assert name not in self._initializers, name
            self._initializers[name] = numpy_helper.from_array(np.ascontiguousarray(array), name)
            return name
        return self.stream(name, [array], dtype=array.dtype, shape=array.shape)

    def stream(self, name: str, pieces: Iterable[NDArray[Any]], *, dtype: np.dtype[Any], shape: Sequence[int]) -> str:
        """An external initializer of `shape`, its bytes written piece by piece."""
        assert name not in self._initializers, name
        offset, length = self._weights.append(pieces)
        expected = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        assert length == expected, f"{name}: wrote {length} bytes of {expected}"
        self._initializers[name] = _external(name, dtype, shape, offset=offset, length=length)
        return name

    def alias(self, name: str, existing: str, shape: Sequence[int]) -> str:
        """An initializer of another shape over the same bytes as `existing`."""
        tensor = self._initializers[existing]
        dtype = helper.tensor_dtype_to_np_dtype(tensor.data_type)
        entries = {entry.key: entry.value for entry in tensor.external_data}
        if entries:
            copy = _external(name, np.dtype(dtype), shape, offset=int(entries["offset"]), length=int(entries["length"]))
        else:
            copy = numpy_helper.from_array(numpy_helper.to_array(tensor).reshape(shape), name)
        self._initializers[name] = copy
        return name

    def add_input(self, name: str, dtype: type[np.generic], shape: Sequence[int | str]) -> str:
        self._inputs.append(helper.make_tensor_value_info(name, _TYPES[np.dtype(dtype)], list(shape)))
        return name

    def add_output(self, name: str, dtype: type[np.generic], shape: Sequence[int | str]) -> str:
        self._outputs.append(helper.make_tensor_value_info(name, _TYPES[np.dtype(dtype)], list(shape)))
        return name

    def save(self, path: Path) -> None:
        """Write the graph; the weights file must lie in the same folder."""
        graph = helper.make_graph(
            self._nodes, "decoder", self._inputs, self._outputs, list(self._initializers.values())
        )
        opsets = [helper.make_opsetid("", OPSET), helper.make_opsetid(MICROSOFT, MICROSOFT_OPSET)]
        model = helper.make_model(graph, opset_imports=opsets, ir_version=IR_VERSION, producer_name="edgeqwen")
        onnx.save(model, str(path))


def _external(name: str, dtype: np.dtype[Any], shape: Sequence[int], *, offset: int, length: int) -> onnx.TensorProto:
    tensor = onnx.TensorProto(name=name, data_type=_TYPES[dtype], dims=list(shape), data_location=TensorProto.EXTERNAL)
    for key, value in (("location", WEIGHTS), ("offset", offset), ("length", length)):
        entry = tensor.external_data.add()
        entry.key, entry.value = key, str(value)
    return tensor
