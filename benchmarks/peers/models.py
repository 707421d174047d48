"""The models that are measured, in every form: packages of ours, and what each peer makes of the same weights.

Files stand side by side behind one name: `standin`, `standin-int8`, `standin-Q4_0.gguf`, `standin-openvino-int4`. Each
is made once, beside its place and then renamed, so that what is there is whole.
"""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from benchmarks import _smollm2, _standin
from benchmarks.peers.catalogue import Form
from benchmarks.peers.environments import Environment, Unavailable, run, say
from edgeqwen.core.package import open_package
from edgeqwen.errors import EdgeqwenError


@dataclass(frozen=True, slots=True)
class Model:
    """`folder` is safetensors as on the hub, `file` the same weights as an unquantised GGUF file."""

    folder: Path
    file: Path

    def beside(self, suffix: str) -> Path:
        return self.folder.with_name(f"{self.folder.name}-{suffix}")


def standin(cache: Path, num_layers: int = _standin.NUM_LAYERS) -> Model:
    """Random weights in the shape of Qwen3-0.6B, for speed and memory; with fewer layers to try things out."""
    spec = _standin.standin_spec(num_layers)
    name = "standin" if num_layers == _standin.NUM_LAYERS else f"standin{num_layers}"
    model = Model(cache / name, cache / f"{name}-f16.gguf")
    _once(model.folder, lambda out: _standin.write_folder(out, spec))
    _once(model.file, lambda out: _standin.write_gguf(out, spec))
    return model


def rotated(cache: Path, source: Path | None) -> Model:
    """The real model off its file's grid, for quality."""
    folder = cache / "smollm2"
    folder.mkdir(parents=True, exist_ok=True)
    model = Model(folder / "rotated", folder / "rotated.gguf")
    if not (model.folder.exists() and model.file.exists()):
        _smollm2.make_rotated(source or _smollm2.find_source(folder), model.folder, model.file)
    return model


def package(model: Model, quant: str, *, remake: bool = False) -> Path:
    """Our own package, by the command that everybody imports with; again if an older version wrote it."""
    out = model.beside(quant)
    if out.exists() and (remake or not _is_current(out)):
        shutil.rmtree(out)
    options = ["--quant", quant, "--name", out.name]

    def make(path: Path) -> None:
        run([sys.executable, "-m", "edgeqwen", "import", str(model.folder), *options, "--out", str(path)])

    _once(out, make)
    return out


def _is_current(path: Path) -> bool:
    try:
        open_package(path)
    except EdgeqwenError:
        return False
    return True


def form(model: Model, environment: Environment, wanted: Form) -> Path:
    """The peer's own form of the model; raises `Unavailable` if the peer cannot make it."""
    if not wanted.file:
        return model.folder
    out = model.beside(wanted.file)
    _once(out, lambda path: _MAKERS[environment.peer.name](model, environment, wanted, path))
    return out


def _gguf(model: Model, environment: Environment, wanted: Form, out: Path) -> None:
    run(environment.command("quantize", str(model.file), str(out), wanted.name))


def _openvino(model: Model, environment: Environment, wanted: Form, out: Path) -> None:
    program = str(environment.python.with_name("optimum-cli"))
    task = ["--task", "text-generation-with-past"]
    weights = ["--weight-format", "int4", "--group-size", "128", "--ratio", "1.0"]
    weights += ["--group-size-fallback", "adjust"]  # smaller groups where rows are no multiple of 128
    run([program, "export", "openvino", "-m", str(model.folder), *task, *weights, str(out)])


def _genai(model: Model, environment: Environment, wanted: Form, out: Path) -> None:
    builder = [str(environment.python), "-m", "onnxruntime_genai.models.builder"]
    extra = ["--extra_options", "prune_lm_head=true"] if wanted.name.endswith("last") else []
    run([*builder, "-m", str(model.folder), "-o", str(out), "-p", "int4", "-e", "cpu", *extra])
    if not (out / "model.onnx").exists():
        raise Unavailable("the model builder wrote no model.onnx")


def _optimum(model: Model, environment: Environment, wanted: Form, out: Path) -> None:
    """As exported, or that with its weights quantised for this processor, and its activations at each step."""
    program = str(environment.python.with_name("optimum-cli"))
    if wanted.name == "fp32":
        run([program, "export", "onnx", "--task", "text-generation-with-past", "-m", str(model.folder), str(out)])
        return
    plain = form(model, environment, next(each for each in environment.peer.forms if each.name == "fp32"))
    flags = set(Path("/proc/cpuinfo").read_text(encoding="utf-8").split())
    kernels = "--avx512_vnni" if "avx512_vnni" in flags else "--avx2" if "avx2" in flags else "--arm64"
    run([program, "onnxruntime", "quantize", kernels, "--onnx_model", str(plain), "-o", str(out)])


_MAKERS: dict[str, Callable[[Model, Environment, Form, Path], None]] = {
    "llama.cpp": _gguf,
    "openvino": _openvino,
    "onnxruntime-genai": _genai,
    "optimum": _optimum,
}


def _once(out: Path, make: Callable[[Path], None]) -> None:
    """Make a file or folder that is not there yet."""
    if out.exists():
        return
    began = time.monotonic()
    say(f"making {out}")
    unfinished = out.with_name(f"unfinished-{out.name}")
    if unfinished.is_dir():
        shutil.rmtree(unfinished)
    unfinished.unlink(missing_ok=True)
    make(unfinished)
    unfinished.rename(out)
    say(f"{out.name} took {time.monotonic() - began:.0f} s")
