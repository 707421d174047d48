"""transformers on a folder of the hub, eager torch; for the commands see `base`."""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM, DynamicCache

from benchmarks.peers.runners.base import Tokens, Window, main

TYPES = {"bf16": torch.bfloat16, "f32": torch.float32}


def load_model(path: str, given: argparse.Namespace) -> Any:
    torch.set_num_threads(given.threads)
    torch.set_grad_enabled(False)
    return AutoModelForCausalLM.from_pretrained(path, dtype=TYPES[given.setting]).eval()


class Transformers:
    """See `base.Engine`."""

    def __init__(self, model: str, given: argparse.Namespace, *, capacity: int, streams: int) -> None:
        self._model = load_model(model, given)
        self._cache: Any = None

    def prefill(self, tokens: Tokens) -> None:
        self._cache = DynamicCache(config=self._model.config)
        self._step(tokens)

    def decode(self, tokens: Tokens) -> None:
        self._step(tokens[:, None])

    def _step(self, tokens: Tokens) -> None:
        self._model(torch.from_numpy(tokens), past_key_values=self._cache, use_cache=True, logits_to_keep=1)

    def close(self) -> None:
        self._cache = None


def open_logits(path: str, given: argparse.Namespace) -> Window:
    model = load_model(path, given)

    def logits(ids: Tokens) -> NDArray[np.float32]:
        return np.asarray(model(torch.from_numpy(ids[None])).logits[0].float().numpy())

    return logits


if __name__ == "__main__":
    main(Transformers, open_logits, settings=tuple(TYPES))
