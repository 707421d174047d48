"""Plain transformers as most people run it: float32, `generate`, greedy. Run by an interpreter that has it.

    python -m benchmarks.articles.generate MODEL_FOLDER --threads 2

Prints a line when ready, then for each line `{"text":..., "num_tokens":...}` on standard input one line with the times.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.generation.streamers import BaseStreamer


class FirstToken(BaseStreamer):  # type: ignore[misc]  # the library has no types
    """Notes when the first new token was there; what comes before it is the prompt."""

    def __init__(self) -> None:
        self.num_calls = 0
        self.at = 0.0

    def put(self, value: Any) -> None:
        self.num_calls += 1
        if self.num_calls == 2:
            self.at = time.perf_counter()

    def end(self) -> None:
        """Nothing is held back."""


def answer(model: Any, tokenizer: Any, text: str, num_tokens: int) -> dict[str, Any]:
    """The whole way from the question to the answer's text."""
    began = time.perf_counter()
    streamer = FirstToken()
    inputs = tokenizer.apply_chat_template(
        [{"role": "user", "content": text}], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    lengths = {"max_new_tokens": num_tokens, "min_new_tokens": num_tokens}
    output = model.generate(**inputs, **lengths, do_sample=False, streamer=streamer)
    num_prompt = inputs["input_ids"].shape[1]
    reply = tokenizer.decode(output[0][num_prompt:], skip_special_tokens=True)
    total_s = time.perf_counter() - began
    counts = {"num_prompt": num_prompt, "num_tokens": output.shape[1] - num_prompt}
    return {"total_s": total_s, "first_s": streamer.at - began, **counts, "text": reply}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--threads", type=int, default=2)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    tokenizer = AutoTokenizer.from_pretrained(given.model)
    model = AutoModelForCausalLM.from_pretrained(given.model, dtype=torch.float32).eval()
    answer(model, tokenizer, "Hello", 4)
    print(json.dumps({"state": "ready"}), flush=True)
    for line in sys.stdin:
        question = json.loads(line)
        print(json.dumps(answer(model, tokenizer, question["text"], question["num_tokens"])), flush=True)


if __name__ == "__main__":
    main()
