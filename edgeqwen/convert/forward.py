"""One layer of the decoder in numpy, its products left to the caller.

Calibration has to know what goes into every linear layer, and what goes into it once the layers before are quantised.
A runtime cannot tell: it gives logits, not inner activations, and holds the whole model. Here the caller is asked for
each product, so it sees the inputs, multiplies with whatever weights it likes, and has one layer's in memory at a time.

    qkv      normed input         -> queries, keys and values, one beside the other
    o        attended values      -> added to the residual
    gate_up  normed residual      -> gate and up
    down     silu(gate) * up      -> added to the residual

Activations are float32 `[tokens, width]`: windows of equal length one below the other, each attending to itself alone.
Products use the threads of numpy's own library; all the rest is spread over threads by windows (`Workers`), which numpy
would do on one.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from edgeqwen.convert.checkpoint import Checkpoint, Float32Array
from edgeqwen.core.model import ModelSpec
from edgeqwen.core.rope import rotary_tables
from edgeqwen.core.tensor_names import EMBEDDING, StepName, layer_prefix


@dataclass(frozen=True, slots=True)
class Attended:
    """What attention saw: `keys` (after norm and rotary) and `values` `[tokens, kv_heads, head_dim]`, and how much of
    it each token got, `shares` `[tokens]`, all queries of its window together, mean over the heads.
    """

    keys: Float32Array
    values: Float32Array
    shares: Float32Array


Multiply: TypeAlias = Callable[[StepName, Float32Array, Float32Array | None], Float32Array]
"""From a step, the activations that go into it and what its product is added to, if anything, to that product; all
`[tokens, ...]`.
"""


def embed(checkpoint: Checkpoint, windows: np.ndarray[tuple[int, int], np.dtype[np.int64]]) -> Float32Array:
    """Rows of the embedding for `windows` `[windows, window_len]`, as `[tokens, hidden]`; reads only what it needs."""
    ids, places = np.unique(windows, return_inverse=True)
    rows = np.empty((len(ids), checkpoint.spec.hidden_size), np.float32)
    edges = np.flatnonzero(np.diff(ids, prepend=-2, append=ids[-1] + 2) != 1)  # runs of consecutive ids
    for first, last in itertools.pairwise(edges):
        rows[first:last] = checkpoint.read(EMBEDDING, int(ids[first]), int(ids[last - 1]) + 1)
    return rows[places.ravel()]


def rms_norm(x: Float32Array, gain: Float32Array, epsilon: float) -> Float32Array:
    """x / sqrt(mean(x^2) + epsilon) * gain over the last axis."""
    mean_square = np.einsum("...c,...c->...", x, x)[..., None] / np.float32(x.shape[-1])
    result = x / np.sqrt(mean_square + np.float32(epsilon))
    result *= gain
    return np.asarray(result, np.float32)


class Workers:
    """Applies functions to activations, some windows in each of `num_threads` threads; use as a context manager.

    What comes out does not depend on the number of threads: no function looks beyond a window.
    """

    def __init__(self, num_threads: int, window_len: int) -> None:
        self.window_len = window_len
        self._num_threads = num_threads
        self._pool = ThreadPoolExecutor(num_threads, thread_name_prefix="calibration")

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown()

    def apply(self, function: Callable[..., Float32Array], *arrays: NDArray[Any]) -> Float32Array:
        """`function(*arrays)`, all `[tokens, ...]`, computed in pieces of whole windows."""
        windows = len(arrays[0]) // self.window_len
        edges = [windows * index // self._num_threads * self.window_len for index in range(self._num_threads + 1)]
        spans = [(start, stop) for start, stop in itertools.pairwise(edges) if stop > start]  # windows may be few
        pieces = [tuple(array[start:stop] for array in arrays) for start, stop in spans]
        return np.concatenate(list(self._pool.map(lambda piece: function(*piece), pieces)))


class LayerForward:
    """What a layer computes beside its products."""

    def __init__(self, checkpoint: Checkpoint, layer: int, workers: Workers) -> None:
        self._spec = checkpoint.spec
        self._workers = workers
        prefix = layer_prefix(layer)
        self._input_gain = checkpoint.read(prefix + "input_layernorm.weight")
        self._middle_gain = checkpoint.read(prefix + "post_attention_layernorm.weight")
        self._head_gains: dict[str, Float32Array] = {}
        self._bias: Float32Array | None = None
        if self._spec.has_qk_norm:
            self._head_gains = {which: checkpoint.read(f"{prefix}self_attn.{which}_norm.weight") for which in "qk"}
        if self._spec.has_qkv_bias:
            parts = [checkpoint.read(f"{prefix}self_attn.{which}_proj.bias") for which in "qkv"]
            self._bias = np.concatenate(parts)
        self._rotary = Rotary(self._spec, workers.window_len)

    def run(
        self, x: Float32Array, multiply: Multiply, *, on_attention: Callable[[Attended], None] | None = None
    ) -> Float32Array:
        """The layer's output for `x` `[tokens, hidden]`; asks for the products of the four steps in order."""
        apply = self._workers.apply
        query, key, value = self._heads(multiply("qkv", apply(self._norm(self._input_gain), x), None))
        mixed, shares = attend(query, key, value, self._workers)
        if on_attention is not None:
            on_attention(Attended(key, value, shares))
        x = x + multiply("o", mixed, x)
        gate_up = multiply("gate_up", apply(self._norm(self._middle_gain), x), None)
        return x + multiply("down", apply(gated, gate_up), x)

    def _norm(self, gain: Float32Array) -> Callable[[Float32Array], Float32Array]:
        return lambda x: rms_norm(x, gain, self._spec.rms_norm_eps)

    def _heads(self, product: Float32Array) -> tuple[Float32Array, Float32Array, Float32Array]:
        """Queries, keys (both normed and rotated where the family does) and values, `[tokens, heads, head_dim]`."""
        spec = self._spec
        rows = product if self._bias is None else product + self._bias
        ends = np.cumsum([spec.num_heads, spec.num_kv_heads]) * spec.head_dim
        query, key, value = (part.reshape(len(rows), -1, spec.head_dim) for part in np.split(rows, ends, axis=1))

        def prepared(which: str) -> Callable[[Float32Array], Float32Array]:
            norm = self._norm(self._head_gains[which]) if self._head_gains else np.asarray
            return lambda heads: self._rotary.turn(norm(heads))

        apply = self._workers.apply
        return apply(prepared("q"), query), apply(prepared("k"), key), np.ascontiguousarray(value)


