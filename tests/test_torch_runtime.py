"""The runtime on torch: what transformers computes, in every form of weights; and what it says when it cannot."""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgeqwen.cpu import ThreadGroup, ThreadPlan, read_processor
from edgeqwen.errors import ConfigInvalid
from edgeqwen.evaluate import built_in_texts
from edgeqwen.runtime.torch import library
from edgeqwen.runtime.torch.library import library_environment, prepare_environment, version_of
from edgeqwen.runtime.torch.options import TorchOptions
from edgeqwen.text import Tokenizer
from tests.models import Array, all_logits, smollm2_gguf
from tests.record_parity import CASES, DATA, POSITIONS, case_ids, recorded, reference_logits
from tests.runtimes import ONE_THREAD, needs_torch, tiny_checkpoint, torch_runtime

TOLERANCE = 1e-3  # of the logits' standard deviation
GREEDY: list[dict[str, Any]] = json.loads((DATA / "smollm2_greedy.json").read_text(encoding="utf-8"))
ROOT = Path(__file__).parent.parent


@functools.cache
def case_checkpoint(name: str) -> Path:
    family, options = CASES[name]
    return tiny_checkpoint(family, **options)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("chunk", [2000, 7])
def test_logits_equal_those_recorded_from_transformers(name: str, chunk: int) -> None:
    runtime = torch_runtime(case_checkpoint(name), capacity=2048)
    logits = all_logits(runtime, case_ids(runtime.spec.vocab_size), chunk=chunk)
    difference = np.abs(logits[list(POSITIONS)] - recorded()[name]).max(axis=1)
    assert difference.max() <= TOLERANCE * recorded()[name + ".std"][0], dict(zip(POSITIONS, difference, strict=True))
    runtime.close()


@pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None or importlib.util.find_spec("torch") is None,
    reason="torch and transformers are not installed: recorded logits stand in",
)
@pytest.mark.parametrize("name", CASES)
def test_every_position_equals_transformers_run_here(name: str) -> None:
    runtime = torch_runtime(case_checkpoint(name), capacity=2048)
    ids = case_ids(runtime.spec.vocab_size)
    reference = reference_logits(case_checkpoint(name), ids)
    assert np.abs(all_logits(runtime, ids, chunk=256) - reference).max() <= TOLERANCE * reference.std()
    runtime.close()


@pytest.mark.parametrize("name", ["qwen3-tied", "qwen2-untied", "llama-llama3"])
def test_a_compiled_layer_computes_what_transformers_computes(name: str, tmp_path: Path) -> None:
    needs_torch()
    try:
        runtime = torch_runtime(case_checkpoint(name), capacity=2048, mode="compile", code_dir=tmp_path / "code")
    except ConfigInvalid as error:
        pytest.skip(error.message)
    logits = all_logits(runtime, case_ids(runtime.spec.vocab_size), chunk=256)
    assert np.abs(logits[list(POSITIONS)] - recorded()[name]).max() <= TOLERANCE * recorded()[name + ".std"][0]
    runtime.close()


def test_a_slot_of_two_tokens_is_enough_to_be_compiled_for(tmp_path: Path) -> None:
    needs_torch()
    try:
        runtime = torch_runtime(tiny_checkpoint(), capacity=2, mode="compile", code_dir=tmp_path / "code")
    except ConfigInvalid as error:
        if "compiler" not in error.message:
            raise
        pytest.skip(error.message)
    assert all_logits(runtime, [1, 2], chunk=2).shape[0] == 2
    runtime.close()


