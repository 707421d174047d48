"""The default runtime: one graph of a package, executed by onnxruntime's CPU provider over our own KV arenas.

A step binds the contiguous range of slots from its first chunk's to its last by pointer: past and present are the
same memory, so keys and values are appended in place and nothing is copied. A slot inside the range that has no chunk
is a row with no tokens (`query_seqlens` 0): the operator leaves its cache alone. Bindings are made once for each
range and kept; a step sets only the small inputs.

**Why chunks are padded to an even length.** A sequence's logits are to be the same bits however it is cut into chunks
and whoever is computed beside it. All operators here work row by row in an order that does not depend on the number
of rows, but for one: the attention's inner product has a kernel of its own for a single row, which adds up in another
order. So a chunk never leaves a single row: an odd one gets a dummy token at its end, whose keys and values stand
where the next token's will, and are overwritten by it. Only behind the last position that the model knows there is no
place for one (the rotary tables end there), so that one row may differ in its last bits. This holds on x86 processors
with AVX2 or later, where it is tested; with SSE4 alone every kernel's order depends on the number of rows. (`int4`
promises no such thing and does not pay for it.)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from edgeqwen.core.kernel import KERNEL_CHECK
from edgeqwen.core.model import Manifest, ModelSpec
from edgeqwen.core.package import MANIFEST, Package
from edgeqwen.core.step import Batch, Chunk, KVData, Logits, RuntimeSpec, StepResult
from edgeqwen.errors import ModelInvalid, RuntimeFailed
from edgeqwen.runtime.arena import Arena, ArenaShape
from edgeqwen.runtime.kernel_check import needs_precise_kernel
from edgeqwen.runtime.session import KINDS, first_line, has_shape, open_session, session_options

MAX_CHUNK: Final = 256  # larger chunks take more memory and were not faster
DEFAULT_SLOTS: Final = 8
PADDING: Final = 2  # capacity that dummy tokens may touch


@dataclass(frozen=True, slots=True)
class OnnxOptions:
    """`capacity` is the tokens that a slot holds (the context), `num_threads` those that compute a step."""

    num_slots: int = DEFAULT_SLOTS
    capacity: int = 4096
    num_threads: int = 1


@dataclass(slots=True)
class _Binding:
    """A bound range of slots; `inputs` keeps the arrays alive that the session reads by pointer."""

    io: Any
    inputs: list[Any]


class OnnxRuntime:
    """Implements `core.step.Runtime` on onnxruntime."""

    def __init__(self, session: ort.InferenceSession, manifest: Manifest, options: OnnxOptions) -> None:
        self._session = session
        self._model: ModelSpec = manifest.spec
        shape = ArenaShape(
            options.num_slots, self._model.num_kv_heads, options.capacity + PADDING, self._model.head_dim
        )
        self._arenas = {f"{layer}.{kind}": Arena(shape) for layer in range(self._model.num_layers) for kind in KINDS}
        self._dims = (shape.num_heads, shape.capacity, shape.head_dim)
        self._pads_to_even = manifest.quant != "int4"
        self._lengths = [0] * options.num_slots
        self._bindings: dict[tuple[int, int], _Binding] = {}
        self._logits = np.empty((1, self._model.vocab_size), np.float32)
        self._spec = RuntimeSpec(
            num_slots=options.num_slots,
            capacity=options.capacity,
            vocab_size=self._model.vocab_size,
            num_tokens=self._model.num_tokens,
            kv_bytes_per_token=4 * self._model.kv_floats_per_token,
            max_chunk=min(MAX_CHUNK, options.capacity),
        )

    @classmethod
    def load(
        cls, package: Package, options: OnnxOptions, progress: Callable[[float], None] = lambda _: None
    ) -> OnnxRuntime:
        """Load a package and warm up; raises `ModelInvalid` if its graph cannot be run (rightly) on this machine."""
        is_precise = needs_precise_kernel(package.path / KERNEL_CHECK)
        progress(0.1)
        session = open_session(package.graph_path, session_options(options.num_threads, is_precise=is_precise))
        progress(0.8)
        if not has_shape(session, package.manifest.spec):
            message = f"{package.path}: {MANIFEST} and the graph are of different models; import the model again"
            raise ModelInvalid(message)
        runtime = cls(session, package.manifest, options)
        runtime._warm_up()
        progress(1.0)
        return runtime

    @property
    def spec(self) -> RuntimeSpec:
        """See `core.step.Runtime`; so for the methods below."""
        return self._spec

    def step(self, batch: Batch) -> StepResult:
        chunks = batch.chunks
        first, last = chunks[0].slot, chunks[-1].slot
        num_rows, width = last - first + 1, max(self._padded_len(chunk) for chunk in chunks)
        ids = np.zeros((num_rows, width), np.int64)
        new = np.zeros(num_rows, np.int32)
        ends = np.ones(num_rows, np.int32)
        wanted: list[NDArray[np.int64]] = []
        for chunk in chunks:
            assert chunk.start <= self._lengths[chunk.slot], chunk
            assert chunk.stop <= self._spec.capacity, chunk
            row, count = chunk.slot - first, len(chunk.ids)
            ids[row, :count] = chunk.ids
            new[row] = self._padded_len(chunk)
            ends[row] = chunk.start + new[row]
            wanted.append(np.arange(count - chunk.num_logits, count, dtype=np.int64) + row * width)
        if ids.max() >= self._spec.vocab_size or ids.min() < 0:  # the quantised embedding reads without a check
            raise RuntimeFailed(f"a token id lies outside the vocabulary of {self._spec.vocab_size}")
        logits = self._run(first, ids, new=new, ends=ends, wanted=np.concatenate(wanted))
        for chunk in chunks:
            self._lengths[chunk.slot] = chunk.stop
        bounds = np.cumsum([chunk.num_logits for chunk in chunks])[:-1]
        return StepResult(tuple(np.split(logits, bounds)))

    def _padded_len(self, chunk: Chunk) -> int:
        """Tokens of a chunk, with the dummy at its end if it gets one."""
        count = len(chunk.ids)
        is_padded = self._pads_to_even and chunk.stop < self._model.max_position
        return count + count % 2 if is_padded else count

    def read_kv(self, slot: int, start: int, stop: int) -> KVData:
        assert 0 <= start <= stop <= self._lengths[slot]
        return np.stack([arena.view[slot, :, start:stop] for arena in self._arenas.values()])

    def write_kv(self, slot: int, start: int, data: KVData) -> None:
        assert start <= self._lengths[slot]
        stop = start + data.shape[2]
        for arena, block in zip(self._arenas.values(), data, strict=True):
            arena.view[slot, :, start:stop] = block
        self._lengths[slot] = stop

    def move(self, src: int, dst: int) -> None:
        length = self._lengths[src]
        for arena in self._arenas.values():
            arena.view[dst, :, :length] = arena.view[src, :, :length]
        self._lengths[dst] = length
        self.release(src)

    def release(self, slot: int) -> None:
        for arena in self._arenas.values():
            arena.release(slot)
        self._lengths[slot] = 0

    def close(self) -> None:
        self._bindings.clear()
        del self._session
        for arena in self._arenas.values():
            arena.close()

    def _run(
        self,
        first: int,
        ids: NDArray[np.int64],
        *,
        new: NDArray[np.int32],
        ends: NDArray[np.int32],
        wanted: NDArray[np.int64],
    ) -> Logits:
        """Logits of the rows `wanted` of `ids` `[slots, width]`, slots from `first` on; `new` and `ends` by slot."""
        binding = self._binding(first, len(ids))
        inputs = {
            "input_ids": ids,
            "seqlens_k": ends - np.int32(1),
            "query_seqlens": new,
            "total_len": np.array(ends.max(), np.int32),
            "logit_rows": wanted,
        }
        logits = self._logits_buffer(len(wanted))
        try:
            for name, array in inputs.items():
                binding.io.bind_cpu_input(name, array)
            binding.inputs[:] = inputs.values()
            shape = (len(wanted), self._spec.vocab_size)
            binding.io.bind_output("logits", "cpu", 0, np.float32, shape, self._logits.ctypes.data)
            self._session.run_with_iobinding(binding.io)
        except Exception as error:  # onnxruntime raises its own types, RuntimeError and ValueError
            raise RuntimeFailed(f"the model's graph failed: {first_line(error)}") from error
        return logits

    def _logits_buffer(self, rows: int) -> Logits:
        """A buffer of `rows` rows, reused from step to step (one more row than needed when none is wanted)."""
        if len(self._logits) < rows:
            self._logits = np.empty((rows, self._spec.vocab_size), np.float32)
        return self._logits[:rows]

    def _binding(self, first: int, num_rows: int) -> _Binding:
        key = (first, num_rows)
        if key not in self._bindings:
            io = self._session.io_binding()
            shape = (num_rows, *self._dims)
            for name, arena in self._arenas.items():
                address = arena.address(first)
                io.bind_input(f"past.{name}", "cpu", 0, np.float32, shape, address)
                io.bind_output(f"present.{name}", "cpu", 0, np.float32, shape, address)
            self._bindings[key] = _Binding(io, [])
        return self._bindings[key]

    def _warm_up(self) -> None:
        """One chunk of several tokens and one of a single token, so that the first request pays for nothing."""
        count = min(8, self._spec.capacity)
        for chunk in (Chunk(0, 0, (0,) * count), Chunk(0, count - 1, (0,))):
            self.step(Batch((chunk,)))
        self.release(0)
