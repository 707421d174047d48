"""GGUF files: hostile headers, unknown types, and the values that come out."""

from __future__ import annotations

import itertools
import struct
import time
import tracemalloc
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from edgeqwen.convert.files import DataFile
from edgeqwen.convert.gguf_checkpoint import open_gguf
from edgeqwen.convert.gguf_header import TENSOR_TYPES, GgufHeader, read_header
from edgeqwen.convert.sources import open_checkpoint
from edgeqwen.core.model import RopeScaling
from edgeqwen.core.tensor_names import EMBEDDING
from edgeqwen.errors import EXIT_BAD_MODEL, EXIT_NO_INPUT, EdgeqwenError, ModelInvalid, ModelMissing
from tests.checkpoints import (
    add_gguf_shape,
    add_gguf_tokenizer,
    gguf_name,
    permuted,
    random_tensors,
    tiny_spec,
    write_gguf_model,
)

K_QUANT_SHAPE: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_heads": 2,
    "num_kv_heads": 1,
    "head_dim": 128,
}


def string(text: str) -> bytes:
    return struct.pack("<Q", len(text.encode())) + text.encode()


def pair(key: str, kind: int, value: bytes) -> bytes:
    return string(key) + struct.pack("<I", kind) + value


def tensor(name: str, shape: tuple[int, ...], kind: int, offset: int, num_dims: int | None = None) -> bytes:
    extents = b"".join(struct.pack("<Q", extent) for extent in shape)
    return string(name) + struct.pack("<I", num_dims or len(shape)) + extents + struct.pack("<IQ", kind, offset)


def header(*parts: bytes, version: int = 3, num_tensors: int = 0, num_pairs: int = 0, magic: bytes = b"GGUF") -> bytes:
    return magic + struct.pack("<IQQ", version, num_tensors, num_pairs) + b"".join(parts)


def parse(path: Path, content: bytes) -> GgufHeader:
    path.write_bytes(content)
    file = DataFile(path)
    try:
        return read_header(file)
    finally:
        file.close()


