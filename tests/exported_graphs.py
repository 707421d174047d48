"""Folders as optimum exports them: recorded ones, and ones whose graph is changed as other exporters would have it."""

from __future__ import annotations

import functools
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from edgeqwen.convert.exported import import_exported
from edgeqwen.core.package import open_package
from edgeqwen.runtime.exported import ExportedRuntime
from edgeqwen.runtime.onnx import OnnxOptions
from tests.models import Array, scratch
from tests.record_exported import DATA


def unpack(folder: Path, case: str = "qwen3") -> Path:
    """A recorded folder, written to `folder`."""
    with zipfile.ZipFile(DATA / f"{case}.zip") as archive:
        archive.extractall(folder)
    return folder


def golden_logits(family: str) -> Array:
    """What transformers computes for `record_exported.case_ids`."""
    with np.load(DATA / "logits.npz") as arrays:
        logits: Array = arrays[family]
    return logits


def changed(folder: Path, change: Callable[[onnx.ModelProto], None], **saving: Any) -> Path:
    """The folder with its graph changed, and saved by onnx with the settings `saving`."""
    path = unpack(folder) / "model.onnx"
    model = onnx.load(str(path))
    change(model)
    onnx.save(model, str(path), **saving)
    return folder


def drop_input(model: onnx.ModelProto, name: str) -> None:
    model.graph.input.remove(next(value for value in model.graph.input if value.name == name))


def count_positions(model: onnx.ModelProto) -> None:
    """Have the graph count positions from the length of its past, as exports before 2024 did."""
    drop_input(model, "position_ids")
    nodes = [
        helper.make_node("Shape", ["past_key_values.0.key"], ["past_len"], start=2, end=3),
        helper.make_node("Shape", ["attention_mask"], ["whole_len"], start=1, end=2),
        helper.make_node("Squeeze", ["past_len"], ["first"]),
        helper.make_node("Squeeze", ["whole_len"], ["after_last"]),
        helper.make_node("Range", ["first", "after_last", "one"], ["positions"]),
        helper.make_node("Unsqueeze", ["positions", "axis"], ["position_ids"]),
    ]
    for node in reversed(nodes):
        model.graph.node.insert(0, node)
    model.graph.initializer.append(numpy_helper.from_array(np.array(1), "one"))
    model.graph.initializer.append(numpy_helper.from_array(np.array([0]), "axis"))


def keep_last_logits(model: onnx.ModelProto) -> None:
    """Have the graph give logits of the last row alone."""
    for node in model.graph.node:
        node.output[:] = ["all_logits" if name == "logits" else name for name in node.output]
    model.graph.node.append(helper.make_node("Gather", ["all_logits", "last_row"], ["logits"], axis=1))
    model.graph.initializer.append(numpy_helper.from_array(np.array([-1]), "last_row"))
    logits = next(value for value in model.graph.output if value.name == "logits")
    logits.type.tensor_type.shape.dim[1].dim_value = 1


def add_input(model: onnx.ModelProto, name: str) -> None:
    model.graph.input.append(helper.make_tensor_value_info(name, TensorProto.BOOL, [1]))


def imported(folder: Path, out: Path) -> Path:
    """The package of an exported folder, without the trial that the command makes."""
    import_exported(folder, out, name=out.name, trial=lambda _: None)
    return out


@functools.cache
def exported_package(case: str = "qwen3") -> Path:
    """The package of a recorded folder (made once)."""
    return imported(unpack(scratch() / f"exported-{case}-source", case), scratch() / f"exported-{case}")


def exported_runtime(package: Path, *, num_slots: int = 4, capacity: int = 128) -> ExportedRuntime:
    options = OnnxOptions(num_slots=num_slots, capacity=capacity, num_threads=1)
    return ExportedRuntime.load(open_package(package), options)
