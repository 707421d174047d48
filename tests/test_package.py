"""Opening a package: what is missing or wrong is named, and with the right exit code."""

from __future__ import annotations

import errno
import hashlib
import io
import os
from pathlib import Path
from typing import Any

import msgspec
import pytest

from edgeqwen.core.model import Manifest, ModelSpec, Source
from edgeqwen.core.package import installed_models, models_dir, open_package, resolve_model, verify_digests
from edgeqwen.errors import EXIT_BAD_MODEL, EXIT_NO_INPUT, ModelInvalid, ModelMissing

FILES = {
    "decode.onnx": b"graph",
    "weights.bin": b"weights",
    "tokenizer.json": b"{}",
    "chat_template.jinja": b"{{ messages }}",
    "generation_config.json": b'{"eos_token_id": [7, 9], "top_k": 20}',
}

SPEC = ModelSpec(
    family="qwen3",
    vocab_size=16,
    num_tokens=12,
    hidden_size=8,
    intermediate_size=16,
    num_layers=1,
    num_heads=2,
    num_kv_heads=1,
    head_dim=4,
    max_position=64,
    rms_norm_eps=1e-6,
    rope_theta=1e6,
    tie_embeddings=True,
    eos_token_ids=(7,),
)


def write_package(path: Path) -> Path:
    path.mkdir(parents=True)
    for name, data in FILES.items():
        (path / name).write_bytes(data)
    manifest = Manifest(
        name=path.name,
        spec=SPEC,
        quant="int8",
        target="any",
        weight_form="signed",
        source=Source("gguf", "tiny.gguf"),
        builder_version="0",
        sizes={name: len(data) for name, data in FILES.items()},
        digests={name: "sha256:" + hashlib.sha256(data).hexdigest() for name, data in FILES.items()},
    )
    (path / "model.json").write_bytes(msgspec.json.encode(manifest))
    return path


@pytest.fixture
def package_path(tmp_path: Path) -> Path:
    return write_package(tmp_path / "tiny")


def test_opens_what_is_whole(package_path: Path) -> None:
    package = open_package(package_path)
    assert package.manifest.spec == SPEC
    assert package.generation_config["top_k"] == 20
    assert package.eos_token_ids == (7, 9)
    assert package.read_template() == "{{ messages }}"
    verify_digests(package)


@pytest.mark.parametrize(("config", "eos"), [(b"{}", (7,)), (b'{"eos_token_id": 3}', (7, 3)), (b"", (7,))])
def test_end_tokens_come_as_a_number_a_list_or_not_at_all(package_path: Path, config: bytes, eos: tuple[int]) -> None:
    restate(package_path, "generation_config.json", config)
    assert open_package(package_path).eos_token_ids == eos


def test_empty_template_is_none(package_path: Path) -> None:
    restate(package_path, "chat_template.jinja", b"")
    assert open_package(package_path).read_template() is None


def test_template_that_is_not_utf8_is_named(package_path: Path) -> None:
    restate(package_path, "chat_template.jinja", b"{{ messages }}\xff")
    with pytest.raises(ModelInvalid, match=r"chat_template\.jinja: not UTF-8"):
        open_package(package_path).read_template()


def restate(path: Path, name: str, data: bytes) -> None:
    """Replace a file and its size in the manifest."""
    (path / name).write_bytes(data)
    manifest = msgspec.json.decode((path / "model.json").read_bytes())
    manifest["sizes"][name] = len(data)
    (path / "model.json").write_bytes(msgspec.json.encode(manifest))


@pytest.mark.parametrize("name", sorted(FILES))
def test_missing_file_is_named(package_path: Path, name: str) -> None:
    (package_path / name).unlink()
    with pytest.raises(ModelMissing, match=name) as caught:
        open_package(package_path)
    assert caught.value.exit_code == EXIT_NO_INPUT


@pytest.mark.parametrize("name", sorted(FILES))
def test_truncated_file_is_named_with_both_sizes(package_path: Path, name: str) -> None:
    size = len(FILES[name])
    (package_path / name).write_bytes(FILES[name][:-1])
    with pytest.raises(ModelInvalid, match=rf"{name}: {size - 1} bytes.*{size}") as caught:
        open_package(package_path)
    assert caught.value.exit_code == EXIT_BAD_MODEL


