"""Which runtime serves: what was timed, what `auto` makes of it, and where a package's checkpoint is."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import msgspec
import pytest

from edgeqwen.config import ConfigSources
from edgeqwen.convert.hub import HubSettings
from edgeqwen.convert.importer import import_model
from edgeqwen.convert.origin import find_checkpoint
from edgeqwen.core.model import Source, model_name
from edgeqwen.core.package import MANIFEST, open_package
from edgeqwen.core.speeds import Speed, read_speeds, speeds_path, write_speeds
from edgeqwen.cpu import Memory, Processor, ThreadGroup, ThreadPlan
from edgeqwen.doctor import runtimes
from edgeqwen.doctor.runtimes import Timing, runtime_findings, time_runtimes, timing_findings
from edgeqwen.doctor.sample import write_sample
from edgeqwen.errors import ConfigInvalid, ModelMissing
from edgeqwen.loading import choice, open_model
from edgeqwen.loading.checkpoint_model import checkpoint_identity, chosen_weights, code_folder, find_origin
from edgeqwen.loading.choice import choose_runtime, machine_of
from edgeqwen.loading.options import DaemonOptions
from tests.checkpoints import tiny_spec, write_safetensors_model
from tests.daemons import run_command
from tests.runtimes import ONE_THREAD, needs_torch, tiny_checkpoint

FAST, SLOW = Speed(2000.0, 50.0), Speed(500.0, 10.0)


def options(tmp_path: Path, package: Path, **flags: Any) -> DaemonOptions:
    sources = ConfigSources(None, {}, flags)
    return DaemonOptions(
        config=sources.read(),
        sources=sources,
        package_path=package,
        socket_path=tmp_path / "s",
        threads=ONE_THREAD,
        state_dir=tmp_path / "state",
        cache_dir=tmp_path / "cache",
    )


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """Imported from a checkpoint that stays where it is."""
    write_safetensors_model(tmp_path / "source")
    import_model(tmp_path / "source", tmp_path / "package", quant="int8", target="any", name="tiny")
    return tmp_path / "package"


@pytest.fixture(autouse=True)
def torch_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """As far as the choice looks."""
    monkeypatch.setattr("edgeqwen.loading.checkpoint_model.installed_version", lambda name: "2.13.0")


def keep(tmp_path: Path, **speeds: Speed) -> None:
    write_speeds(speeds_path(tmp_path / "state", machine_of(ONE_THREAD)), speeds)


def test_the_fastest_runtime_that_was_timed_here_is_chosen(tmp_path: Path, package: Path) -> None:
    keep(tmp_path, onnx=SLOW, torch=FAST)
    assert choose_runtime(options(tmp_path, package)) == "torch"
    keep(tmp_path, onnx=FAST, torch=SLOW)
    assert choose_runtime(options(tmp_path, package)) == "onnx"


def test_without_timing_a_package_is_for_onnx_and_a_checkpoint_for_torch(tmp_path: Path, package: Path) -> None:
    assert choose_runtime(options(tmp_path, package)) == "onnx"
    assert choose_runtime(options(tmp_path, tmp_path / "source")) == "torch"


def test_what_was_not_timed_is_not_chosen_over_what_was(tmp_path: Path, package: Path) -> None:
    keep(tmp_path, torch=SLOW)
    assert choose_runtime(options(tmp_path, package)) == "torch"


def test_a_package_whose_checkpoint_is_gone_stays_with_onnx(tmp_path: Path, package: Path) -> None:
    keep(tmp_path, onnx=SLOW, torch=FAST)
    shutil.rmtree(tmp_path / "source")
    assert choose_runtime(options(tmp_path, package)) == "onnx"


def test_weights_that_would_fill_the_memory_are_not_chosen(
    tmp_path: Path, package: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep(tmp_path, onnx=SLOW, torch=FAST)
    monkeypatch.setattr(choice, "read_memory", lambda: Memory(total=1 << 18, available=1 << 16))
    assert choose_runtime(options(tmp_path, package)) == "onnx"


def test_an_unknown_runtime_is_refused_with_those_there_are(tmp_path: Path, package: Path) -> None:
    with pytest.raises(ConfigInvalid, match=r"engine\.runtime: 'tensorrt' is unknown; there are onnx, torch"):
        open_model(options(tmp_path, package, **{"engine.runtime": "tensorrt"}))


# Timings.


def test_timings_are_kept_and_a_broken_file_is_none(tmp_path: Path) -> None:
    path = speeds_path(tmp_path / "new", "some machine")
    assert read_speeds(path) == {}
    write_speeds(path, {"onnx": FAST})
    assert read_speeds(path) == {"onnx": FAST}
    assert [each.name for each in path.parent.iterdir()] == [path.name]
    assert speeds_path(tmp_path / "new", "another machine") != path
    for content in (b"{", b'{"onnx": {"prefill_tok_s": 0, "decode_tok_s": 1}}', b"[]", b'{"onnx": 1}'):
        path.write_bytes(content)
        assert read_speeds(path) == {}


def test_a_request_takes_as_long_as_its_two_parts() -> None:
    assert Speed(500.0, 100.0).request_s == pytest.approx(1.0 + 2.0)


def test_each_installed_runtime_is_timed_and_what_fails_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    import subprocess

    calls: list[tuple[str, ...]] = []

    def run(*arguments: str) -> bytes:
        calls.append(arguments)
        if arguments[0] == "import":
            return b""
        if "torch" in arguments:
            raise subprocess.CalledProcessError(78, "edgeqwen", stderr=b"noise\nedgeqwen: torch.mode: no compiler\n")
        return b'{"prefill_tok_s": 100.0, "decode_tok_s": 10.0}'

    monkeypatch.setattr(runtimes, "_run", run)
    monkeypatch.setattr(runtimes, "installed_runtimes", lambda: {"onnx": "1", "torch": "2", "ipex": None})
    timing = time_runtimes(
        tiny_spec(), quant="hybrid", flags=("--threads", "2"), torch_flags=("--torch-mode", "compile")
    )
    assert timing.speeds == {"onnx": Speed(100.0, 10.0)}
    assert timing.failures == {"torch": "torch.mode: no compiler"}
    imported, onnx, torch = calls
    assert imported[3:5] == ("--quant", "hybrid")
    assert "--torch-mode" not in onnx
    assert torch[-2:] == ("--torch-mode", "compile")
    assert all(call[-2:] == ("--threads", "2") or "--torch-mode" in call for call in calls[1:])
    assert [line.split()[0] for line in timing.lines()] == ["onnx", "torch"]


def test_the_sample_is_a_checkpoint_of_two_layers_that_can_be_imported(tmp_path: Path) -> None:
    for family in ("qwen3", "qwen2", "llama"):
        spec = write_sample(tmp_path / family, tiny_spec(family, num_layers=9))
        manifest = import_model(tmp_path / family, tmp_path / f"{family}-p", quant="int8", target="any", name="sample")
        assert manifest.spec.num_layers == 2
        assert (manifest.spec.hidden_size, manifest.spec.family) == (spec.hidden_size, family)


def test_another_runtime_that_is_clearly_faster_is_worth_a_note() -> None:
    timing = Timing({"onnx": SLOW, "torch": FAST}, {})
    (found,) = timing_findings(timing, "onnx")
    assert 'engine.runtime = "torch"' in found.advice
    assert not list(timing_findings(timing, "auto"))
    assert not list(timing_findings(timing, "torch"))
    assert not list(timing_findings(Timing({"onnx": FAST, "torch": FAST}, {}), "onnx"))
    assert not list(timing_findings(Timing({}, {"onnx": "broke"}), "onnx"))


def test_a_processor_with_bf16_is_told_of_torch_if_it_lacks_it() -> None:
    able, plain = (Processor("x86_64", "a CPU", frozenset(flags)) for flags in ({"avx2", "amx_bf16"}, {"avx2"}))
    assert [each.topic for each in runtime_findings(able, {"torch": None})] == ["torch-bf16"]
    assert not list(runtime_findings(able, {"torch": "2.13"}))
    assert not list(runtime_findings(plain, {"torch": None}))


def test_weights_are_bf16_where_the_processor_computes_in_it() -> None:
    able, plain = (Processor("x86_64", "a CPU", frozenset(flags)) for flags in ({"avx512_bf16"}, {"avx2"}))
    arm = Processor("aarch64", "a CPU", frozenset({"asimd", "bf16"}))
    assert [chosen_weights("auto", each) for each in (able, plain, arm)] == ["bf16", "fp32", "bf16"]
    assert chosen_weights("int8", able) == "int8"
    assert chosen_weights("auto", able, "avx2") == "fp32", "oneDNN may not use what the processor has"
    assert chosen_weights("auto", able, "avx512_core_amx") == "bf16"
    assert chosen_weights("auto", arm, "avx2") == "bf16", "a setting for other processors"


def test_compiled_code_is_kept_for_a_processor_and_a_number_of_threads(tmp_path: Path) -> None:
    """Both are written into it, and code for another processor would end the process."""
    able, plain = (Processor("x86_64", "a CPU", frozenset(flags)) for flags in ({"avx512_bf16"}, {"avx2"}))
    one, two = (ThreadPlan(ThreadGroup(count), ThreadGroup(count)) for count in (1, 2))
    folders = [code_folder(tmp_path, each, threads) for each in (able, plain) for threads in (one, two)]
    assert len(set(folders)) == 4
    assert code_folder(tmp_path, able, two) == folders[1]


# Where a checkpoint is.


def test_a_package_leads_to_the_checkpoint_it_was_imported_from(tmp_path: Path, package: Path) -> None:
    origin = find_origin(package)
    assert origin.path == tmp_path / "source"
    assert origin.name == "tiny"
    assert origin.identity == checkpoint_identity(tmp_path / "source")


def test_a_checkpoint_that_changes_is_another(tmp_path: Path) -> None:
    folder = shutil.copytree(tiny_checkpoint(), tmp_path / "Some-Model_FP16.q8_0")
    before = find_origin(folder)
    assert before.name == model_name(folder.name) == "some-model_fp16"
    with (folder / "model.safetensors").open("ab") as file:
        file.write(b" ")
    assert find_origin(folder) != before
    (folder / "README.md").write_text("words")
    assert find_origin(folder).identity == checkpoint_identity(folder)


@pytest.mark.parametrize("is_named", [True, False])
def test_a_checkpoint_that_is_gone_is_named_with_what_to_do(tmp_path: Path, package: Path, is_named: bool) -> None:
    shutil.rmtree(tmp_path / "source")
    if not is_named:  # as packages of former versions
        manifest = open_package(package).manifest
        source = msgspec.structs.replace(manifest.source, path="")
        (package / MANIFEST).write_bytes(msgspec.json.encode(msgspec.structs.replace(manifest, source=source)))
    with pytest.raises(ModelMissing, match="give the checkpoint itself") as caught:
        find_origin(package)
    assert (str(tmp_path / "source") in caught.value.message) == is_named
    assert str(package) in caught.value.message


def test_a_hubs_checkpoint_is_looked_for_in_the_cache_alone(tmp_path: Path) -> None:
    settings = HubSettings(endpoint="http://127.0.0.1:9", cache=tmp_path / "empty")
    with pytest.raises(ModelMissing, match="no longer in the cache of what was fetched"):
        find_checkpoint(tmp_path / "package", Source("hub", "org/name", "a" * 40), settings)


# What is said of a checkpoint before it is served.


def test_a_configuration_with_a_checkpoint_is_checked_as_torch_would_serve_it(tmp_path: Path) -> None:
    needs_torch()
    environ = {"EDGEQWEN_MODEL_PACKAGE": str(tiny_checkpoint()), "EDGEQWEN_SOCKET_PATH": str(tmp_path / "s")}
    environ["STATE_DIRECTORY"] = str(tmp_path / "state")
    torch = environ | {"EDGEQWEN_ENGINE_RUNTIME": "torch"}
    assert run_command("config", "check", environ=torch).returncode == 0
    assert run_command("config", "check", environ=environ | {"EDGEQWEN_ENGINE_RUNTIME": "auto"}).returncode == 0
    for name, value, said in (
        ("KV_TYPE", "int8", b"kv.type: torch keeps"),
        ("KV_CONTEXT", "1000000", b"kv.context: 1000000 is above"),
        ("MODEL_PACKAGE", str(tmp_path), b"config.json does not exist"),
        ("ENGINE_RUNTIME", "pytorch", b"engine.runtime: 'pytorch' is unknown"),
    ):
        done = run_command("config", "check", environ=torch | {f"EDGEQWEN_{name}": value})
        assert done.returncode == 78
        assert said in done.stdout, name


def test_doctor_looks_at_a_checkpoint_where_torch_is_to_serve_it(tmp_path: Path) -> None:
    needs_torch()
    environ = {"EDGEQWEN_ENGINE_RUNTIME": "torch", "STATE_DIRECTORY": str(tmp_path / "state")}
    whole, none = (
        run_command("doctor", "--quick", "--socket", str(tmp_path / "s"), str(path), environ=environ)
        for path in (tiny_checkpoint(), tmp_path)
    )
    assert whole.returncode == 0, whole.stdout
    assert none.returncode == 66
    assert b"config.json does not exist" in none.stdout
