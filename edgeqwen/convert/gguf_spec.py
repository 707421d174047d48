"""The model's shape out of the metadata of a GGUF file, and the canonical names of its tensors."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Final, cast

import msgspec
import numpy as np

from edgeqwen.convert.checkpoint import Float32Array
from edgeqwen.convert.files import DataFile, Fields
from edgeqwen.convert.gguf_header import GgufHeader, GgufTensor
from edgeqwen.convert.side_files import TextFiles
from edgeqwen.convert.strict import FAMILIES, MAX_LAYERS
from edgeqwen.core.model import Family, ModelSpec, RopeScaling
from edgeqwen.core.tensor_names import EMBEDDING, FINAL_NORM, OUTPUT
from edgeqwen.errors import ModelInvalid

ROPE_FACTORS: Final = "rope_freqs.weight"

WHOLE: Final = {"token_embd.weight": EMBEDDING, "output_norm.weight": FINAL_NORM, "output.weight": OUTPUT}
IN_LAYER: Final = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
LAYER_NAME: Final = re.compile(r"blk\.(0|[1-9][0-9]{0,3})\.([a-z_]+)\.(weight|bias)")


def check_architecture(path: Path, header: GgufHeader) -> Family:
    """The family, or an error that says which kind of file this is; before anything else is looked at."""
    general = Fields(path, header.metadata, prefix="general.")
    architecture = general.string("architecture")
    split = header.metadata.get("split.count", 0)
    if isinstance(split, int) and split > 1:
        part = header.metadata.get("split.no", 0)
        raise ModelInvalid(
            f"{path} is part {part + 1 if isinstance(part, int) else '?'} of {split} of a split model: "
            "join the parts with 'llama-gguf-split --merge' first"
        )
    if architecture is None:
        raise general.error("architecture", "is missing")
    if architecture not in FAMILIES:
        raise ModelInvalid(f"{path}: architecture '{architecture}' is not supported; supported: {', '.join(FAMILIES)}")
    return cast(Family, architecture)


def read_spec(file: DataFile, header: GgufHeader) -> ModelSpec:
    """The shape that metadata and tensors agree on, without what the tokenizer says; raises `ModelInvalid`."""
    path = file.path
    family = check_architecture(path, header)
    fields = Fields(path, header.metadata, prefix=f"{family}.")
    _refuse_variants(fields)
    num_heads = fields.integer("attention.head_count")
    num_kv_heads = fields.integer("attention.head_count_kv", num_heads)
    hidden_size = fields.integer("embedding_length")
    head_dim = _head_dim(fields, header, num_heads=num_heads, hidden_size=hidden_size)
    rope_dims = fields.integer("rope.dimension_count", head_dim)
    if rope_dims != head_dim:
        raise fields.error("rope.dimension_count", f"is {rope_dims}, but heads have {head_dim}: not supported")
    if num_heads % num_kv_heads:
        raise fields.error("attention.head_count_kv", f"is {num_kv_heads}, no divisor of {num_heads} heads")
    theta = fields.number("rope.freq_base", 10000.0)
    vocab_size = _tensor(path, header, "token_embd.weight").shape[0]
    return ModelSpec(
        family=family,
        vocab_size=vocab_size,
        num_tokens=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=fields.integer("feed_forward_length"),
        num_layers=fields.integer("block_count", maximum=MAX_LAYERS),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        max_position=fields.integer("context_length"),
        rms_norm_eps=_rounded(fields.number("attention.layer_norm_rms_epsilon")),
        rope_theta=_rounded(theta),
        tie_embeddings="output.weight" not in header.tensors,
        eos_token_ids=(),
        rope_scaling=_rope_scaling(file, header, fields, theta=theta, head_dim=head_dim),
        has_qk_norm=family == "qwen3",
        has_qkv_bias=family == "qwen2" or "blk.0.attn_q.bias" in header.tensors,
    )


def with_tokens(path: Path, spec: ModelSpec, text: TextFiles) -> ModelSpec:
    """`spec` with the number of real tokens and the end tokens; raises `ModelInvalid` if there are more than rows."""
    if text.num_tokens > spec.vocab_size:
        raise ModelInvalid(
            f"{path}: the tokenizer has {text.num_tokens:,} tokens, 'token_embd.weight' only {spec.vocab_size:,} rows"
        )
    return msgspec.structs.replace(spec, num_tokens=text.num_tokens, eos_token_ids=text.eos_token_ids)


def canonical_names(path: Path, header: GgufHeader, spec: ModelSpec) -> dict[str, str]:
    """The file's tensor name by canonical name; raises `ModelInvalid` for a tensor that has none."""
    names: dict[str, str] = {}
    for name in header.tensors:
        layer = LAYER_NAME.fullmatch(name)
        if name in WHOLE:
            names[WHOLE[name]] = name
        elif layer and layer[2] in IN_LAYER:
            names[f"model.layers.{layer[1]}.{IN_LAYER[layer[2]]}.{layer[3]}"] = name
        elif name != ROPE_FACTORS or spec.rope_scaling is None:
            raise ModelInvalid(f"{path}: tensor '{name}' is not part of a {spec.family} model")
    return names


