"""llama.cpp through the plain functions of llama-cpp-python.

`llama_cpp quantize SOURCE.gguf OUT.gguf TYPE` makes a quantised file; for the rest see `base`. Prompts go in
as batches of at most 2,048 tokens, computed in pieces of 512, as its own server does; several streams are sequences of
one context, one token of each in a batch. Settings: flash attention off or on.
"""

from __future__ import annotations

import argparse
import ctypes
import sys
from typing import Any

import llama_cpp as llama
import numpy as np
from numpy.typing import NDArray

from benchmarks.peers.runners.base import Tokens, Window, main

BATCH = 2048
PIECE = 512


@llama.llama_log_callback  # type: ignore[untyped-decorator]  # the library has no types
def quiet(level: int, text: bytes, data: ctypes.c_void_p) -> None:
    """Drops the library's log."""


def quantize(source: str, out: str, kind: str) -> None:
    options = llama.llama_model_quantize_default_params()
    options.ftype = getattr(llama, f"LLAMA_FTYPE_MOSTLY_{kind}")
    options.nthread = 2
    if llama.llama_model_quantize(source.encode(), out.encode(), ctypes.byref(options)):
        raise SystemExit(f"{source}: llama.cpp cannot quantise it to {kind}")


def open_context(model: Any, given: argparse.Namespace, *, capacity: int, streams: int) -> Any:
    options = llama.llama_context_default_params()
    options.n_ctx = capacity * streams
    options.n_batch, options.n_ubatch = BATCH, PIECE
    options.n_seq_max = streams
    options.n_threads = options.n_threads_batch = given.threads
    options.flash_attn_type = int(given.setting == "flash")
    context = llama.llama_init_from_model(model, options)
    if not context:
        raise SystemExit("llama.cpp cannot make a context")
    return context


def load_model(path: str) -> Any:
    model = llama.llama_model_load_from_file(path.encode(), llama.llama_model_default_params())
    if not model:
        raise SystemExit(f"{path}: llama.cpp cannot load it")
    return model


def run(context: Any, rows: list[tuple[int, int, int]], *, all_logits: bool = False, last: bool = True) -> None:
    """Rows of (token, position, sequence); logits of all of them, of the last, or of none."""
    batch = llama.llama_batch_init(len(rows), 0, 1)
    for index, (token, position, sequence) in enumerate(rows):
        batch.token[index], batch.pos[index] = token, position
        batch.n_seq_id[index] = 1
        batch.seq_id[index][0] = sequence
        batch.logits[index] = all_logits or (last and index == len(rows) - 1)
    batch.n_tokens = len(rows)
    status = llama.llama_decode(context, batch)
    llama.llama_synchronize(context)
    llama.llama_batch_free(batch)
    if status:
        raise SystemExit(f"llama_decode failed: {status}")


class LlamaCpp:
    """See `base.Engine`."""

    def __init__(self, model: str, given: argparse.Namespace, *, capacity: int, streams: int) -> None:
        self._model = load_model(model)
        self._context = open_context(self._model, given, capacity=capacity, streams=streams)
        self._position = 0

    def prefill(self, tokens: Tokens) -> None:
        llama.llama_memory_clear(llama.llama_get_memory(self._context), True)
        self._position = tokens.shape[1]
        for sequence, row in enumerate(tokens.tolist()):
            rows = [(token, position, sequence) for position, token in enumerate(row)]
            for start in range(0, len(rows), BATCH):
                run(self._context, rows[start : start + BATCH], last=start + BATCH >= len(rows))
            llama.llama_get_logits_ith(self._context, -1)

    def decode(self, tokens: Tokens) -> None:
        rows = [(token, self._position, sequence) for sequence, token in enumerate(tokens.tolist())]
        run(self._context, rows, all_logits=True)
        llama.llama_get_logits_ith(self._context, len(rows) - 1)
        self._position += 1

    def close(self) -> None:
        llama.llama_free(self._context)
        llama.llama_model_free(self._model)


def open_logits(path: str, given: argparse.Namespace) -> Window:
    model = load_model(path)
    context = open_context(model, given, capacity=given.window, streams=1)
    size = (llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(model)),)

    def logits(ids: Tokens) -> NDArray[np.float32]:
        llama.llama_memory_clear(llama.llama_get_memory(context), True)
        run(context, [(token, position, 0) for position, token in enumerate(ids.tolist())], all_logits=True)
        rows = (llama.llama_get_logits_ith(context, index) for index in range(len(ids)))
        return np.stack([np.ctypeslib.as_array(row, size).copy() for row in rows])

    return logits


if __name__ == "__main__":
    llama.llama_log_set(quiet, ctypes.c_void_p(0))
    llama.llama_backend_init()
    if sys.argv[1] == "quantize":
        quantize(*sys.argv[2:])
    else:
        main(LlamaCpp, open_logits, settings=("plain", "flash"))