def test_compiled_code_is_found_again_and_made_anew_if_it_is_broken(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    needs_torch()
    options: dict[str, Any] = {"mode": "compile", "code_dir": tmp_path / "code"}
    try:
        first = torch_runtime(tiny_checkpoint(), **options)
    except ConfigInvalid as error:
        pytest.skip(error.message)
    ids = case_ids(first.spec.vocab_size, 40)
    expected = all_logits(first, ids, chunk=40)
    first.close()
    kept = sorted((tmp_path / "code").glob("layer-*.bin"))
    assert len(kept) == 2

    made_at = [path.stat().st_mtime_ns for path in kept]
    again = torch_runtime(tiny_checkpoint(), **options)
    assert [path.stat().st_mtime_ns for path in kept] == made_at, "what is compiled again is written again"
    assert np.abs(all_logits(again, ids, chunk=40) - expected).max() <= TOLERANCE * expected.std()
    again.close()
    kept[0].write_bytes(b"no code")
    anew = torch_runtime(tiny_checkpoint(), **options)
    assert "made anew" in caplog.text
    assert kept[0].name in caplog.text
    assert kept[0].stat().st_mtime_ns != made_at[0]
    assert np.abs(all_logits(anew, ids, chunk=40) - expected).max() <= TOLERANCE * expected.std()
    anew.close()


# The real model.


@functools.cache
def text_ids() -> tuple[int, ...]:
    """1,280 tokens each of English and of code."""
    from edgeqwen.convert.sources import open_checkpoint

    checkpoint = open_checkpoint(smollm2_gguf())
    checkpoint.close()
    tokenizer, texts = Tokenizer.from_bytes(checkpoint.side_files.tokenizer_json), built_in_texts()
    return tuple(token for name in ("english", "code") for token in tokenizer.encode(texts[name], special=False)[:1280])


@functools.cache
def real_logits(weights: str, *, computes_bf16: bool) -> Array:
    """Of `text_ids`, in windows of 256 tokens."""
    runtime = torch_runtime(smollm2_gguf(), weights=weights, computes_bf16=computes_bf16, capacity=256, threads=TWO)
    ids = text_ids()
    logits = np.concatenate([all_logits(runtime, ids[at : at + 256], chunk=256) for at in range(0, len(ids), 256)])
    runtime.close()
    return logits


TWO = ThreadPlan(ThreadGroup(2), ThreadGroup(2))


def log_softmax(logits: Array) -> Array:
    shifted = logits - logits.max(axis=-1, keepdims=True)
    return np.asarray(shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True)), np.float32)


def divergence(weights: str, *, computes_bf16: bool) -> float:
    """Mean KL of what these weights make likely from what fp32 does."""
    reference = log_softmax(real_logits("fp32", computes_bf16=False))
    return float(
        (np.exp(reference) * (reference - log_softmax(real_logits(weights, computes_bf16=computes_bf16))))
        .sum(axis=-1)
        .mean()
    )


def test_fp32_says_of_the_real_model_what_transformers_recorded() -> None:
    runtime = torch_runtime(smollm2_gguf(), capacity=512, threads=TWO)
    for case in GREEDY:
        ids = [*case["prompt"], *case["tokens"]]
        chosen = all_logits(runtime, ids, chunk=len(ids)).argmax(axis=1)[len(case["prompt"]) - 1 : -1]
        differing = np.flatnonzero(chosen != np.array(case["tokens"]))
        assert all(case["gaps"][at] < 1e-3 for at in differing), case["question"]
    runtime.close()


def test_bf16_chooses_the_token_of_fp32_nearly_always() -> None:
    """fp32 is what transformers computes, by the tests above."""
    chosen = real_logits("bf16", computes_bf16=True).argmax(axis=1)
    agreement = float((chosen == real_logits("fp32", computes_bf16=False).argmax(axis=1)).mean())
    assert agreement >= 0.99
    assert divergence("bf16", computes_bf16=True) < 0.001


@pytest.mark.parametrize(("weights", "limit"), [("woq8", 0.012), ("int8", 0.03)])
def test_eight_bits_stay_within_their_bar(weights: str, limit: float) -> None:
    if weights == "int8" and read_processor().is_x86 and not read_processor().has_vnni:
        pytest.skip("int8 is refused without VNNI")
    assert 0 < divergence(weights, computes_bf16=True) < limit


# Environment, and what is in the way.


def plan(*masks: tuple[int, ...]) -> ThreadPlan:
    group = ThreadGroup(max(1, len(masks)), masks)
    return ThreadPlan(group, group)


