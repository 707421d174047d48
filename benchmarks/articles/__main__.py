"""Ten everyday questions and three code tasks to a small real model: plain transformers beside edgeqwen's daemon.

    scripts/benchmark articles [--quants int8] [--threads 2] [--shape smollm2]

Each question is put to both sides in turns, with the same template and as many new tokens on either side, greedily.
Total is the sum over all questions, from sending the question to the end of its answer. Then three of them at once:
time one after another over time together, ours alone. `--shape standin` takes random weights in Qwen3-0.6B's shape
instead, whose answers are noise.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks import _smollm2
from benchmarks._processes import Daemon, running_daemon
from benchmarks.articles.questions import QUESTIONS, TOGETHER, Question
from benchmarks.peers import models
from benchmarks.peers.catalogue import peer_named
from benchmarks.peers.environments import CHECKOUT, Unavailable, prepare, say
from benchmarks.peers.models import Model

Answer = dict[str, Any]
Ask = Callable[[Question], Answer]


def ask_daemon(daemon: Daemon, question: Question) -> Answer:
    """One question over the socket, streamed: seconds until the first text and until the end."""
    first_s, text = 0.0, ""
    with daemon.client() as client:
        began = time.perf_counter()
        for frame in client.stream(
            "chat", prompt=question.text, max_tokens=question.num_tokens, temperature=0, ignore_eos=True, stream=True
        ):
            text += frame.get("delta", "")
            if text and not first_s:
                first_s = time.perf_counter() - began
        total_s = time.perf_counter() - began
    usage = frame["usage"]
    counts = {"num_prompt": usage["prompt"], "num_tokens": usage["completion"]}
    return {"total_s": total_s, "first_s": first_s, **counts, "text": text}


@contextlib.contextmanager
def transformers(python: Path, folder: Path, num_threads: int) -> Iterator[Ask]:
    """The peer as a process that answers line by line."""
    command = [str(python), "-m", "benchmarks.articles.generate", str(folder), f"--threads={num_threads}"]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, text=True, cwd=CHECKOUT) as run:

        def next_line() -> Answer:
            line = run.stdout.readline() if run.stdout else ""
            if not line:
                raise Unavailable(f"transformers ended with exit code {run.wait()}")
            answer: Answer = json.loads(line)
            return answer

        def ask(question: Question) -> Answer:
            assert run.stdin
            run.stdin.write(json.dumps({"text": question.text, "num_tokens": question.num_tokens}) + "\n")
            run.stdin.flush()
            return next_line()

        try:
            next_line()
            yield ask
        finally:
            run.kill()


def compare(questions: Sequence[Question], ours: Ask, theirs: Ask | None) -> list[dict[str, Any]]:
    """One row a question, both sides one after the other."""
    rows = []
    for question in questions:
        own = ours(question)
        row: dict[str, Any] = {"question": question.name, "ours": own}
        if theirs:
            row["theirs"] = theirs(question)
            row["ratio"] = row["theirs"]["total_s"] / own["total_s"]
        rows.append(row)
        say(f"{question.name}: {own['total_s']:.2f} s" + (f", ratio {row['ratio']:.2f}" if theirs else ""))
    return rows


def together(daemon: Daemon, questions: Sequence[Question], rounds: int) -> float:
    """Median over rounds of the time one after another over the time at once."""
    ratios = []
    with ThreadPoolExecutor(len(questions)) as pool:
        for _ in range(rounds):
            began = time.perf_counter()
            for question in questions:
                ask_daemon(daemon, question)
            middle = time.perf_counter()
            list(pool.map(lambda question: ask_daemon(daemon, question), questions))
            ratios.append((middle - began) / (time.perf_counter() - middle))
    return statistics.median(ratios)


def summary(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Totals over all questions."""
    sides = [side for side in ("ours", "theirs") if side in rows[0]]
    report: dict[str, Any] = {}
    for side in sides:
        answers = [row[side] for row in rows]
        total, tokens = (sum(each[key] for each in answers) for key in ("total_s", "num_tokens"))
        report[side] = {
            "total_s": round(total, 2),
            "tok_s": round(tokens / total, 1),
            "first_s_median": round(statistics.median(each["first_s"] for each in answers), 3),
            "first_s_worst": round(max(each["first_s"] for each in answers), 3),
            "prompt_tokens": sum(each["num_prompt"] for each in answers),
            "tokens": tokens,
        }
    if "theirs" in report:
        report["total_ratio"] = round(report["theirs"]["total_s"] / report["ours"]["total_s"], 2)
    return report


def the_model(shape: str, cache: Path, source: Path | None) -> Model:
    """The model as a folder of the hub, made if it is not there."""
    if shape == "standin":
        return models.standin(cache)
    folder = cache / "smollm2"
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "plain" / "tokenizer_config.json").exists():
        _smollm2.make_plain(source or _smollm2.find_source(folder), folder / "plain")
    return Model(folder / "plain", folder / "plain.gguf")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quants", type=lambda text: text.split(","), default=["int8"], help="default: int8")
    parser.add_argument("--shape", choices=["smollm2", "standin"], default="smollm2")
    parser.add_argument("--threads", type=int, default=2, help="for both sides; default: 2")
    parser.add_argument("--rounds", type=int, default=3, help="of three at once; default: 3")
    parser.add_argument("--questions", type=int, default=len(QUESTIONS), help="only the first N")
    parser.add_argument("--cache", type=Path, default=CHECKOUT / ".cache" / "peers")
    parser.add_argument("--python", type=Path, help="an interpreter that has transformers; default: one of its own")
    parser.add_argument("--source", type=Path, help="the real model's GGUF file; default: a small package's")
    parser.add_argument("--answers", action="store_true", help="print the answers too")
    given = parser.parse_args()
    given.cache = given.cache.absolute()
    model = the_model(given.shape, given.cache, given.source)
    for quant in given.quants:
        print(json.dumps(measure(given, model, quant)), flush=True)


def measure(given: argparse.Namespace, model: Model, quant: str) -> dict[str, Any]:
    """Everything about one package of ours."""
    report: dict[str, Any] = {"benchmark": "articles", "shape": given.shape, "quant": quant, "threads": given.threads}
    package = models.package(model, quant)
    with contextlib.ExitStack() as stack:
        theirs = None
        try:
            python = prepare(peer_named("transformers"), given.cache, given.python).python
            theirs = stack.enter_context(transformers(python, model.folder, given.threads))
        except Unavailable as error:
            report["unavailable"] = f"transformers: {error}"
        threads = ("--threads", str(given.threads))
        daemon = stack.enter_context(running_daemon(package, given.cache / "state", *threads))
        rows = compare(QUESTIONS[: given.questions], lambda question: ask_daemon(daemon, question), theirs)
        report |= summary(rows)
        report["three_at_once_ratio"] = round(together(daemon, _together(), given.rounds), 2)
    if given.answers:
        report["answers"] = rows
    return report


def _together() -> list[Question]:
    return [question for question in QUESTIONS if question.name in TOGETHER]


if __name__ == "__main__":
    main()
