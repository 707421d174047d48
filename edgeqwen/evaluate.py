"""Quality as a number: how far a package's predictions are from another's over the same text.

For each position of a text both packages give a distribution over the next token. Reported are the Kullback-Leibler
divergence D(reference || candidate) in nats (mean and 99th percentile), how often the likeliest token is the same, both
perplexities, and the *gap*: the largest difference between the reference's two best logits at which the candidate still
preferred another token; above it, greedy output of the two is the same on this text.

Texts are taken in windows of `WINDOW` tokens, each from an empty cache. Logits are compared chunk by chunk, so a
large vocabulary costs no memory. The built-in texts are of this project's own writing: English and code count towards
the bars, Chinese is reported beside them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import resources
from pathlib import Path
from typing import Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from edgeqwen.core.model import KVType, Stage
from edgeqwen.core.package import Package, open_package
from edgeqwen.core.step import Batch, Chunk, Runtime
from edgeqwen.errors import BadRequest, CannotWrite, ModelInvalid, ModelMissing
from edgeqwen.runtime.onnx import OnnxOptions
from edgeqwen.runtime.packages import load_package
from edgeqwen.text import Tokenizer

WINDOW: Final = 1024
CHUNK: Final = 32  # rows with logits in one step: each takes memory in the size of the fine head's rows
BUILT_IN: Final = ("english", "code", "chinese")
Doubles = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Score:
    """One text's figures; those that need a reference are None without one. Divergences in nats, gap in logits."""

    text: str
    tokens: int
    perplexity: float
    reference_perplexity: float | None = None
    kl_mean: float | None = None
    kl_p99: float | None = None
    top1_agreement: float | None = None
    gap: float | None = None


@dataclass(frozen=True, slots=True)
class EvalReport:
    """Scores for each text; `counted` pools English and code (or all of a text given)."""

    package: str
    quant: str
    against: str | None
    scores: tuple[Score, ...]
    counted: Score

    def to_json(self) -> str:
        """One line of JSON."""
        return msgspec.json.encode(asdict(self)).decode()

    def to_text(self) -> str:
        """A small table for people; without a reference only what needs none."""
        title = f"{self.package} ({self.quant})" + (f" against {self.against}" if self.against else "")
        header = f"{'text':<10}{'tokens':>8}{'ppl':>9}"
        if self.against:
            header += f"{'ref ppl':>9}{'KL mean':>9}{'KL p99':>9}{'top-1':>8}{'gap':>8}"
        rows = self.scores if len(self.scores) == 1 else (*self.scores, self.counted)
        return "\n".join([title, header, *(_row(score) for score in rows)])


@dataclass(frozen=True, slots=True)
class Samples:
    """Per-position figures of one text, joined at the end (`kl`, `agrees`, `gaps` are empty without a reference)."""

    losses: Doubles
    reference_losses: Doubles
    kl: Doubles
    agrees: NDArray[np.bool_]
    gaps: Doubles


def evaluate(
    path: Path,
    *,
    text_path: Path | None = None,
    against: Path | None = None,
    num_threads: int = 1,
    kv_type: KVType | None = None,
    stage: Stage = "decode",
    progress: Callable[[float], None] = lambda _: None,
) -> EvalReport:
    """Score the package at `path` on a text (default: the built-in ones), against another package if given.

    `kv_type` None is the package's own; the other package has a float32 cache. `stage` is the graph that is measured,
    in packages with one for answers (`decode`) and one for prompts. `progress` is called with the share done, 0 to 1.
    """
    package = open_package(path)
    reference = open_package(against) if against else None
    if reference and reference.manifest.spec.vocab_size != package.manifest.spec.vocab_size:
        raise ModelInvalid(f"{against}: its vocabulary differs from that of {path}; compare packages of one model")
    tokenizer = Tokenizer.from_file(package.tokenizer_path)
    texts = {text_path.name: _read_text(text_path)} if text_path else built_in_texts()
    ids = {name: tokenizer.encode(text, special=False) for name, text in texts.items()}
    if text_path and len(ids[text_path.name]) < 2:
        raise BadRequest(f"{text_path}: the text is too short, it needs at least two tokens", field="text")
    runtimes = [_load(package, num_threads, kv_type=kv_type, stage=stage)]
    if reference:
        runtimes.append(_load(reference, num_threads, kv_type=_exact_kv_type(reference)))
    try:
        samples = _measure_all(runtimes, ids, progress)
    finally:
        for runtime in runtimes:
            runtime.close()
    scores = tuple(score(name, [sample]) for name, sample in samples.items())
    counted = score_counted(samples)
    return EvalReport(package.manifest.name, package.manifest.quant, str(against) if against else None, scores, counted)


