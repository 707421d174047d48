"""A short real run, in a process of its own, and where its time goes.

The run is `edgeqwen bench`: loading, reading a text as tokens, a prompt, an answer, and how fast memory is copied with
the same threads. A crash of a native library is then a finding and not the end of the examination.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from edgeqwen.doctor.finding import Finding, size_text
from edgeqwen.errors import EXIT_CONFIG

PROMPT, ANSWER = 500, 200
"""Tokens of the request that the split is told of: a short document, and an answer of two paragraphs."""

TRIAL_FLAGS: Final = ("--prompt", "128", "--decode", "32", "--json")
GIVE_UP_S: Final = 180.0
MEMORY_BOUND: Final = 0.5
"""Of what memory gives when it is copied; weights are only read, in pieces, and one core does not get all of it."""

SLOW_LOAD_S: Final = 10.0


@dataclass(frozen=True, slots=True)
class Trial:
    """What a run measured. Bytes a second are of weights that each token reads, and of memory that is copied."""

    load_s: float
    tokenize_tok_s: float
    prefill_tok_s: float
    decode_tok_s: float
    weights_bytes_s: float
    memory_bytes_s: float

    @classmethod
    def of(cls, report: dict[str, Any]) -> Trial:
        """From what `edgeqwen bench --json` says."""
        return cls(
            load_s=report["load_s"],
            tokenize_tok_s=report["tokenize_tok_s"],
            prefill_tok_s=report["prefill_tok_s"],
            decode_tok_s=report["decode_tok_s"],
            weights_bytes_s=report["weights_bytes"] * report["decode_tok_s"],
            memory_bytes_s=report["memory_bytes_s"],
        )

    @property
    def split(self) -> dict[str, float]:
        """Seconds of a request of `PROMPT` new tokens and `ANSWER` tokens, part by part, and of the load before."""
        return {
            "load_s": round(self.load_s, 2),
            "tokenize_s": round(PROMPT / self.tokenize_tok_s, 4),
            "prefill_s": round(PROMPT / self.prefill_tok_s, 2),
            "decode_s": round(ANSWER / self.decode_tok_s, 2),
        }

    @property
    def memory_share(self) -> float:
        """How much of what memory gives decoding takes."""
        return self.weights_bytes_s / self.memory_bytes_s if self.memory_bytes_s else 0.0

    def to_dict(self) -> dict[str, Any]:
        return {
            "prefill_tok_s": self.prefill_tok_s,
            "decode_tok_s": self.decode_tok_s,
            "tokenize_tok_s": self.tokenize_tok_s,
            "weights_bytes_s": round(self.weights_bytes_s),
            "memory_bytes_s": round(self.memory_bytes_s),
            "split": self.split,
        }

    def lines(self) -> Iterator[str]:
        """For people."""
        split = self.split
        yield (
            f"load {split['load_s']:.1f} s; then {PROMPT} tokens of a prompt: read in {1000 * split['tokenize_s']:.0f}"
            f" ms, computed in {split['prefill_s']:.1f} s; {ANSWER} of an answer: {split['decode_s']:.1f} s"
        )
        yield (
            f"prompts {self.prefill_tok_s:.0f}, answers {self.decode_tok_s:.0f} tokens/s; decoding reads"
            f" {self.weights_bytes_s / 1e9:.1f} GB/s of weights, memory copies {self.memory_bytes_s / 1e9:.1f} GB/s"
        )


def trial_obstacle(*, num_active: int, needed_bytes: int, free_bytes: int | None) -> Finding | None:
    """Why no run should begin now: it would take the cores of a daemon's `num_active` requests, or memory that is not
    there. `free_bytes` None: not known.
    """
    if num_active:
        text = f"no run: the daemon has {num_active} requests under way, which it would slow down"
        return Finding("note", "trial-skipped", text, "ask again when `edgeqwen stats` shows none")
    if free_bytes is not None and free_bytes < needed_bytes:
        text = f"no run: it takes {size_text(needed_bytes)}, and {size_text(free_bytes)} are free"
        return Finding("note", "trial-skipped", text, "stop the daemon first, or what else takes the memory")
    return None


def run_trial(package: str, flags: Sequence[str]) -> Trial | Finding:
    """Measured, or what went wrong. `flags` are those of `edgeqwen bench` that say where it computes."""
    command = [sys.executable, "-m", "edgeqwen", "bench", package, *TRIAL_FLAGS, *flags]
    try:
        done = subprocess.run(command, capture_output=True, check=False, timeout=GIVE_UP_S, env=dict(os.environ))
    except subprocess.TimeoutExpired:
        text = f"a short run was not over within {GIVE_UP_S:g} s"
        return Finding("warning", "trial-slow", text, "see what else the machine does; `edgeqwen bench` waits longer")
    if done.returncode == 0:
        return Trial.of(json.loads(done.stdout))
    return _failure(done.returncode, done.stderr.decode("utf-8", "replace"))


def _failure(returncode: int, stderr: str) -> Finding:
    if returncode >= 0:
        last = stderr.strip().splitlines()[-1:] or ["no word of why"]
        text = f"a short run ended with {returncode}: {last[0].removeprefix('edgeqwen: ')}"
        return Finding(
            "error", "trial-failed", text, "what it says is what `serve` would say", returncode or EXIT_CONFIG
        )
    name = signal.Signals(-returncode).name
    advice = {
        "SIGILL": "the libraries take this processor for another; a virtual machine may hide or feign instruction sets",
        "SIGKILL": "memory ran out: take a smaller quant, or raise the limit of the control group",
    }.get(name, "run `edgeqwen bench` by itself and tell us what it says")
    return Finding("error", "trial-crashed", f"a short run was ended by {name}", advice, EXIT_CONFIG)


def trial_findings(trial: Trial, *, quant: str, num_threads: int, num_cores: int) -> Iterator[Finding]:
    """The likely bottleneck of a request, and the setting that changes it."""
    split = trial.split
    if split["decode_s"] >= split["prefill_s"]:
        yield _decoding(trial, quant, num_threads, num_cores)
    else:
        advice = "`hybrid` and `int8` read prompts fastest" if quant == "int4" else "more or faster cores"
        text = f"prompts take longest: {split['prefill_s']:.1f} s of {PROMPT} new tokens"
        yield Finding("note", "bottleneck-prefill", text, f"{advice}; what was asked before is not computed again")
    if trial.load_s > SLOW_LOAD_S:
        text = f"loading took {trial.load_s:.0f} s"
        advice = "service.idle_unload_s = 0 keeps the model in memory; a faster disk, or a smaller quant"
        yield Finding("note", "slow-load", text, advice)


def _decoding(trial: Trial, quant: str, num_threads: int, num_cores: int) -> Finding:
    took = f"answers take longest, {trial.split['decode_s']:.1f} s of {ANSWER} tokens"
    if trial.memory_share >= MEMORY_BOUND:
        text = f"{took}: memory is the limit ({trial.memory_share:.0%} of what copying gets of it)"
        smaller = "`--quant hybrid` reads half as much a token" if quant in {"int8", "fp32"} else "a smaller model"
        return Finding("note", "bottleneck-memory", text, f"{smaller}; more threads would not help")
    text = f"{took}: the cores are the limit (memory is at {trial.memory_share:.0%})"
    advice = "cpu.threads" if num_threads < num_cores else "stop what else computes, or see the governor"
    return Finding("note", "bottleneck-cores", text, f"{advice}; `edgeqwen bench --threads N` compares")
