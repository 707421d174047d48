"""Decode speed of answers that must be values of a JSON schema, beside that of free ones.

    scripts/benchmark constraints --package PACKAGE [--pairs 5] [--streams 1] [--tokens 200] [--threads 0]

One engine answers in turns, bound and free, by lot at the model's own settings, without guessing ahead. The schema asks
for so many objects that none comes to its end, and free answers go on at an end token, so all have `--tokens` tokens. A
first turn of each is not counted (it compiles the grammar). Speed is tokens after the first by the time from the first
to the last; the ratio is the median of the pairs'. Nothing else should run meanwhile.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
from pathlib import Path
from typing import Any, Final

from benchmarks.speculation import Answer, open_engine
from edgeqwen.engine.generation import GenerationInput
from edgeqwen.engine.inference import Inference

PROMPT: Final = "Describe the people of a small town as JSON, each with name, age, trade, street and a remark."

PERSON: Final[dict[str, Any]] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 40},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "trade": {"enum": ["baker", "smith", "teacher", "farmer", "none"]},
        "street": {"type": "string", "maxLength": 40},
        "remark": {"anyOf": [{"type": "string", "maxLength": 200}, {"type": "null"}]},
    },
    "required": ["name", "age", "trade", "street", "remark"],
    "additionalProperties": False,
}
SCHEMA: Final[dict[str, Any]] = {"type": "array", "items": PERSON, "minItems": 1000}
FORMAT: Final[dict[str, Any]] = {"type": "json_schema", "json_schema": {"name": "people", "schema": SCHEMA}}


async def run_turn(engine: Inference, given: argparse.Namespace, *, is_bound: bool) -> float:
    """Tokens a second of all streams together."""
    answers = [Answer() for _ in range(given.streams)]
    for number, answer in enumerate(answers):
        request = GenerationInput(
            messages=({"role": "user", "content": PROMPT},),
            max_tokens=given.tokens,
            seed=number,
            speculate=False,
            response_format=FORMAT if is_bound else None,
            ignore_eos=not is_bound,
        )
        await engine.submit(request, owner="0", sink=answer)
    await asyncio.gather(*(answer.over.wait() for answer in answers))
    seconds = max(answer.ended_at for answer in answers) - min(answer.began_at for answer in answers)
    return sum(answer.num_tokens - 1 for answer in answers) / seconds


async def measure(given: argparse.Namespace) -> None:
    engine = open_engine(given.package, given)
    await engine.start()
    pairs = []
    for number in range(1 + given.pairs):
        free, bound = [await run_turn(engine, given, is_bound=is_bound) for is_bound in (False, True)]
        if number:
            pairs.append((free, bound))
    found = {
        "benchmark": "constraints",
        "quant": engine.quant,
        "streams": given.streams,
        "tokens": given.tokens,
        "free_tok_s": round(statistics.median(free for free, _ in pairs), 1),
        "bound_tok_s": round(statistics.median(bound for _, bound in pairs), 1),
        "ratio": round(statistics.median(bound / free for free, bound in pairs), 3),
    }
    print(json.dumps(found), flush=True)
    await engine.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--package", type=Path, required=True, help="a package that import made of a real chat model")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--streams", type=int, default=1, help="answers at once")
    parser.add_argument("--tokens", type=int, default=200, help="of each answer")
    parser.add_argument("--threads", type=int, default=0, help="0: as many as there are processors")
    asyncio.run(measure(parser.parse_args()))


if __name__ == "__main__":
    main()
