"""A model folder of Qwen3-0.6B's exact shape with random weights, and its GGUF forms: right for speed and memory.

    python -m benchmarks._standin OUT_DIR [--layers 28]

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
import msgspec
import numpy as np
from numpy.typing import NDArray

from edgeqwen.convert.checkpoint import expected_tensors
from edgeqwen.core.model import ModelSpec
from edgeqwen.doctor.package import QWEN3
from tests.checkpoints import add_gguf_shape, config_json, encode, gguf_name

ROWS_AT_ONCE = 8192
NUM_LAYERS = 28


def standin_spec(num_layers: int = NUM_LAYERS) -> ModelSpec:
    """Qwen3-0.6B's published shape."""
    return msgspec.structs.replace(QWEN3, num_layers=num_layers)


def weights(name: str, shape: tuple[int, ...]) -> Iterator[NDArray[np.float32]]:
    """A tensor's values, some rows at a time; the same on every call."""
    draw = np.random.default_rng([len(name), *name.encode()])
    if name.endswith("norm.weight"):
        yield np.ones(shape, np.float32)
        return
    for start in range(0, shape[0], ROWS_AT_ONCE):
        rows = min(ROWS_AT_ONCE, shape[0] - start)
        yield draw.standard_normal((rows, shape[1]), np.float32) * np.float32(0.02)


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
                file.write(encode(piece, "BF16"))
    (out / "config.json").write_text(json.dumps(config_json(spec)))
    (out / "tokenizer.json").write_text(json.dumps(tokenizer(spec)))
    template = "{% for message in messages %}{{ message.content }}\n{% endfor %}"
    beside = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "!", "pad_token": "!"}
    beside["chat_template"] = template
    (out / "tokenizer_config.json").write_text(json.dumps(beside))


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
    add_gguf_shape(writer, spec)
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


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--layers", type=int, default=NUM_LAYERS)
    arguments = parser.parse_args()
    write_folder(arguments.out, standin_spec(arguments.layers))
