"""Speed at every number of threads from one to twice the cores, and whether the default is near the best.

    scripts/benchmark threads [--quants int8,int4,hybrid] [--rounds 3] [--package FOLDER]

Each round measures the default (no `--threads`) and then every number, each in a process of its own; figures are
medians of the rounds. The default is good if it reaches 0.9 of the best, for prompts and for decoding. One JSON line
for each package; `--markdown` prints tables as well. Without `--package` the model is a stand-in in Qwen3-0.6B's shape.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.peers import models
from benchmarks.peers.environments import CHECKOUT, Unavailable, run_json, say
from benchmarks.peers.report import as_markdown, machine

METRICS = ("prefill_tok_s", "decode_tok_s")
GOOD = 0.9
DEFAULT = 0
"""Stands for: no number given."""


def sweep(package: Path, *, rounds: int, most: int, options: list[str]) -> dict[int, list[dict[str, Any]]]:
    """Reports of `edgeqwen bench` by number of threads."""
    found: dict[int, list[dict[str, Any]]] = defaultdict(list)
    command = [sys.executable, "-m", "edgeqwen", "bench", str(package), "--json", *options]
    for number in range(rounds):
        for threads in range(DEFAULT, most + 1):
            say(f"{package.name}: round {number + 1} of {rounds}, {threads or 'default'} threads")
            given = [f"--threads={threads}"] if threads else []
            found[threads].append(run_json([*command, *given]))
    return found


def verdict(found: dict[int, list[dict[str, Any]]]) -> dict[str, Any]:
    """Medians by number of threads, and the default's share of the best.

    The default and the number that it comes to are the same configuration, so their runs are one sample.
    """
    first = found[DEFAULT][0]
    numbers = {"prefill_tok_s": first.get("prefill_threads", first["threads"]), "decode_tok_s": first["threads"]}
    speeds: dict[str, dict[int, float]] = {}
    for metric in METRICS:
        same = found[DEFAULT] + found.get(numbers[metric], [])
        pooled = {**found, DEFAULT: same, numbers[metric]: same}
        speeds[metric] = {threads: statistics.median(each[metric] for each in runs) for threads, runs in pooled.items()}
    shares = {metric: values[DEFAULT] / max(values.values()) for metric, values in speeds.items()}
    return {
        "default_threads": {"prefill": numbers["prefill_tok_s"], "decode": numbers["decode_tok_s"]},
        **{
            metric: {str(threads or "default"): value for threads, value in speeds[metric].items()}
            for metric in METRICS
        },
        "default_share_of_best": {metric: round(share, 3) for metric, share in shares.items()},
        "is_default_good": all(share >= GOOD for share in shares.values()),
    }


def table(report: dict[str, Any]) -> list[list[str]]:
    """One row for each number of threads."""
    rows = [
        [threads, f"{report['prefill_tok_s'][threads]:.1f}", f"{report['decode_tok_s'][threads]:.1f}"]
        for threads in report["prefill_tok_s"]
    ]
    return [["threads", "prefill, tok/s", "decode, tok/s"], *rows]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quants", type=lambda text: text.split(","), default=["int8", "int4", "hybrid"])
    parser.add_argument("--package", type=Path, help="a package, instead of the stand-in's")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--most", type=int, default=2 * len(os.sched_getaffinity(0)), help="default: twice the cores")
    parser.add_argument("--prompt", type=int, default=256)
    parser.add_argument("--decode", type=int, default=64)
    parser.add_argument("--cache", type=Path, default=CHECKOUT / ".cache" / "peers")
    parser.add_argument("--markdown", action="store_true")
    given = parser.parse_args()
    given.cache.mkdir(parents=True, exist_ok=True)
    print(json.dumps({"benchmark": "threads", **machine()}), flush=True)
    for name, make in packages(given).items():
        try:
            report = measure(make(), given)
        except Unavailable as error:
            report = {"unavailable": str(error)}
        print(json.dumps({"benchmark": "threads", "package": name, **report}), flush=True)
        if given.markdown and "unavailable" not in report:
            print(as_markdown(table(report)), flush=True)


def packages(given: argparse.Namespace) -> dict[str, Callable[[], Path]]:
    """What is measured, by name: the package given, or one of the stand-in for each quant."""
    if given.package:
        return {given.package.name: lambda: given.package}
    model = models.standin(given.cache.absolute())
    return {quant: partial(models.package, model, quant) for quant in given.quants}


def measure(package: Path, given: argparse.Namespace) -> dict[str, Any]:
    options = [f"--prompt={given.prompt}", f"--decode={given.decode}"]
    return verdict(sweep(package, rounds=given.rounds, most=given.most, options=options))


if __name__ == "__main__":
    main()
