"""Safetensors folders: damaged files, stored types, shards and ties."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from edgeqwen.convert.files import DataFile
from edgeqwen.convert.rows import decode_plain
from edgeqwen.convert.safetensors_header import StoredTensor, read_header
from edgeqwen.convert.sources import open_checkpoint
from edgeqwen.core.tensor_names import EMBEDDING, OUTPUT
from edgeqwen.errors import EXIT_BAD_MODEL, EXIT_NO_INPUT, EdgeqwenError, ModelInvalid, ModelMissing
from tests.checkpoints import random_tensors, rounded, safetensors_bytes, tiny_spec, write_json, write_safetensors_model

INDEX = "model.safetensors.index.json"


def build(header: Any, data: bytes = b"", *, length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def entry(dtype: Any = "F32", shape: Any = (2, 4), offsets: Any = (0, 32)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def parse(path: Path, content: bytes) -> dict[str, StoredTensor]:
    path.write_bytes(content)
    file = DataFile(path)
    try:
        return read_header(file)
    finally:
        file.close()


DATA = bytes(32)
GOOD = build({"a": entry()}, DATA)
DAMAGED = {
    "empty": (b"", r"is empty \(0 bytes\)"),
    "seven bytes": (b"\0" * 7, "is truncated: 8 bytes expected or more, 7 found"),
    "cut by a byte": (GOOD[:-1], rf"is truncated: {len(GOOD)} bytes expected, {len(GOOD) - 1} found"),
    "cut in half": (GOOD[: len(GOOD) // 2], "is truncated: "),
    "cut in the header": (GOOD[:20], rf"is truncated: {len(GOOD) - 32} bytes expected or more, 20 found"),
    "8 bytes too many": (GOOD + DATA[:8], rf"has 8 bytes too many: {len(GOOD)} bytes expected, {len(GOOD) + 8} found"),
    "header of 2^63": (
        build({"a": entry()}, DATA, length=1 << 63),
        "claims a header of 9,223,372,036,854,775,808 bytes",
    ),
    "no JSON": (build(b"{not json}", DATA), "is not valid JSON"),
    "no UTF-8": (build(b'{"\xff": 1}', DATA), "is not valid JSON"),
    "deep JSON": (build(b"[" * 100_000, DATA), "is not valid JSON"),
    "an array": (build([1], DATA), "must hold a JSON object"),
    "no tensors": (build({"__metadata__": {}}), "lists 0 tensors"),
    "overlap": (
        build({"a": entry(), "b": entry(offsets=(16, 48))}, bytes(48)),
        "lets tensor 'b' overlap 'a'",
    ),
    "hole": (build({"a": entry(), "b": entry(offsets=(40, 72))}, bytes(72)), "a hole of 8 bytes before tensor 'b'"),
    "offsets swapped": (
        build({"a": entry(offsets=(32, 0))}, DATA),
        "gives tensor 'a' -32 bytes; its shape and type take 32",
    ),
    "offsets too short": (
        build({"a": entry(offsets=(0, 28))}, DATA),
        "gives tensor 'a' 28 bytes; its shape and type take 32",
    ),
    "offset negative": (build({"a": entry(offsets=(-32, 0))}, DATA), "offsets that are not whole numbers"),
    "offset a fraction": (build({"a": entry(offsets=(0, 32.0))}, DATA), "offsets that are not whole numbers"),
    "shape huge": (
        build({"a": entry(shape=(1 << 62, 4))}, DATA),
        "gives tensor 'a' 32 bytes; its shape and type take 73,",
    ),
    "shape no list": (build({"a": entry(shape="xx")}, DATA), "describes tensor 'a' with a shape"),
    "five dimensions": (
        build({"a": entry(shape=(1, 1, 2, 2, 2))}, DATA),
        r"gives tensor 'a' the shape \[1, 1, 2, 2, 2\]",
    ),
    "a hundred thousand dimensions": (
        build({"a": entry(shape=(9,) * 100_000)}, DATA),
        "gives tensor 'a' the shape of 100,000 dimensions; 1 to 4",
    ),
    "no dimension": (build({"a": entry(shape=(), offsets=(0, 4))}, bytes(4)), r"gives tensor 'a' the shape \[\]"),
    "member missing": (
        build({"a": {"dtype": "F32"}}, DATA),
        "describes tensor 'a' without dtype, shape or data_offsets",
    ),
    "entry no object": (build({"a": 1}, DATA), "describes tensor 'a' without"),
    "unknown type": (build({"a": entry(dtype="X7")}, DATA), "stores tensor 'a' in the unknown type 'X7'"),
    "type no string": (build({"a": entry(dtype=[1])}, DATA), "stores tensor 'a' in the unknown type"),
    "F8_E4M3": (
        build({"a": entry(dtype="F8_E4M3", shape=(4, 8))}, DATA),
        "stores tensor 'a' in type F8_E4M3; supported: F32, F16, BF16",
    ),
    "I64": (build({"a": entry(dtype="I64", shape=(4,))}, DATA), "stores tensor 'a' in type I64"),
    "Git LFS pointer": (
        b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1192135096\n",
        r"is a Git LFS pointer of 7\d bytes in the place of a file of 1,192,135,096 bytes",
    ),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_a_damaged_file_is_refused(name: str, tmp_path: Path) -> None:
    content, message = DAMAGED[name]
    with pytest.raises(ModelInvalid, match=message) as error:
        parse(tmp_path / "model.safetensors", content)
    assert str(tmp_path / "model.safetensors") in error.value.message
    assert "\n" not in error.value.message
    assert error.value.exit_code == EXIT_BAD_MODEL


def test_tensors_may_stand_in_any_order(tmp_path: Path) -> None:
    found = parse(tmp_path / "m.safetensors", build({"b": entry(offsets=(32, 64)), "a": entry()}, bytes(64)))
    assert {name: tensor.offset - found["a"].offset for name, tensor in found.items()} == {"b": 32, "a": 0}


@given(data=st.data())
@hypothesis_settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_damage_is_found_or_harmless(data: st.DataObject, tmp_path: Path) -> None:
    content = bytearray(safetensors_bytes(random_tensors(tiny_spec(num_layers=1))))
    header_len = struct.unpack_from("<Q", content)[0]
    for _ in range(data.draw(st.integers(1, 3))):
        content[data.draw(st.integers(0, header_len + 8))] = data.draw(st.integers(0, 255))
    message = str(tmp_path)
    try:
        parse(tmp_path / "m.safetensors", bytes(content))
    except EdgeqwenError as error:
        message = error.message
    assert str(tmp_path) in message


def test_stored_values_come_back_exactly() -> None:
    values = np.array([1.0, -2.5, 3.3895314e38, 1e-40, -0.0], np.float32)
    bits = values.view(np.uint32)
    assert np.array_equal(decode_plain(values.view(np.uint8), "F32").view(np.uint32), bits)
    upper = (bits >> 16).astype(np.uint16)
    assert np.array_equal(decode_plain(upper.view(np.uint8), "BF16").view(np.uint32), upper.astype(np.uint32) << 16)
    halves = np.array([1.0, -2.5, 65504.0, 6e-8], np.float16)
    assert np.array_equal(decode_plain(halves.view(np.uint8), "F16"), halves.astype(np.float32))


@pytest.mark.parametrize("family", ["qwen3", "qwen2", "llama"])
@pytest.mark.parametrize("tie", [True, False])
@pytest.mark.parametrize("num_shards", [1, 3])
def test_rows_and_shape_come_back(family: Any, tie: bool, num_shards: int, tmp_path: Path) -> None:
    spec = write_safetensors_model(tmp_path, family=family, tie=tie, num_shards=num_shards, seed=5)
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.spec == spec
    assert (checkpoint.source.kind, checkpoint.source.id) == ("safetensors", tmp_path.name)
    assert checkpoint.side_files.notes == ()
    for name, values in random_tensors(spec, seed=5).items():
        assert np.array_equal(checkpoint.read(name), values), name
        assert np.array_equal(checkpoint.read(name, 2, 9), values[2:9]), name
        assert checkpoint.read_blocks(name) is None
    checkpoint.close()


@pytest.mark.parametrize("dtype", ["F16", "BF16"])
def test_half_precision_comes_back_exactly(dtype: Any, tmp_path: Path) -> None:
    spec = write_safetensors_model(tmp_path, dtype=dtype)
    checkpoint = open_checkpoint(tmp_path)
    for name, values in random_tensors(spec).items():
        assert checkpoint.tensors[name].stored_type == dtype
        assert np.array_equal(checkpoint.read(name), rounded(values, dtype))
    checkpoint.close()


@pytest.mark.parametrize(("dtype", "value"), [("F32", np.nan), ("F16", 1e6), ("BF16", np.inf)])
@pytest.mark.filterwarnings("ignore:overflow encountered in cast")
def test_nan_and_overflow_are_refused_by_name(dtype: Any, value: float, tmp_path: Path) -> None:
    spec = write_safetensors_model(tmp_path)
    tensors = random_tensors(spec)
    name = "model.layers.1.post_attention_layernorm.weight"
    tensors[name][17] = value
    (tmp_path / "model.safetensors").write_bytes(safetensors_bytes(tensors, dtype))
    checkpoint = open_checkpoint(tmp_path)
    with pytest.raises(ModelInvalid, match=rf"tensor '{name}' holds NaN or infinity \(row 17\)"):
        checkpoint.read(name)
    checkpoint.close()


def rewrite(folder: Path, spec: Any, change: Any) -> None:
    tensors = random_tensors(spec)
    change(tensors)
    (folder / "model.safetensors").write_bytes(safetensors_bytes(tensors))


def edit_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    config = {**json.loads(path.read_text()), **changes}
    write_json(path, {key: value for key, value in config.items() if value is not ...})


UP = "model.layers.0.mlp.up_proj.weight"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop(UP), f"tensor '{UP}' is missing"),
        (
            lambda t: t.update({UP: t[UP][:-1]}),
            rf"tensor '{UP}' has shape \[127, 64\], but the configuration asks for \[128, 64\]",
        ),
        (lambda t: t.update({"score.weight": t[UP]}), "tensor 'score.weight' is not part of a qwen3 model"),
        (lambda t: t.pop(EMBEDDING), f"tensor '{EMBEDDING}' is missing"),
        (
            lambda t: t.pop("model.layers.0.self_attn.q_proj.weight"),
            "tensor 'model.layers.0.self_attn.q_proj.weight' is missing",
        ),
    ],
)
def test_a_tensor_too_few_too_many_or_misshapen_is_named(change: Any, message: str, tmp_path: Path) -> None:
    rewrite(tmp_path, write_safetensors_model(tmp_path), change)
    with pytest.raises(ModelInvalid, match=message):
        open_checkpoint(tmp_path)


def test_a_buffer_of_older_versions_is_ignored(tmp_path: Path) -> None:
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    rewrite(tmp_path, write_safetensors_model(tmp_path), lambda t: t.update({name: np.ones(16, np.float32)}))
    checkpoint = open_checkpoint(tmp_path)
    assert name not in checkpoint.tensors
    checkpoint.close()


def test_an_output_matrix_equal_to_the_embedding_is_tied(tmp_path: Path) -> None:
    spec = write_safetensors_model(tmp_path, tie=True)
    rewrite(tmp_path, spec, lambda t: t.update({OUTPUT: t[EMBEDDING]}))
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.spec.tie_embeddings
    assert OUTPUT not in checkpoint.tensors
    checkpoint.close()


def test_an_output_matrix_that_differs_from_the_tied_embedding_is_refused(tmp_path: Path) -> None:
    spec = write_safetensors_model(tmp_path, tie=True)
    rewrite(tmp_path, spec, lambda t: t.update({OUTPUT: t[EMBEDDING] + np.float32(1)}))
    with pytest.raises(ModelInvalid, match=rf"tensor '{OUTPUT}' differs from '{EMBEDDING}', but config.json ties them"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("tie", [False, ...])
def test_an_untied_model_without_output_matrix_is_refused(tie: Any, tmp_path: Path) -> None:
    write_safetensors_model(tmp_path, tie=True)
    edit_config(tmp_path, tie_word_embeddings=tie)
    with pytest.raises(ModelInvalid, match=rf"tensor '{OUTPUT}' is missing, and config.json does not tie it"):
        open_checkpoint(tmp_path)


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    write_safetensors_model(tmp_path, num_shards=3)
    (tmp_path / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(
        ModelMissing, match=r"model-00002-of-00003\.safetensors does not exist, but .* names it"
    ) as error:
        open_checkpoint(tmp_path)
    assert error.value.exit_code == EXIT_NO_INPUT


def test_a_tensor_that_is_not_in_its_shard_is_named(tmp_path: Path) -> None:
    write_safetensors_model(tmp_path, num_shards=2)
    index = json.loads((tmp_path / INDEX).read_text())
    index["weight_map"][EMBEDDING] = "model-00002-of-00002.safetensors"
    write_json(tmp_path / INDEX, index)
    with pytest.raises(ModelInvalid, match=f"model-00002-of-00002.safetensors: tensor '{EMBEDDING}' is missing"):
        open_checkpoint(tmp_path)


def test_a_tensor_in_two_shards_is_named(tmp_path: Path) -> None:
    write_safetensors_model(tmp_path, num_shards=2)
    both = safetensors_bytes(random_tensors(tiny_spec()))
    (tmp_path / "model-00002-of-00002.safetensors").write_bytes(both)
    with pytest.raises(ModelInvalid, match=r"tensor '.*' is also in model-00001-of-00002.safetensors"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize(
    "shard", ["../model.safetensors", "/etc/model.safetensors", "a/../../m.safetensors", "a\\m.safetensors", "", 7]
)
def test_a_shard_outside_of_the_folder_is_refused(shard: Any, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    write_safetensors_model(folder, num_shards=2)
    write_json(folder / INDEX, {"weight_map": {EMBEDDING: shard}})
    with pytest.raises(ModelInvalid, match="'weight_map' names a file outside of the folder"):
        open_checkpoint(folder)


@pytest.mark.parametrize("weight_map", [None, {}, [1], "x"])
def test_an_index_without_a_map_is_refused(weight_map: Any, tmp_path: Path) -> None:
    write_safetensors_model(tmp_path, num_shards=2)
    write_json(tmp_path / INDEX, {"weight_map": weight_map})
    with pytest.raises(ModelInvalid, match=r"'weight_map' (is missing or empty|must be an object)"):
        open_checkpoint(tmp_path)


def test_a_pickled_shard_is_refused(tmp_path: Path) -> None:
    write_safetensors_model(tmp_path, num_shards=2)
    write_json(tmp_path / INDEX, {"weight_map": {EMBEDDING: "pytorch_model.bin"}})
    with pytest.raises(ModelInvalid, match=r"names 'pytorch_model.bin', which is no safetensors file"):
        open_checkpoint(tmp_path)


def test_shards_behind_links_are_read(tmp_path: Path) -> None:
    """The cache of the hub's library keeps files elsewhere and links to them."""
    write_safetensors_model(tmp_path / "blobs", num_shards=2)
    (tmp_path / "snapshot").mkdir()
    for path in (tmp_path / "blobs").iterdir():
        (tmp_path / "snapshot" / path.name).symlink_to(path)
    linked, direct = (open_checkpoint(tmp_path / folder) for folder in ("snapshot", "blobs"))
    assert np.array_equal(linked.read(EMBEDDING), direct.read(EMBEDDING))
    linked.close()
    direct.close()


def test_the_first_missing_file_is_named(tmp_path: Path) -> None:
    write_safetensors_model(tmp_path)
    for name in ("model.safetensors", "tokenizer.json", "config.json"):
        (tmp_path / name).unlink()
        with pytest.raises(ModelMissing, match=name.replace(".", r"\.")) as error:
            open_checkpoint(tmp_path)
        assert error.value.exit_code == EXIT_NO_INPUT


def test_pickled_weights_are_not_read(tmp_path: Path) -> None:
    write_safetensors_model(tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(ModelMissing, match="pickled weights are never read"):
        open_checkpoint(tmp_path)


def test_a_weights_file_alone_asks_for_its_folder(tmp_path: Path) -> None:
    write_safetensors_model(tmp_path)
    with pytest.raises(ModelInvalid, match="give the folder that holds it"):
        open_checkpoint(tmp_path / "model.safetensors")
