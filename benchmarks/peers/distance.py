"""How far logits that another program wrote are from those of a package of ours, by the measure of `edgeqwen eval`.

The same token ids, windows, chunks and formulas: what `evaluate` does with two packages is done here with one package,
whose logits are kept in files, and with files of logits.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.peers.environments import run
from edgeqwen import evaluate
from edgeqwen.core.package import MANIFEST, open_package
from edgeqwen.evaluate import CHUNK, WINDOW, Score
from edgeqwen.text import Tokenizer


@dataclass(frozen=True, slots=True)
class Text:
    """A text's ids and the reference's logits for them, both .npy files."""

    name: str
    ids: Path
    logits: Path


def write_reference(package: Path, folder: Path, *, num_threads: int) -> tuple[Text, ...]:
    """Ids and logits of the built-in texts; those that an older package of this place left are written again."""
    folder.mkdir(parents=True, exist_ok=True)
    texts = tuple(
        Text(name, folder / f"{name}-ids.npy", folder / f"{name}-reference.npy") for name in evaluate.BUILT_IN
    )
    tokenizer = Tokenizer.from_file(open_package(package).tokenizer_path)
    contents = evaluate.built_in_texts()
    made_at = (package / MANIFEST).stat().st_mtime
    for text in texts:
        if text.logits.exists() and text.logits.stat().st_mtime >= made_at:
            continue
        np.save(text.ids, np.array(tokenizer.encode(contents[text.name], special=False)))
        _write_logits(package, text, num_threads=num_threads)
    return texts


def _write_logits(package: Path, text: Text, *, num_threads: int) -> None:
    """Window by window: each begins with an empty cache."""
    ids = np.load(text.ids)
    pieces = []
    with tempfile.TemporaryDirectory(dir=text.ids.parent) as name:
        window, out = Path(name) / "ids.npy", Path(name) / "logits.npy"
        for start in range(0, len(ids), WINDOW):
            np.save(window, ids[start : start + WINDOW])
            files = ["--ids", str(window), "--logits", str(out)]
            run([sys.executable, "-m", "edgeqwen", "eval", str(package), *files, "--threads", str(num_threads)])
            pieces.append(np.load(out))
    np.save(text.logits, np.concatenate(pieces))


def scores(texts: Sequence[Text], logits: Mapping[str, Path]) -> dict[str, Score]:
    """By text, and `counted` (English and code together); `logits` are the candidate's files by text."""
    samples = {text.name: _samples(text, logits[text.name]) for text in texts}
    single = {name: evaluate.score(name, [sample]) for name, sample in samples.items()}
    return {**single, "counted": evaluate.score_counted(samples)}


def _samples(text: Text, path: Path) -> evaluate.Samples:
    ids = np.load(text.ids)
    candidate, reference = np.load(path, mmap_mode="r"), np.load(text.logits, mmap_mode="r")
    if candidate.shape != reference.shape:
        raise ValueError(f"{path}: has the shape {candidate.shape}, needs {reference.shape}")
    parts = []
    for start in range(0, len(ids), WINDOW):
        stop = min(start + WINDOW, len(ids))
        for at in range(start, stop, CHUNK):
            rows = slice(at, min(at + CHUNK, stop))
            parts.append(evaluate.compare([candidate[rows], reference[rows]], ids[at + 1 : stop]))
    return evaluate.join(parts)
