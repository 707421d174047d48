"""Run by the tests under an emulated processor, which has the project's dependencies but none of the tests' tools.

    python -m tests.emulated JOB.json

A job says of which packages to compute logits (for `ids`, `chunk` tokens a step), which check of kernels to examine,
and where to write what came of it: `OUT.npz` and `OUT.json`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

from edgeqwen.core.model import KVType
from edgeqwen.core.package import open_package
from edgeqwen.core.step import Batch, Chunk
from edgeqwen.runtime.kernel_check import examine
from edgeqwen.runtime.onnx import OnnxOptions
from edgeqwen.runtime.packages import load_package


def logits_of(package: Path, ids: list[int], chunk: int, kv_type: KVType | None = None) -> Any:
    """Float32 `[len(ids), vocabulary]`, over the default type of cache unless one is given."""
    options = OnnxOptions(num_slots=1, capacity=len(ids), num_threads=1, kv_type=kv_type)
    runtime = load_package(open_package(package), options)
    parts = []
    for start in range(0, len(ids), chunk):
        piece = tuple(ids[start : start + chunk])
        parts.append(runtime.step(Batch((Chunk(0, start, piece, len(piece)),))).logits[0].copy())
    runtime.close()
    return np.concatenate(parts)


def run(job: dict[str, Any]) -> None:
    out, packages = job["out"], [Path(package) for package in job["packages"]]
    np.savez(out + ".npz", **{path.name: logits_of(path, job["ids"], job["chunk"]) for path in packages})
    wrong = {
        kind: [kernel.name for kernel in examine(Path(job["check"]), is_precise=kind == "precise").wrong]
        for kind in ("usual", "precise")
    }
    Path(out + ".json").write_text(json.dumps(wrong))


if __name__ == "__main__":
    run(json.loads(Path(sys.argv[1]).read_text()))
