"""A model folder of Qwen3-0.6B's exact shape with random weights, and its GGUF forms: right for speed and memory.

    python benchmarks/_standin.py OUT_DIR [--layers 28]

Speed does not depend on the values; text does, and is noise. Needs no torch. The tokenizer is made up: only its size
counts.
"""

from __future__ import annotations

import argparse
import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray

from edgeqwen.convert.checkpoint import EMBEDDING, FINAL_NORM, expected_tensors
from edgeqwen.core.model import ModelSpec

ROWS_AT_ONCE = 8192
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


def standin_spec(num_layers: int = 28) -> ModelSpec:
    """Qwen3-0.6B's published shape."""
    return ModelSpec(
        family="qwen3",
        vocab_size=151936,
        num_tokens=151669,
        hidden_size=1024,
        intermediate_size=3072,
        num_layers=num_layers,
        num_heads=16,
        num_kv_heads=8,
        head_dim=128,
        max_position=40960,
        rms_norm_eps=1e-6,
        rope_theta=1e6,
        tie_embeddings=True,
        eos_token_ids=(151645, 151643),
        has_qk_norm=True,
    )


def weights(name: str, shape: tuple[int, ...]) -> Iterator[NDArray[np.float32]]:
    """A tensor's values, some rows at a time; the same on every call."""
    draw = np.random.default_rng([len(name), *name.encode()])
    if name.endswith("norm.weight"):
        yield np.ones(shape, np.float32)
        return
    for start in range(0, shape[0], ROWS_AT_ONCE):
        rows = min(ROWS_AT_ONCE, shape[0] - start)
        yield draw.standard_normal((rows, shape[1]), np.float32) * np.float32(0.02)


def bfloat16(values: NDArray[np.float32]) -> bytes:
    return (values.view(np.uint32) >> 16).astype(np.uint16).tobytes()


def write_folder(out: Path, spec: ModelSpec) -> None:
    """config.json, tokenizer.json and bf16 weights, as the hub has them."""
    out.mkdir(parents=True, exist_ok=True)
    header: dict[str, Any] = {}
    offset = 0
    for name, shape in expected_tensors(spec).items():
        size = 2 * int(np.prod(shape))
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with (out / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for name, shape in expected_tensors(spec).items():
            for piece in weights(name, shape):
                file.write(bfloat16(piece))
    (out / "config.json").write_text(json.dumps(config(spec)))
    (out / "tokenizer.json").write_text(json.dumps(tokenizer(spec)))


def config(spec: ModelSpec) -> dict[str, Any]:
    return {
        "model_type": "qwen3",
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
        "rope_scaling": None,
        "tie_word_embeddings": True,
        "eos_token_id": spec.eos_token_ids[0],
        "torch_dtype": "bfloat16",
    }


def tokenizer(spec: ModelSpec) -> dict[str, Any]:
    """Byte-level BPE without merges: 256 byte tokens, the rest never produced by text but with a text of their own."""
    alphabet = [chr(code) for code in (*range(33, 127), *range(161, 173), *range(174, 256), *range(256, 324))]
    texts = alphabet + [f"token{index}" for index in range(len(alphabet), spec.num_tokens)]
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": True}
    return {
        "version": "1.0",
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": level,
        "post_processor": None,
        "decoder": level,
        "model": {"type": "BPE", "vocab": {text: index for index, text in enumerate(texts)}, "merges": []},
    }


def write_gguf(path: Path, spec: ModelSpec) -> None:
    """The same weights as an F16 GGUF file, for peers that quantise it themselves."""
    writer = gguf.GGUFWriter(path, "qwen3")
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
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_F16)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    texts = list(tokenizer(spec)["model"]["vocab"])
    writer.add_token_list(texts + [f"[PAD{index}]" for index in range(len(texts), spec.vocab_size)])
    writer.add_token_types([gguf.TokenType.NORMAL] * spec.vocab_size)
    writer.add_token_merges(["! !"])
    writer.add_eos_token_id(spec.eos_token_ids[0])
    for name, shape in expected_tensors(spec).items():
        values = np.concatenate(list(weights(name, shape)))
        writer.add_tensor(gguf_name(name), values if values.ndim == 1 else values.astype(np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def gguf_name(name: str) -> str:
    whole = {EMBEDDING: "token_embd.weight", FINAL_NORM: "output_norm.weight"}
    if name in whole:
        return whole[name]
    layer, rest = name.removeprefix("model.layers.").split(".", 1)
    stem, kind = rest.rsplit(".", 1)
    return f"blk.{layer}.{GGUF_NAMES[stem]}.{kind}"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--layers", type=int, default=28)
    arguments = parser.parse_args()
    write_folder(arguments.out, standin_spec(arguments.layers))
