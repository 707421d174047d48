"""Opening local checkpoints: no network, no large framework, nothing written."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from edgeqwen.convert.sources import open_checkpoint
from edgeqwen.errors import ModelInvalid
from tests.checkpoints import write_gguf_model, write_safetensors_model

PROGRAM = """
import os, sys
from pathlib import Path

def refuse(event, args):
    if event.startswith("socket.") and event != "socket.gethostname":
        raise SystemExit(f"network: {event} {args}")
    if event == "open" and isinstance(args[2], int) and args[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
        if args[0] != "/dev/null":
            raise SystemExit(f"written: {args[0]}")

sys.addaudithook(refuse)
from edgeqwen.convert.sources import open_checkpoint

checkpoint = open_checkpoint(Path(sys.argv[1]))
for name in checkpoint.tensors:
    checkpoint.read(name)
checkpoint.close()
banned = {"torch", "transformers", "huggingface_hub", "onnxruntime", "requests", "httpx"} & set(sys.modules)
print(checkpoint.spec.family, sorted(banned))
"""


@pytest.mark.parametrize("kind", ["safetensors", "gguf"])
def test_a_local_checkpoint_needs_no_network_and_writes_nothing(kind: str, tmp_path: Path) -> None:
    """The folder is named like a model of the hub; the home cannot be written to; no variable is set."""
    folder = tmp_path / "Qwen" / "Qwen3-0.6B"
    if kind == "gguf":
        write_gguf_model(folder / "model.gguf", stored_type="Q4_1")
    else:
        write_safetensors_model(folder, dtype="BF16")
    root = str(Path(__file__).parent.parent)
    result = subprocess.run(
        [sys.executable, "-B", "-c", PROGRAM, "Qwen/Qwen3-0.6B"],
        cwd=tmp_path,
        env={"HOME": "/nonexistent", "PATH": os.environ.get("PATH", ""), "PYTHONPATH": root},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (result.returncode, result.stdout, result.stderr) == (0, "qwen3 []\n", "")


def test_a_package_is_told_from_a_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "model.json").write_text("{}")
    with pytest.raises(ModelInvalid, match="is a model package already: serve it"):
        open_checkpoint(tmp_path)