def test_libraries_are_told_threads_places_and_instruction_sets() -> None:
    assert library_environment(plan((0, 4), (1, 5)), "avx2") == {
        "OMP_NUM_THREADS": "2",
        "GOMP_SPINCOUNT": "20000",
        "KMP_BLOCKTIME": "1",
        "KMP_AFFINITY": "granularity=fine,proclist=[[0,4],[1,5]],explicit",
        "ONEDNN_MAX_CPU_ISA": "AVX2",
    }
    assert set(library_environment(ONE_THREAD, "auto")) == {"OMP_NUM_THREADS", "GOMP_SPINCOUNT", "KMP_BLOCKTIME"}


def test_what_the_environment_says_already_stays() -> None:
    environ = {"KMP_BLOCKTIME": "200", "ONEDNN_MAX_CPU_ISA": "AVX512_CORE"}
    prepare_environment(TorchOptions(threads=ONE_THREAD, max_isa="avx2", code_dir=Path("/somewhere")), environ)
    assert environ["KMP_BLOCKTIME"] == "200"
    assert environ["ONEDNN_MAX_CPU_ISA"] == "AVX512_CORE"
    assert environ["TORCHINDUCTOR_CACHE_DIR"] == "/somewhere"
    assert environ["OMP_NUM_THREADS"] == "1"


@pytest.mark.parametrize(
    ("text", "version"),
    [("2.13.0+cpu", (2, 13)), ("2.8", (2, 8)), ("", (0,)), ("2.x", (0,)), ("2.14.0a0+git", (2, 14))],
)
def test_versions_are_read(text: str, version: tuple[int, ...]) -> None:
    assert version_of(text) == version


def test_a_torch_that_is_too_old_is_named_with_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "installed_version", lambda _: "2.1.0")
    with pytest.raises(ConfigInvalid, match=r"torch 2\.1\.0 is too old.*pip install 'torch>=2\.6'"):
        library.check_library(TorchOptions(threads=ONE_THREAD))