def write_logits(path: Path, *, ids_path: Path, out: Path, num_threads: int = 1) -> int:
    """Write float32 logits `[tokens, vocabulary]` of the ids in a .npy file (one dimension); returns the token
    count.
    """
    package = open_package(path)
    spec = package.manifest.spec
    ids = _read_ids(ids_path, spec.vocab_size)
    if len(ids) > spec.max_position:
        message = f"{ids_path}: {len(ids)} ids are more than the model's {spec.max_position} positions"
        raise BadRequest(message, field="ids")
    header = {"descr": "<f4", "fortran_order": False, "shape": (len(ids), spec.vocab_size)}
    runtime = _load(package, num_threads, capacity=len(ids))
    try:
        # Written, not mapped: on a full disk a write is an error, a page of a mapped file is SIGBUS.
        with out.open("wb") as file:
            np.lib.format.write_array_header_1_0(file, header)
            for _, logits in _chunks(runtime, ids):
                file.write(np.ascontiguousarray(logits, dtype="<f4").data)
    except OSError as error:
        raise CannotWrite(f"{out}: cannot write the logits: {error.strerror or error}") from error
    finally:
        runtime.close()
    return len(ids)


def built_in_texts() -> dict[str, str]:
    """The texts that the package carries, by name."""
    folder = resources.files("edgeqwen.data") / "evaluation"
    return {name: (folder / f"{name}.txt").read_text(encoding="utf-8") for name in BUILT_IN}


def _load(
    package: Package,
    num_threads: int,
    *,
    capacity: int = WINDOW,
    kv_type: KVType | None = None,
    stage: Stage = "decode",
) -> Runtime:
    capacity = min(capacity, package.manifest.spec.max_position)
    options = OnnxOptions(
        num_slots=1,
        capacity=capacity,
        num_threads=num_threads,
        kv_type=kv_type,
        is_single=stage == "decode",
        prefill_rows=1,
    )
    return load_package(package, options)


def _exact_kv_type(package: Package) -> KVType:
    """The most exact cache that a package has."""
    kv_types = package.manifest.kv_types
    return "fp32" if "fp32" in kv_types else kv_types[0]


def _chunks(runtime: Runtime, ids: Sequence[int]) -> Iterator[tuple[int, NDArray[np.float32]]]:
    """(start, logits) for consecutive chunks of one sequence, from an empty slot on."""
    for start in range(0, len(ids), CHUNK):
        piece = tuple(ids[start : start + CHUNK])
        yield start, runtime.step(Batch((Chunk(0, start, piece, len(piece)),))).logits[0]
    runtime.release(0)


def _measure_all(
    runtimes: Sequence[Runtime], texts: Mapping[str, Sequence[int]], progress: Callable[[float], None]
) -> dict[str, Samples]:
    total = sum(len(ids) for ids in texts.values())
    done = 0

    def advance(num_tokens: int) -> None:
        nonlocal done
        done += num_tokens
        progress(done / total)

    return {name: _measure(runtimes, ids, advance) for name, ids in texts.items()}


