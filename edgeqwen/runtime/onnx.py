"""The default runtime: the graphs of a package, executed by onnxruntime's CPU provider over our own KV arenas.

A step of few rows takes the decode graph, one of many the prefill graph if the package has one; both work on one cache.
From which number of rows the prefill graph is the faster one depends on the machine (`runtime.profile`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from edgeqwen.core.kernel import KERNEL_CHECK
from edgeqwen.core.model import KVType, Manifest, Stage
from edgeqwen.core.package import MANIFEST, WEIGHTS, Package
from edgeqwen.core.step import Batch, Chunk, KVData, RuntimeSpec, StepResult
from edgeqwen.cpu import ThreadPlan, forget_pages, keep_large_blocks_apart, trim_heap
from edgeqwen.errors import ConfigInvalid, EdgeqwenError, ModelInvalid
from edgeqwen.runtime.batches import check_ids, split_rows
from edgeqwen.runtime.cache import Cache
from edgeqwen.runtime.kernel_check import KernelChoice, choose_kernels
from edgeqwen.runtime.pauses import PAUSE_S, Pauses
from edgeqwen.runtime.profile import kept_profile
from edgeqwen.runtime.session import (
    attention_settings,
    has_shape,
    open_session,
    session_options,
)
from edgeqwen.runtime.step_graph import BatchGraph, ChunkGraph, StepGraph

MAX_CHUNK: Final = 256  # larger chunks take more memory and were not faster
DEFAULT_SLOTS: Final = 8
PADDING: Final = 2  # capacity that dummy tokens may touch
DEFAULT_PREFILL_ROWS: Final = 12
KV_LAYOUT: Final = 1
BIT_STABLE: Final = frozenset({"fp32", "int8"})
"""Quants whose logits are the same bits in any batch; the others do not pay for padding."""


_NO_HIDDEN: Final = np.empty((0, 0), np.float32)


@dataclass(frozen=True, slots=True)
class OnnxOptions:
    """`capacity` is the tokens that a slot holds (the context). `num_threads` compute a step, `num_prefill_threads` one
    of many rows where that has a graph of its own (0: as many); the affinities are onnxruntime's (see `session`).
    `kv_type` None is the package's default. `is_single` keeps to the decode graph. `profile_path` tells for a package
    and a type of cache where what is measured of this machine is kept; None: nothing is measured, and `prefill_rows`
    rows or more take the prefill graph.
    """

    num_slots: int = DEFAULT_SLOTS
    capacity: int = 4096
    num_threads: int = 1
    num_prefill_threads: int = 0
    affinities: str | None = None
    prefill_affinities: str | None = None
    kv_type: KVType | None = None
    is_single: bool = False
    prefill_rows: int = DEFAULT_PREFILL_ROWS
    profile_path: Callable[[Manifest, KVType], Path] | None = None

    @classmethod
    def planned(cls, plan: ThreadPlan, **others: Any) -> OnnxOptions:
        """Options with the threads of `plan`. The thread that runs the steps is placed by whoever it belongs to."""
        return cls(
            num_threads=plan.decode.num_threads,
            num_prefill_threads=plan.prefill.num_threads,
            affinities=plan.decode.ort_affinities,
            prefill_affinities=plan.prefill.ort_affinities,
            **others,
        )


class OnnxRuntime:
    """Implements `core.step.Runtime` on onnxruntime.

    Steps of many rows need memory beside the cache, 1 to 3 MB for each row of logits, and have it at hand from then on:
    to get it anew for each costs a third of their time. When no step has come for `PAUSE_S` it is given back.
    """

    def __init__(
        self, decode: StepGraph, prefill: StepGraph | None, *, cache: Cache, manifest: Manifest, options: OnnxOptions
    ) -> None:
        self._decode = decode
        self._prefill = prefill or decode
        self._graphs = (self._decode,) if prefill is None else (self._decode, prefill)
        self._pauses = Pauses(self._give_back, after_s=PAUSE_S)
        self._is_one_by_one = isinstance(prefill, ChunkGraph)
        self._prefill_rows = options.prefill_rows
        self._cache = cache
        self.kv_type: KVType = "int8" if cache.shape.dtype is np.int8 else "fp32"
        self._logits = np.empty((0, manifest.spec.vocab_size), np.float32)
        hidden_size = min(graph.hidden_size for graph in self._graphs)
        self._spec = RuntimeSpec(
            num_slots=options.num_slots,
            capacity=options.capacity,
            vocab_size=manifest.spec.vocab_size,
            num_tokens=manifest.spec.num_tokens,
            kv_bytes_per_token=cache.bytes_per_token,
            max_chunk=min(MAX_CHUNK, options.capacity),
            kv_fingerprint=kv_fingerprint(manifest, self.kv_type),
            hidden_size=hidden_size,
        )

    @classmethod
    def load(
        cls, package: Package, options: OnnxOptions, progress: Callable[[float], None] = lambda _: None
    ) -> OnnxRuntime:
        """Load a package and warm up; raises `ModelInvalid` if its graphs cannot be run (rightly) on this machine,
        `ConfigInvalid` if it has none for the type of cache.
        """
        manifest = package.manifest
        kernels = choose_kernels(package.path / KERNEL_CHECK)
        kv_type = options.kv_type or _default_kv_type(package, kernels)
        if kv_type == "bf16":
            raise ConfigInvalid("kv.type: bf16 is for the torch runtime; take auto, or --runtime torch")
        if kv_type not in manifest.kv_types:
            raise ConfigInvalid(
                f"kv.type: {package.path} has no {kv_type} cache (its scales come from calibration); import it again "
                f"without --fast, or use --kv {manifest.kv_types[0]}"
            )
        progress(0.1)
        keep_large_blocks_apart()
        opened = _Opener(package, kv_type, options=options, kernels=kernels)
        stages: tuple[Stage, ...] = ("decode",) if options.is_single else ("decode", "prefill")
        sessions = opened.open_all(stages)
        progress(0.8)
        cache = Cache(manifest.spec, kv_type, num_slots=options.num_slots, capacity=options.capacity + PADDING)
        graphs = {stage: _step_graph(stage, session, cache, manifest) for stage, session in sessions.items()}
        decode, prefill = graphs["decode"], graphs.get("prefill")
        runtime = cls(decode, prefill, cache=cache, manifest=manifest, options=options)
        runtime._warm_up()
        progress(0.9)
        if options.profile_path is not None:
            runtime._fit_to_machine(options.profile_path(manifest, kv_type), progress)
        forget_pages(package.path / WEIGHTS)
        runtime._give_back()
        progress(1.0)
        return runtime

    @property
    def spec(self) -> RuntimeSpec:
        """See `core.step.Runtime`; so for the methods below."""
        return self._spec

    def step(self, batch: Batch) -> StepResult:
        chunks = batch.chunks
        for chunk in chunks:
            assert chunk.start <= self._cache.lengths[chunk.slot], chunk
            assert chunk.stop <= self._spec.capacity, chunk
        check_ids(chunks, self._spec.vocab_size)
        logits = self._logits_buffer(sum(chunk.num_logits for chunk in chunks))
        hidden = np.empty((sum(chunk.num_hidden for chunk in chunks), self._spec.hidden_size), np.float32)
        assert hidden.size or not len(hidden), "this package gives no hidden states"
        counts = [len(chunk.ids) for chunk in chunks]
        num_rows = min(counts) if self._is_one_by_one else sum(counts)
        graph = self._prefill if num_rows >= self._prefill_rows else self._decode
        with self._pauses.work():
            graph.run(chunks, logits, hidden)
            if graph.is_worn:
                self._pauses.expect()
        for chunk in chunks:
            self._cache.lengths[chunk.slot] = chunk.stop
        parts = split_rows(logits, [chunk.num_logits for chunk in chunks])
        if not len(hidden):
            return StepResult(parts)
        return StepResult(parts, split_rows(hidden, [chunk.num_hidden for chunk in chunks]))

    def read_kv(self, slot: int, start: int, stop: int) -> KVData:
        return self._cache.read(slot, start, stop)

    def expect_kv(self, slot: int, start: int, stop: int) -> None:
        self._cache.expect(slot, start, stop)

    def write_kv(self, slot: int, start: int, data: KVData) -> None:
        self._cache.write(slot, start, data)

    def move(self, src: int, dst: int) -> None:
        self._cache.move(src, dst)

    def release(self, slot: int) -> None:
        self._cache.release(slot)

    def close(self) -> None:
        self._pauses.close()
        del self._decode, self._prefill, self._graphs
        self._cache.close()

    def _give_back(self) -> None:
        for graph in self._graphs:
            if graph.is_worn:
                with contextlib.suppress(EdgeqwenError):  # for want of memory, if at all; nobody waits for this
                    graph.give_back()
        self._logits = np.empty((0, self._spec.vocab_size), np.float32)
        trim_heap()

    def _logits_buffer(self, rows: int) -> NDArray[np.float32]:
        """A buffer of `rows` rows, reused from step to step."""
        if len(self._logits) < rows:
            self._logits = np.empty((rows, self._spec.vocab_size), np.float32)
        return self._logits[:rows]

    def _fit_to_machine(self, path: Path, progress: Callable[[float], None]) -> None:
        """Take what this machine is known to need from its profile, which is measured where there is none."""
        profile = kept_profile(
            path,
            self._time_step,
            has_prefill=self._prefill is not self._decode,
            capacity=self._spec.capacity,
            progress=progress,
        )
        self.release(0)
        self._prefill_rows = profile.prefill_rows
        self._spec = dataclasses.replace(self._spec, row_costs=profile.row_costs)

    def _time_step(self, stage: Stage, chunk: Chunk) -> float:
        graph = self._decode if stage == "decode" else self._prefill
        began_at = time.perf_counter()
        graph.run((chunk,), self._logits_buffer(chunk.num_logits), _NO_HIDDEN)
        return time.perf_counter() - began_at

    def _warm_up(self) -> None:
        """A chunk for each graph and one of a single token, so that the first request pays for nothing."""
        count = min(max(8, self._prefill_rows), self._spec.capacity)
        for chunk in (Chunk(0, 0, (0,) * count), Chunk(0, count - 1, (0,))):
            self.step(Batch((chunk,)))
        self.release(0)


def kv_fingerprint(manifest: Manifest, kv_type: KVType) -> str:
    """What keys and values depend on: the files of the package, the quantisation, the version that built them, the type
    of the cache and how `Cache.read` lays it out.
    """
    facts = {
        "files": sorted(manifest.digests.items()),
        "quant": manifest.quant,
        "builder": manifest.builder_version,
        "kv_type": kv_type,
        "layout": KV_LAYOUT,
    }
    return hashlib.sha256(msgspec.json.encode(facts)).hexdigest()


def _default_kv_type(package: Package, kernels: KernelChoice) -> KVType:
    """The package's own, unless its prefill graph is one of integer attention that must not be used here."""
    kv_types = package.manifest.kv_types
    is_lost = not kernels.has_integer_attention and package.graph_path("prefill", kv_types[0]) is not None
    return "fp32" if is_lost and "fp32" in kv_types else kv_types[0]


