"""Decode speed with guesses ahead beside the same without, on tasks that copy and tasks that do not.

    scripts/benchmark speculation --package PACKAGE [--pairs 3] [--streams 1] [--tokens 200] [--threads 0]

One engine answers each task in turns, with and without guesses (the requests say which); a first turn of each is not
counted. Copying tasks are answered greedily, free ones by lot with a fixed seed: both turns of a pair are the same
text, and where they are not (`int4`: the last bits depend on the number of rows) the line says so. Speed is tokens
after the first by the time from the first to the last. A JSON line for each task, the median of its pairs' ratios, and
one for each half of the tasks: the median and the least of the tasks' ratios. Nothing else should run meanwhile.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks._speculation_tasks import TASKS, Task
from edgeqwen.core.package import open_package
from edgeqwen.core.request import Delta, Done, Event, Failed
from edgeqwen.core.step import Runtime
from edgeqwen.engine.generation import GenerationInput
from edgeqwen.engine.inference import Inference
from edgeqwen.engine.settings import EngineLimits, ModelFiles
from edgeqwen.runtime.onnx import OnnxOptions, OnnxRuntime
from edgeqwen.runtime.profile import profile_path
from edgeqwen.text import ChatTemplate, Tokenizer

CONTEXT = 2048


@dataclass(eq=False)
class Answer:
    """A sink: what came, and when it began and ended."""

    text: str = ""
    num_tokens: int = 0
    began_at: float = 0.0
    ended_at: float = 0.0
    over: asyncio.Event = field(default_factory=asyncio.Event)

    def __call__(self, event: Event) -> None:
        match event:
            case Delta():
                self.text += event.text
                self.began_at = self.began_at or time.perf_counter()
            case Done():
                self.num_tokens = event.usage.completion
                self.ended_at = time.perf_counter()
                self.over.set()
            case Failed():
                raise SystemExit(f"a request failed: {event.error}")


@dataclass(frozen=True)
class Turn:
    """All streams of one turn together."""

    text: str
    num_tokens: int
    tok_s: float
    drafted: int
    accepted: int


async def run_turn(engine: Inference, tasks: Sequence[Task], given: argparse.Namespace, *, speculate: bool) -> Turn:
    """Answer the tasks at once."""
    before = engine.stats().speculation
    answers = [Answer() for _ in tasks]
    for task, answer in zip(tasks, answers, strict=True):
        request = GenerationInput(
            messages=({"role": "user", "content": task.prompt},),
            max_tokens=given.tokens,
            temperature=0.0 if task.is_copying else 0.8,
            top_p=0.95,
            seed=3,
            speculate=speculate,
        )
        await engine.submit(request, owner="0", sink=answer)
    await asyncio.gather(*(answer.over.wait() for answer in answers))
    after = engine.stats().speculation
    seconds = max(answer.ended_at for answer in answers) - min(answer.began_at for answer in answers)
    num_tokens = sum(answer.num_tokens - 1 for answer in answers)
    return Turn(
        "\x00".join(answer.text for answer in answers),
        num_tokens,
        num_tokens / max(seconds, 1e-9),
        after["drafted"] - before["drafted"],
        after["accepted"] - before["accepted"],
    )


async def compare(engine: Inference, tasks: Sequence[Task], given: argparse.Namespace) -> dict[str, Any]:
    """One line of the report, for the first of the tasks."""
    pairs = []
    for number in range(1 + given.pairs):
        off = await run_turn(engine, tasks, given, speculate=False)
        on = await run_turn(engine, tasks, given, speculate=True)
        if number:
            pairs.append((off, on))
    return {
        "benchmark": "speculation",
        "task": tasks[0].name,
        "kind": tasks[0].kind,
        "streams": len(tasks),
        "tokens": pairs[0][1].num_tokens,
        "off_tok_s": round(statistics.median(off.tok_s for off, _ in pairs), 1),
        "on_tok_s": round(statistics.median(on.tok_s for _, on in pairs), 1),
        "ratio": round(statistics.median(on.tok_s / off.tok_s for off, on in pairs), 3),
        "drafted": pairs[-1][1].drafted,
        "accepted": pairs[-1][1].accepted,
        "same_text": all(off.text == on.text for off, on in pairs),
    }


def open_engine(path: Path, given: argparse.Namespace) -> Inference:
    """An engine like the daemon's."""
    package = open_package(path)
    files = ModelFiles(
        name=package.manifest.name,
        quant=package.manifest.quant,
        tokenizer=Tokenizer.from_file(package.tokenizer_path),
        template=ChatTemplate(package.read_template() or ""),
        generation_defaults=package.generation_config,
        eos_token_ids=package.eos_token_ids,
    )
    threads = given.threads or len(os.sched_getaffinity(0))

    def load(progress: Callable[[float], None]) -> Runtime:
        with tempfile.TemporaryDirectory(prefix="speculation-") as folder:  # timed anew, as on a machine's first load
            options = OnnxOptions(
                num_slots=given.streams,
                capacity=CONTEXT,
                num_threads=threads,
                profile_path=lambda manifest, kv_type: profile_path(Path(folder), "here", manifest, kv_type),
            )
            return OnnxRuntime.load(package, options, progress)

    return Inference(runtime_factory=load, model=files, limits=EngineLimits(), seed_source=lambda: 1)


async def measure(given: argparse.Namespace) -> None:
    engine = open_engine(given.package, given)
    await engine.start()
    for is_copying in (True, False):
        tasks = [task for task in TASKS if task.is_copying == is_copying and given.task in (None, task.name)]
        ratios = []
        for first in range(len(tasks)):
            together = [tasks[(first + offset) % len(tasks)] for offset in range(given.streams)]
            line = await compare(engine, together, given)
            ratios.append(line["ratio"])
            print(json.dumps(line | {"quant": engine.quant}), flush=True)
        if ratios:
            summary = {"tasks": "copying" if is_copying else "free", "streams": given.streams, "quant": engine.quant}
            found = {"median_ratio": round(statistics.median(ratios), 3), "least_ratio": min(ratios)}
            print(json.dumps({"benchmark": "speculation"} | summary | found), flush=True)
    await engine.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--package", type=Path, required=True, help="a package that import made of a real chat model")
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--streams", type=int, default=1, help="answers at once")
    parser.add_argument("--tokens", type=int, default=200, help="the most of one answer")
    parser.add_argument("--threads", type=int, default=0, help="0: as many as there are processors")
    parser.add_argument("--task", help="this one alone")
    asyncio.run(measure(parser.parse_args()))


if __name__ == "__main__":
    main()