ARCH = pair("general.architecture", 8, string("qwen3"))
PAD = b"\0" * 4096
HOSTILE = {
    "no magic": (b"PK\x03\x04" + PAD, "is not a GGUF file"),
    "empty": (b"", r"is empty \(0 bytes\)"),
    "three bytes": (b"GGU", "is not a GGUF file"),
    "magic alone": (b"GGUF", r"is truncated: 8 bytes expected or more, 4 found"),
    "version 1": (header(version=1) + PAD, "is GGUF version 1; versions 2 and 3 are supported"),
    "version 99": (header(version=99) + PAD, "is GGUF version 99"),
    "big-endian": (b"GGUF" + struct.pack(">IQQ", 3, 1, 1) + PAD, "is big-endian"),
    "no tensors": (header() + PAD, "holds no tensors"),
    "2^40 tensors": (header(num_tensors=1 << 40) + PAD, "claims 1,099,511,627,776 tensors"),
    "2^63 pairs": (header(num_tensors=1, num_pairs=1 << 63) + PAD, "metadata pairs"),
    "key of 2^62": (header(struct.pack("<Q", 1 << 62), num_tensors=1, num_pairs=1) + PAD, "metadata key of 4,611,"),
    "string of 2^62": (
        header(pair("general.name", 8, struct.pack("<Q", 1 << 62)), num_tensors=1, num_pairs=1) + PAD,
        "gives 'general.name' a string of 4,611,686,018,427,387,904 bytes",
    ),
    "string past the end": (
        header(pair("general.name", 8, struct.pack("<Q", 1 << 20)), num_tensors=1, num_pairs=1) + PAD,
        "is truncated: 1,048,6.. bytes expected or more, 4,1.. found",
    ),
    "array of 2^60": (
        header(pair("a", 9, struct.pack("<IQ", 4, 1 << 60)), num_tensors=1, num_pairs=1) + PAD,
        "gives 'a' 1,152,921,504,606,846,976 elements",
    ),
    "array past the end": (
        header(pair("a", 9, struct.pack("<IQ", 10, 1 << 20)), num_tensors=1, num_pairs=1) + PAD,
        "is truncated",
    ),
    "array of arrays": (
        header(pair("a", 9, struct.pack("<IQ", 9, 1)), num_tensors=1, num_pairs=1) + PAD,
        "gives 'a' elements of type 9",
    ),
    "unknown value type": (header(pair("a", 77, b""), num_tensors=1, num_pairs=1) + PAD, "unknown value type 77"),
    "key twice": (header(ARCH, ARCH, num_tensors=1, num_pairs=2) + PAD, "'general.architecture' twice"),
    "key no UTF-8": (
        header(struct.pack("<Q", 2) + b"\xff\xfe", num_tensors=1, num_pairs=1) + PAD,
        "a metadata key that is not UTF-8",
    ),
    "token no UTF-8": (
        header(pair("tokenizer.x", 8, struct.pack("<Q", 1) + b"\xff"), num_tensors=1, num_pairs=1) + PAD,
        "gives 'tokenizer.x' a string that is not UTF-8",
    ),
    "alignment 0": (
        header(pair("general.alignment", 4, struct.pack("<I", 0)), num_tensors=1, num_pairs=1) + PAD,
        "gives 'general.alignment' as 0",
    ),
    "alignment 3": (
        header(pair("general.alignment", 4, struct.pack("<I", 3)), num_tensors=1, num_pairs=1) + PAD,
        "gives 'general.alignment' as 3; it must be a power of two",
    ),
    "alignment 2^31": (
        header(pair("general.alignment", 4, struct.pack("<I", 1 << 31)), num_tensors=1, num_pairs=1) + PAD,
        "gives 'general.alignment' as 2147483648",
    ),
    "9 dimensions": (header(tensor("t", (1,) * 9, 0, 0), num_tensors=1) + PAD, "tensor 't' 9 dimensions"),
    "0 dimensions": (header(string("t") + struct.pack("<I", 0), num_tensors=1) + PAD, "tensor 't' 0 dimensions"),
    "empty shape": (header(tensor("t", (0, 4), 0, 0), num_tensors=1) + PAD, r"tensor 't' the empty shape \[4, 0\]"),
    "offset wraps": (
        header(tensor("t", (32,), 0, (1 << 64) - 32), num_tensors=1) + PAD,
        r"is truncated: 18,446,744,073,709,551,.* bytes expected \(tensor 't' ends there\)",
    ),
    "size wraps": (header(tensor("t", (1 << 62, 4), 0, 0), num_tensors=1) + PAD, "is truncated: 73,786,"),
    "offset unaligned": (
        header(tensor("t", (32,), 0, 4), num_tensors=1) + PAD,
        "tensor 't' at offset 4, no multiple of 32",
    ),
    "overlap": (
        header(tensor("a", (32,), 0, 0), tensor("b", (32,), 0, 96), num_tensors=2) + PAD,
        "lets tensor 'b' overlap 'a'",
    ),
    "tensor twice": (
        header(tensor("a", (32,), 0, 0), tensor("a", (32,), 0, 128), num_tensors=2) + PAD,
        "tensor 'a' twice",
    ),
    "Git LFS pointer": (
        b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 639446688\n",
        r"is a Git LFS pointer of 7\d bytes in the place of a file of 639,446,688 bytes: run 'git lfs pull'",
    ),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_header_is_refused_at_once(name: str, tmp_path: Path) -> None:
    content, message = HOSTILE[name]
    tracemalloc.start()
    started = time.monotonic()
    try:
        with pytest.raises(ModelInvalid, match=message) as error:
            parse(tmp_path / "model.gguf", content)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert str(tmp_path / "model.gguf") in error.value.message
    assert "\n" not in error.value.message
    assert error.value.exit_code == EXIT_BAD_MODEL
    assert peak < 64 << 20
    assert time.monotonic() - started < 10  # a hang guard: the header takes milliseconds


@pytest.mark.parametrize(
    ("kind", "known"),
    [
        (20, r" \(IQ4_NL\)"),
        (23, r" \(IQ4_XS\)"),
        (36, r" \(IQ4_NL_4_4, removed from the format\)"),
        (39, r" \(MXFP4\)"),
        (156, ""),
    ],
)
def test_an_unknown_tensor_type_is_named(kind: int, known: str, tmp_path: Path) -> None:
    parts = tensor("good", (256,), 12, 0), tensor("blk.0.ffn_up.weight", (256, 2), kind, 160)
    with pytest.raises(ModelInvalid, match=rf"tensor 'blk.0.ffn_up.weight' in type {kind}{known}; supported: F32, F16"):
        parse(tmp_path / "model.gguf", header(*parts, num_tensors=2) + PAD)


def test_a_row_that_is_no_multiple_of_the_block_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelInvalid, match="tensor 't' rows of 100 elements; Q4_K needs a multiple of 256"):
        parse(tmp_path / "model.gguf", header(tensor("t", (100, 256), 12, 0), num_tensors=1) + PAD)


