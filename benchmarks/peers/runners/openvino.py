"""OpenVINO on a model that optimum-intel exported; for the commands see `base`.

`bf16` is its default on processors with AMX, `f32` the hint that keeps activations in single precision. As exported,
the graph computes logits of every prompt position; with `-last` the output matrix sees the last position alone, as
OpenVINO's own generation library arranges it.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov
from numpy.typing import NDArray
from openvino import opset13

from benchmarks.peers.runners.base import Tokens, Window, main

SETTINGS = ("bf16", "f32", "bf16-last", "f32-last")


def compiled(path: str, given: argparse.Namespace) -> Any:
    precision, _, only = given.setting.partition("-")
    core = ov.Core()
    model = core.read_model(Path(path) / "openvino_model.xml")
    if only:
        keep_last_position(model)
    options = {
        "INFERENCE_NUM_THREADS": given.threads,
        "PERFORMANCE_HINT": "LATENCY",
        "INFERENCE_PRECISION_HINT": precision,
    }
    return core.compile_model(model, "CPU", options)


def keep_last_position(model: Any) -> None:
    """Put a slice of the last position before the product that makes the logits."""
    node = model.output("logits").get_node().input_value(0).get_node()
    while node.get_type_name() != "MatMul":
        node = node.input_value(0).get_node()
    one, last, end = (np.array([value], np.int64) for value in (1, -1, np.iinfo(np.int64).max))
    sliced = opset13.slice(node.input_value(0), last, end, one, one)
    node.input(0).replace_source_output(sliced.output(0))
    model.validate_nodes_and_infer_types()


class OpenVino:
    """See `base.Engine`; the cache is the graph's state."""

    def __init__(self, model: str, given: argparse.Namespace, *, capacity: int, streams: int) -> None:
        self._request = compiled(model, given).create_infer_request()
        self._position = 0

    def restart(self) -> None:
        self._request.reset_state()
        self._position = 0

    def prefill(self, tokens: Tokens) -> None:
        self.restart()
        self.step(tokens)

    def decode(self, tokens: Tokens) -> None:
        self.step(tokens[:, None])

    def step(self, tokens: Tokens) -> NDArray[np.float32]:
        streams, length = tokens.shape
        start, self._position = self._position, self._position + length
        inputs = {
            "input_ids": tokens,
            "attention_mask": np.ones((streams, self._position), np.int64),
            "position_ids": np.tile(np.arange(start, self._position), (streams, 1)),
            "beam_idx": np.arange(streams, dtype=np.int32),
        }
        self._request.infer(inputs)
        return np.asarray(self._request.get_tensor("logits").data)

    def close(self) -> None:
        del self._request


def open_logits(path: str, given: argparse.Namespace) -> Window:
    engine = OpenVino(path, given, capacity=given.window, streams=1)

    def logits(ids: Tokens) -> NDArray[np.float32]:
        engine.restart()
        return np.array(engine.step(ids[None])[0])

    return logits


if __name__ == "__main__":
    main(OpenVino, open_logits, settings=SETTINGS)
