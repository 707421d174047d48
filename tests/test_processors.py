"""Processors that this machine is not, emulated: they answer as this one does, or say in one line why they cannot."""

from __future__ import annotations

import contextlib
import functools
import json
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
import pytest

from edgeqwen.convert.importer import Target
from edgeqwen.convert.kernel_graph import check_model
from edgeqwen.core.kernel import KERNEL_CHECK, RowKernel
from edgeqwen.core.model import KVType, Quant
from edgeqwen.core.package import GRAPH, MANIFEST, open_package
from edgeqwen.errors import ConfigInvalid
from tests.checkpoints import write_safetensors_model
from tests.daemons import DaemonProcess, running_daemon, wait_until_listening
from tests.emulated import logits_of
from tests.emulation import CORE2, CORTEX_A72, HASWELL, NEHALEM, NEOVERSE_N1, SOCKETS, Emulated
from tests.exported_graphs import exported_package
from tests.models import Array, calibrated_package, scratch, tiny_package
from tests.test_kernel_check import KERNELS

PROCESSORS = (HASWELL, NEHALEM, CORTEX_A72, NEOVERSE_N1)
FORMS: tuple[tuple[Quant, Target], ...] = (
    ("fp32", "any"),
    ("int8", "any"),
    ("int8", "vnni"),
    ("int4", "any"),
    ("hybrid", "vnni"),  # with an int8 cache, and integer attention for prompts
)
EXPORTED = {"qwen3": 1e-4, "qwen3-int8": 0.05}
"""Graphs of another exporter, and how far their logits may be off, as below."""

CHECKED = [kernel for kernel in KERNELS if isinstance(kernel, RowKernel) or kernel.block_size in {32, 64}]
NUM_TOKENS, CHUNK = 104, 13
HANG_GUARD_S = 240.0

LARGEST_DIFFERENCE = {"fp32": 1e-4, "int8": 0.05, "int4": 0.25, "hybrid": 0.25}
"""Of a logit to this processor's, in standard deviations of all. A last bit of an activation may turn a code over, and
on ARM the 4-bit kernel rounds activations by row instead of by block; codes in a cache are read again and again.
"""


@dataclass(frozen=True, slots=True)
class Run:
    """An emulated program under way."""

    process: subprocess.Popen[bytes]
    out: Path

    def logits(self, package: Path) -> Array:
        self._wait()
        logits: Array = np.load(f"{self.out}.npz")[package.name]
        return logits

    def wrong(self, kind: str) -> set[str]:
        self._wait()
        return set(json.loads(Path(f"{self.out}.json").read_text())[kind])

    def _wait(self) -> None:
        error = self.process.communicate(timeout=HANG_GUARD_S)[1] if self.process.poll() is None else b""
        assert self.process.returncode == 0, error.decode()


def package_of(quant: Quant, target: Target) -> Path:
    return (
        calibrated_package("qwen3", quant, target) if quant == "hybrid" else tiny_package("qwen3", quant, target=target)
    )


def needs(processor: Emulated) -> None:
    if processor.obstacle:
        pytest.skip(processor.obstacle)


@functools.cache
def ids() -> tuple[int, ...]:
    return tuple(int(token) for token in np.random.default_rng(11).integers(0, 256, NUM_TOKENS))


@functools.cache
def here(package: Path, kv_type: KVType | None = None) -> Array:
    logits: Array = logits_of(package, list(ids()), CHUNK, kv_type)
    return logits


@pytest.fixture(scope="module")
def runs() -> Iterator[dict[str, Run]]:
    """One program for each processor, all at the same time: it is slow, and most of it is starting up."""
    folder = scratch() / "emulated"
    folder.mkdir()
    onnx.save(check_model(CHECKED), str(folder / KERNEL_CHECK))
    job = {"ids": ids(), "chunk": CHUNK, "check": str(folder / KERNEL_CHECK)}
    packages = [*(package_of(quant, target) for quant, target in FORMS), *map(exported_package, EXPORTED)]
    job |= {"packages": [str(package) for package in packages]}
    started = {}
    for processor in PROCESSORS:
        if not processor.obstacle:
            out = folder / processor.name
            out.with_suffix(".job").write_text(json.dumps(job | {"out": str(out)}))
            arguments = ["-m", "tests.emulated", str(out.with_suffix(".job"))]
            pipes = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
            process = processor.start(arguments, processor.prefix(folder), **pipes)
            started[processor.name] = Run(process, out)
    yield started
    for run in started.values():
        run.process.kill()
        run.process.communicate()