class Rotary:
    """The rotary embedding of windows that all begin at position 0."""

    def __init__(self, spec: ModelSpec, window_len: int) -> None:
        cosines, sines = rotary_tables(spec)
        self._cosines, self._sines = (table[:window_len, None, :] for table in (cosines, sines))

    def turn(self, heads: Float32Array) -> Float32Array:
        """`[tokens, heads, head_dim]`, pairs (i, i + head_dim / 2) turned by the angle of their position."""
        half = heads.shape[-1] // 2
        windows = heads.reshape(-1, len(self._cosines), *heads.shape[1:])
        first, second = windows[..., :half], windows[..., half:]
        turned = np.empty_like(windows)
        turned[..., :half] = first * self._cosines - second * self._sines
        turned[..., half:] = second * self._cosines + first * self._sines
        return turned.reshape(heads.shape)


def attend(
    query: Float32Array, key: Float32Array, value: Float32Array, workers: Workers
) -> tuple[Float32Array, Float32Array]:
    """Causal attention inside each window: values mixed `[tokens, heads * head_dim]`, and the shares of `Attended`."""
    window_len = workers.window_len
    shares = np.empty(len(query), np.float32)
    places = np.arange(len(query))[:, None]  # each piece is told where in `shares` it belongs
    mask = np.triu(np.full((window_len, window_len), -np.inf, np.float32), 1)

    def attend_piece(
        query: Float32Array, key: Float32Array, value: Float32Array, places: NDArray[np.intp]
    ) -> Float32Array:
        mixed = np.empty((len(query), query.shape[1] * query.shape[2]), np.float32)
        for start in range(0, len(query), window_len):
            window = slice(start, start + window_len)
            mixed[window], shares[places[window, 0]] = _attend_window(query[window], key[window], value[window], mask)
        return mixed

    return workers.apply(attend_piece, query, key, value, places), shares


def gated(gate_up: Float32Array) -> Float32Array:
    """silu(gate) * up of `[tokens, 2 * inner]`."""
    gate, up = np.split(gate_up, 2, axis=1)
    divisor = np.maximum(gate, np.float32(-80))  # exp of more would overflow; silu there is 0 either way
    np.negative(divisor, out=divisor)
    np.exp(divisor, out=divisor)
    divisor += 1
    result = gate * up
    result /= divisor
    return result


def _attend_window(
    query: Float32Array, key: Float32Array, value: Float32Array, mask: Float32Array
) -> tuple[Float32Array, Float32Array]:
    """(mixed values, shares) of one window; the queries of a key-value head stand one below the other."""
    window_len, num_heads, head_dim = query.shape
    num_kv_heads = key.shape[1]
    grouped = query.transpose(1, 0, 2).reshape(num_kv_heads, -1, head_dim) / np.sqrt(np.float32(head_dim))
    scores = (grouped @ key.transpose(1, 2, 0)).reshape(num_heads, window_len, window_len)
    scores += mask
    scores -= scores.max(axis=-1, keepdims=True)
    np.exp(scores, out=scores)
    scores /= scores.sum(axis=-1, keepdims=True)
    weights = scores.reshape(num_kv_heads, -1, window_len)
    mixed = (weights @ value.transpose(1, 0, 2)).reshape(num_heads, window_len, head_dim)
    return mixed.transpose(1, 0, 2).reshape(window_len, -1), weights.sum(axis=(0, 1)) / num_heads
