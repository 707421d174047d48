"""`core.step.Runtime` on torch: the rows of all chunks go through the decoder together, over KV arenas.

A row's logits do not depend on what is computed beside it, but for their last bits: oneDNN and flash attention add up
in an order that depends on the number of rows. No weights promise the same bits in any batch.
"""

from __future__ import annotations

import dataclasses
import hashlib
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from typing import Any, Final, Self

import msgspec
import numpy as np
import torch

from edgeqwen.core.model import KVType, Stage
from edgeqwen.core.rope import rotary_tables
from edgeqwen.core.step import Batch, Chunk, KVData, RuntimeSpec, StepResult
from edgeqwen.cpu import trim_heap
from edgeqwen.errors import EdgeqwenError, RuntimeFailed
from edgeqwen.runtime.batches import check_ids, split_rows
from edgeqwen.runtime.cache import Cache
from edgeqwen.runtime.pauses import PAUSE_S, Pauses
from edgeqwen.runtime.profile import kept_profile
from edgeqwen.runtime.torch.attention import CacheAttention
from edgeqwen.runtime.torch.compiler import Compiler, explained
from edgeqwen.runtime.torch.decoder import Decoder
from edgeqwen.runtime.torch.library import first_line
from edgeqwen.runtime.torch.options import TorchOptions, check_kv_type
from edgeqwen.runtime.torch.weights import WeightSource
from edgeqwen.runtime.torch.workers import start_workers

MAX_CHUNK: Final = 256
KV_LAYOUT: Final = 1
DTYPES: Final[dict[KVType, Any]] = {"fp32": torch.float32, "bf16": torch.bfloat16}


