"""Tiny models of random weights, written as the hub and as converters write real ones: folders and GGUF files.

The tokenizer is byte-level BPE with a few merges made by hand, so it is the same in every version of the library. The
vocabulary has rows without a token at its end, as Qwen's has.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import gguf
import numpy as np
from numpy.typing import NDArray
from tokenizers import pre_tokenizers

from edgeqwen.convert.checkpoint import expected_tensors
from edgeqwen.core.model import Family, ModelSpec, RopeScaling
from edgeqwen.core.tensor_names import EMBEDDING, FINAL_NORM, OUTPUT

Array = NDArray[np.float32]
Dtype = Literal["F32", "F16", "BF16"]

WORDS = ("the", "and", "ing", "hello", "world", "def", "return", "user", "assistant", "system", "sky", "blue", "you")
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
USER_DEFINED = ("<tool_call>", "</tool_call>", "<think>", "</think>")
QWEN2_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
GGUF_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def tiny_vocabulary() -> tuple[list[str], list[tuple[str, str]]]:
    """Texts of the plain tokens in id order, and merges that build `WORDS` from left to right, also after a space."""
    texts = sorted(pre_tokenizers.ByteLevel.alphabet())
    known, merges = set(texts), []
    for word in [prefix + each for each in WORDS for prefix in ("", "\u0120")]:
        for length in range(2, len(word) + 1):
            if word[:length] not in known:
                known.add(word[:length])
                texts.append(word[:length])
                merges.append((word[: length - 1], word[length - 1]))
    return texts, merges


def tiny_num_tokens() -> int:
    return len(tiny_vocabulary()[0]) + len(SPECIAL) + len(USER_DEFINED)


def tiny_tokenizer_json() -> dict[str, Any]:
    """The content of `tokenizer.json`, of the kind of Qwen's."""
    texts, merges = tiny_vocabulary()
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    split = {"type": "Split", "pattern": {"Regex": QWEN2_PATTERN}, "behavior": "Isolated", "invert": False}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    added = [
        {"id": len(texts) + index, "content": text, **flags, "special": text in SPECIAL}
        for index, text in enumerate(SPECIAL + USER_DEFINED)
    ]
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": {"type": "NFC"},
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, byte_level]},
        "post_processor": byte_level,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": "",
            "end_of_word_suffix": "",
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {text: index for index, text in enumerate(texts)},
            "merges": [list(pair) for pair in merges],
        },
    }


