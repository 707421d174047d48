"""Records small graphs exported by optimum, and what transformers computes for their models:

python -m tests.record_exported OPTIMUM_PYTHON   -> tests/data/exported/*.zip, tests/data/exported/logits.npz

OPTIMUM_PYTHON has `optimum-onnx[onnxruntime]` and torch; scripts/extras/optimum makes such an environment.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import numpy as np

from edgeqwen.core.model import Family
from tests.checkpoints import tiny_num_tokens, write_safetensors_model

DATA = Path(__file__).parent / "data" / "exported"
REFERENCE = Path(__file__).parent / "exported_reference.py"
NUM_IDS = 24
SHAPE: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 48, "head_dim": 16}
FAMILIES: tuple[Family, ...] = ("qwen3", "qwen2", "llama")
TIME = (2000, 1, 1, 0, 0, 0)


def case_ids() -> list[int]:
    """The ids that the logits were recorded for."""
    return [int(token) for token in np.random.default_rng(8).integers(0, tiny_num_tokens(), NUM_IDS)]


def run_reference(python: str, *arguments: str) -> None:
    """A command of `exported_reference` in optimum's environment."""
    subprocess.run([python, str(REFERENCE), *arguments], check=True, stdin=subprocess.DEVNULL)


def pack(folder: Path, out: Path) -> None:
    """A zip file that is the same whenever it is made of the same files."""
    out.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        for path in sorted(folder.iterdir()):
            archive.writestr(zipfile.ZipInfo(path.name, TIME), path.read_bytes(), zipfile.ZIP_DEFLATED)


def record(python: str) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        np.save(folder / "ids.npy", case_ids())
        logits = {}
        for family in FAMILIES:
            write_safetensors_model(folder / family, family=family, **SHAPE)
            run_reference(python, "export", str(folder / family), str(folder / f"{family}-fp32"))
            run_reference(python, "logits", str(folder / family), str(folder / "ids.npy"), str(folder / "logits.npy"))
            logits[family] = np.load(folder / "logits.npy")
            pack(folder / f"{family}-fp32", DATA / f"{family}.zip")
        run_reference(python, "export", str(folder / "qwen3"), str(folder / "fp16"), "fp16")
        run_reference(python, "quantize", str(folder / "qwen3-fp32"), str(folder / "int8"))
        pack(folder / "fp16", DATA / "qwen3-fp16.zip")
        pack(folder / "int8", DATA / "qwen3-int8.zip")
        np.savez_compressed(DATA / "logits.npz", allow_pickle=False, **logits)


if __name__ == "__main__":
    record(sys.argv[1])