def test_sizes_of_types_are_those_of_the_format() -> None:
    for type_id, kind in TENSOR_TYPES.items():
        known = gguf.GGMLQuantizationType(type_id)
        assert (known.name, *gguf.GGML_QUANT_SIZES[known]) == (kind.name, kind.block_len, kind.block_bytes)


@given(data=st.data())
@hypothesis_settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_damaged_file_opens_or_is_refused(data: st.DataObject, tmp_path: Path) -> None:
    original = tmp_path / "original.gguf"
    if not original.exists():
        write_gguf_model(original, stored_type="Q8_0", num_layers=1)
    content = bytearray(original.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, 12000))] = data.draw(st.integers(0, 255))
    path = tmp_path / "damaged.gguf"
    path.write_bytes(content[: data.draw(st.integers(0, len(content)))] if data.draw(st.booleans()) else content)
    message = str(tmp_path)
    try:
        open_gguf(path).close()
    except EdgeqwenError as error:
        message = error.message
    assert str(tmp_path) in message


@pytest.mark.parametrize("cut", [1, 1000, 100_000])
def test_a_file_cut_short_tells_both_sizes(cut: int, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_gguf_model(path)
    whole = path.read_bytes()
    path.write_bytes(whole[:-cut])
    with pytest.raises(ModelInvalid, match=rf"is truncated: \S+ bytes expected .*, {len(whole) - cut:,} found"):
        open_checkpoint(path)


def test_a_file_that_shrinks_while_it_is_read_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_gguf_model(path)
    checkpoint = open_checkpoint(path)
    with path.open("r+b") as file:
        file.truncate(20_000)
    with pytest.raises(ModelInvalid, match="became shorter while it was read"):
        for name in checkpoint.tensors:
            checkpoint.read(name)
    checkpoint.close()


def edited(path: Path, **changes: Any) -> Path:
    """A tiny model whose writer was told something else; `changes` are metadata by key with `__` for `.`."""
    spec = tiny_spec("llama")
    architecture = changes.pop("architecture", "llama")
    writer = gguf.GGUFWriter(path, architecture)
    values: dict[str, Any] = {
        "context_length": spec.max_position,
        "embedding_length": spec.hidden_size,
        "block_count": spec.num_layers,
        "feed_forward_length": spec.intermediate_size,
        "attention.head_count": spec.num_heads,
        "attention.head_count_kv": spec.num_kv_heads,
        "attention.key_length": spec.head_dim,
        "attention.layer_norm_rms_epsilon": 1e-6,
    }
    drop = changes.pop("drop", ())
    extra = changes.pop("extra_tensors", {})
    for key, value in {**values, **{key.replace("__", "."): value for key, value in changes.items()}}.items():
        full = key if key.startswith(("split.", "general.")) else f"{architecture}.{key}"
        if isinstance(value, str):
            writer.add_string(full, value)
        elif isinstance(value, float):
            writer.add_float32(full, value)
        elif isinstance(value, list):
            writer.add_array(full, value)
        else:
            writer.add_uint32(full, value)
    add_gguf_tokenizer(writer, spec)
    tensors = {gguf_name(name): values for name, values in random_tensors(spec).items()} | extra
    for name, array in tensors.items():
        if name not in drop:
            writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architecture": "qwen3moe"}, "architecture 'qwen3moe' is not supported; supported: qwen3, qwen2, llama"),
        ({"split__count": 3, "split__no": 0}, "is part 1 of 3 of a split model.*llama-gguf-split --merge"),
        ({"expert_count": 8}, "'llama.expert_count' is 8: mixtures of experts"),
        ({"expert_count": [8, 8]}, "'llama.expert_count' must be an integer"),
        ({"attention__head_count": [4, 2]}, "'llama.attention.head_count' must be an integer"),
        ({"attention__sliding_window": [64, 0]}, "'llama.attention.sliding_window' must be an integer"),
        ({"attention__sliding_window": 64}, "'llama.attention.sliding_window' is 64"),
        ({"rope__dimension_count": 16}, "'llama.rope.dimension_count' is 16, but heads have 32"),
        ({"rope__scaling__type": "yarn"}, "'llama.rope.scaling.type' is 'yarn'; supported: none, linear"),
        (
            {"attention__key_length": 16},
            "'llama.attention.key_length' is 16 for 4 heads, but 'blk.0.attn_q.weight' has 128",
        ),
        ({"attention__value_length": 16}, "'llama.attention.value_length' differs"),
        ({"attention__head_count_kv": 3}, "'llama.attention.head_count_kv' is 3, no divisor of 4"),
        ({"block_count": 3}, r"tensor 'blk.2.attn_q.weight' is missing \(9 of 29 are\)"),
        ({"block_count": 1}, "tensor 'blk.1.attn_q.weight' is not part of a llama model"),
        ({"block_count": 1 << 30}, "'llama.block_count' must be an integer from 1 to 1,024"),
        ({"embedding_length": 96}, r"tensor 'token_embd.weight' has shape \[\d+, 64\], but the configuration asks for"),
        ({"feed_forward_length": 0}, "'llama.feed_forward_length' must be an integer"),
        ({"attention__layer_norm_rms_epsilon": float("nan")}, "must be a finite number above 0, not nan"),
        ({"drop": ("blk.1.ffn_up.weight",)}, "tensor 'blk.1.ffn_up.weight' is missing"),
        ({"drop": ("token_embd.weight",)}, "tensor 'token_embd.weight' is missing"),
        (
            {"extra_tensors": {"blk.0.ffn_gate_inp.weight": np.ones(32, np.float32)}},
            "'blk.0.ffn_gate_inp.weight' is not part",
        ),
        (
            {"extra_tensors": {"rope_freqs.weight": np.full(16, 2, np.float32)}},
            "'rope_freqs.weight' scales the rotation",
        ),
    ],
)
def test_a_model_of_another_kind_is_refused_by_name(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    path = edited(tmp_path / "model.gguf", **changes)
    with pytest.raises(ModelInvalid, match=message) as error:
        open_checkpoint(path)
    assert "\n" not in error.value.message


@pytest.mark.parametrize("family", ["qwen3", "qwen2", "llama"])
@pytest.mark.parametrize("tie", [True, False])
def test_rows_and_shape_come_back(family: Any, tie: bool, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    spec = write_gguf_model(path, family=family, tie=tie, seed=3)
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.spec == spec
    assert checkpoint.source.id == "model.gguf"
    for name, values in random_tensors(spec, seed=3).items():
        assert np.array_equal(checkpoint.read(name), values), name
        middle = len(values) // 2
        assert np.array_equal(checkpoint.read(name, 3, middle + 2), values[3 : middle + 2]), name
        assert checkpoint.read_blocks(name) is None
    checkpoint.close()


def stored(values: np.ndarray, type_name: str) -> np.ndarray:
    """What the reference dequantiser makes of the stored tensor."""
    kind = gguf.GGMLQuantizationType[type_name]
    return gguf.quants.dequantize(gguf.quants.quantize(values, kind), kind)


@pytest.mark.parametrize("type_name", ["F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
@pytest.mark.parametrize("family", ["qwen3", "llama"])
def test_stored_types_give_the_reference_values(type_name: str, family: Any, tmp_path: Path) -> None:
    spec = write_gguf_model(tmp_path / "model.gguf", family=family, stored_type=type_name)
    checkpoint = open_checkpoint(tmp_path / "model.gguf")
    for name, values in random_tensors(spec).items():
        if values.ndim == 2:
            assert checkpoint.tensors[name].stored_type == type_name
            assert np.array_equal(checkpoint.read(name, 5, 64), stored(values, type_name)[5:64]), name
    checkpoint.close()


K_SCALES = {"Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}
"""Where in a block its half-precision scales stand."""


@pytest.mark.parametrize("type_names", [*([name] for name in K_SCALES), list(K_SCALES)], ids="-".join)
def test_k_quants_give_the_reference_values(type_names: list[str], tmp_path: Path) -> None:
    """There is no quantiser for these, so the blocks are random bytes with scales that are finite."""
    cycle = itertools.cycle(type_names)
    path = tmp_path / "model.gguf"
    spec = tiny_spec("llama", num_layers=1, **K_QUANT_SHAPE)
    writer = gguf.GGUFWriter(path, "llama")
    add_gguf_shape(writer, spec)
    add_gguf_tokenizer(writer, spec)
    draw = np.random.default_rng(1)
    expected = {}
    for name, values in random_tensors(spec).items():
        if values.ndim == 1:
            writer.add_tensor(gguf_name(name), values)
            continue
        type_name = next(cycle)
        kind = gguf.GGMLQuantizationType[type_name]
        block_bytes = gguf.GGML_QUANT_SIZES[kind][1]
        blocks = draw.integers(0, 256, (values.shape[0], values.shape[1] // 256, block_bytes), np.uint8)
        for at in K_SCALES[type_name]:
            scales = draw.standard_normal(blocks.shape[:2]).astype("<f2")
            blocks[:, :, at : at + 2] = scales[:, :, None].view(np.uint8)
        raw = blocks.reshape(values.shape[0], -1)
        expected[name] = gguf.quants.dequantize(raw, kind)
        is_permuted = ".q_proj." in name or ".k_proj." in name
        heads = spec.num_heads if ".q_proj." in name else spec.num_kv_heads
        writer.add_tensor(gguf_name(name), permuted(raw, heads) if is_permuted else raw, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    checkpoint = open_checkpoint(path)
    for name, values in expected.items():
        assert np.array_equal(checkpoint.read(name), values), name
        assert checkpoint.read_blocks(name) is None
    checkpoint.close()


@pytest.mark.parametrize("family", ["qwen2", "llama"])
@pytest.mark.parametrize(("type_name", "bits", "zero_point"), [("Q4_0", 4, 8), ("Q8_0", 8, 128)])
def test_blocks_hold_the_codes_of_the_file(
    type_name: str, bits: int, zero_point: int, family: Any, tmp_path: Path
) -> None:
    spec = write_gguf_model(tmp_path / "model.gguf", family=family, stored_type=type_name)
    checkpoint = open_checkpoint(tmp_path / "model.gguf")
    for name, shape in ((name, info.shape) for name, info in checkpoint.tensors.items()):
        if len(shape) == 1:
            assert checkpoint.read_blocks(name) is None
            continue
        blocks = checkpoint.read_blocks(name, 3, 50)
        assert blocks is not None
        assert (blocks.bits, blocks.zero_point, blocks.block_size) == (bits, zero_point, 32)
        assert (blocks.codes.dtype, blocks.codes.shape) == (np.dtype(np.uint8), (47, shape[1]))
        assert blocks.codes.max() < 1 << bits
        codes = blocks.codes.reshape(47, -1, 32).astype(np.float32)
        values = (codes - zero_point) * blocks.scales[:, :, None]
        assert np.array_equal(values.reshape(47, -1), checkpoint.read(name, 3, 50))
    assert checkpoint.spec == spec
    checkpoint.close()


def poke(path: Path, name: str, value: bytes, *, row: int) -> None:
    """Overwrite the first bytes of a stored row."""
    file = DataFile(path)
    info = read_header(file).tensors[gguf_name(name)]
    file.close()
    with path.open("r+b") as out:
        out.seek(info.offset + row * info.row_bytes)
        out.write(value)


@pytest.mark.parametrize(
    ("type_name", "bits"),
    [
        ("F32", struct.pack("<f", np.nan)),
        ("F16", b"\x00\x7c"),
        ("BF16", b"\x80\x7f"),
        ("Q8_0", b"\x00\x7e"),
        ("Q4_1", b"\x00\xfc"),
    ],
)
def test_nan_and_infinity_are_refused_by_name(type_name: str, bits: bytes, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_gguf_model(path, stored_type=type_name)
    checkpoint = open_checkpoint(path)
    poke(path, EMBEDDING, bits, row=77)
    with pytest.raises(ModelInvalid, match=rf"tensor '{EMBEDDING}' holds NaN or infinity \(row 77\)"):
        checkpoint.read(EMBEDDING)
    if type_name == "Q8_0":
        with pytest.raises(ModelInvalid, match=rf"tensor '{EMBEDDING}' holds NaN or infinity \(row 77\)"):
            checkpoint.read_blocks(EMBEDDING)
    assert np.isfinite(checkpoint.read(EMBEDDING, 0, 77)).all()
    checkpoint.close()


def test_llama3_scaling_is_found_in_the_factors(tmp_path: Path) -> None:
    scaling = RopeScaling("llama3", 32.0)
    spec = write_gguf_model(tmp_path / "model.gguf", family="llama", rope_theta=500000.0, rope_scaling=scaling)
    checkpoint = open_checkpoint(tmp_path / "model.gguf")
    assert checkpoint.spec == spec
    checkpoint.close()


def test_linear_scaling_is_read(tmp_path: Path) -> None:
    spec = write_gguf_model(tmp_path / "model.gguf", rope_scaling=RopeScaling("linear", 4.0))
    checkpoint = open_checkpoint(tmp_path / "model.gguf")
    assert checkpoint.spec == spec
    checkpoint.close()


@pytest.mark.parametrize(
    ("changes", "scaling"),
    [
        ({"rope__scaling__type": "none", "rope__scaling__factor": 4.0}, None),
        ({"rope__scaling__factor": 4.0}, RopeScaling("linear", 4.0)),
        ({"rope__scale_linear": 4.0}, RopeScaling("linear", 4.0)),
        ({"rope__scaling__type": "linear"}, None),
    ],
)
def test_a_factor_scales_unless_the_type_says_none(
    changes: dict[str, Any], scaling: RopeScaling | None, tmp_path: Path
) -> None:
    checkpoint = open_checkpoint(edited(tmp_path / "model.gguf", **changes))
    assert checkpoint.spec.rope_scaling == scaling
    checkpoint.close()


def test_a_folder_with_several_gguf_files_names_them(tmp_path: Path) -> None:
    for name in ("a.gguf", "b.gguf"):
        write_gguf_model(tmp_path / name)
    with pytest.raises(ModelInvalid, match=r"holds 2 GGUF files \(a.gguf, b.gguf, ...\): give one of them"):
        open_checkpoint(tmp_path)


def test_a_missing_path_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelMissing, match=r"nothing\.gguf does not exist") as error:
        open_checkpoint(tmp_path / "nothing.gguf")
    assert error.value.exit_code == EXIT_NO_INPUT


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelInvalid, match="/dev/zero is not a regular file"):
        open_checkpoint(Path("/dev/zero"))


def test_more_tokens_than_rows_are_refused(tmp_path: Path) -> None:
    write_gguf_model(tmp_path / "model.gguf", vocab_size=256, eos_token_ids=(1,))
    with pytest.raises(ModelInvalid, match=r"the tokenizer has \d+ tokens, 'token_embd.weight' only 256 rows"):
        open_checkpoint(tmp_path / "model.gguf")
