"""Import as a whole: what a package holds, exact repacking, and that nothing half-written is ever left."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from edgeqwen.convert import importer
from edgeqwen.convert.importer import import_model
from edgeqwen.convert.sources import open_checkpoint
from edgeqwen.core.model import Quant
from edgeqwen.core.package import GRAPH, open_package, verify_digests
from edgeqwen.core.tensor_names import EMBEDDING
from edgeqwen.errors import CannotWrite, ModelInvalid, ModelMissing
from tests.checkpoints import write_gguf_model, write_safetensors_model
from tests.models import all_logits, tiny_package, tiny_runtime


def initializers(package: Path) -> dict[str, np.ndarray]:
    graph = onnx.load(str(package / GRAPH))
    return {tensor.name: numpy_helper.to_array(tensor) for tensor in graph.graph.initializer}


@pytest.mark.parametrize("quant", ["fp32", "int8", "int4"])
def test_a_package_opens_and_its_digests_hold(quant: Quant) -> None:
    package = open_package(tiny_package("qwen3", quant))
    verify_digests(package)
    assert package.manifest.quant == quant
    assert package.manifest.source.kind == "safetensors"


@pytest.mark.parametrize("quant", ["fp32", "int8", "int4"])
def test_a_tied_matrix_stands_once_in_the_weights_file(quant: Quant) -> None:
    tied, untied = (tiny_package("qwen3", quant, tie=tie) for tie in (True, False))
    sizes = [open_package(path).manifest.sizes["weights.bin"] for path in (tied, untied)]
    spec = open_package(tied).manifest.spec
    matrix_bytes = spec.vocab_size * spec.hidden_size * (4 if quant == "fp32" else 1)
    assert sizes[1] - sizes[0] >= matrix_bytes


def test_q4_0_is_repacked_without_rounding(tmp_path: Path) -> None:
    write_gguf_model(tmp_path / "model.gguf", stored_type="Q4_0")
    import_model(tmp_path / "model.gguf", tmp_path / "package", quant="int4", target="any", name="m")
    stored = open_checkpoint(tmp_path / "model.gguf")
    values = initializers(tmp_path / "package")
    name = "model.layers.0.mlp.down_proj.weight"
    packed = values[name + ".codes"]
    codes = np.stack([packed & 15, packed >> 4], axis=-1).reshape(packed.shape[0], -1)
    exact = (codes.astype(np.float32) - 8) * np.repeat(values[name + ".scales"], 32, axis=1)
    assert np.array_equal(exact, stored.read(name))
    embedding = (values[EMBEDDING + ".codes"].astype(np.float32) - 128) * values[EMBEDDING + ".scales"][..., None]
    assert np.array_equal(embedding.reshape(stored.tensors[EMBEDDING].shape), stored.read(EMBEDDING))


def test_q8_0_embeddings_are_repacked_without_rounding(tmp_path: Path) -> None:
    write_gguf_model(tmp_path / "model.gguf", stored_type="Q8_0")
    import_model(tmp_path / "model.gguf", tmp_path / "package", quant="int8", target="any", name="m")
    stored, values = open_checkpoint(tmp_path / "model.gguf"), initializers(tmp_path / "package")
    embedding = (values[EMBEDDING + ".codes"].astype(np.float32) - 128) * values[EMBEDDING + ".scales"][..., None]
    assert np.array_equal(embedding.reshape(stored.tensors[EMBEDDING].shape), stored.read(EMBEDDING))


def test_a_packages_quant_changes_its_logits_little_and_int8_less_than_int4() -> None:
    ids = list(range(5, 300))
    exact, int8, int4 = (
        all_logits(tiny_runtime(tiny_package("qwen3", quant)), ids, chunk=256) for quant in ("fp32", "int8", "int4")
    )
    errors = [float(np.sqrt(np.square(each - exact).mean()) / exact.std()) for each in (int8, int4)]
    assert 0 < errors[0] < 0.1
    assert errors[0] < errors[1] < 0.5


def test_an_import_over_a_running_package_leaves_the_running_one_its_files(tmp_path: Path) -> None:
    write_safetensors_model(tmp_path / "source")
    import_model(tmp_path / "source", tmp_path / "package", quant="int8", target="any", name="m")
    runtime = tiny_runtime(tmp_path / "package")
    before = all_logits(runtime, [1, 2, 3], chunk=3)
    write_safetensors_model(tmp_path / "source", seed=9)
    import_model(tmp_path / "source", tmp_path / "package", quant="int8", target="any", name="m")
    assert np.array_equal(all_logits(runtime, [1, 2, 3], chunk=3), before)
    assert not np.array_equal(all_logits(tiny_runtime(tmp_path / "package"), [1, 2, 3], chunk=3), before)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["package", "source"]


def test_a_failed_import_keeps_the_package_that_was_there(tmp_path: Path) -> None:
    write_safetensors_model(tmp_path / "source")
    import_model(tmp_path / "source", tmp_path / "package", quant="int8", target="any", name="m")
    weights = tmp_path / "source" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    with pytest.raises(ModelInvalid, match=r"model\.safetensors"):
        import_model(tmp_path / "source", tmp_path / "package", quant="int8", target="any", name="m")
    verify_digests(open_package(tmp_path / "package"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["package", "source"]


def test_nan_in_a_weight_is_refused_by_name_and_nothing_is_left(tmp_path: Path) -> None:
    write_safetensors_model(tmp_path / "source")
    weights = tmp_path / "source" / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-4:] = np.float32("nan").tobytes()
    weights.write_bytes(content)
    with pytest.raises(ModelInvalid, match="NaN"):
        import_model(tmp_path / "source", tmp_path / "package", quant="fp32", target="any", name="m")
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_leftovers_of_a_killed_import_are_removed_by_the_next(tmp_path: Path) -> None:
    write_safetensors_model(tmp_path / "source")
    leftover = tmp_path / ".package.importing"
    leftover.mkdir()
    (leftover / "weights.bin").write_bytes(b"half")
    import_model(tmp_path / "source", tmp_path / "package", quant="int8", target="any", name="m")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["package", "source"]


def test_a_missing_source_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelMissing, match="nowhere"):
        import_model(tmp_path / "nowhere", tmp_path / "package", quant="int8", target="any", name="m")


def test_a_folder_that_is_not_a_package_is_not_replaced(tmp_path: Path) -> None:
    write_safetensors_model(tmp_path / "source")
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "letter.txt").write_text("dear")
    with pytest.raises(CannotWrite, match="not a model package"):
        import_model(tmp_path / "source", tmp_path / "precious", quant="int8", target="any", name="m")
    assert (tmp_path / "precious" / "letter.txt").read_text() == "dear"


FULL_DISK = """
import resource, signal, sys
from pathlib import Path
from edgeqwen.convert.importer import import_model
from edgeqwen.errors import CannotWrite
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000))
try:
    import_model(Path(sys.argv[1]), Path(sys.argv[2]), quant="fp32", target="any", name="m")
