"""Writes a package's check graph: one product of extreme values for each kernel that its graphs use."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from edgeqwen.convert.graph import IR_VERSION, MICROSOFT, MICROSOFT_OPSET, OPSET
from edgeqwen.convert.quantize import pack_nibbles
from edgeqwen.core.kernel import (
    ACTIVATIONS,
    CODES,
    DEPTH,
    KERNEL_CHECK,
    SIGNED_WEIGHTS,
    UNSIGNED_WEIGHTS,
    WIDTH,
    BlockKernel,
    Kernel,
    RowKernel,
    block_codes,
    block_zero_points,
    row_weights,
)
from edgeqwen.core.model import WeightForm

ROW_PRODUCTS: Final = {"MatMulIntegerToFloat", "MatMulInteger"}
MOVES: Final = {"Slice", "Transpose", "Reshape", "TensorScatter", "Unsqueeze", "Concat", "Identity", "Expand"}
"""Operators that pass the element type of their first input on."""


def write_kernel_check(folder: Path) -> None:
    """Write the check of all graphs in `folder` beside them; none if they use no quantised product."""
    kernels: dict[Kernel, None] = {}
    for path in sorted(folder.glob("*.onnx")):
        if path.name != KERNEL_CHECK:
            kernels |= dict.fromkeys(kernels_of(onnx.load(str(path), load_external_data=False).graph))
    if kernels:
        onnx.save(check_model(kernels), str(folder / KERNEL_CHECK))


def kernels_of(graph: onnx.GraphProto) -> Iterator[Kernel]:
    """The kernels of a graph's quantised products, some of them more than once."""
    types = _ElementTypes(graph)
    for node in graph.node:
        if node.op_type in ROW_PRODUCTS:
            form: WeightForm = "unsigned" if types.of(node.input[1]) == TensorProto.UINT8 else "signed"
            yield RowKernel(form, is_computed=node.input[1] not in types.constants)
        elif node.op_type == "MatMulNBits":
            attributes = {attribute.name: helper.get_attribute_value(attribute) for attribute in node.attribute}
            has_zero_points = len(node.input) > 3 and bool(node.input[3])
            yield BlockKernel(attributes["bits"], attributes["block_size"], has_zero_points)


class _ElementTypes:
    """Element types of a graph's tensors, as far as they can be followed back to a constant or an input."""

    def __init__(self, graph: onnx.GraphProto) -> None:
        self.constants: dict[str, int] = {tensor.name: tensor.data_type for tensor in graph.initializer}
        self._inputs: dict[str, int] = {value.name: value.type.tensor_type.elem_type for value in graph.input}
        self._producers = {output: node for node in graph.node for output in node.output}

    def of(self, name: str) -> int:
        """`TensorProto.UNDEFINED` if it is not known."""
        while name in self._producers:
            node = self._producers[name]
            if node.op_type == "QuantizeLinear":
                return self.of(node.input[2])
            if node.op_type == "ConstantOfShape":
                return int(next((attribute.t.data_type for attribute in node.attribute), TensorProto.FLOAT))
            if node.op_type not in MOVES:
                break
            name = node.input[0]
        return self.constants.get(name) or self._inputs.get(name, TensorProto.UNDEFINED)


def check_model(kernels: Iterable[Kernel]) -> onnx.ModelProto:
    """A graph with one output `[rows, WIDTH]` for each kernel, named after it."""
    check = _Check()
    for kernel in kernels:
        if isinstance(kernel, RowKernel):
            check.add_row_product(kernel)
        else:
            check.add_block_product(kernel)
    return check.model()


class _Check:
    """The check graph while it is put together."""

    def __init__(self) -> None:
        self._nodes: list[onnx.NodeProto] = []
        self._constants: dict[str, Any] = {}
        self._inputs: dict[str, tuple[int, list[int | str]]] = {}

    def add_row_product(self, kernel: RowKernel) -> None:
        weights = SIGNED_WEIGHTS if kernel.form == "signed" else UNSIGNED_WEIGHTS
        self._inputs[CODES] = (TensorProto.UINT8, ["rows", DEPTH])
        if kernel.is_computed:
            element = TensorProto.INT8 if kernel.form == "signed" else TensorProto.UINT8
            self._inputs[weights] = (element, [DEPTH, WIDTH])
        else:
            weights = f"{kernel.name}.weights"
            self._constants[weights] = row_weights(kernel.form)
        self._constants |= {"one": np.float32(1), "ones": np.ones(WIDTH, np.float32), "zero_point": np.uint8(128)}
        inputs = [CODES, weights, "one", "ones", "zero_point"] + (["zero_point"] if kernel.form == "unsigned" else [])
        self._nodes.append(helper.make_node("MatMulIntegerToFloat", inputs, [kernel.name], domain=MICROSOFT))

    def add_block_product(self, kernel: BlockKernel) -> None:
        bits, block_size = kernel.bits, kernel.block_size
        assert DEPTH % block_size == 0, kernel
        self._inputs[ACTIVATIONS] = (TensorProto.FLOAT, ["rows", DEPTH])
        codes = block_codes(bits).reshape(WIDTH, DEPTH // block_size, block_size)
        zero_points = block_zero_points(kernel)
        inputs = {
            f"{kernel.name}.codes": pack_nibbles(codes) if bits == 4 else codes,
            f"{kernel.name}.scales": np.ones((WIDTH, DEPTH // block_size), np.float32),
        }
        if kernel.has_zero_points:
            inputs[f"{kernel.name}.zeros"] = _packed_zero_points(zero_points) if bits == 4 else zero_points
        self._constants |= inputs
        self._nodes.append(
            helper.make_node(
                "MatMulNBits",
                [ACTIVATIONS, *inputs],
                [kernel.name],
                domain=MICROSOFT,
                K=DEPTH,
                N=WIDTH,
                bits=bits,
                block_size=block_size,
                accuracy_level=4,
            )
        )

    def model(self) -> onnx.ModelProto:
        outputs = [node.output[0] for node in self._nodes]
        graph = helper.make_graph(
            self._nodes,
            "kernel_check",
            [helper.make_tensor_value_info(name, element, shape) for name, (element, shape) in self._inputs.items()],
            [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["rows", WIDTH]) for name in outputs],
            [numpy_helper.from_array(np.asarray(value), name) for name, value in self._constants.items()],
        )
        opsets = [helper.make_opsetid("", OPSET), helper.make_opsetid(MICROSOFT, MICROSOFT_OPSET)]
        return helper.make_model(graph, opset_imports=opsets, ir_version=IR_VERSION)


def _packed_zero_points(zero_points: Any) -> Any:
    """Two a byte along each row of blocks, a lone last one in the low half."""
    if zero_points.shape[1] % 2:
        zero_points = np.pad(zero_points, ((0, 0), (0, 1)))
    return pack_nibbles(zero_points)
