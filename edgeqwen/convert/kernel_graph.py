"""Writes the check graph of an int8 package: one integer product of extreme values in the weight form of its layers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from edgeqwen.convert.graph import IR_VERSION, MICROSOFT, MICROSOFT_OPSET, OPSET
from edgeqwen.core.kernel import DEPTH, WIDTH, check_weights
from edgeqwen.core.model import WeightForm


def write_kernel_check(path: Path, form: WeightForm) -> None:
    """codes uint8 `[rows, DEPTH]` -> product float32 `[rows, WIDTH]` of (codes - 128) and `check_weights()`."""
    weights = check_weights()
    if form == "unsigned":
        weights = (weights.astype(np.int16) + 128).astype(np.uint8)
    constants = {
        "weights": weights,
        "one": np.float32(1),
        "ones": np.ones(WIDTH, np.float32),
        "zero_point": np.uint8(128),
    }
    inputs = ["codes", "weights", "one", "ones", "zero_point"] + (["zero_point"] if form == "unsigned" else [])
    node = helper.make_node("MatMulIntegerToFloat", inputs, ["product"], domain=MICROSOFT)
    graph = helper.make_graph(
        [node],
        "kernel_check",
        [helper.make_tensor_value_info("codes", TensorProto.UINT8, ["rows", DEPTH])],
        [helper.make_tensor_value_info("product", TensorProto.FLOAT, ["rows", WIDTH])],
        [numpy_helper.from_array(np.asarray(value), name) for name, value in constants.items()],
    )
    opsets = [helper.make_opsetid("", OPSET), helper.make_opsetid(MICROSOFT, MICROSOFT_OPSET)]
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=IR_VERSION), str(path))