except CannotWrite as error:
    print(error.exit_code, error.message)
"""


def test_a_file_that_cannot_grow_is_a_clear_error_and_nothing_is_left(tmp_path: Path) -> None:
    write_safetensors_model(tmp_path / "source")
    command = [sys.executable, "-c", FULL_DISK, str(tmp_path / "source"), str(tmp_path / "package")]
    run = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert run.stdout.startswith("73 "), run.stderr
    assert "cannot write the package" in run.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_a_full_disk_is_named_as_such(tmp_path: Path) -> None:
    if os.geteuid() != 0 or shutil.which("mount") is None:
        pytest.skip("needs root to mount a small file system")
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=400k", "none", str(disk)], check=False)
    if mount.returncode:
        pytest.skip("mounting is not allowed here")
    try:
        write_safetensors_model(tmp_path / "source")
        with pytest.raises(CannotWrite, match="no space left"):
            import_model(tmp_path / "source", disk / "package", quant="fp32", target="any", name="m")
        assert list(disk.iterdir()) == []
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_weight_forms_follow_the_target() -> None:
    assert importer.WEIGHT_FORMS == {"any": "unsigned", "vnni": "signed", "arm": "signed"}


STREAMING = """
import resource, sys
from pathlib import Path
from edgeqwen.convert.importer import import_model
fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
limit = (int(fields["VmData"].split()[0]) << 10) + (100 << 20)
resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
import_model(Path(sys.argv[1]), Path(sys.argv[2]), quant="int8", target="any", name="m")
assert "torch" not in sys.modules and "transformers" not in sys.modules
"""


def test_an_import_streams_its_tensors_instead_of_loading_them(tmp_path: Path) -> None:
    """A matrix of 246 MB is imported with 100 MB of memory besides what the libraries take when they are loaded."""
    write_safetensors_model(tmp_path / "source", vocab_size=120000, hidden_size=512, num_layers=1)
    command = [sys.executable, "-c", STREAMING, str(tmp_path / "source"), str(tmp_path / "package")]
    run = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert run.returncode == 0, run.stderr[-2000:]


LOCKING = """
import sys
from pathlib import Path
from edgeqwen.convert.staging import staging
with staging(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_a_second_import_to_the_same_place_is_told_and_the_first_goes_on(tmp_path: Path) -> None:
    write_safetensors_model(tmp_path / "source")
    out = tmp_path / "package"
    command = [sys.executable, "-c", LOCKING, str(out)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as first:
        assert first.stdout is not None
        assert first.stdout.readline() == "held\n"
        with pytest.raises(CannotWrite, match="another import"):
            import_model(tmp_path / "source", out, quant="int8", target="any", name="m")
        assert (tmp_path / ".package.importing").is_dir()
        first.kill()
    import_model(tmp_path / "source", out, quant="int8", target="any", name="m")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["package", "source"]
