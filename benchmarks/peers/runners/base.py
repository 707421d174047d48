"""What all runners share: their commands, timing, and the talk with the program that started them.

A runner is run by the interpreter of its peer's own environment and prints JSON lines:

    RUNNER bench MODEL    one line of speeds
    RUNNER rest MODEL     a line when ready; then for each line on standard input one piece of work and a line after it;
                          ends with its input. The starter reads memory and CPU time of the process from outside.
    RUNNER logits MODEL --ids IDS.npy --out OUT.npy    float32 logits [tokens, vocabulary], windows from an empty cache
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

Tokens = NDArray[np.int64]
WORK_PROMPT = 128
WORK_DECODE = 32


class Engine(Protocol):
    """One loaded model with room for some streams."""

    def prefill(self, tokens: Tokens) -> None:
        """`[streams, prompt]` into an empty cache, down to the logits of each last position."""

    def decode(self, tokens: Tokens) -> None:
        """One more token for each stream `[streams]`, down to logits."""

    def close(self) -> None:
        """Free what it holds."""


class Load(Protocol):
    """Makes an engine with `capacity` positions for each of `streams` sequences."""

    def __call__(self, model: str, given: argparse.Namespace, *, capacity: int, streams: int) -> Engine: ...


Window = Callable[[Tokens], "NDArray[np.float32]"]
"""One window of ids, from an empty cache -> logits [window, vocabulary]."""


def main(load: Load, open_logits: Callable[[str, argparse.Namespace], Window], *, settings: tuple[str, ...]) -> None:
    given = _arguments(settings)
    if given.command == "bench":
        _say(_bench(load, given))
    elif given.command == "rest":
        _rest(load, given)
    else:
        _write_logits(open_logits(given.model, given), given)


def _arguments(settings: tuple[str, ...]) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("command", choices=["bench", "rest", "logits"])
    parser.add_argument("model")
    parser.add_argument("--setting", choices=settings, default=settings[0])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--decode", type=int, default=64)
    parser.add_argument("--streams", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--ids", type=Path)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--window", type=int, default=1024)
    return parser.parse_args()


def _bench(load: Load, given: argparse.Namespace) -> dict[str, Any]:
    """Medians of the runs after one that is not counted: caches, kernels made for a shape, pages touched first."""
    began = time.perf_counter()
    engine = load(given.model, given, capacity=given.prompt + given.decode + 1, streams=given.streams)
    load_s = time.perf_counter() - began
    draw = np.random.default_rng(0)
    prefill_s, decode_s = [], []
    for _ in range(1 + given.repeats):
        prompt = draw.integers(0, 1000, (given.streams, given.prompt))
        tokens = draw.integers(0, 1000, (given.decode, given.streams))
        began = time.perf_counter()
        engine.prefill(prompt)
        filled = time.perf_counter()
        for each in tokens:
            engine.decode(each)
        prefill_s.append(filled - began)
        decode_s.append(time.perf_counter() - filled)
    engine.close()
    return {
        "prefill_tok_s": given.prompt * given.streams / statistics.median(prefill_s[1:]),
        "decode_tok_s": given.decode * given.streams / statistics.median(decode_s[1:]),
        "load_s": load_s,
    }


def _rest(load: Load, given: argparse.Namespace) -> None:
    engine = load(given.model, given, capacity=2048, streams=1)
    engine.prefill(np.full((1, 4), 5))
    engine.decode(np.full(1, 5))
    _say({"state": "ready"})
    for _ in sys.stdin:
        engine.prefill(np.arange(WORK_PROMPT)[None])
        for token in range(WORK_DECODE):
            engine.decode(np.full(1, token))
        _say({"state": "done"})
    engine.close()


def _write_logits(compute: Window, given: argparse.Namespace) -> None:
    ids = np.load(given.ids)
    pieces = [compute(ids[at : at + given.window]) for at in range(0, len(ids), given.window)]
    np.save(given.out, np.concatenate(pieces).astype(np.float32, copy=False))
    _say({"tokens": len(ids)})


def _say(line: dict[str, Any]) -> None:
    print(json.dumps(line), flush=True)
