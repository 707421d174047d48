"""How much each way of storing weights loses, on a real model and by one measure.

The source is the real model rotated off the grid of its own file; the reference our `fp32` package of it. Every
engine gets the same ids in the same windows. Ours go through `edgeqwen eval`; peers write logits, compared here.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.peers.contenders import Contender
from benchmarks.peers.distance import Text, scores, write_reference
from benchmarks.peers.environments import Unavailable, run_json, say
from edgeqwen.evaluate import WINDOW, Score


@dataclass(frozen=True, slots=True)
class Quality:
    """`scores` by text, and `counted`; `setting` is the one of a peer's that lost least."""

    label: str
    setting: str
    num_bytes: int
    scores: dict[str, Score]

    @property
    def kl_mean(self) -> float:
        value = self.scores["counted"].kl_mean
        assert value is not None
        return value


def measure(
    contenders: Sequence[Contender], reference: Path, folder: Path, *, num_threads: int
) -> tuple[dict[str, Quality], dict[str, str]]:
    """By label: the scores, and reasons where there are none."""
    texts = write_reference(reference, folder, num_threads=num_threads)
    found: dict[str, Quality] = {}
    failures: dict[str, str] = {}
    for contender in contenders:
        say(f"quality: {contender.label}")
        try:
            each = [
                Quality(
                    contender.label,
                    setting,
                    size(contender.path),
                    _scores(contender, setting, texts, num_threads)
                    if contender.environment
                    else _own(contender, reference, num_threads),
                )
                for setting in contender.settings
            ]
        except Unavailable as error:
            failures[contender.label] = str(error)
            continue
        found[contender.label] = min(each, key=lambda one: one.kl_mean)
    return found, failures


def _own(contender: Contender, reference: Path, num_threads: int) -> dict[str, Score]:
    options = ["--against", str(reference), "--threads", str(num_threads), "--json", *contender.options]
    report = run_json([sys.executable, "-m", "edgeqwen", "eval", str(contender.path), *options])
    found = [Score(**score) for score in [*report["scores"], report["counted"]]]
    return {score.text: score for score in found}


def _scores(contender: Contender, setting: str, texts: tuple[Text, ...], num_threads: int) -> dict[str, Score]:
    assert contender.environment
    options = [f"--setting={setting}", f"--threads={num_threads}", f"--window={WINDOW}"]
    with tempfile.TemporaryDirectory(dir=texts[0].logits.parent) as name:
        logits = {text.name: Path(name) / f"{text.name}.npy" for text in texts}
        for text in texts:
            files = [f"--ids={text.ids}", f"--out={logits[text.name]}"]
            run_json(contender.environment.command("logits", str(contender.path), *options, *files))
        return scores(texts, logits)


def size(path: Path) -> int:
    """Bytes on disk; of a folder all files, links followed."""
    if path.is_dir():
        return sum(each.stat().st_size for each in path.rglob("*") if each.is_file())
    return path.stat().st_size
