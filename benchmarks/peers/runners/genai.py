"""onnxruntime-genai on a model folder of its own builder; for the commands see `base`.

Decoding includes what this library does between two steps: it takes the likeliest token itself. Logits of all
positions, which it does not give out, come from the same graph run by onnxruntime.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import onnxruntime_genai as og
from numpy.typing import NDArray

from benchmarks.peers.runners.base import Tokens, Window, main


class Genai:
    """See `base.Engine`."""

    def __init__(self, model: str, given: argparse.Namespace, *, capacity: int, streams: int) -> None:
        config = og.Config(model)
        threads = {"intra_op_num_threads": given.threads}
        config.overlay(json.dumps({"model": {"decoder": {"session_options": threads}}}))
        self._model = og.Model(config)
        self._options = {"max_length": capacity, "min_length": capacity, "batch_size": streams, "do_sample": False}
        self._generator: Any = None

    def prefill(self, tokens: Tokens) -> None:
        del self._generator
        options = og.GeneratorParams(self._model)
        options.set_search_options(**self._options)
        self._generator = og.Generator(self._model, options)
        self._generator.append_tokens(tokens.astype(np.int32))
        self._generator.generate_next_token()  # takes a token of the prompt's logits; the next one computes

    def decode(self, tokens: Tokens) -> None:
        """Goes on with tokens of its own choice: random weights know no better, and speed does not depend on them."""
        self._generator.generate_next_token()

    def close(self) -> None:
        del self._generator
        del self._model


def open_logits(path: str, given: argparse.Namespace) -> Window:
    options = ort.SessionOptions()
    options.intra_op_num_threads = given.threads
    session = ort.InferenceSession(Path(path) / "model.onnx", options, providers=["CPUExecutionProvider"])
    config = json.loads((Path(path) / "genai_config.json").read_text(encoding="utf-8"))["model"]["decoder"]
    past = (1, config["num_key_value_heads"], 0, config["head_size"])
    types = {"tensor(float)": np.float32, "tensor(float16)": np.float16, "tensor(int64)": np.int64}

    def logits(ids: Tokens) -> NDArray[np.float32]:
        feeds: dict[str, Any] = {"input_ids": ids[None], "attention_mask": np.ones((1, len(ids)), np.int64)}
        for each in session.get_inputs():
            if each.name == "position_ids":
                feeds[each.name] = np.arange(len(ids))[None]
            elif each.name.startswith("past"):
                feeds[each.name] = np.empty(past, types[each.type])
        return np.asarray(session.run(["logits"], feeds)[0][0], np.float32)

    return logits


if __name__ == "__main__":
    main(Genai, open_logits, settings=("default",))
