"""What optimum exports and what it and transformers compute; runs in optimum's environment, without this project.

python tests/exported_reference.py export MODEL FOLDER [fp16]     -> as `optimum-cli export onnx` with past
python tests/exported_reference.py quantize FOLDER OUT            -> a copy with dynamically quantised weights
python tests/exported_reference.py logits MODEL IDS.npy OUT.npy   -> logits `[tokens, vocabulary]` by transformers
python tests/exported_reference.py ort FOLDER IDS.npy OUT.npy     -> the same by ORTModelForCausalLM, token by token
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch


def export(model: Path, folder: Path, dtype: str = "fp32") -> None:
    from optimum.exporters.onnx import main_export

    main_export(str(model), folder, task="text-generation-with-past", dtype=dtype)


def quantize(folder: Path, out: Path) -> None:
    from optimum.onnxruntime import AutoQuantizationConfig, ORTQuantizer

    settings = AutoQuantizationConfig.avx512_vnni(is_static=False, per_channel=False)
    ORTQuantizer.from_pretrained(folder).quantize(save_dir=out, quantization_config=settings)


def reference_logits(model: Path, ids: list[int]) -> Any:
    from transformers import AutoModelForCausalLM

    loaded: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    loaded.eval()
    with torch.inference_mode():
        return loaded(torch.tensor([ids])).logits[0].numpy()


def ort_logits(folder: Path, ids: list[int]) -> Any:
    """Half of the tokens as a prompt, then the others one by one, each from the past of those before."""
    model = load_ort_model(folder)
    half = len(ids) // 2
    parts, past = [], None
    for start, stop in [(0, half), *((index, index + 1) for index in range(half, len(ids)))]:
        given = torch.tensor([ids[start:stop]])
        mask = torch.ones((1, stop), dtype=torch.long)
        answer = model(given, attention_mask=mask, past_key_values=past, use_cache=True)
        past = answer.past_key_values
        parts.append(answer.logits[0].numpy())
    return np.concatenate(parts)


def load_ort_model(folder: Path) -> Any:
    """ORTModelForCausalLM as it is, but for the size of a head: version 0.1.0 takes hidden size by heads for Qwen3's,
    whose configuration has a size of its own, and then fails at the first token.
    """
    from optimum.onnxruntime import ORTModelForCausalLM

    model = ORTModelForCausalLM.from_pretrained(folder, use_io_binding=False)
    model.embed_size_per_head = getattr(model.config, "head_dim", None) or model.embed_size_per_head
    return model


if __name__ == "__main__":
    command, source, *others = sys.argv[1:]
    if command == "export":
        export(Path(source), Path(others[0]), *others[1:])
    elif command == "quantize":
        quantize(Path(source), Path(others[0]))
    else:
        compute = reference_logits if command == "logits" else ort_logits
        np.save(others[1], compute(Path(source), np.load(others[0]).tolist()))
