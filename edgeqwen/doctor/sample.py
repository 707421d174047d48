"""A checkpoint of a few layers of a model's shape, with random weights: enough to compare runtimes by."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
from tokenizers import pre_tokenizers

from edgeqwen.convert.checkpoint import expected_tensors
from edgeqwen.core.model import ModelSpec

NUM_LAYERS: Final = 2


def write_sample(folder: Path, spec: ModelSpec) -> ModelSpec:
    """Write safetensors, configuration and a tokenizer of single bytes to `folder`; returns the shape that was cut."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    cut = msgspec.structs.replace(
        spec,
        num_layers=NUM_LAYERS,
        vocab_size=len(alphabet),
        num_tokens=len(alphabet),
        tie_embeddings=True,
        rope_scaling=None,
        eos_token_ids=(0,),
    )
    folder.mkdir(parents=True, exist_ok=True)
    _write_json(folder / "config.json", _config(cut))
    _write_json(folder / "tokenizer.json", _tokenizer(alphabet))
    _write_json(folder / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast"})
    _write_weights(folder / "model.safetensors", cut)
    return cut


def _config(spec: ModelSpec) -> dict[str, Any]:
    config = {
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
        "rope_theta": spec.rope_theta,
        "tie_word_embeddings": True,
        "eos_token_id": 0,
        "torch_dtype": "bfloat16",
    }
    return config if spec.family == "qwen2" else config | {"attention_bias": False}


def _tokenizer(alphabet: list[str]) -> dict[str, Any]:
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    return {
        "version": "1.0",
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": byte_level,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "vocab": {text: index for index, text in enumerate(alphabet)},
            "merges": [],
            "byte_fallback": False,
            "ignore_merges": False,
        },
    }


def _write_weights(path: Path, spec: ModelSpec) -> None:
    """bf16, by cutting off the lower half of floats."""
    draw = np.random.default_rng(0)
    header: dict[str, Any] = {}
    parts, offset = [], 0
    for name, shape in expected_tensors(spec).items():
        values = draw.standard_normal(shape, np.float32) / np.float32(np.sqrt(shape[-1]))
        part = ((1 + values if len(shape) == 1 else values).astype("<f4").view("<u4") >> 16).astype("<u2").tobytes()
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [offset, offset + len(part)]}
        parts.append(part)
        offset += len(part)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(parts))


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content), encoding="utf-8")
