"""A graph that optimum has exported (decoder with past) as a runtime: the operators that it has, behind our slots.

What follows from such a graph (`exported_graph`):

* It copies the whole cache of a sequence in each of its steps, and computes logits for every row of a chunk. If it
  gives those of the last row only, a chunk of which more are wanted runs token by token from there on.
* Sequences are computed together as one padded batch, the padding masked. Whether the graph computes a padded batch
  rightly is tried at load. One that does not gets one sequence at a time; so does one that rounds the activations of
  all rows by one scale, with which a sequence's answer would depend on its company.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from edgeqwen.core.kernel import KERNEL_CHECK
from edgeqwen.core.model import KVType, Manifest, Quant
from edgeqwen.core.package import GRAPH, WEIGHTS, Package
from edgeqwen.core.step import Batch, Chunk, KVData, Logits, RuntimeSpec, StepResult
from edgeqwen.cpu import forget_pages, keep_large_blocks_apart, trim_heap
from edgeqwen.errors import ConfigInvalid, ModelInvalid, RuntimeFailed
from edgeqwen.runtime.batches import check_ids
from edgeqwen.runtime.dense_cache import DenseCache, Padded
from edgeqwen.runtime.exported_graph import ExportedGraph
from edgeqwen.runtime.kernel_check import choose_kernels
from edgeqwen.runtime.onnx import MAX_CHUNK, OnnxOptions, kv_fingerprint
from edgeqwen.runtime.pauses import PAUSE_S, Pauses
from edgeqwen.runtime.session import open_session, session_options

NARROW: Final = 16
"""Chunks of more tokens than this run alone: there is little to gain, and padding would cost much."""

NEAR: Final = 256
"""Sequences run together if the longest past is at most twice the shortest and so many tokens."""

PADDED_BYTES: Final = 256 << 20  # of past that is copied side by side for one run
LOGIT_BYTES: Final = 64 << 20  # of the logits of one chunk
LEAST_CHUNK: Final = 16
TOLERANCE: Final[dict[Quant, float]] = {"fp32": 1e-3, "fp16": 0.1, "int4": 0.25}
"""Of the standard deviation of logits: how far those of the trial may be apart. A quant that is not named rounds
activations by one scale for all rows.
"""

MENDING: Final = "quantise the exported graph for this processor (`optimum-cli onnxruntime quantize`) and import that"
TRIAL_IDS: Final = (1, 2, 3, 5)


class ExportedRuntime:
    """Implements `core.step.Runtime` on the graph of a package whose manifest says `graph: optimum`."""

    def __init__(self, graph: ExportedGraph, *, cache: DenseCache, manifest: Manifest, options: OnnxOptions) -> None:
        vocab_size = manifest.spec.vocab_size
        self.kv_type: KVType = manifest.kv_types[0]
        self.pads_batches = False
        self._graph = graph
        self._cache = cache
        self._pauses = Pauses(self._give_back, after_s=PAUSE_S)
        widest = MAX_CHUNK if graph.gives_last_only else max(LEAST_CHUNK, LOGIT_BYTES // (4 * vocab_size))
        self._spec = RuntimeSpec(
            num_slots=options.num_slots,
            capacity=options.capacity,
            vocab_size=vocab_size,
            num_tokens=manifest.spec.num_tokens,
            kv_bytes_per_token=cache.bytes_per_token,
            max_chunk=min(MAX_CHUNK, widest, options.capacity),
            kv_fingerprint=kv_fingerprint(manifest, self.kv_type),
        )

    @classmethod
    def load(
        cls, package: Package, options: OnnxOptions, progress: Callable[[float], None] = lambda _: None
    ) -> ExportedRuntime:
        """Load a package and try its graph; raises `ModelInvalid` if it cannot be run (rightly) here, `ConfigInvalid`
        if another type of cache is wanted than it has.
        """
        manifest, path = package.manifest, package.path / GRAPH
        if options.kv_type not in {None, *manifest.kv_types}:
            raise ConfigInvalid(
                f"kv.type: {package.path} holds a graph exported by optimum, whose cache is {manifest.kv_types[0]} and "
                f"cannot be {options.kv_type}; use --kv auto"
            )
        progress(0.1)
        keep_large_blocks_apart()
        is_precise = choose_kernels(package.path / KERNEL_CHECK, mending=MENDING).is_precise
        settings = session_options(options.num_threads, is_precise=is_precise, affinities=options.affinities)
        session = open_session(path, settings)
        progress(0.8)
        cache = DenseCache(manifest.spec, manifest.kv_types[0], num_slots=options.num_slots, capacity=options.capacity)
        try:
            graph = ExportedGraph(session, cache, vocab_size=manifest.spec.vocab_size)
            runtime = cls(graph, cache=cache, manifest=manifest, options=options)
            runtime._try_out(manifest.quant, may_pad=not options.is_single)
        except (ModelInvalid, RuntimeFailed) as error:
            raise ModelInvalid(f"{path}: {error.message}") from error
        forget_pages(package.path / WEIGHTS)
        runtime._give_back()
        progress(1.0)
        return runtime

    @property
    def spec(self) -> RuntimeSpec:
        return self._spec

    def step(self, batch: Batch) -> StepResult:
        chunks = batch.chunks
        assert not any(chunk.num_hidden for chunk in chunks), "this package gives no hidden states"
        for chunk in chunks:
            assert 0 < len(chunk.ids) >= chunk.num_logits, chunk
            assert chunk.start <= self._cache.length(chunk.slot), chunk
            assert chunk.stop <= self._spec.capacity, chunk
        logits = {chunk.slot: np.empty((chunk.num_logits, self._spec.vocab_size), np.float32) for chunk in chunks}
        try:
            check_ids(chunks, self._spec.vocab_size)
            with self._pauses.work():
                for group in self._groups(chunks):
                    self._run(group, [logits[chunk.slot] for chunk in group])
                self._pauses.expect()
        except RuntimeFailed:
            for chunk in chunks:
                self._cache.release(chunk.slot)
            raise
        return StepResult(tuple(logits.values()))

    def read_kv(self, slot: int, start: int, stop: int) -> KVData:
        return self._cache.read(slot, start, stop)

    def expect_kv(self, slot: int, start: int, stop: int) -> None:
        with self._pauses.work():  # it uses the spare row, which a pause gives back
            self._cache.expect(slot, stop)

    def write_kv(self, slot: int, start: int, data: KVData) -> None:
        with self._pauses.work():
            self._cache.write(slot, start, data)
            self._pauses.expect()

    def move(self, src: int, dst: int) -> None:
        self._cache.move(src, dst)

    def release(self, slot: int) -> None:
        self._cache.release(slot)

    def close(self) -> None:
        self._pauses.close()
        del self._graph
        self._cache.close()

    def _groups(self, chunks: Sequence[Chunk]) -> Iterator[Sequence[Chunk]]:
        """Chunks that are computed in one run: narrow ones with pasts of about the same length."""
        group: list[Chunk] = []
        for chunk in sorted(chunks, key=lambda chunk: chunk.start):
            if group and not self._fit_together([*group, chunk]):
                yield group
                group = []
            group.append(chunk)
        yield group

    def _fit_together(self, chunks: Sequence[Chunk]) -> bool:
        padded, shortest = Padded.of(chunks), chunks[0].start
        if not self.pads_batches or padded.width > NARROW:
            return False
        if self._graph.gives_last_only and any(len(each.ids) < padded.width or each.num_logits > 1 for each in chunks):
            return False
        num_bytes = len(chunks) * (padded.past + padded.width) * self._cache.bytes_per_token
        return padded.past <= 2 * shortest + NEAR and num_bytes <= PADDED_BYTES

    def _run(self, group: Sequence[Chunk], logits: Sequence[Logits]) -> None:
        """Compute a group's logits; in several runs where the graph gives one row of them and more are wanted."""
        chunk, rows = group[0], logits[0]
        if len(rows) <= 1 or not self._graph.gives_last_only:
            self._graph.run(Padded.of(group), logits)
            return
        start = 0
        for row, stop in enumerate(range(len(chunk.ids) - len(rows) + 1, len(chunk.ids) + 1)):
            piece = Chunk(chunk.slot, chunk.start + start, chunk.ids[start:stop])
            self._graph.run(Padded.of([piece]), [rows[row : row + 1]])
            start = stop

    def _give_back(self) -> None:
        self._graph.give_back()
        self._cache.give_back()
        trim_heap()

    def _try_out(self, quant: Quant, *, may_pad: bool) -> None:
        """Warm up, see that the graph goes on from its past as it should, and whether it computes padded batches
        rightly. Raises `ModelInvalid` if it does not go on, `RuntimeFailed` if it does not run.
        """
        tolerance = TOLERANCE.get(quant)
        ids = tuple(index % self._spec.num_tokens for index in TRIAL_IDS)[: self._spec.capacity]
        last = Chunk(0, len(ids) - 1, ids[-1:])
        (whole,) = self.step(Batch((Chunk(0, 0, ids, len(ids)),))).logits
        (alone,) = self.step(Batch((last,))).logits
        if tolerance is not None and not _are_close(alone, whole[-1:], tolerance):
            raise ModelInvalid(
                "the graph computes a token otherwise from its past than in one go; "
                "export it again with --task text-generation-with-past"
            )
        if may_pad and tolerance is not None and self._spec.num_slots > 1 and len(ids) == len(TRIAL_IDS):
            # A past of another length: only then does it show where the graph takes a token to stand.
            self.step(Batch((Chunk(1, 0, ids[:1], 0),)))
            self.pads_batches = True
            found = self.step(Batch((last, Chunk(1, 1, ids[1:2])))).logits
            expected = (whole[-1:], whole[1:2])
            self.pads_batches = all(_are_close(*pair, tolerance) for pair in zip(found, expected, strict=True))
            self.release(1)
        self.release(0)


def _are_close(found: NDArray[np.float32], expected: NDArray[np.float32], tolerance: float) -> bool:
    return bool(np.abs(found - expected).max() <= tolerance * expected.std())
