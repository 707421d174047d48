"""Three prompts together against one after another: how much faster a batch is.

    scripts/benchmark batch [--package PACKAGE] [--kv fp32|int8] [--prompts 3] [--max-tokens 64] [--rounds 5]

A daemon serves the package (default: SmolLM2-135M-Instruct in int8). In each round the prompts are asked one after
another, each when the one before has its answer, and then together as one `batch`; every answer has all its tokens and
nothing is taken from a cache. One JSON line: medians of the rounds, and of the ratios within them.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks._processes import running_daemon
from benchmarks.conversations.packages import smollm2
from edgeqwen.client import Client

TOPICS = ("the sea", "a mountain", "an old clock", "the first train", "a garden", "rain", "a lighthouse", "bread")


def items(num_prompts: int, number: int, max_tokens: int) -> list[dict[str, Any]]:
    """Prompts that no round before has had. Nothing is guessed ahead, or some would take fewer steps than others."""
    common = {
        "max_tokens": max_tokens,
        "ignore_eos": True,
        "cache": False,
        "speculate": False,
        "temperature": 0,
    }
    topics = [TOPICS[index % len(TOPICS)] for index in range(num_prompts)]
    return [{"prompt": f"Story {number}: write at length about {topic}.", **common} for topic in topics]


def in_turn(client: Client, prompts: list[dict[str, Any]]) -> float:
    """Seconds for all of them, one after another."""
    began = time.perf_counter()
    for members in prompts:
        _check(client.request("chat", **members), members)
    return time.perf_counter() - began


def together(client: Client, prompts: list[dict[str, Any]]) -> float:
    """Seconds for all of them at once."""
    began = time.perf_counter()
    results = list(client.batch(prompts))
    took_s = time.perf_counter() - began
    assert len(results) == len(prompts)
    for result in results:
        assert result.error is None, result.error
        _check(result.frame, prompts[result.number])
    return took_s


def _check(frame: Any, members: dict[str, Any]) -> None:
    assert frame["usage"]["completion"] == members["max_tokens"], frame
    assert frame["usage"]["cached"] == 0, frame


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--package", type=Path, help="default: SmolLM2-135M-Instruct in int8")
    parser.add_argument("--kv", choices=("fp32", "int8"), help="default: what the daemon chooses")
    parser.add_argument("--prompts", type=int, default=3)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    package = given.package or smollm2()
    rounds: list[tuple[float, float]] = []
    with (
        tempfile.TemporaryDirectory(prefix="bench-batch-") as state,
        running_daemon(package, Path(state), *(["--kv", given.kv] if given.kv else [])) as daemon,
        daemon.client() as client,
    ):
        for number in range(given.rounds + 1):
            turn_s = in_turn(client, items(given.prompts, 2 * number, given.max_tokens))
            at_once_s = together(client, items(given.prompts, 2 * number + 1, given.max_tokens))
            if number:  # the first warms up
                rounds.append((turn_s, at_once_s))
    report = {
        "benchmark": "batch",
        "package": package.name,
        "kv": given.kv or "auto",
        "prompts": given.prompts,
        "max_tokens": given.max_tokens,
        "in_turn_s": round(statistics.median(turn_s for turn_s, _ in rounds), 3),
        "together_s": round(statistics.median(at_once_s for _, at_once_s in rounds), 3),
        "times_as_fast": round(statistics.median(turn_s / at_once_s for turn_s, at_once_s in rounds), 2),
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main()