def tiny_spec(family: Family = "qwen3", *, tie: bool = True, **shape: Any) -> ModelSpec:
    """A shape with grouped heads, of a size that `hidden_size / num_heads` does not give; `shape` overrides members."""
    num_tokens = tiny_num_tokens()
    first_special = len(tiny_vocabulary()[0])
    values: dict[str, Any] = {
        "family": family,
        "vocab_size": -(-(num_tokens + 5) // 32) * 32,
        "num_tokens": num_tokens,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_layers": 2,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 32,
        "max_position": 4096,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0 if family.startswith("qwen") else 10000.0,
        "tie_embeddings": tie,
        "eos_token_ids": (first_special + 2, first_special),
        "has_qk_norm": family == "qwen3",
        "has_qkv_bias": family == "qwen2",
    }
    return ModelSpec(**{**values, **shape})


def random_tensors(spec: ModelSpec, *, seed: int = 0) -> dict[str, Array]:
    """Weights by canonical name, of a size that keeps activations near one."""
    draw = np.random.default_rng(seed)
    tensors: dict[str, Array] = {}
    for name, shape in expected_tensors(spec).items():
        values = draw.standard_normal(shape)
        if name.endswith("norm.weight"):
            values = 1.0 + 0.1 * values
        elif name.endswith(".bias"):
            values = 0.1 * values
        else:
            values = values / np.sqrt(shape[-1])
        tensors[name] = values.astype(np.float32)
    return tensors


def encode(values: Array, dtype: Dtype) -> bytes:
    """Little-endian bytes; BF16 by cutting off the lower half."""
    if dtype == "BF16":
        return (np.ascontiguousarray(values, "<f4").view("<u4") >> 16).astype("<u2").tobytes()
    return values.astype("<f4" if dtype == "F32" else "<f2").tobytes()


def rounded(values: Array, dtype: Dtype) -> Array:
    """What a reader must get back for `encode(values, dtype)`."""
    if dtype == "BF16":
        return (values.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)
    return values.astype(np.float16).astype(np.float32) if dtype == "F16" else values


def safetensors_bytes(tensors: dict[str, Array], dtype: Dtype = "F32") -> bytes:
    """A safetensors file."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    data = b""
    for name, values in tensors.items():
        encoded = encode(values, dtype)
        header[name] = {"dtype": dtype, "shape": values.shape, "data_offsets": [len(data), len(data) + len(encoded)]}
        data += encoded
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + data


def config_json(spec: ModelSpec, *, is_new_form: bool = False) -> dict[str, Any]:
    """`config.json` as most of the hub has it, or as transformers 5 writes it."""
    config: dict[str, Any] = {
        "architectures": [f"{spec.family.capitalize()}ForCausalLM"],
        "model_type": spec.family,
        "vocab_size": spec.vocab_size,
        "hidden_size": spec.hidden_size,
        "intermediate_size": spec.intermediate_size,
        "num_hidden_layers": spec.num_layers,
        "num_attention_heads": spec.num_heads,
        "num_key_value_heads": spec.num_kv_heads,
        "head_dim": spec.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": spec.max_position,
        "rms_norm_eps": spec.rms_norm_eps,
        "tie_word_embeddings": spec.tie_embeddings,
        "eos_token_id": spec.eos_token_ids[0],
        "attention_bias": False,
    }
    if spec.family == "qwen2":
        del config["attention_bias"]
    scaling = _scaling_json(spec.rope_scaling)
    if is_new_form:
        config["rope_parameters"] = {"rope_theta": spec.rope_theta, **(scaling or {"rope_type": "default"})}
        config["dtype"] = "float32"
    else:
        config |= {"rope_theta": spec.rope_theta, "rope_scaling": scaling, "torch_dtype": "float32"}
    return config


def _scaling_json(scaling: RopeScaling | None) -> dict[str, Any] | None:
    if scaling is None:
        return None
    if scaling.rope_type == "linear":
        return {"rope_type": "linear", "factor": scaling.factor}
    return {
        "rope_type": "llama3",
        "factor": scaling.factor,
        "low_freq_factor": scaling.low_freq_factor,
        "high_freq_factor": scaling.high_freq_factor,
        "original_max_position_embeddings": scaling.original_max_position,
    }


def write_safetensors_model(
    folder: Path,
    *,
    family: Family = "qwen3",
    seed: int = 0,
    tie: bool = True,
    dtype: Dtype = "F32",
    num_shards: int = 1,
    is_new_form: bool = False,
    **shape: Any,
) -> ModelSpec:
    """Write a folder that transformers can load too; returns the shape it has."""
    spec = tiny_spec(family, tie=tie, **shape)
    tensors = random_tensors(spec, seed=seed)
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "config.json", config_json(spec, is_new_form=is_new_form))
    write_json(folder / "tokenizer.json", tiny_tokenizer_json())
    write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "chat_template": CHAT_TEMPLATE,
            "eos_token": "<|im_end|>",
            "bos_token": None,
        },
    )
    write_json(folder / "generation_config.json", {"eos_token_id": list(spec.eos_token_ids), "do_sample": False})
    if num_shards == 1:
        (folder / "model.safetensors").write_bytes(safetensors_bytes(tensors, dtype))
        return spec
    weight_map: dict[str, str] = {}
    for index in range(num_shards):
        name = f"model-{index + 1:05}-of-{num_shards:05}.safetensors"
        part = dict(list(tensors.items())[index::num_shards])
        (folder / name).write_bytes(safetensors_bytes(part, dtype))
        weight_map |= dict.fromkeys(part, name)
    write_json(folder / "model.safetensors.index.json", {"metadata": {}, "weight_map": weight_map})
    return spec


def write_gguf_model(
    path: Path,
    *,
    family: Family = "qwen3",
    seed: int = 0,
    tie: bool = True,
    stored_type: str = "F32",
    tokenizer: bool = True,
    metadata: Mapping[str, int] | None = None,
    **shape: Any,
) -> ModelSpec:
    """Write a GGUF file of the weights that `write_safetensors_model` writes for the same arguments, as converters do.

    Matrices are stored as `stored_type` (one that the `gguf` package can quantise to), vectors as F32. `metadata` is
    further.
    """
    spec = tiny_spec(family, tie=tie, **shape)
    path.parent.mkdir(parents=True, exist_ok=True)
    writer = gguf.GGUFWriter(path, family)
    add_gguf_shape(writer, spec)
    if tokenizer:
        add_gguf_tokenizer(writer, spec)
    for key, value in (metadata or {}).items():
        if isinstance(value, bool):
            writer.add_bool(key, value)
        else:
            writer.add_uint32(key, value)
    kind = gguf.GGMLQuantizationType[stored_type]
    for name, canonical in random_tensors(spec, seed=seed).items():
        values = canonical
        if family == "llama" and (".q_proj." in name or ".k_proj." in name):
            values = permuted(canonical, spec.num_heads if ".q_proj." in name else spec.num_kv_heads)
        if values.ndim == 1:
            writer.add_tensor(gguf_name(name), values)
        else:
            writer.add_tensor(gguf_name(name), gguf.quants.quantize(values, kind), raw_dtype=kind)
    if spec.rope_scaling and spec.rope_scaling.rope_type == "llama3":
        writer.add_tensor("rope_freqs.weight", llama3_factors(spec))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return spec


def add_gguf_shape(writer: gguf.GGUFWriter, spec: ModelSpec) -> None:
    writer.add_context_length(spec.max_position)
    writer.add_embedding_length(spec.hidden_size)
    writer.add_block_count(spec.num_layers)
    writer.add_feed_forward_length(spec.intermediate_size)
    writer.add_head_count(spec.num_heads)
    writer.add_head_count_kv(spec.num_kv_heads)
    writer.add_key_length(spec.head_dim)
    writer.add_value_length(spec.head_dim)
    writer.add_rope_freq_base(spec.rope_theta)
    writer.add_layer_norm_rms_eps(spec.rms_norm_eps)
    if spec.rope_scaling and spec.rope_scaling.rope_type == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(spec.rope_scaling.factor)


def add_gguf_tokenizer(writer: gguf.GGUFWriter, spec: ModelSpec, *, pre: str | None = "qwen2") -> None:
    """The tokenizer of `tiny_tokenizer_json`, and a chat template."""
    plain, merges = tiny_vocabulary()
    texts = [*plain, *SPECIAL, *USER_DEFINED]
    types = [gguf.TokenType.NORMAL] * len(plain) + [gguf.TokenType.CONTROL] * len(SPECIAL)
    types += [gguf.TokenType.USER_DEFINED] * len(USER_DEFINED)
    padding = range(len(texts), spec.vocab_size)
    writer.add_tokenizer_model("gpt2")
    if pre is not None:
        writer.add_tokenizer_pre(pre)
    writer.add_token_list(texts + [f"[PAD{index}]" for index in padding])
    writer.add_token_types(types + [gguf.TokenType.UNUSED for _ in padding])
    writer.add_token_merges([" ".join(pair) for pair in merges])
    writer.add_eos_token_id(spec.eos_token_ids[0])
    writer.add_bos_token_id(spec.eos_token_ids[-1])
    writer.add_add_bos_token(True)
    writer.add_chat_template(CHAT_TEMPLATE)


def gguf_name(name: str) -> str:
    whole = {EMBEDDING: "token_embd.weight", FINAL_NORM: "output_norm.weight", OUTPUT: "output.weight"}
    if name in whole:
        return whole[name]
    layer, rest = name.removeprefix("model.layers.").split(".", 1)
    stem, suffix = rest.rsplit(".", 1)
    return f"blk.{layer}.{GGUF_NAMES[stem]}.{suffix}"


def permuted(values: Array, num_heads: int) -> Array:
    """Rows of q or k as llama-family GGUF files order them: pairs of the rotation side by side."""
    halves = values.reshape(num_heads, 2, -1, *values.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(values.shape))


def llama3_factors(spec: ModelSpec) -> Array:
    """Divisors of the frequencies as `convert_hf_to_gguf` writes them."""
    scaling = spec.rope_scaling
    assert scaling is not None
    factors = []
    for frequency in spec.rope_theta ** -(np.arange(0, spec.head_dim, 2) / spec.head_dim):
        wave = 2 * np.pi / frequency
        if wave < scaling.original_max_position / scaling.high_freq_factor:
            factors.append(1.0)
        elif wave > scaling.original_max_position / scaling.low_freq_factor:
            factors.append(scaling.factor)
        else:
            span = scaling.high_freq_factor - scaling.low_freq_factor
            smooth = (scaling.original_max_position / wave - scaling.low_freq_factor) / span
            factors.append(1 / ((1 - smooth) / scaling.factor + smooth))
    return np.array(factors, np.float32)


def write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value), encoding="utf-8")
