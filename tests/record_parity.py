"""Records what transformers computes, for tests on machines without it. Needs torch and transformers:

python -m tests.record_parity parity               -> tests/data/parity.npz
python -m tests.record_parity long                 -> tests/data/parity_long.npz
python -m tests.record_parity hidden               -> tests/data/parity_hidden.npz
python -m tests.record_parity greedy FILE.gguf     -> tests/data/smollm2_greedy.json
"""

from __future__ import annotations

import functools
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgeqwen.core.model import Family, RopeScaling
from tests.checkpoints import write_safetensors_model

DATA = Path(__file__).parent / "data"
POSITIONS = (0, 1, 2, 7, 63, 64, 255, 256, 257, 511, 1000, 1023, 1024, 1500, 1998, 1999)
NUM_IDS = 2000
LONG_POSITIONS = (0, 1, 7, 511, 4000)
LONG_CASES = ("qwen3-tied", "qwen2-tied", "llama-tied")
NUM_GREEDY = 64
CASES: dict[str, tuple[Family, dict[str, Any]]] = {
    "qwen3-tied": ("qwen3", {}),
    "qwen3-untied": ("qwen3", {"tie": False}),
    "qwen2-tied": ("qwen2", {}),
    "qwen2-untied": ("qwen2", {"tie": False, "head_dim": 16}),
    "llama-tied": ("llama", {}),
    "llama-untied": ("llama", {"tie": False}),
    "llama-linear": ("llama", {"rope_scaling": RopeScaling("linear", 4.0)}),
    "llama-llama3": ("llama", {"rope_scaling": RopeScaling("llama3", 8.0, 1.0, 4.0, 512)}),
}
QUESTIONS = (
    "Why is the sky blue?",
    "Write a Python function that adds two numbers.",
    "What is the capital of France?",
    "Tell me a short story about a lighthouse.",
    "Explain how to cook rice.",
)


def case_ids(vocab_size: int, count: int = NUM_IDS) -> list[int]:
    """The ids that all cases are computed for."""
    return [int(token) for token in np.random.default_rng(5).integers(0, vocab_size, count)]


@functools.cache
def recorded() -> dict[str, NDArray[np.float32]]:
    """What `record_parity` has recorded."""
    with np.load(DATA / "parity.npz") as file:
        return dict(file)


def reference_logits(folder: Path, ids: list[int]) -> NDArray[np.float32]:
    """Logits `[tokens, vocabulary]` by transformers in float32."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.inference_mode():
        logits: NDArray[np.float32] = model(torch.tensor([ids])).logits[0].numpy()
    return logits


def reference_hidden(folder: Path, ids: list[int]) -> NDArray[np.float32]:
    """Hidden states `[tokens, hidden]` behind the final norm, by transformers in float32."""
    import torch
    from transformers import AutoModel

    model = AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.inference_mode():
        hidden: NDArray[np.float32] = model(torch.tensor([ids])).last_hidden_state[0].numpy()
    return hidden


def record_hidden() -> None:
    """States at `POSITIONS`, then the mean of all."""
    arrays: dict[str, NDArray[np.float32]] = {}
    for name, (family, options) in CASES.items():
        with tempfile.TemporaryDirectory() as folder:
            spec = write_safetensors_model(Path(folder), family=family, **options)
            hidden = reference_hidden(Path(folder), case_ids(spec.vocab_size))
        mean = hidden.mean(axis=0, keepdims=True, dtype=np.float64).astype(np.float32)
        arrays[name] = np.concatenate([hidden[list(POSITIONS)], mean])
    np.savez_compressed(DATA / "parity_hidden.npz", allow_pickle=False, **arrays)


def record_parity() -> None:
    arrays: dict[str, NDArray[np.float32]] = {}
    for name, (family, options) in CASES.items():
        with tempfile.TemporaryDirectory() as folder:
            spec = write_safetensors_model(Path(folder), family=family, **options)
            logits = reference_logits(Path(folder), case_ids(spec.vocab_size))
        arrays[name] = logits[list(POSITIONS)]
        arrays[name + ".std"] = logits.std(keepdims=True)[0]
    np.savez_compressed(DATA / "parity.npz", allow_pickle=False, **arrays)


def record_long() -> None:
    arrays: dict[str, NDArray[np.float32]] = {}
    for name in LONG_CASES:
        family, options = CASES[name]
        with tempfile.TemporaryDirectory() as folder:
            spec = write_safetensors_model(Path(folder), family=family, **options)
            logits = reference_logits(Path(folder), case_ids(spec.vocab_size, LONG_POSITIONS[-1] + 1))
        arrays[name] = logits[list(LONG_POSITIONS)]
        arrays[name + ".std"] = logits.std(keepdims=True)[0]
    np.savez_compressed(DATA / "parity_long.npz", allow_pickle=False, **arrays)


def record_greedy(gguf_path: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    options = {"gguf_file": gguf_path.name}
    tokenizer = AutoTokenizer.from_pretrained(gguf_path.parent, **options)
    model = AutoModelForCausalLM.from_pretrained(gguf_path.parent, dtype=torch.float32, **options).eval()
    cases = []
    for question in QUESTIONS:
        messages = [{"role": "user", "content": question}]
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
        prompt_len, gaps = len(ids), []
        with torch.inference_mode():
            for _ in range(NUM_GREEDY):
                best = model(torch.tensor([ids])).logits[0, -1].double().topk(2)
                gaps.append(float(best.values[0] - best.values[1]))
                ids.append(int(best.indices[0]))
        cases.append({"question": question, "prompt": ids[:prompt_len], "tokens": ids[prompt_len:], "gaps": gaps})
    (DATA / "smollm2_greedy.json").write_text(json.dumps(cases) + "\n", encoding="utf-8")


if __name__ == "__main__":
    if sys.argv[1] == "parity":
        record_parity()
    elif sys.argv[1] == "long":
        record_long()
    elif sys.argv[1] == "hidden":
        record_hidden()
    else:
        record_greedy(Path(sys.argv[2]))