class TorchRuntime:
    """Implements `core.step.Runtime`."""

    decoder_type: type[Decoder] = Decoder
    attention_type: type[CacheAttention] = CacheAttention

    def __init__(self, decoder: Decoder, attention: CacheAttention, cache: Cache, *, options: TorchOptions) -> None:
        spec = decoder.spec
        self._decoder, self._attention, self._cache = decoder, attention, cache
        self._pauses = Pauses(self._give_back, after_s=PAUSE_S)
        cosines, sines = rotary_tables(spec, min(options.capacity, spec.max_position))
        self._tables = torch.from_numpy(cosines), torch.from_numpy(sines)
        self.kv_type: KVType = attention.kv_type
        self._spec = RuntimeSpec(
            num_slots=options.num_slots,
            capacity=options.capacity,
            vocab_size=spec.vocab_size,
            num_tokens=spec.num_tokens,
            kv_bytes_per_token=cache.bytes_per_token,
            max_chunk=min(MAX_CHUNK, options.capacity),
            kv_fingerprint=kv_fingerprint(decoder, self.kv_type, options.identity),
            hidden_size=spec.hidden_size,
        )

    @classmethod
    def load(
        cls, source: WeightSource, options: TorchOptions, progress: Callable[[float], None] = lambda _: None
    ) -> Self:
        """Load weights, compile if that is asked for, and warm up. Raises `ConfigInvalid` for what machine, unit or
        installation do not allow, and what reading the checkpoint raises.
        """
        start_workers(max(options.threads.counts), options.threads.decode.masks)
        dtype = torch.bfloat16 if options.is_bf16 else torch.float32
        kv_type: KVType = options.kv_type or ("bf16" if options.is_bf16 else "fp32")
        check_kv_type(kv_type)
        cache = Cache(source.spec, kv_type, num_slots=options.num_slots, capacity=options.capacity)
        attention = cls.attention_type(cache, kv_type, DTYPES[kv_type])
        decoder = cls.decoder_type(
            source,
            weight_type=options.weights,
            dtype=dtype,
            attention=attention,
            progress=lambda share: progress(0.8 * share),
        )
        runtime = cls(decoder, attention, cache, options=options)
        runtime._warm_up(options, progress)
        if options.profile_path is not None:
            runtime._fit_to_machine(options.profile_path, progress)
        trim_heap()
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
        with self._pauses.work(), self._failing(chunks), torch.inference_mode():
            result = self._compute(chunks)
            self._pauses.expect()
        for chunk in chunks:
            self._cache.lengths[chunk.slot] = chunk.stop
        return result

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
        self._attention.close()
        del self._decoder, self._attention
        self._cache.close()

    def _give_back(self) -> None:
        trim_heap()

    def _compute(self, chunks: Sequence[Chunk]) -> StepResult:
        check_ids(chunks, self._spec.vocab_size)
        ids = torch.tensor([token for chunk in chunks for token in chunk.ids])
        self._attention.plan(chunks)
        positions = torch.cat([torch.arange(chunk.start, chunk.stop) for chunk in chunks])
        cosines, sines = (table[positions].unsqueeze(1) for table in self._tables)
        rows = self._decoder.run(ids, cosines, sines)
        logits = self._last_rows(rows, chunks, [chunk.num_logits for chunk in chunks], self._decoder.logits)
        if not any(chunk.num_hidden for chunk in chunks):
            return StepResult(logits)
        return StepResult(
            logits, self._last_rows(rows, chunks, [chunk.num_hidden for chunk in chunks], self._decoder.hidden)
        )

    def _last_rows(
        self, rows: Any, chunks: Sequence[Chunk], counts: Sequence[int], finish: Callable[[Any], Any]
    ) -> tuple[Any, ...]:
        """What `finish` makes of the last `counts` rows of each chunk, float32."""
        ends = accumulate(len(chunk.ids) for chunk in chunks)
        wanted = [row for end, count in zip(ends, counts, strict=True) for row in range(end - count, end)]
        if not wanted:
            return tuple(np.empty((0, self._spec.vocab_size), np.float32) for _ in chunks)
        return split_rows(finish(rows[wanted]).float().numpy(), counts)

    @contextmanager
    def _failing(self, chunks: Sequence[Chunk]) -> Iterator[None]:
        """Errors of torch are `RuntimeFailed`."""
        try:
            yield
        except EdgeqwenError:
            raise
        except Exception as error:  # torch raises RuntimeError, and MemoryError's like as that
            where = ", ".join(f"{len(chunk.ids)} at {chunk.start}" for chunk in chunks)
            raise RuntimeFailed(f"torch failed in a step of {where} tokens: {first_line(error)}") from error

    def _warm_up(self, options: TorchOptions, progress: Callable[[float], None]) -> None:
        """A chunk of several tokens and one of a single one; what is to be compiled is, here."""
        if options.mode == "compile":
            facts = f"{self._decoder.spec} {options.weights} {self._decoder.dtype} {options.max_isa}"
            with explained(), torch.inference_mode():
                compiler = Compiler(options.code_dir, facts)
                self._decoder.compile(compiler, self._tables, lambda share: progress(0.8 + 0.05 * share))
        self._try(progress)

    def _try(self, progress: Callable[[float], None]) -> None:
        count = min(8, self._spec.capacity)
        for share, chunk in ((0.85, Chunk(0, 0, (0,) * count)), (0.9, Chunk(0, count - 1, (0,)))):
            self.step(Batch((chunk,)))
            progress(share)
        self.release(0)

    def _fit_to_machine(self, path: Any, progress: Callable[[float], None]) -> None:
        """What a step costs by its rows, from this machine's profile."""

        def time_step(_: Stage, chunk: Chunk) -> float:
            began_at = time.perf_counter()
            self.step(Batch((chunk,)))
            return time.perf_counter() - began_at

        profile = kept_profile(path, time_step, has_prefill=False, capacity=self._spec.capacity, progress=progress)
        self.release(0)
        self._spec = dataclasses.replace(self._spec, row_costs=profile.row_costs)


def kv_fingerprint(decoder: Decoder, kv_type: KVType, identity: str) -> str:
    """What keys and values depend on: checkpoint, form of weights, type that is computed in, type and layout of the
    cache.
    """
    facts = {
        "runtime": "torch",
        "identity": identity,
        "weights": decoder.weight_type,
        "dtype": str(decoder.dtype),
        "kv_type": kv_type,
        "layout": KV_LAYOUT,
    }
    return hashlib.sha256(msgspec.json.encode(facts)).hexdigest()
