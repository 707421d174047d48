"""Answers that must be values of random schemas, drawn at temperature 1: every one that is finished is one.

    scripts/soak schemas [--schemas 200] [--clients 4] [--max-tokens 400] [--seed 1] [--package PACKAGE]

Several clients ask at once, some for two answers, a part of them streamed. An answer that is cut off must say `length`,
and at least `LEAST_FINISHED` of them must come to an end.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import jsonschema_rs

from tests.random_schemas import SchemaMaker
from tests.soak.command import run_with_models
from tests.soak.service import Model, Service

LEAST_FINISHED: Final = 0.5
QUESTIONS: Final = ("Describe a shop as JSON.", "Answer in JSON.", "Give me some JSON about a person.", "Go.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """How much is asked."""

    num_schemas: int = 200
    num_clients: int = 4
    max_tokens: int = 400
    seed: int = 1


def run(folder: Path, model: Model, size: Size) -> dict[str, Any]:
    """Raises AssertionError if anything is wrong; else what there was to see."""
    counts: Counter[str] = Counter()
    with Service(folder / "schemas", model) as service, ThreadPoolExecutor(size.num_clients) as pool:
        seeds = range(size.seed, size.seed + size.num_schemas)
        for finishes in pool.map(lambda seed: _ask(service, seed, size), seeds):
            counts.update(finishes)
        stats = service.wait_until_idle()
        assert stats["totals"]["errors"] == 0
    assert counts["stop"] >= LEAST_FINISHED * counts.total(), counts
    return {"model": model.name, "schemas": size.num_schemas, **counts}


def _ask(service: Service, seed: int, size: Size) -> list[str]:
    """One schema; returns how its answers ended."""
    rng = random.Random(seed)
    schema = SchemaMaker(seed).make()
    members = {
        "prompt": rng.choice(QUESTIONS),
        "response_format": {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}},
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": 0,
        "seed": seed,
        "n": rng.choice((1, 1, 2)),
        "max_tokens": size.max_tokens,
        "stream": rng.random() < 0.5,
    }
    answers: dict[int, str] = {}

    def on_frame(frame: dict[str, Any]) -> None:
        choice = frame.get("choice", 0)
        answers[choice] = answers.get(choice, "") + frame.get("delta", "")

    with service.line() as line:
        final = line.final(line.send("chat", **members), on_frame)
    assert "error" not in final, (seed, schema, final)
    choices = final.get("choices") or [final]
    for index, choice in enumerate(choices):
        text = answers.get(index, "") if members["stream"] else choice["text"]
        _check(text, choice["finish"], schema, seed)
    return [choice["finish"] for choice in choices]


def _check(text: str, finish: str, schema: dict[str, Any], seed: int) -> None:
    assert finish in ("stop", "length"), (seed, finish)
    if finish == "length":
        return
    validator = jsonschema_rs.Draft202012Validator(schema, validate_formats=True)
    errors = [error.message for error in validator.iter_errors(json.loads(text))]
    assert not errors, (seed, schema, text, errors)


if __name__ == "__main__":
    run_with_models("schemas", __doc__, Size(), run)