@dataclass(frozen=True, slots=True)
class _Opener:
    """Opens the graphs of a package over one type of cache."""

    package: Package
    kv_type: KVType
    options: OnnxOptions
    kernels: KernelChoice

    def open_all(self, stages: Sequence[Stage]) -> dict[Stage, ort.InferenceSession]:
        """The sessions that there are, opened side by side: packing a graph's weights is the work of one thread."""
        with attention_settings(is_flash=self.kv_type == "fp32"), ThreadPoolExecutor(len(stages)) as pool:
            sessions = pool.map(self._open, stages)
            return {stage: session for stage, session in zip(stages, sessions, strict=True) if session is not None}

    def _open(self, stage: Stage) -> ort.InferenceSession | None:
        """The session of a stage; None if the package has none that is right here. Raises `ModelInvalid`."""
        path = self.package.graph_path(stage, self.kv_type)
        is_integer = stage == "prefill" and self.kv_type == "int8"
        if path is None or (is_integer and not self.kernels.has_integer_attention):
            return None
        given = self.options
        count, affinities = given.num_threads, given.affinities
        if stage == "prefill" and given.num_prefill_threads:
            count, affinities = given.num_prefill_threads, given.prefill_affinities
        options = session_options(count, is_precise=self.kernels.is_precise, affinities=affinities)
        session = open_session(path, options)
        if not has_shape(session, self.package.manifest.spec):
            message = f"{path}: {MANIFEST} and the graph are of different models; import the model again"
            raise ModelInvalid(message)
        return session


def _step_graph(stage: Stage, session: ort.InferenceSession, cache: Cache, manifest: Manifest) -> StepGraph:
    """What runs a session over a cache: integer attention over an int8 cache is of one chunk at a time."""
    is_int8 = cache.shape.dtype is np.int8
    if stage == "prefill" and is_int8:
        return ChunkGraph(session, cache)
    pads = not is_int8 and manifest.quant in BIT_STABLE
    return BatchGraph(session, cache, pads_to_even=pads, max_position=manifest.spec.max_position)