@pytest.mark.parametrize("form", FORMS, ids="-".join)
@pytest.mark.parametrize("processor", PROCESSORS, ids=lambda processor: processor.name)
def test_logits_are_those_of_this_processor(
    processor: Emulated, form: tuple[Quant, Target], runs: dict[str, Run]
) -> None:
    needs(processor)
    package = package_of(*form)
    has_float_cache = processor is HASWELL and form[0] == "hybrid"  # integer attention would be wrong there
    expected, got = here(package, "fp32" if has_float_cache else None), runs[processor.name].logits(package)
    assert np.abs(got - expected).max() < LARGEST_DIFFERENCE[form[0]] * expected.std()


@pytest.mark.parametrize("case", EXPORTED)
@pytest.mark.parametrize("processor", PROCESSORS, ids=lambda processor: processor.name)
def test_exported_graphs_give_the_logits_of_this_processor(
    processor: Emulated, case: str, runs: dict[str, Run]
) -> None:
    """The int8 one has signed weights, which AVX2 without VNNI multiplies wrongly unless they are rewritten."""
    needs(processor)
    package = exported_package(case)
    expected, got = here(package), runs[processor.name].logits(package)
    assert np.abs(got - expected).max() < EXPORTED[case] * expected.std()


@pytest.mark.parametrize("target", ["any", "vnni"])
@pytest.mark.parametrize("processor", PROCESSORS, ids=lambda processor: processor.name)
def test_int8_agrees_with_fp32_as_often_as_on_this_processor(
    processor: Emulated, target: Target, runs: dict[str, Run]
) -> None:
    """Within two points: the best token of a random model often wins by a hair, and a last bit decides. Saturating
    products would agree far less often.
    """
    needs(processor)
    reference, package = tiny_package("qwen3", "fp32"), tiny_package("qwen3", "int8", target=target)
    best = here(reference).argmax(axis=-1)
    agreements = [
        (logits.argmax(axis=-1) == best).mean() for logits in (here(package), runs[processor.name].logits(package))
    ]
    assert abs(agreements[0] - agreements[1]) < 0.02
    assert min(agreements) > 0.9


@pytest.mark.parametrize("processor", PROCESSORS, ids=lambda processor: processor.name)
def test_only_signed_weights_on_avx2_without_vnni_are_multiplied_wrongly(
    processor: Emulated, runs: dict[str, Run]
) -> None:
    needs(processor)
    computed = RowKernel("signed", is_computed=True).name
    expected = {RowKernel("signed").name, computed} if processor is HASWELL else set()
    assert runs[processor.name].wrong("usual") == expected
    assert runs[processor.name].wrong("precise") == expected & {computed}