def test_changed_content_of_the_same_size_is_found_by_digest(package_path: Path) -> None:
    (package_path / "weights.bin").write_bytes(b"WEIGHTS")
    with pytest.raises(ModelInvalid, match=r"weights\.bin"):
        verify_digests(open_package(package_path))


@pytest.mark.parametrize(
    "change",
    [
        {"format_version": 99},
        {"quant": "int3"},
        {"surprise": 1},
        {"sizes": {"../outside": 1}},
        {"spec": {}},
        {"spec": msgspec.to_builtins(SPEC) | {"max_position": -1}},
    ],
)
def test_manifest_of_another_kind_is_refused(package_path: Path, change: dict[str, object]) -> None:
    path = package_path / "model.json"
    path.write_bytes(msgspec.json.encode(msgspec.json.decode(path.read_bytes()) | change))
    with pytest.raises(ModelInvalid, match=r"model\.json"):
        open_package(package_path)


NESTED = b'{"a":' + b"[" * 100_000


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b"\xff\xfe", b'{"spec":' * 2000, NESTED])
def test_broken_manifest_is_refused(package_path: Path, data: bytes) -> None:
    (package_path / "model.json").write_bytes(data)
    with pytest.raises(ModelInvalid, match=r"model\.json"):
        open_package(package_path)


@pytest.mark.parametrize("data", [b"[1]", b"{", b"nothing", NESTED])
def test_broken_generation_config_is_refused(package_path: Path, data: bytes) -> None:
    restate(package_path, "generation_config.json", data)
    with pytest.raises(ModelInvalid, match=r"generation_config\.json"):
        open_package(package_path)


def test_absent_folder_and_other_folders_are_told_apart(tmp_path: Path) -> None:
    with pytest.raises(ModelMissing, match="nowhere"):
        open_package(tmp_path / "nowhere")
    with pytest.raises(ModelInvalid, match="edgeqwen import"):
        open_package(tmp_path)


def test_models_dir_follows_user_and_xdg() -> None:
    assert models_dir({"HOME": "/home/a"}, is_root=True) == Path("/var/lib/edgeqwen/models")
    assert models_dir({"HOME": "/home/a"}, is_root=False) == Path("/home/a/.local/share/edgeqwen/models")
    assert models_dir({"XDG_DATA_HOME": "/data"}, is_root=False) == Path("/data/edgeqwen/models")
    relative = {"XDG_DATA_HOME": "data", "HOME": "/home/a"}
    assert models_dir(relative, is_root=False) == Path("/home/a/.local/share/edgeqwen/models")


def test_name_path_and_the_only_model_resolve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "models"
    write_package(folder / "one")
    assert resolve_model("one", folder) == folder / "one"
    assert resolve_model("", folder) == folder / "one"
    monkeypatch.chdir(tmp_path)
    (tmp_path / "one").mkdir()
    assert resolve_model("one", folder) == Path("one")


def test_unknown_name_lists_what_is_installed(tmp_path: Path) -> None:
    folder = tmp_path / "models"
    with pytest.raises(ModelMissing, match="edgeqwen pull"):
        resolve_model("", folder)
    write_package(folder / "one")
    write_package(folder / "two")
    (folder / "rest").mkdir()
    assert installed_models(folder) == ("one", "two")
    with pytest.raises(ModelMissing, match="one, two"):
        resolve_model("three", folder)
    with pytest.raises(ModelMissing, match="--model"):
        resolve_model("", folder)


@pytest.mark.parametrize("name", [*FILES, "model.json"])
def test_file_that_may_not_be_read_is_named(package_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    really_open, package = io.open, open_package(package_path)

    def refusing(file: str | Path, *args: Any, **kwargs: Any) -> Any:
        if Path(file).name == name:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(file))
        return really_open(file, *args, **kwargs)

    monkeypatch.setattr(io, "open", refusing)  # root, who may run this, can read everything
    with pytest.raises(ModelMissing, match=f"{name}: cannot be read: Permission denied"):
        open_package(package_path)
    if name in FILES:
        with pytest.raises(ModelMissing, match=f"{name}: cannot be read: Permission denied"):
            verify_digests(package)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may enter every folder")
def test_folder_that_may_not_be_entered_is_not_taken_for_another_kind(package_path: Path) -> None:
    package_path.chmod(0)
    try:
        with pytest.raises(ModelMissing, match="cannot be read"):
            open_package(package_path)
    finally:
        package_path.chmod(0o700)
