"""Speed of a model on this machine, measured on the runtime itself: no scheduler, no text, no socket.

Prefill: `num_prompt` random tokens into an empty slot, in chunks of the runtime's size. Decode: one token a step for
each of `num_streams` sequences that hold that prompt. Each is the median of `NUM_REPEATS` runs after one that is not
counted.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from edgeqwen.bench.subject import BenchOptions, load_subject
from edgeqwen.core.step import Batch, Chunk, Runtime
from edgeqwen.cpu import Processor, ThreadPlan, clock_mhz, placed
from edgeqwen.metrics import resident_bytes

if TYPE_CHECKING:
    from edgeqwen.text import Tokenizer

NUM_REPEATS: Final = 3
COPIED_BYTES: Final = 64 << 20
TEXT: Final = "It was a bright cold day in April, and 13 clocks struck; nobody had wound them up. " * 100
Clock = Callable[[], float]


@dataclass(frozen=True, slots=True)
class Speeds:
    """Tokens a second; `decode_tok_s` counts all streams together."""

    prefill_tok_s: float
    decode_tok_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchReport:
    """What one run says, as one JSON object. `weights_bytes` are those that a token reads, `memory_bytes_s` what the
    threads of decoding copy in memory, read and written bytes together. `cpus` is empty if threads run wherever the
    process may; `clock_mhz` is that right after the measurement, None where the kernel does not say.
    """

    model: str
    runtime: str
    quant: str
    weight_form: str
    kv: str
    threads: int
    prefill_threads: int
    cpus: str
    prompt: int
    decode: int
    streams: int
    prefill_tok_s: float
    decode_tok_s: float
    tokenize_tok_s: float
    load_s: float
    rss_bytes: int
    weights_bytes: int
    memory_bytes_s: float
    cpu: str
    clock_mhz: int | None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def bench(
    path: Path, options: BenchOptions, *, processor: Processor, threads: ThreadPlan, clock: Clock = time.perf_counter
) -> BenchReport:
    """Load the package (or with torch the checkpoint) at `path` and measure; raises what loading raises."""
    began_at = clock()
    subject = load_subject(path, options, processor=processor, threads=threads)
    load_s = clock() - began_at
    try:
        with placed(threads.decode.calling_cpus):  # as the daemon's engine thread is
            speeds = measure(subject.runtime, options, clock)
        rss_bytes, frequency = resident_bytes(), clock_mhz()
        memory_bytes_s = copying_speed(threads.decode.num_threads, clock)
    finally:
        subject.runtime.close()
    return BenchReport(
        model=subject.name,
        runtime=options.runtime,
        quant=subject.quant,
        weight_form=subject.weight_form,
        kv=subject.kv_type,
        threads=threads.decode.num_threads,
        prefill_threads=threads.prefill.num_threads,
        cpus=threads.to_dict()["cpus"],
        prompt=options.num_prompt,
        decode=options.num_decode,
        streams=options.num_streams,
        prefill_tok_s=round(speeds.prefill_tok_s, 1),
        decode_tok_s=round(speeds.decode_tok_s, 1),
        tokenize_tok_s=round(tokenizing_speed(subject.make_tokenizer(), clock), 1),
        load_s=round(load_s, 3),
        rss_bytes=rss_bytes,
        weights_bytes=subject.weights_bytes,
        memory_bytes_s=round(memory_bytes_s),
        cpu=" ".join(filter(None, [processor.name, processor.machine, *processor.features])),
        clock_mhz=frequency,
    )


def tokenizing_speed(tokenizer: Tokenizer, clock: Clock) -> float:
    """Tokens a second that a text becomes."""
    tokenizer.encode(TEXT, special=False)
    began_at = clock()
    count = len(tokenizer.encode(TEXT, special=False))
    return count / max(1e-9, clock() - began_at)


def copying_speed(num_threads: int, clock: Clock) -> float:
    """Bytes a second, read and written, that so many threads copy of blocks that no cache holds."""
    blocks = [(np.ones(COPIED_BYTES, np.uint8), np.zeros(COPIED_BYTES, np.uint8)) for _ in range(num_threads)]
    best_s = math.inf
    with ThreadPoolExecutor(num_threads) as pool:
        for _ in range(NUM_REPEATS):
            began_at = clock()
            for future in [pool.submit(np.copyto, target, source) for source, target in blocks]:
                future.result()
            best_s = min(best_s, clock() - began_at)
    return 2 * COPIED_BYTES * num_threads / best_s


def measure(runtime: Runtime, options: BenchOptions, clock: Clock) -> Speeds:
    """Prefill and decode speed of a runtime that has room for the streams."""
    drawn = np.random.default_rng(0).integers(0, runtime.spec.num_tokens, options.num_prompt)
    prompt = tuple(drawn.tolist())
    prefill_s: list[float] = []
    decode_s: list[float] = []
    for _ in range(1 + NUM_REPEATS):
        times = [_timed(clock, _prefill, runtime, prompt, slot) for slot in range(options.num_streams)]
        prefill_s.append(statistics.median(times))
        decode_s.append(_timed(clock, _decode, runtime, prompt, options))
        for slot in range(options.num_streams):
            runtime.release(slot)
    num_decoded = options.num_decode * options.num_streams
    return Speeds(options.num_prompt / statistics.median(prefill_s[1:]), num_decoded / statistics.median(decode_s[1:]))


def _timed(clock: Clock, function: Callable[..., None], *arguments: Any) -> float:
    began_at = clock()
    function(*arguments)
    return clock() - began_at


def _prefill(runtime: Runtime, prompt: tuple[int, ...], slot: int) -> None:
    size = runtime.spec.max_chunk
    for start in range(0, len(prompt), size):
        runtime.step(Batch((Chunk(slot, start, prompt[start : start + size]),)))


def _decode(runtime: Runtime, prompt: tuple[int, ...], options: BenchOptions) -> None:
    for position in range(len(prompt), len(prompt) + options.num_decode):
        token = (prompt[position % len(prompt)],)
        runtime.step(Batch(tuple(Chunk(slot, position, token) for slot in range(options.num_streams))))