def stored_name(canonical: str) -> str:
    """The name that GGUF files have for a canonical one."""
    for name, whole in WHOLE.items():
        if whole == canonical:
            return name
    layer, _, rest = canonical.removeprefix("model.layers.").partition(".")
    stem, _, suffix = rest.rpartition(".")
    in_layer = {theirs: name for name, theirs in IN_LAYER.items()}
    return f"blk.{layer}.{in_layer[stem]}.{suffix}"


def _refuse_variants(fields: Fields) -> None:
    """Members of the families that compute something else: mixtures of experts, windowed attention."""
    num_experts = fields.count("expert_count")
    if num_experts:
        raise fields.error("expert_count", f"is {num_experts}: mixtures of experts are not supported")
    window = fields.count("attention.sliding_window")
    if 0 < window < fields.integer("context_length"):
        raise fields.error("attention.sliding_window", f"is {window}: sliding-window attention is not supported")


def _head_dim(fields: Fields, header: GgufHeader, *, num_heads: int, hidden_size: int) -> int:
    if "attention.key_length" in fields:
        head_dim = fields.integer("attention.key_length")
    elif hidden_size % num_heads:
        raise fields.error("attention.key_length", f"is missing and {hidden_size} is no multiple of {num_heads} heads")
    else:
        head_dim = hidden_size // num_heads
    if fields.integer("attention.value_length", head_dim) != head_dim:
        raise fields.error("attention.value_length", f"differs from the key length {head_dim}: not supported")
    rows = _tensor(fields.path, header, "blk.0.attn_q.weight").shape[0]
    if rows != num_heads * head_dim or head_dim % 2:
        raise fields.error(
            "attention.key_length", f"is {head_dim} for {num_heads} heads, but 'blk.0.attn_q.weight' has {rows} rows"
        )
    return head_dim


def _rope_scaling(
    file: DataFile, header: GgufHeader, fields: Fields, *, theta: float, head_dim: int
) -> RopeScaling | None:
    kind = fields.string("rope.scaling.type") or "linear"  # old files give a factor alone
    factor = fields.number("rope.scaling.factor", fields.number("rope.scale_linear", 1.0))
    if kind not in ("none", "linear"):
        raise fields.error("rope.scaling.type", f"is '{kind}'; supported: none, linear")
    is_linear = kind == "linear" and factor != 1.0
    factors = header.tensors.get(ROPE_FACTORS)
    if factors is None:
        return RopeScaling("linear", factor) if is_linear else None
    if is_linear or factors.shape != (head_dim // 2,) or factors.type.name != "F32":
        raise ModelInvalid(f"{file.path}: tensor '{ROPE_FACTORS}' is not of a kind that is supported")
    stored = file.read(factors.offset, factors.num_bytes).view("<f4").astype(np.float32)
    return llama3_scaling(file.path, stored, theta)


def llama3_scaling(path: Path, factors: Float32Array, theta: float) -> RopeScaling | None:
    """The llama3 scaling that gives these divisors of the frequencies (`[head_dim / 2]`).

    The file holds only the result, computed as in `modeling_rope_utils` of transformers: 1 for wave lengths below
    `original / high`, `factor` for those above `original / low`, interpolated between. `low` 1, `high` 4 and `original`
    8192 are what the Llama 3 models use; other divisors are refused.
    """
    scaling = RopeScaling("llama3", _rounded(float(factors.max())))
    if not np.isfinite(factors).all() or scaling.factor < 1.0:
        raise ModelInvalid(f"{path}: tensor '{ROPE_FACTORS}' holds no usable factors")
    if scaling.factor == 1.0 and factors.min() == 1.0:
        return None
    wave = 2 * math.pi * theta ** (np.arange(len(factors)) / len(factors))
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    smooth = np.clip((scaling.original_max_position / wave - low) / (high - low), 0.0, 1.0)
    expected = 1.0 / ((1.0 - smooth) / scaling.factor + smooth)
    if not np.allclose(factors, expected, rtol=1e-3):
        raise ModelInvalid(f"{path}: tensor '{ROPE_FACTORS}' scales the rotation in a way that is not supported")
    return scaling


def _tensor(path: Path, header: GgufHeader, name: str) -> GgufTensor:
    if name not in header.tensors:
        raise ModelInvalid(f"{path}: tensor '{name}' is missing")
    return header.tensors[name]


def _rounded(value: float) -> float:
    """A float32 of the file as the decimal number that was meant: 1e-06, not 9.99999997e-07."""
    return float(np.format_float_positional(np.float32(value), unique=True))
