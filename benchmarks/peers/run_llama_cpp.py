"""Measures llama.cpp through llama-cpp-python; run by that package's own interpreter, prints one JSON line.

    run_llama_cpp.py quantize SOURCE.gguf OUT.gguf TYPE
    run_llama_cpp.py bench FILE.gguf --prompt 128 --decode 64 --threads 2

Uses the library's plain functions, the same work as `edgeqwen bench`: the prompt in one batch with logits of its last
token, then one token a step with logits.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import statistics
import time
from typing import Any

import llama_cpp as llama

FILE_TYPES = {"Q4_0": 2, "Q8_0": 7, "Q4_K_M": 15}
NUM_REPEATS = 3


@llama.llama_log_callback  # type: ignore[untyped-decorator]  # the library has no types
def quiet(level: int, text: bytes, data: ctypes.c_void_p) -> None:
    """Drops the library's log."""


def quantize(source: str, out: str, kind: str) -> None:
    options = llama.llama_model_quantize_default_params()
    options.ftype = FILE_TYPES[kind]
    options.nthread = 2
    if llama.llama_model_quantize(source.encode(), out.encode(), ctypes.byref(options)):
        raise SystemExit(f"{source}: llama.cpp cannot quantise it to {kind}")


def batch_of(tokens: list[int], start: int) -> Any:
    batch = llama.llama_batch_init(len(tokens), 0, 1)
    for index, token in enumerate(tokens):
        batch.token[index] = token
        batch.pos[index] = start + index
        batch.n_seq_id[index] = 1
        batch.seq_id[index][0] = 0
        batch.logits[index] = index == len(tokens) - 1
    batch.n_tokens = len(tokens)
    return batch


def run(context: Any, tokens: list[int], start: int) -> float:
    batch = batch_of(tokens, start)
    began = time.perf_counter()
    if llama.llama_decode(context, batch):
        raise SystemExit("llama_decode failed")
    llama.llama_synchronize(context)
    llama.llama_get_logits_ith(context, len(tokens) - 1)
    took = time.perf_counter() - began
    llama.llama_batch_free(batch)
    return took


def bench(path: str, prompt: int, decode: int, threads: int) -> dict[str, float]:
    began = time.perf_counter()
    model = llama.llama_model_load_from_file(path.encode(), llama.llama_model_default_params())
    options = llama.llama_context_default_params()
    options.n_ctx = prompt + decode + 64
    options.n_batch = options.n_ubatch = max(512, prompt)
    options.n_threads = options.n_threads_batch = threads
    context = llama.llama_init_from_model(model, options)
    load_s = time.perf_counter() - began
    tokens = [(index * 7919) % 1000 for index in range(prompt)]
    prefill, decoded = [], []
    for _ in range(1 + NUM_REPEATS):
        llama.llama_memory_clear(llama.llama_get_memory(context), True)
        prefill.append(run(context, tokens, 0))
        decoded.append(sum(run(context, [5], prompt + index) for index in range(decode)))
    return {
        "prefill_tok_s": prompt / statistics.median(prefill[1:]),
        "decode_tok_s": decode / statistics.median(decoded[1:]),
        "load_s": load_s,
    }


if __name__ == "__main__":
    llama.llama_log_set(quiet, ctypes.c_void_p(0))
    llama.llama_backend_init()
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=["quantize", "bench"])
    parser.add_argument("files", nargs="+")
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--decode", type=int, default=64)
    parser.add_argument("--threads", type=int, default=2)
    given = parser.parse_args()
    if given.what == "quantize":
        quantize(*given.files)
    else:
        print(json.dumps(bench(given.files[0], given.prompt, given.decode, given.threads)))
