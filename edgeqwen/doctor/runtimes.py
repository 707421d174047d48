"""Which runtimes are installed, what they would gain here, and how fast they are when they are timed.

A timing takes about ten seconds: two layers of the model's shape, with random weights, through each runtime in a
process of its own. It is kept in the state directory, where `engine.runtime = "auto"` looks.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from edgeqwen.core.model import ModelSpec
from edgeqwen.core.speeds import ANSWER, PROMPT, Speed, write_speeds
from edgeqwen.cpu import Processor
from edgeqwen.doctor.finding import Finding
from edgeqwen.doctor.sample import write_sample
from edgeqwen.loading.choice import PACKAGES
from edgeqwen.runtime.torch.options import installed_version

TIMING_FLAGS: Final = ("--prompt", "256", "--decode", "24", "--json")
GIVE_UP_S: Final = 120.0
CLEARLY: Final = 1.15
"""So many times as fast a request must be before it is worth a word."""


@dataclass(frozen=True, slots=True)
class Timing:
    """Speeds by runtime, and what went wrong with those that have none."""

    speeds: Mapping[str, Speed]
    failures: Mapping[str, str]

    def to_dict(self) -> dict[str, Any]:
        speeds = {name: _speed_facts(speed) for name, speed in self.speeds.items()}
        return {"speeds": speeds, "failures": dict(self.failures)}

    def lines(self) -> Iterator[str]:
        """For people, the fastest first."""
        for name, speed in sorted(self.speeds.items(), key=lambda pair: pair[1].request_s):
            yield (
                f"{name:5} prompts {speed.prefill_tok_s:.0f}, answers {speed.decode_tok_s:.0f} tokens/s of two layers; "
                f"{PROMPT} and {ANSWER} tokens would take {speed.request_s:.2f} s"
            )
        for name, reason in self.failures.items():
            yield f"{name:5} {reason}"


def _speed_facts(speed: Speed) -> dict[str, float]:
    return {
        "prefill_tok_s": speed.prefill_tok_s,
        "decode_tok_s": speed.decode_tok_s,
        "request_s": round(speed.request_s, 3),
    }


def installed_runtimes() -> dict[str, str | None]:
    """Runtime -> version of its package; None if that is not installed."""
    return {name: installed_version(package) for name, package in PACKAGES.items()}


def runtime_findings(processor: Processor, installed: Mapping[str, str | None]) -> Iterator[Finding]:
    """What this machine would gain from a runtime that it does not have."""
    if processor.computes_bf16 and installed["torch"] is None:
        text = "this processor multiplies bf16 in hardware, which onnxruntime leaves idle and torch does not"
        advice = "`pip install torch` beside edgeqwen, then `edgeqwen doctor --time` compares"
        yield Finding("note", "torch-bf16", text, advice)


def timing_findings(timing: Timing, configured: str) -> Iterator[Finding]:
    """Whether another runtime than the configured one is clearly faster here."""
    timed = timing.speeds
    if not timed:
        return
    best = min(timed, key=lambda name: timed[name].request_s)
    current = timed.get(configured)
    if configured not in {"auto", best} and current and current.request_s > CLEARLY * timed[best].request_s:
        gain = current.request_s / timed[best].request_s
        text = f"{best} is {gain:.1f} times as fast as {configured} here"
        yield Finding("note", "runtime", text, f'engine.runtime = "{best}", or "auto"')


def time_runtimes(spec: ModelSpec, *, quant: str, flags: Sequence[str], torch_flags: Sequence[str]) -> Timing:
    """Time each installed runtime on two layers of `spec`. `flags` say where to compute, `torch_flags` how torch does;
    `quant` is that of the package for onnxruntime.
    """
    speeds: dict[str, Speed] = {}
    failures: dict[str, str] = {}
    with tempfile.TemporaryDirectory(prefix="edgeqwen-timing-") as folder:
        sample, package = Path(folder) / "sample", Path(folder) / "package"
        write_sample(sample, spec)
        for name, version in installed_runtimes().items():
            if version is None:
                continue
            try:
                if name == "onnx":
                    _run("import", str(sample), "--fast", "--quant", quant, "--out", str(package))
                subject = package if name == "onnx" else sample
                more = () if name == "onnx" else torch_flags
                report = json.loads(_run("bench", str(subject), "--runtime", name, *TIMING_FLAGS, *flags, *more))
                speeds[name] = Speed(report["prefill_tok_s"], report["decode_tok_s"])
            except (subprocess.SubprocessError, ValueError, KeyError) as error:
                failures[name] = _reason(error)
    return Timing(speeds, failures)


def keep_timing(path: Path, timing: Timing) -> Finding | None:
    """Keep it for `auto`; what is in the way of that."""
    try:
        write_speeds(path, timing.speeds)
    except OSError as error:
        return Finding(
            "warning", "timing-lost", f"{path}: {error.strerror}: what was timed is not kept", "see --state-dir"
        )
    return None


def _run(*arguments: str) -> bytes:
    command = [sys.executable, "-m", "edgeqwen", *arguments]
    done = subprocess.run(command, capture_output=True, check=True, timeout=GIVE_UP_S, env=dict(os.environ))
    return done.stdout


def _reason(error: Exception) -> str:
    if isinstance(error, subprocess.TimeoutExpired):
        return f"was not done within {GIVE_UP_S:g} s"
    if isinstance(error, subprocess.CalledProcessError):
        lines = error.stderr.decode("utf-8", "replace").strip().splitlines()
        return lines[-1].removeprefix("edgeqwen: ") if lines else f"ended with {error.returncode}"
    return f"gave no report ({error})"
