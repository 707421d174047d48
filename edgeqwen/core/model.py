"""What a model is: its shape (`ModelSpec`) and the record of a package (`Manifest`, the file `model.json`)."""

from __future__ import annotations

import re
from typing import Literal

import msgspec

Family = Literal["qwen3", "qwen2", "llama"]
Quant = Literal["fp32", "fp16", "int8", "int4", "hybrid"]
"""Form of the weights; `fp16` is only in graphs that another tool has exported."""

KVType = Literal["fp32", "int8", "bf16", "fp16"]
"""Types of keys and values in the cache; `bf16` is of the torch runtime alone, `fp16` of exported graphs."""

Graph = Literal["own", "optimum"]
"""Who has made a package's graph: this project, or optimum's exporter (then there is one graph, used as it is)."""

Pooling = Literal["last", "mean"]
"""Which hidden states of a text its vector is made of: that of the last token, or the mean of all."""

KV_KINDS = ("key", "value")
"""The two tensors that a layer keeps of a token, in the order of their names `past.LAYER.KIND`."""

Stage = Literal["decode", "prefill"]
WeightForm = Literal["signed", "unsigned"]

FORMAT_VERSION = 2

_QUANT_SUFFIX = re.compile(r"[-._](q\d\w*|iq\d\w*|f16|f32|bf16|fp16|fp32)$", re.IGNORECASE)


def model_name(source_name: str) -> str:
    """What a model is called by default: `SmolLM2-135M-Instruct.Q4_1.gguf` -> `smollm2-135m-instruct`."""
    stem = re.sub(r"\.(gguf|safetensors)$", "", source_name.rstrip("/").split("/")[-1], flags=re.IGNORECASE)
    return re.sub(r"[^a-z0-9._-]+", "-", _QUANT_SUFFIX.sub("", stem).lower()).strip("-.") or "model"


class RopeScaling(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Rotary scaling of type llama3 or linear (factors as in transformers' `modeling_rope_utils`)."""

    rope_type: Literal["linear", "llama3"]
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192


class ModelSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The shape of a decoder of the family, independent of how it is stored.

    `vocab_size` counts the rows of the output matrix; `num_tokens` the ids that have a text (ids from `num_tokens` up
    to `vocab_size` are padding: never sampled, refused in input). `eos_token_ids` ends an answer.
    """

    family: Family
    vocab_size: int
    num_tokens: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position: int
    rms_norm_eps: float
    rope_theta: float
    tie_embeddings: bool
    eos_token_ids: tuple[int, ...]
    rope_scaling: RopeScaling | None = None
    has_qk_norm: bool = False
    has_qkv_bias: bool = False

    @property
    def num_layer_weights(self) -> int:
        """Elements of all layers' matrices together, without embedding and output matrix."""
        attention = 2 * self.hidden_size * self.head_dim * (self.num_heads + self.num_kv_heads)
        return self.num_layers * (attention + 3 * self.hidden_size * self.intermediate_size)

    @property
    def kv_floats_per_token(self) -> int:
        """Elements of key and value cache that one token takes, all layers together."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim


class Source(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where a package came from. `revision` is the hub's commit, pinned; empty for a local file, whose `path` is where
    it lay when it was imported.
    """

    kind: Literal["hub", "modelscope", "safetensors", "gguf", "package", "optimum"]
    id: str
    revision: str = ""
    path: str = ""


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`model.json`: all that a package says of itself.

    `kv_types` are the types of cache that the package has graphs for, the default first. `digests` maps each file of
    the package to `sha256:<hex>`, sizes stand in `sizes` (bytes). `notes` says in words what was filled in or changed
    at import (a missing template, re-quantised tensors). `pooling` is how an embedding model makes its vectors, None
    for a model of another kind.
    """

    name: str
    spec: ModelSpec
    quant: Quant
    target: Literal["any", "vnni", "arm"]
    weight_form: WeightForm
    source: Source
    builder_version: str
    sizes: dict[str, int]
    digests: dict[str, str]
    kv_types: tuple[KVType, ...] = ("fp32",)
    notes: tuple[str, ...] = ()
    pooling: Pooling | None = None
    graph: Graph = "own"
    format_version: int = FORMAT_VERSION
