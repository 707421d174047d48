"""edgeqwen beside llama.cpp on a model of Qwen3-0.6B's shape: ratios of speeds measured in turns, in one run.

    scripts/benchmark beside_llama_cpp (or: .venv/bin/python benchmarks/beside_llama_cpp.py [--prompt 128] [--pairs 3]
    ...)

Sets up llama-cpp-python in an environment of its own (`.cache/peers`, about ten minutes once; built without AMX,
whose path crashed on the processor this was written on), makes the stand-in model and its quants there, then runs
each pair of processes one after the other, as often as `--pairs` says. Prints a JSON line for each pair of quants:
the median of the pairs' ratios and both sides' medians. A ratio above 1 means edgeqwen is faster. Nothing else should
run meanwhile.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

from benchmarks._standin import standin_spec, write_folder, write_gguf
from edgeqwen.convert.importer import import_model
from edgeqwen.core.model import Quant
from edgeqwen.cpu import read_processor

HERE = Path(__file__).resolve().parent
PEER = HERE / "peers" / "run_llama_cpp.py"
PAIRS: tuple[tuple[Quant, str], ...] = (("int8", "Q8_0"), ("int4", "Q4_0"))
CPU_FLAGS = {
    "avx": "AVX",
    "avx2": "AVX2",
    "fma": "FMA",
    "f16c": "F16C",
    "bmi2": "BMI2",
    "avx512f": "AVX512",
    "avx512vbmi": "AVX512_VBMI",
    "avx512_vnni": "AVX512_VNNI",
    "avx512_bf16": "AVX512_BF16",
    "avx_vnni": "AVX_VNNI",
}
Speeds = dict[str, float]


def peer_python(cache: Path, given: Path | None) -> Path:
    """The interpreter that has llama-cpp-python; builds its environment the first time."""
    if given is not None:
        return given
    python = cache / "llama-cpp" / "bin" / "python"
    if not python.exists():
        flags = set(Path("/proc/cpuinfo").read_text(encoding="ascii").split())
        options = ["-DGGML_NATIVE=OFF", *(f"-DGGML_{name}=ON" for flag, name in CPU_FLAGS.items() if flag in flags)]
        subprocess.run([sys.executable, "-m", "venv", str(cache / "llama-cpp")], check=True)
        environment = {**os.environ, "CMAKE_ARGS": " ".join(options)}
        subprocess.run([str(python), "-m", "pip", "install", "-q", "llama-cpp-python"], check=True, env=environment)
    return python


def prepare(cache: Path, python: Path) -> None:
    """The stand-in as packages and as GGUF files, made once."""
    spec = standin_spec()
    source = cache / "standin"
    if not (source / "tokenizer.json").exists():
        write_folder(source, spec)
    target = read_processor().target
    for quant, kind in PAIRS:
        if not (cache / f"standin-{quant}").exists():
            import_model(source, cache / f"standin-{quant}", quant=quant, target=target, name=f"standin-{quant}")
        if not (cache / f"standin-{kind}.gguf").exists():
            if not (cache / "standin-f16.gguf").exists():
                write_gguf(cache / "standin-f16.gguf", spec)
            files = [str(cache / "standin-f16.gguf"), str(cache / f"standin-{kind}.gguf")]
            subprocess.run([str(python), str(PEER), "quantize", *files, kind], check=True)


def measure(command: list[str], options: list[str]) -> Speeds:
    run = subprocess.run([*command, *options], capture_output=True, text=True, check=True)
    speeds: Speeds = json.loads(run.stdout.splitlines()[-1])
    return speeds


def compare(ours: list[str], theirs: list[str], options: list[str], pairs: int) -> dict[str, float]:
    """Both sides in turns; medians of the speeds and of the ratios."""
    rounds = [(measure(ours, options), measure(theirs, options)) for _ in range(pairs)]
    report: dict[str, float] = {}
    for key in ("prefill_tok_s", "decode_tok_s"):
        report[f"{key}_ratio"] = round(statistics.median(mine[key] / other[key] for mine, other in rounds), 2)
        report[key] = round(statistics.median(mine[key] for mine, _ in rounds), 1)
        report[f"peer_{key}"] = round(statistics.median(other[key] for _, other in rounds), 1)
    return report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cache", type=Path, default=HERE.parent / ".cache" / "peers")
    parser.add_argument("--peer-python", type=Path)
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--decode", type=int, default=64)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--pairs", type=int, default=3)
    given = parser.parse_args()
    given.cache.mkdir(parents=True, exist_ok=True)
    python = peer_python(given.cache, given.peer_python)
    prepare(given.cache, python)
    options = [f"--prompt={given.prompt}", f"--decode={given.decode}", f"--threads={given.threads}"]
    for quant, kind in PAIRS:
        ours = [sys.executable, "-m", "edgeqwen", "bench", str(given.cache / f"standin-{quant}"), "--json"]
        theirs = [str(python), str(PEER), "bench", str(given.cache / f"standin-{kind}.gguf")]
        report = compare(ours, theirs, options, given.pairs)
        names = {"benchmark": "llama_cpp", "quant": quant, "peer": f"llama.cpp {kind}"}
        print(json.dumps({**names, "prompt": given.prompt, "threads": given.threads, **report}), flush=True)


if __name__ == "__main__":
    main()
