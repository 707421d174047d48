"""Emitting an ONNX graph node by node, over the tensors of a package's store."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import helper, numpy_helper

from edgeqwen.convert.store import TYPES, TensorStore

MICROSOFT: Final = "com.microsoft"
OPSET: Final = 21
MICROSOFT_OPSET: Final = 1
IR_VERSION: Final = 10
LATER_IR_VERSION: Final = 11


class GraphBuilder:
    """Collects nodes, initializers, inputs and outputs of one graph; every name is a plain string."""

    def __init__(self, store: TensorStore, *, opset: int = OPSET) -> None:
        self._store = store
        self._opset = opset
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

    def reshape(self, x: str, shape: Sequence[int], output: str) -> str:
        """A view of another shape; -1 is what is left."""
        name = "shape." + ".".join(map(str, shape))
        return self.node("Reshape", [x, self.constant(name, list(shape), np.int64)], output)

    def filled(self, output: str, shape: str, value: np.generic) -> str:
        """A tensor of the shape that `shape` holds, every element `value`."""
        element = numpy_helper.from_array(np.asarray([value]))
        return self.node("ConstantOfShape", [shape], output, value=element)

    def has_value(self, name: str) -> bool:
        """Whether a node of this name was emitted."""
        return name in self._values

    def constant(self, name: str, value: Any, dtype: type[np.generic] = np.float32) -> str:
        """An initializer from a Python value or array; the same name must mean the same value in every graph."""
        return self.tensor(name, np.asarray(value, dtype))

    def tensor(self, name: str, array: NDArray[Any]) -> str:
        """An initializer from an array, kept in the store unless it is there under this name."""
        if name not in self._store:
            self._store.add(name, array)
        return self.stored(name)

    def is_stored(self, name: str) -> bool:
        """Whether the store has a tensor of this name."""
        return name in self._store

    def stored(self, name: str) -> str:
        """An initializer that the store has."""
        self._initializers[name] = self._store[name]
        return name

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor of the store."""
        return tuple(self._store[name].dims)

    def alias(self, name: str, existing: str, shape: Sequence[int]) -> str:
        """An initializer of another shape over the same bytes as `existing` of the store."""
        if name not in self._store:
            self._store.alias(name, existing, shape)
        return self.stored(name)

    def add_input(self, name: str, dtype: type[np.generic], shape: Sequence[int | str]) -> str:
        self._inputs.append(helper.make_tensor_value_info(name, TYPES[np.dtype(dtype)], list(shape)))
        return name

    def add_output(self, name: str, dtype: type[np.generic], shape: Sequence[int | str]) -> str:
        self._outputs.append(helper.make_tensor_value_info(name, TYPES[np.dtype(dtype)], list(shape)))
        return name

    def save(self, path: Path) -> None:
        """Write the graph; it must lie in the folder of the store's weights file."""
        graph = helper.make_graph(
            self._nodes, path.stem, self._inputs, self._outputs, list(self._initializers.values())
        )
        opsets = [helper.make_opsetid("", self._opset), helper.make_opsetid(MICROSOFT, MICROSOFT_OPSET)]
        version = IR_VERSION if self._opset <= OPSET else LATER_IR_VERSION
        model = helper.make_model(graph, opset_imports=opsets, ir_version=version, producer_name="edgeqwen")
        onnx.save(model, str(path))
