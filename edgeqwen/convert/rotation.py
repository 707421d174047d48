"""A checkpoint of the same function whose weights and activations are spread out evenly.

A few channels of a decoder's residual stream carry values a hundred times the rest, and a scale shared with them leaves
the rest with few steps. The stream's basis is arbitrary, though: with R orthogonal, `x R` in place of x everywhere
changes nothing, provided that whoever writes into the stream multiplies by R and whoever reads from it by its
transpose. Root mean square norms commute with R once their gains are folded into the matrices that follow them
(Ashkboos et al., "QuaRot", 2024). So all of it is done to the weights, here, and costs nothing when running:

    embedding, rows of o and down     W -> W R       (they write)
    q, k, v, gate, up, output matrix  W -> W G R     (they read; G the gains of the norm before, which become 1)
    v of a key-value head             W -> S^T W     (the values' basis is as arbitrary; S is one matrix a head)
    o of that head's queries          W -> W S

Where embedding and output matrix are one tensor, that can take no gains; they stand in a small matrix before it,
R^T G R, that what leaves the final norm is multiplied with. Whoever wants hidden states as the model's own multiplies
what leaves the final norm with G R.

R is a Hadamard matrix, whose entries are all of one size and so spread best, times random signs. Sizes that are no
power of two are a power of two times an odd number; for the odd part the discrete Hartley transform does, which is real
and orthogonal for any size.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from edgeqwen.convert.checkpoint import BlockTensor, Checkpoint, Float32Array, SideFiles, TensorInfo
from edgeqwen.core.model import ModelSpec, Source
from edgeqwen.core.tensor_names import EMBEDDING, FINAL_NORM, HIDDEN_TURN, OUTPUT, OUTPUT_TURN


def orthogonal(size: int, rng: np.random.Generator) -> Float32Array:
    """An orthogonal matrix `[size, size]` that spreads every unit vector over all of its entries."""
    hadamard = np.ones((1, 1))
    while size % (2 * len(hadamard)) == 0:
        hadamard = np.block([[hadamard, hadamard], [hadamard, -hadamard]])
    odd = size // len(hadamard)
    angles = 2 * np.pi * np.outer(np.arange(odd), np.arange(odd)) / odd
    spread = np.kron(hadamard, np.cos(angles) + np.sin(angles)) / np.sqrt(size)
    signs = rng.choice(np.array([-1.0, 1.0]), size)
    return np.asarray(signs[:, None] * spread, np.float32)


class RotatedCheckpoint:
    """`Checkpoint` over another one. Owns nothing: closing it closes the other."""

    def __init__(self, inner: Checkpoint, *, seed: int = 0) -> None:
        rng = np.random.default_rng(seed)
        spec = inner.spec
        self._inner = inner
        self._spec = spec
        self._residual = orthogonal(spec.hidden_size, rng)
        heads = [orthogonal(spec.head_dim, rng) for _ in range(spec.num_layers * spec.num_kv_heads)]
        self._heads = np.stack(heads).reshape(spec.num_layers, spec.num_kv_heads, spec.head_dim, spec.head_dim)
        self._tensors = dict(inner.tensors)
        if spec.tie_embeddings:
            self._tensors[OUTPUT_TURN] = TensorInfo((spec.hidden_size, spec.hidden_size), "F32")
        self._tensors[HIDDEN_TURN] = TensorInfo((spec.hidden_size, spec.hidden_size), "F32")

    @property
    def spec(self) -> ModelSpec:
        return self._spec

    @property
    def source(self) -> Source:
        return self._inner.source

    @property
    def side_files(self) -> SideFiles:
        return self._inner.side_files

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        return self._tensors

    def read(self, name: str, start: int = 0, stop: int | None = None) -> Float32Array:
        stop = self._tensors[name].shape[0] if stop is None else stop
        if name == EMBEDDING:
            return self._inner.read(EMBEDDING, start, stop) @ self._residual
        if name == OUTPUT:
            return self._reading(OUTPUT, FINAL_NORM, start, stop)
        if name == OUTPUT_TURN:
            return np.asarray((self._residual.T[start:stop] * self._inner.read(FINAL_NORM)) @ self._residual)
        if name == HIDDEN_TURN:
            return np.asarray(self._inner.read(FINAL_NORM)[start:stop, None] * self._residual[start:stop])
        if name == FINAL_NORM or name.endswith("layernorm.weight"):
            return np.ones(stop - start, np.float32)
        return self._read_layer(name, start, stop)

    def read_blocks(self, name: str, start: int = 0, stop: int | None = None) -> BlockTensor | None:
        """None: what was on a grid is on it no more."""
        return None

    def close(self) -> None:
        self._inner.close()

    def _read_layer(self, name: str, start: int, stop: int) -> Float32Array:
        prefix, part = name[: name.index(".", len("model.layers.")) + 1], name.split(".", 3)[3]
        layer = int(name.split(".")[2])
        if part in {"mlp.gate_proj.weight", "mlp.up_proj.weight"}:
            return self._reading(name, prefix + "post_attention_layernorm.weight", start, stop)
        if part in {"self_attn.q_proj.weight", "self_attn.k_proj.weight"}:
            return self._reading(name, prefix + "input_layernorm.weight", start, stop)
        if part == "self_attn.v_proj.weight":
            rows = self._reading(name, prefix + "input_layernorm.weight", 0, self._tensors[name].shape[0])
            return self._values(layer, rows)[start:stop]
        if part == "self_attn.v_proj.bias":
            return self._values(layer, self._inner.read(name)[:, None])[start:stop, 0]
        if part == "self_attn.o_proj.weight":
            return self._residual.T[start:stop] @ self._queries(layer, self._inner.read(name))
        if part == "mlp.down_proj.weight":
            return self._residual.T[start:stop] @ self._inner.read(name)
        return self._inner.read(name, start, stop)

    def _reading(self, stored: str, norm: str, start: int, stop: int) -> Float32Array:
        """Rows of a matrix that reads the residual stream behind a norm."""
        return np.asarray((self._inner.read(stored, start, stop) * self._inner.read(norm)) @ self._residual)

    def _values(self, layer: int, rows: Float32Array) -> Float32Array:
        """`[kv_heads * head_dim, ...]` with each head in its new basis."""
        heads = rows.reshape(self._spec.num_kv_heads, self._spec.head_dim, -1)
        return np.asarray((self._heads[layer].transpose(0, 2, 1) @ heads).reshape(rows.shape))

    def _queries(self, layer: int, columns: Float32Array) -> Float32Array:
        """`[hidden, heads * head_dim]`, the columns of each query head in its key-value head's basis."""
        spec = self._spec
        shape = (len(columns), spec.num_kv_heads, spec.num_heads // spec.num_kv_heads, spec.head_dim)
        turned = np.einsum("rkgd,kde->rkge", columns.reshape(shape), self._heads[layer], optimize=True)
        return np.ascontiguousarray(turned.reshape(columns.shape), np.float32)
