"""What a checkpoint is to the importer, whatever its format: a spec, side files and named tensors read one at a time.

Tensor names are the canonical ones below (those of transformers), shapes are `[out, in]` as in a linear layer, rows
of q and k in half-split rotary order. A reader undoes what its format did to them (llama-family GGUF files permute q
and k).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from edgeqwen.core.model import ModelSpec, Pooling, Source
from edgeqwen.core.tensor_names import EMBEDDING, FINAL_NORM, OUTPUT, layer_prefix

Float32Array: TypeAlias = NDArray[np.float32]
Uint8Array: TypeAlias = NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Shape and stored type (`F32`, `F16`, `BF16`, `Q4_0`, ...) of a tensor."""

    shape: tuple[int, ...]
    stored_type: str


@dataclass(frozen=True, slots=True)
class BlockTensor:
    """A tensor `[rows, columns]` as its file quantised it, unrounded: value = scale * (code - zero_point).

    `codes` is uint8 `[rows, columns]` (one code a byte, whatever `bits`), `scales` float32 `[rows, columns / 32]`.
    """

    bits: Literal[4, 8]
    codes: Uint8Array
    scales: Float32Array
    zero_point: int
    block_size: int = 32


@dataclass(frozen=True, slots=True)
class SideFiles:
    """What goes beside the weights: `tokenizer_json` is a `tokenizers` file, `generation_config` may be empty.

    `pooling` is as in `Manifest`.
    """

    tokenizer_json: bytes
    chat_template: str
    generation_config: dict[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    pooling: Pooling | None = None


class Checkpoint(Protocol):
    """A checkpoint opened and validated: every tensor that `spec` needs is there in its shape, and none besides."""

    @property
    def spec(self) -> ModelSpec: ...

    @property
    def source(self) -> Source: ...

    @property
    def side_files(self) -> SideFiles: ...

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """By canonical name."""
        ...

    def read(self, name: str, start: int = 0, stop: int | None = None) -> Float32Array:
        """Rows `[start, stop)` of a tensor as float32 (a new array); raises `ModelInvalid` for NaN or infinity."""
        ...

    def read_blocks(self, name: str, start: int = 0, stop: int | None = None) -> BlockTensor | None:
        """The same rows as stored, if the format can be repacked exactly (Q4_0, Q8_0); else None."""
        ...

    def close(self) -> None: ...


def expected_tensors(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Canonical names and shapes of all tensors that a model of this shape has (`lm_head` only if not tied)."""
    hidden, inner, head_dim = spec.hidden_size, spec.intermediate_size, spec.head_dim
    width = {"q": spec.num_heads * head_dim, "k": spec.num_kv_heads * head_dim, "v": spec.num_kv_heads * head_dim}
    shapes: dict[str, tuple[int, ...]] = {EMBEDDING: (spec.vocab_size, hidden), FINAL_NORM: (hidden,)}
    if not spec.tie_embeddings:
        shapes[OUTPUT] = (spec.vocab_size, hidden)
    for layer in range(spec.num_layers):
        prefix = layer_prefix(layer)
        for name, rows in width.items():
            shapes[f"{prefix}self_attn.{name}_proj.weight"] = (rows, hidden)
            if spec.has_qkv_bias:
                shapes[f"{prefix}self_attn.{name}_proj.bias"] = (rows,)
        if spec.has_qk_norm:
            shapes[prefix + "self_attn.q_norm.weight"] = (head_dim,)
            shapes[prefix + "self_attn.k_norm.weight"] = (head_dim,)
        shapes[prefix + "self_attn.o_proj.weight"] = (hidden, width["q"])
        shapes[prefix + "mlp.gate_proj.weight"] = (inner, hidden)
        shapes[prefix + "mlp.up_proj.weight"] = (inner, hidden)
        shapes[prefix + "mlp.down_proj.weight"] = (hidden, inner)
        shapes[prefix + "input_layernorm.weight"] = (hidden,)
        shapes[prefix + "post_attention_layernorm.weight"] = (hidden,)
    return shapes
