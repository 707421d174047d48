"""A model off every quantisation grid: the same function, its inside turned by random rotations.

A checkpoint that was quantised once makes formats that can repeat its grid look better than they are. So its weights
are read as float32 and rotated: the residual stream by one orthogonal matrix R, the values of each attention head by
another. With the norms' gains folded into the matrices behind them the root-mean-square norm commutes with R, so the
function stays the same up to rounding while no weight stays on its grid.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import numpy as np
from numpy.typing import NDArray

from edgeqwen.convert.checkpoint import Checkpoint, expected_tensors
from edgeqwen.core.model import ModelSpec
from edgeqwen.core.tensor_names import EMBEDDING, FINAL_NORM, OUTPUT

SEED = 20240607
Doubles = NDArray[np.float64]
Weights = dict[str, NDArray[np.float32]]


def orthogonal(draw: np.random.Generator, size: int) -> Doubles:
    """A rotation drawn uniformly: Q of a Gaussian matrix, with the signs that make the factorisation unique."""
    q, r = np.linalg.qr(draw.standard_normal((size, size)))
    return np.asarray(q * np.sign(np.diagonal(r)))


def rotate(checkpoint: Checkpoint, *, seed: int = SEED) -> tuple[ModelSpec, Weights]:
    """The same function in other weights. The output matrix is its own afterwards: it carries the last norm's gain."""
    spec = checkpoint.spec
    if spec.has_qkv_bias:
        raise SystemExit("a model with biases in its attention cannot be rotated here")
    draw = np.random.default_rng(seed)
    turn = orthogonal(draw, spec.hidden_size)
    read = _Reader(checkpoint)
    weights: Weights = {}
    embedding = read(EMBEDDING)
    head = embedding if spec.tie_embeddings else read(OUTPUT)
    weights[EMBEDDING] = _single(embedding @ turn)
    weights[OUTPUT] = _single((head * read(FINAL_NORM)) @ turn)
    weights[FINAL_NORM] = np.ones(spec.hidden_size, np.float32)
    for layer in range(spec.num_layers):
        prefix = f"model.layers.{layer}."
        weights.update({prefix + name: _single(values) for name, values in _layer(read, prefix, spec, turn, draw)})
    untied = msgspec.structs.replace(spec, tie_embeddings=False)
    assert set(weights) == set(expected_tensors(untied))
    return untied, weights


class _Reader:
    """Tensors of a checkpoint as doubles."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint

    def __call__(self, name: str) -> Doubles:
        return self._checkpoint.read(name).astype(np.float64)


def _layer(
    read: _Reader, prefix: str, spec: ModelSpec, turn: Doubles, draw: np.random.Generator
) -> Iterator[tuple[str, Doubles]]:
    """Names below `prefix` and rotated tensors of one layer."""
    gains = {name: read(f"{prefix}{name}.weight") for name in ("input_layernorm", "post_attention_layernorm")}
    into = {
        "input_layernorm": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        "post_attention_layernorm": ("mlp.gate_proj", "mlp.up_proj"),
    }
    rotated = {
        f"{name}.weight": (read(f"{prefix}{name}.weight") * gains[norm]) @ turn
        for norm, names in into.items()
        for name in names
    }
    for name in ("self_attn.o_proj", "mlp.down_proj"):
        rotated[f"{name}.weight"] = turn.T @ read(f"{prefix}{name}.weight")
    _turn_values(rotated, spec, draw)
    yield from rotated.items()
    for norm in into:
        yield f"{norm}.weight", np.ones(spec.hidden_size)
    if spec.has_qk_norm:
        for name in ("self_attn.q_norm.weight", "self_attn.k_norm.weight"):
            yield name, read(prefix + name)


def _turn_values(rotated: dict[str, Doubles], spec: ModelSpec, draw: np.random.Generator) -> None:
    """Each value head gets a rotation of its own, which the query heads that read it undo in the output matrix."""
    values = rotated["self_attn.v_proj.weight"].reshape(spec.num_kv_heads, spec.head_dim, -1)
    outputs = rotated["self_attn.o_proj.weight"].reshape(spec.hidden_size, spec.num_heads, spec.head_dim)
    group = spec.num_heads // spec.num_kv_heads
    for head in range(spec.num_kv_heads):
        turn = orthogonal(draw, spec.head_dim)
        values[head] = turn.T @ values[head]
        outputs[:, head * group : (head + 1) * group] = outputs[:, head * group : (head + 1) * group] @ turn
    rotated["self_attn.v_proj.weight"] = values.reshape(-1, spec.hidden_size)
    rotated["self_attn.o_proj.weight"] = outputs.reshape(spec.hidden_size, -1)


def _single(values: Doubles) -> NDArray[np.float32]:
    return np.ascontiguousarray(values, np.float32)
