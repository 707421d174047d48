"""The runtimes side by side: one model's shape, the same threads, the same run.

    scripts/benchmark backends [--rounds 2] [--ipex PYTHON] [--layers 28] [--only WORD]... [--markdown]

The model is a stand-in in Qwen3-0.6B's shape. onnxruntime on packages, torch in its forms, IPEX if an interpreter that
has it is given (`scripts/extras/ipex` makes `.venv-ipex`), the graph that optimum exports on our adapter and on
ORTModelForCausalLM, and transformers. Each round runs every row, each in a process of its own: prompts of 128 and 1,024
tokens with 32 tokens after each. Figures are medians of the rounds. `peak` is the most memory of the run of 1,024;
`start` is a whole run of one token, from the start of the process to its end.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.peers import models
from benchmarks.peers.catalogue import peer_named
from benchmarks.peers.environments import CHECKOUT, Environment, Unavailable, last_words, prepare, say
from benchmarks.peers.report import as_markdown, machine

PROMPTS = (128, 1024)
NUM_DECODE = 32
BASE = "transformers bf16"


@dataclass(frozen=True, slots=True)
class Row:
    """A command that prints a JSON line of speeds as its last, once `--prompt N --decode N` are added."""

    label: str
    command: Sequence[str]


@dataclass(frozen=True, slots=True)
class Run:
    """`report` is what the program said."""

    report: dict[str, Any]
    wall_s: float
    peak_bytes: int


def run(row: Row, prompt: int, decode: int) -> Run:
    """Run a row to its end; raises `Unavailable` with its last words."""
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        began = time.perf_counter()
        command = [*row.command, "--prompt", str(prompt), "--decode", str(decode)]
        process = subprocess.Popen(command, stdout=out, stderr=err, stdin=subprocess.DEVNULL, cwd=CHECKOUT)
        _, status, usage = os.wait4(process.pid, 0)
        wall_s = time.perf_counter() - began
        process.returncode = os.waitstatus_to_exitcode(status)
        out.seek(0)
        err.seek(0)
        lines = out.read().decode("utf-8", "replace").splitlines()
        if process.returncode or not lines:
            raise Unavailable(f"{row.label}: {last_words(err.read().decode('utf-8', 'replace'))}")
    return Run(json.loads(lines[-1]), wall_s, usage.ru_maxrss << 10)


def own(label: str, path: Path, *flags: str, python: Path | str = sys.executable) -> Row:
    """`edgeqwen bench`, by default with this interpreter."""
    return Row(label, [str(python), "-m", "edgeqwen", "bench", str(path), "--json", *flags])


def rows(given: argparse.Namespace) -> Iterator[Row]:
    """All that can be had; what cannot is said."""
    model = models.standin(given.cache, given.layers)
    for quant in ("int8", "hybrid"):
        yield own(f"onnx {quant}", models.package(model, quant))
    for mode in ("eager", "compile"):
        for weights in ("bf16", "int8"):
            chosen = ("--torch-mode", mode, "--torch-weights", weights)
            yield own(f"torch {mode} {weights}", model.folder, "--runtime", "torch", *chosen)
    yield own("torch eager woq8", model.folder, "--runtime", "torch", "--torch-weights", "woq8")
    if given.ipex:
        for weights in ("bf16", "int8"):
            kind = ("--torch-weights", weights)
            yield own(f"ipex {weights}", model.folder, "--runtime", "ipex", *kind, python=given.ipex)
    yield from _optimum_rows(model, given)
    transformers = _environment("transformers", given)
    if transformers is not None:
        yield Row(BASE, transformers.command("bench", str(model.folder), "--setting", "bf16"))


def _optimum_rows(model: models.Model, given: argparse.Namespace) -> Iterator[Row]:
    environment = _environment("optimum", given)
    if environment is None:
        return
    form = next(form for form in environment.peer.forms if form.name == "fp32")
    try:
        folder = models.form(model, environment, form)
    except Unavailable as error:
        say(f"optimum: {error}")
        return
    yield own("optimum's graph fp32, our adapter", _imported(folder))
    yield Row("optimum's graph fp32, ORTModelForCausalLM", environment.command("bench", str(folder)))


def _imported(folder: Path) -> Path:
    """The package of an exported graph, made once."""
    out = folder.with_name(f"{folder.name}-imported")
    if not out.exists():
        command = [sys.executable, "-m", "edgeqwen", "import", str(folder), "--out", str(out)]
        subprocess.run(command, check=True, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, cwd=CHECKOUT)
    return out


def _environment(name: str, given: argparse.Namespace) -> Environment | None:
    try:
        return prepare(peer_named(name), given.cache, getattr(given, name))
    except Unavailable as error:
        say(f"{name}: {error}")
        return None


def measure(found: Sequence[Row], rounds: int) -> dict[str, dict[str, float]]:
    """Medians by row; a row that fails is left out, and said."""
    runs: dict[str, list[dict[str, float]]] = {}
    lost: set[str] = set()
    for number in range(rounds):
        for row in found:
            if row.label in lost:
                continue
            say(f"round {number + 1} of {rounds}: {row.label}")
            try:
                runs.setdefault(row.label, []).append(_figures(row))
            except Unavailable as error:
                say(str(error))
                lost.add(row.label)
    return {
        label: {key: statistics.median(each[key] for each in several) for key in several[0]}
        for label, several in runs.items()
        if label not in lost
    }


def _figures(row: Row) -> dict[str, float]:
    start = run(row, 1, 1)
    figures = {"start_s": start.wall_s}
    for prompt in PROMPTS:
        done = run(row, prompt, NUM_DECODE)
        figures |= {f"prefill_{prompt}": done.report["prefill_tok_s"], f"decode_{prompt}": done.report["decode_tok_s"]}
        figures |= {"peak_mb": done.peak_bytes / 1e6, "load_s": done.report["load_s"]}
    return figures


def table(figures: dict[str, dict[str, float]]) -> list[list[str]]:
    """Figures, and in brackets how many times those of transformers they are."""
    base = figures.get(BASE)
    head = ["", "prefill 128", "prefill 1,024", "decode at 128", "decode at 1,024", "peak MB", "load s", "start s"]
    lines = [head]
    for label, each in figures.items():
        cells = [label]
        for key in ("prefill_128", "prefill_1024", "decode_128", "decode_1024"):
            cells.append(f"{each[key]:.0f}" if key.startswith("prefill") else f"{each[key]:.1f}")
            if base:
                cells[-1] += f" ({each[key] / base[key]:.1f})"
        lines.append([*cells, f"{each['peak_mb']:.0f}", f"{each['load_s']:.1f}", f"{each['start_s']:.1f}"])
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--cache", type=Path, default=CHECKOUT / ".cache" / "peers")
    for name in ("ipex", "optimum", "transformers"):
        parser.add_argument(f"--{name}", type=Path, metavar="PYTHON", help="An interpreter that has it.")
    parser.add_argument("--only", action="append", default=[], metavar="WORD", help="Rows whose label has it.")
    parser.add_argument("--markdown", action="store_true")
    given = parser.parse_args()
    found = [row for row in rows(given) if not given.only or any(word in row.label for word in given.only)]
    figures = measure(found, given.rounds)
    print(json.dumps({"machine": machine(), "rounds": given.rounds, "figures": figures}))
    if given.markdown:
        print(as_markdown(table(figures)))


if __name__ == "__main__":
    main()
