"""ORTModelForCausalLM of optimum on a graph that optimum exported; for the commands see `base`.

`bound` hands memory to onnxruntime (its io binding), `plain` has it copied. Nothing of the class is changed but the
size of a head: version 0.1.0 takes hidden size by heads where Qwen3's configuration has a size of its own, and then
fails at the first token.
"""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np
import onnxruntime as ort
import torch
from numpy.typing import NDArray
from optimum.onnxruntime import ORTModelForCausalLM

from benchmarks.peers.runners.base import Tokens, Window, main


def load_model(path: str, given: argparse.Namespace) -> Any:
    torch.set_num_threads(given.threads)
    torch.set_grad_enabled(False)
    options = ort.SessionOptions()
    options.intra_op_num_threads = given.threads
    is_bound = given.setting == "bound"
    model = ORTModelForCausalLM.from_pretrained(path, session_options=options, use_io_binding=is_bound)
    model.embed_size_per_head = getattr(model.config, "head_dim", None) or model.embed_size_per_head
    return model


class Optimum:
    """See `base.Engine`; the cache is what the graph gave last."""

    def __init__(self, model: str, given: argparse.Namespace, *, capacity: int, streams: int) -> None:
        self._model = load_model(model, given)
        self._past: Any = None
        self._position = 0

    def prefill(self, tokens: Tokens) -> None:
        self._past, self._position = None, 0
        self._step(tokens)

    def decode(self, tokens: Tokens) -> None:
        self._step(tokens[:, None])

    def _step(self, tokens: Tokens) -> None:
        streams, length = tokens.shape
        self._position += length
        mask = torch.ones((streams, self._position), dtype=torch.long)
        ids = torch.from_numpy(np.ascontiguousarray(tokens))
        answer = self._model(ids, attention_mask=mask, past_key_values=self._past, use_cache=True)
        self._past = answer.past_key_values

    def close(self) -> None:
        self._past = None


def open_logits(path: str, given: argparse.Namespace) -> Window:
    model = load_model(path, given)

    def logits(ids: Tokens) -> NDArray[np.float32]:
        mask = torch.ones((1, len(ids)), dtype=torch.long)
        return np.asarray(model(torch.from_numpy(ids[None]), attention_mask=mask).logits[0].numpy())

    return logits


if __name__ == "__main__":
    main(Optimum, open_logits, settings=("bound", "plain"))
