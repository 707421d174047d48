"""Time and memory of an import of the stand-in of Qwen3-0.6B's shape (1.2 GB of bf16), for each quant.

    scripts/benchmark importing

Memory is the importer's peak of anonymous pages, sampled while it runs: mapped pages of files don't count, the system
can take them back at any time.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
import sys
import time
from pathlib import Path

from benchmarks._standin import standin_spec, write_folder

CACHE = Path(__file__).resolve().parent.parent / ".cache" / "peers"
SAMPLE_S = 0.01


def anonymous_bytes(pid: int) -> int:
    """Anonymous resident memory of a process; 0 when it has ended."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text(encoding="ascii").splitlines():
            if line.startswith("RssAnon:"):
                return int(line.split()[1]) << 10
    return 0


def measure(source: Path, out: Path, quant: str) -> dict[str, object]:
    command = [sys.executable, "-m", "edgeqwen", "import", str(source), "--quant", quant, "--out", str(out)]
    began, peak = time.perf_counter(), 0
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        while process.poll() is None:
            peak = max(peak, anonymous_bytes(process.pid))
            time.sleep(SAMPLE_S)
    if process.returncode:
        raise SystemExit(f"{' '.join(command)}: exit code {process.returncode}")
    took = time.perf_counter() - began
    size = sum(path.stat().st_size for path in out.iterdir())
    report = {"benchmark": "importing", "quant": quant, "seconds": round(took, 1), "peak_private_mb": peak >> 20}
    return {**report, "package_mb": size >> 20}


def main() -> None:
    source = CACHE / "standin"
    if not (source / "tokenizer.json").exists():
        write_folder(source, standin_spec())
    for quant in ("int8", "int4", "fp32"):
        out = CACHE / f"imported-{quant}"
        print(json.dumps(measure(source, out, quant)), flush=True)
        shutil.rmtree(out)


if __name__ == "__main__":
    main()