def _measure(runtimes: Sequence[Runtime], ids: Sequence[int], advance: Callable[[int], None]) -> Samples:
    """Figures of one text of at least two tokens; `advance` is told how many more are done."""
    window = min(WINDOW, runtimes[0].spec.capacity)
    parts: list[Samples] = []
    for start in range(0, len(ids), window):
        piece = ids[start : start + window]
        streams = zip(*(_chunks(runtime, piece) for runtime in runtimes), strict=True)
        for pairs in streams:
            offset = pairs[0][0]
            parts.append(compare([logits for _, logits in pairs], np.asarray(piece[offset + 1 :])))
            advance(len(pairs[0][1]))
    return join(parts)


def compare(logits: Sequence[NDArray[np.float32]], following: NDArray[np.int64]) -> Samples:
    """Figures of one chunk; `logits[0]` is the candidate's, `[1]` the reference's; `following` the true next tokens."""
    candidate = _log_softmax(logits[0])
    known = min(len(candidate), len(following))
    rows = np.arange(known)
    losses = -candidate[rows, following[:known]]
    if len(logits) == 1:
        empty = np.empty(0)
        return Samples(losses, empty, empty, np.empty(0, bool), empty)
    reference = _log_softmax(logits[1])
    kl = (np.exp(reference) * (reference - candidate)).sum(axis=1)
    agrees = candidate.argmax(axis=1) == reference.argmax(axis=1)
    best = np.partition(reference, -2, axis=1)[:, -2:]
    return Samples(losses, -reference[rows, following[:known]], kl, agrees, (best[:, 1] - best[:, 0])[~agrees])


def _log_softmax(logits: NDArray[np.float32]) -> Doubles:
    shifted = logits.astype(np.float64) - logits.max(axis=1, keepdims=True)
    return np.asarray(shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True)))


def join(parts: Sequence[Samples]) -> Samples:
    return Samples(*(np.concatenate([getattr(part, name) for part in parts]) for name in Samples.__dataclass_fields__))


def score(name: str, samples: Sequence[Samples]) -> Score:
    joined = join(samples)
    perplexity = float(np.exp(joined.losses.mean()))
    tokens = len(joined.losses) + len(samples)
    if not len(joined.kl):
        return Score(name, tokens, perplexity)
    return Score(
        text=name,
        tokens=tokens,
        perplexity=perplexity,
        reference_perplexity=float(np.exp(joined.reference_losses.mean())),
        kl_mean=float(joined.kl.mean()),
        kl_p99=float(np.quantile(joined.kl, 0.99)),
        top1_agreement=float(joined.agrees.mean()),
        gap=float(joined.gaps.max(initial=0.0)),
    )


def score_counted(samples: Mapping[str, Samples]) -> Score:
    """The texts that count, together: all but the Chinese one, which is reported beside them."""
    return score("counted", [sample for name, sample in samples.items() if name != "chinese"])


def _row(score: Score) -> str:
    own = f"{score.text:<10}{score.tokens:>8}{score.perplexity:>9.2f}"
    if score.reference_perplexity is None:
        return own
    return (
        f"{own}{score.reference_perplexity:>9.2f}{score.kl_mean:>9.4f}{score.kl_p99:>9.3f}"
        f"{score.top1_agreement:>8.3f}{score.gap:>8.2f}"
    )


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ModelMissing(f"{path}: cannot read the text: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise BadRequest(f"{path}: the text is not UTF-8", field="text") from error


def _read_ids(path: Path, vocab_size: int) -> list[int]:
    try:
        array = np.load(path, allow_pickle=False)
    except OSError as error:
        raise ModelMissing(f"{path}: cannot read the ids: {error.strerror or error}") from error
    except ValueError as error:
        raise BadRequest(f"{path}: not a .npy file of numbers", field="ids") from error
    if array.ndim != 1 or array.dtype.kind not in "iu" or not len(array):
        raise BadRequest(f"{path}: needs one dimension of integers, has {array.dtype} {array.shape}", field="ids")
    if array.min() < 0 or array.max() >= vocab_size:
        raise BadRequest(f"{path}: ids must lie in 0 to {vocab_size - 1}", field="ids")
    return [int(token) for token in array]
