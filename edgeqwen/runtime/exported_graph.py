"""A graph in the layout of optimum's exports, over a cache in its layout: what one run of it takes and gives.

It takes `input_ids`, `attention_mask`, mostly `position_ids`, and `past_key_values.LAYER.key|value`
`[batch, kv_heads, past, head_dim]`; it gives `logits` and `present.LAYER.key|value`, which is past and new tokens one
behind the other.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any, Final, TypeAlias

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from edgeqwen.core.step import Logits
from edgeqwen.errors import EdgeqwenError, ModelInvalid
from edgeqwen.runtime.dense_cache import DenseCache, Padded
from edgeqwen.runtime.session import graph_failures, shrinking_run

LOGIT_TYPES: Final = {"tensor(float)": np.float32, "tensor(float16)": np.float16}

Inputs: TypeAlias = dict[str, NDArray[Any]]


class ExportedGraph:
    """Runs a session over a cache. `gives_last_only`: the graph leaves all rows of logits but the last away."""

    def __init__(self, session: ort.InferenceSession, cache: DenseCache, *, vocab_size: int) -> None:
        """Raises `RuntimeFailed` if the graph does not run, `ModelInvalid` if it is no graph of this shape."""
        self._session = session
        self._cache = cache
        self._names = frozenset(argument.name for argument in session.get_inputs())
        self._logit_type = next(LOGIT_TYPES[given.type] for given in session.get_outputs() if given.name == "logits")
        self._all_logits = np.empty((0, vocab_size), self._logit_type)
        with graph_failures():
            (logits,) = session.run(["logits"], self._first_step(2))
        if logits.shape not in {(1, 1, vocab_size), (1, 2, vocab_size)}:
            raise ModelInvalid(f"its logits are {list(logits.shape)}, which no graph of this model gives")
        self.gives_last_only = logits.shape[1] == 1

    def run(self, padded: Padded, wanted: Sequence[Logits]) -> None:
        """Compute some chunks, append their tokens to the cache, and write the last rows of each chunk's logits into
        its array of `wanted`, as many as that has (at most one if the graph gives the last one only).
        """
        chunks = padded.chunks
        rows = 1 if self.gives_last_only else padded.width
        given = self._logits_buffer(len(chunks) * rows).reshape(len(chunks), rows, -1)
        io = self._session.io_binding()
        with graph_failures():
            for name, array in self._inputs(padded).items():
                io.bind_cpu_input(name, array)
            io.bind_output("logits", "cpu", 0, self._logit_type, given.shape, given.ctypes.data)
            if len(chunks) == 1:
                self._cache.bind_one(io, chunks[0])
            else:
                self._cache.bind_padded(io, padded)
            self._session.run_with_iobinding(io)
        if len(chunks) == 1:
            self._cache.keep_one(chunks[0])
        else:
            self._cache.keep_padded(padded)
        for index, (chunk, logits) in enumerate(zip(chunks, wanted, strict=True)):
            stop = 1 if self.gives_last_only else len(chunk.ids)
            logits[:] = given[index, stop - len(logits) : stop]

    def give_back(self) -> None:
        """Give back what runs have left behind; the session does so at the end of a run of one token."""
        self._all_logits = self._all_logits[:0].copy()
        with (
            contextlib.suppress(EdgeqwenError),
            graph_failures(),
        ):  # for want of memory, if at all; nobody waits for this
            self._session.run(None, self._first_step(1), shrinking_run())

    def _inputs(self, padded: Padded) -> Inputs:
        """Ids, mask and positions `[chunks, tokens]`; what is padding is masked."""
        count = len(padded.chunks)
        ids, positions = (np.zeros((count, padded.width), np.int64) for _ in range(2))
        mask = np.zeros((count, padded.past + padded.width), np.int64)
        for index, chunk in enumerate(padded.chunks):
            num_ids = len(chunk.ids)
            ids[index, :num_ids] = chunk.ids
            positions[index, :num_ids] = range(chunk.start, chunk.stop)
            mask[index, : chunk.start] = 1
            mask[index, padded.past : padded.past + num_ids] = 1
        return self._taken(ids, mask, positions)

    def _first_step(self, num_tokens: int) -> Inputs:
        """All inputs for the first tokens of a sequence, each of id 0."""
        ids, positions = np.zeros((1, num_tokens), np.int64), np.arange(num_tokens, dtype=np.int64)[None]
        known = self._taken(ids, ids + 1, positions)
        past = np.empty((1, self._cache.num_heads, 0, self._cache.head_dim), self._cache.element)
        return known | dict.fromkeys(self._names - known.keys(), past)

    def _taken(self, ids: NDArray[np.int64], mask: NDArray[np.int64], positions: NDArray[np.int64]) -> Inputs:
        """Those inputs that the graph has: older exports count positions themselves."""
        named = {"input_ids": ids, "attention_mask": mask, "position_ids": positions}
        return {name: array for name, array in named.items() if name in self._names}

    def _logits_buffer(self, rows: int) -> NDArray[Any]:
        """A buffer of `rows` rows, reused from run to run."""
        if len(self._all_logits) < rows:
            self._all_logits = np.empty((rows, self._all_logits.shape[1]), self._logit_type)
        return self._all_logits[:rows]