@pytest.mark.parametrize(
    "command",
    [
        ["serve", "--model", "{package}", "--socket", "/nowhere/s"],
        ["eval", "{package}"],
        ["bench", "{package}"],
        ["import", "{checkpoint}", "--out", "{out}"],
        ["import", "{package}", "--out", "{out}"],
        ["pull", "someone/something"],
    ],
    ids=lambda command: " ".join(command[:2]),
)
def test_processor_too_old_for_the_libraries_is_told_before_they_are_loaded(command: list[str], tmp_path: Path) -> None:
    """It would die of an illegal instruction; the exit code is one that systemd does not restart after."""
    needs(CORE2)
    checkpoint = scratch() / "checkpoint-for-old"
    if not checkpoint.exists():
        write_safetensors_model(checkpoint)
    names = {"package": tiny_package("qwen3", "fp32"), "checkpoint": checkpoint, "out": tmp_path / "out"}
    arguments = ["-m", "edgeqwen", *(argument.format(**names) for argument in command)]
    with CORE2.start(arguments, CORE2.prefix(tmp_path), stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        out, err = process.communicate(timeout=HANG_GUARD_S)
    lines = [line for line in err.decode().splitlines() if not line.startswith("qemu")]
    assert process.returncode == ConfigInvalid("").exit_code, err
    assert out == b""
    assert len(lines) == 1
    assert "too old: it lacks sse4_1, sse4_2, popcnt" in lines[0]


@contextlib.contextmanager
def emulated_daemon(processor: Emulated, folder: Path, *flags: str) -> Iterator[DaemonProcess]:
    """`edgeqwen serve` on that processor, once it listens."""
    prefix, log_path = processor.prefix(folder), folder / "log"
    arguments = ["-m", "edgeqwen", "serve", "--socket", f"/{SOCKETS}/s", *flags]
    with log_path.open("wb") as log:
        process = processor.start(arguments, prefix, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
    daemon = DaemonProcess(process, prefix / SOCKETS / "s", log_path)
    try:
        wait_until_listening(daemon, HANG_GUARD_S)
        yield daemon
    finally:
        process.kill()
        process.wait()


def answer_of(daemon: DaemonProcess) -> str:
    with daemon.client() as client:
        messages = [{"role": "user", "content": "Hello there"}]
        wishes = {"max_tokens": 6, "temperature": 0, "ignore_eos": True, "stream": False}
        return str(client.request("chat", messages=messages, **wishes)["text"])


@pytest.mark.parametrize("processor", [HASWELL, NEOVERSE_N1], ids=lambda processor: processor.name)
def test_daemon_answers_there_with_a_package_made_for_a_processor_with_vnni(processor: Emulated) -> None:
    """What AVX2 alone multiplies wrongly is remade, in the cache directory; ARM takes it as it is."""
    needs(processor)
    with tempfile.TemporaryDirectory(prefix="eq-") as name:  # a socket's path is short
        cache = Path(name) / "cache"
        flags = ["--model", str(tiny_package("qwen3", "int8", target="vnni")), "--context", "64", "--slots", "1"]
        flags += ["--threads", "1", "--state-dir", str(Path(name) / "state"), "--cache-dir", str(cache)]
        with running_daemon("onnx", *flags) as daemon:
            expected = answer_of(daemon)
        shutil.rmtree(cache, ignore_errors=True)
        with emulated_daemon(processor, Path(name), *flags) as daemon:
            assert answer_of(daemon) == expected
            is_remade = "using a copy remade for this processor" in daemon.log
        copies = [open_package(path.parent).manifest for path in cache.glob(f"*/*/{MANIFEST}")]
    assert is_remade == (processor is HASWELL)
    assert [copy.weight_form for copy in copies] == (["unsigned"] if is_remade else [])


def tensors_of(package: Path) -> dict[str, Array]:
    """Weights of the decode graph."""
    return {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in onnx.load(package / GRAPH).graph.initializer}


def test_import_on_arm_makes_the_same_weights(tmp_path: Path) -> None:
    needs(NEOVERSE_N1)
    imported = tiny_package("qwen3", "int8", target="vnni")
    source = imported.with_name(imported.name + "-source")
    arguments = ["-m", "edgeqwen", "import", str(source), "--out", str(tmp_path / "made"), "--quant", "int8", "--fast"]
    pipes = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
    with NEOVERSE_N1.start(arguments, NEOVERSE_N1.prefix(tmp_path), **pipes) as process:
        err = process.communicate(timeout=HANG_GUARD_S)[1]
    assert process.returncode == 0, err
    assert open_package(tmp_path / "made").manifest.target == "arm"
    expected, made = tensors_of(imported), tensors_of(tmp_path / "made")
    assert made.keys() == expected.keys()
    for name, tensor in expected.items():
        if name.startswith("rotary."):  # numpy's cosine differs in its last bit from processor to processor
            assert np.abs(made[name] - tensor).max() < 1e-6
        else:
            assert np.array_equal(made[name], tensor), name