def test_a_processor_that_torch_takes_for_a_slow_one_is_told_of(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Without /proc/cpuinfo torch computes 5 to 35 times as slowly, and says nothing."""
    monkeypatch.setattr(library, "processor_has_avx2", lambda: True)
    library.check_capability("AVX512")
    assert not caplog.text
    library.check_capability("DEFAULT")
    assert "ProcSubset=all" in caplog.text


def test_a_cache_type_that_torch_does_not_keep_is_refused() -> None:
    with pytest.raises(ConfigInvalid, match=r"kv\.type: torch keeps keys and values in fp32 or bf16, not in int8"):
        torch_runtime(tiny_checkpoint(), kv_type="int8")


def bench(folder: Path, *flags: str, prefix: Sequence[str] = (), **environ: str) -> subprocess.CompletedProcess[str]:
    """`edgeqwen bench` on the tiny checkpoint with torch, with a state directory of its own."""
    command = [*prefix, sys.executable, "-m", "edgeqwen", "bench", str(tiny_checkpoint()), "--runtime", "torch"]
    command += ["--prompt", "8", "--decode", "2", *flags]
    env = {key: value for key, value in os.environ.items() if not key.startswith("EDGEQWEN_")}
    env |= {"STATE_DIRECTORY": str(folder / "state"), "PYTHONPATH": str(ROOT), **environ}
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=300, check=False)


def refusal(done: subprocess.CompletedProcess[str]) -> str:
    """The one line that is said of a bad configuration."""
    assert done.returncode == 78, done.stderr
    lines = [line for line in done.stderr.splitlines() if line.startswith("edgeqwen: ")]
    assert len(lines) == 1, done.stderr
    assert "Traceback" not in done.stderr
    return lines[0]


def test_a_missing_compiler_is_named_with_what_to_install(tmp_path: Path) -> None:
    needs_torch()
    line = refusal(bench(tmp_path, "--torch-mode", "compile", CXX="/nowhere/c++"))
    assert line.startswith("edgeqwen: torch.mode: compile needs a C++ compiler")
    assert "apt-get install g++" in line


def test_products_of_codes_that_overflow_are_refused_with_what_to_take_instead(tmp_path: Path) -> None:
    """oneDNN without VNNI adds them up in 16 bits, and says nothing."""
    needs_torch()
    if not read_processor().is_x86:
        pytest.skip("of x86")
    line = refusal(bench(tmp_path, "--torch-weights", "int8", ONEDNN_MAX_CPU_ISA="AVX2"))
    assert line.startswith("edgeqwen: torch.weights: ")
    assert "take woq8 or fp32" in line
    assert bench(tmp_path, "--torch-weights", "woq8", ONEDNN_MAX_CPU_ISA="AVX2").returncode == 0


MDWE = (
    "import ctypes, os, sys\n"
    "ctypes.CDLL(None).prctl(65, 1, 0, 0, 0) and sys.exit(9)\n"
    "os.execv(sys.argv[1], sys.argv[1:])\n"
)


@pytest.mark.parametrize(("weights", "works"), [("bf16", False), ("fp32", True)])
def test_memory_that_may_not_be_made_executable_is_named_with_its_setting(
    tmp_path: Path, weights: str, works: bool
) -> None:
    needs_torch()
    done = bench(tmp_path, "--torch-weights", weights, prefix=(sys.executable, "-c", MDWE))
    if done.returncode == 9:
        pytest.skip("this kernel cannot deny it (before Linux 6.3)")
    if works or not done.returncode:  # without matrix units bf16 needs no code of its own
        assert done.returncode == 0, done.stderr
    else:
        assert "MemoryDenyWriteExecute=no (the drop-in jit.conf)" in refusal(done)


NOEXEC = 'mkdir -p {0} && mount -t tmpfs -o noexec none {0} && exec "$@"'


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to mount")
def test_a_folder_that_code_may_not_run_from_is_named_with_its_settings(tmp_path: Path) -> None:
    needs_torch()
    mounting = ("unshare", "-m", "sh", "-c", NOEXEC.format(tmp_path / "state"), "sh")
    if subprocess.run([*mounting, "true"], capture_output=True, check=False).returncode:
        pytest.skip("nothing can be mounted here")
    line = refusal(bench(tmp_path, "--torch-mode", "compile", prefix=mounting))
    assert str(tmp_path / "state/cache/torch-code") in line
    assert "ExecPaths=" in line
    assert "service.cache_dir" in line


def test_a_folder_without_torch_says_what_to_install(tmp_path: Path) -> None:
    """As on a base install: the module is not there, nor its metadata."""
    hiding = (
        "import importlib.metadata as m, runpy, sys\n"
        "found = m.version\n"
        "def version(name):\n"
        "    if name == 'torch': raise m.PackageNotFoundError(name)\n"
        "    return found(name)\n"
        "m.version = version\n"
        "sys.argv = ['edgeqwen', *sys.argv[1:]]\n"
        "runpy.run_module('edgeqwen', run_name='__main__')\n"
    )
    command = [sys.executable, "-c", hiding, "serve", "--runtime", "torch", "--model", str(tiny_checkpoint())]
    command += ["--socket", str(tmp_path / "s")]
    env = os.environ | {"STATE_DIRECTORY": str(tmp_path / "state"), "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 78
    assert "pip install torch" in done.stderr.splitlines()[-1]


def test_workers_are_placed_and_the_calling_thread_is_left_alone() -> None:
    needs_torch()
    cpus = sorted(os.sched_getaffinity(0))
    if len(cpus) < 2:
        pytest.skip("needs two CPUs")
    script = f"""
import os
from edgeqwen.runtime.torch.workers import start_workers
workers = start_workers(2, (({cpus[0]},), ({cpus[1]},)))
print(len(workers), os.sched_getaffinity(workers[0]) == {{{cpus[1]}}}, len(os.sched_getaffinity(0)))
"""
    done = subprocess.run(
        [sys.executable, "-c", script],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == ["1", "True", str(len(cpus))]
