"""The onnxruntime runtime: same bits in any company, slots that don't touch each other, errors that name the file."""

from __future__ import annotations

import shutil
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgeqwen.core.model import Quant
from edgeqwen.core.package import GRAPH, open_package
from edgeqwen.core.step import Batch, Chunk
from edgeqwen.errors import ModelInvalid, RuntimeFailed
from edgeqwen.metrics import resident_bytes
from edgeqwen.runtime.onnx import OnnxOptions, OnnxRuntime
from edgeqwen.runtime.session import open_session, session_options
from tests.models import Array, all_logits, needs_row_invariance, scratch, tiny_package, tiny_runtime

SEQUENCES = 4
LENGTH = 90


def sequences(vocab_size: int) -> list[list[int]]:
    draw = np.random.default_rng(11)
    return [[int(token) for token in draw.integers(0, vocab_size, LENGTH)] for _ in range(SEQUENCES)]


@pytest.fixture(scope="module", params=["int8", "fp32"])
def runtime(request: pytest.FixtureRequest) -> OnnxRuntime:
    quant: Quant = request.param
    return tiny_runtime(tiny_package("qwen3", quant), num_slots=SEQUENCES, capacity=128)


@pytest.fixture(scope="module")
def alone(runtime: OnnxRuntime) -> list[Array]:
    """Logits of each sequence computed by itself in one chunk."""
    needs_row_invariance()
    return [all_logits(runtime, ids, chunk=LENGTH) for ids in sequences(runtime.spec.vocab_size)]


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_logits_are_the_same_bits_alone_and_in_any_ragged_batch(
    runtime: OnnxRuntime, alone: list[Array], data: st.DataObject
) -> None:
    """Random steps: each moves a random subset of the sequences on by a random number of tokens, 0 to 40."""
    ids = sequences(runtime.spec.vocab_size)
    done = [0] * SEQUENCES
    while min(done) < LENGTH:
        counts = data.draw(st.lists(st.integers(0, 40), min_size=SEQUENCES, max_size=SEQUENCES))
        chunks = tuple(
            Chunk(slot, start, tuple(ids[slot][start : start + count]), len(ids[slot][start : start + count]))
            for slot, (start, count) in enumerate(zip(done, counts, strict=True))
            if count and start < LENGTH
        )
        if not chunks:
            chunks = tuple(Chunk(slot, at, (ids[slot][at],)) for slot, at in enumerate(done) if at < LENGTH)[:1]
        result = runtime.step(Batch(chunks))
        for chunk, logits in zip(chunks, result.logits, strict=True):
            assert np.array_equal(logits, alone[chunk.slot][chunk.start : chunk.stop]), chunk
            done[chunk.slot] = chunk.stop
    for slot in range(SEQUENCES):
        runtime.release(slot)


def test_int4_gives_close_logits_in_any_chunking_though_not_the_same_bits() -> None:
    runtime = tiny_runtime(tiny_package("qwen3", "int4"))
    ids = sequences(runtime.spec.vocab_size)[0]
    whole, single = all_logits(runtime, ids, chunk=LENGTH), all_logits(runtime, ids, chunk=1)
    assert np.abs(whole - single).max() < 0.2 * whole.std()


def test_a_sequence_that_is_cut_back_goes_on_as_if_it_had_never_been_longer(runtime: OnnxRuntime) -> None:
    needs_row_invariance()
    ids = sequences(runtime.spec.vocab_size)[0]
    runtime.step(Batch((Chunk(0, 0, tuple(ids[:60]), 0),)))
    (first,) = runtime.step(Batch((Chunk(0, 20, tuple(ids[20:50]), 30),))).logits
    kept = first.copy()
    runtime.release(0)
    assert np.array_equal(kept, all_logits(runtime, ids[:50], chunk=50)[20:])


def test_a_hole_between_two_slots_keeps_its_cache(runtime: OnnxRuntime, alone: list[Array]) -> None:
    ids = sequences(runtime.spec.vocab_size)
    for slot in range(3):
        runtime.step(Batch((Chunk(slot, 0, tuple(ids[slot][:33]), 0),)))
    runtime.step(Batch((Chunk(0, 33, (ids[0][33],)), Chunk(2, 33, (ids[2][33],)))))
    (logits,) = runtime.step(Batch((Chunk(1, 33, (ids[1][33],)),))).logits
    assert np.array_equal(logits[0], alone[1][33])
    for slot in range(3):
        runtime.release(slot)


def test_kv_that_is_read_and_written_elsewhere_or_moved_carries_the_sequence(
    runtime: OnnxRuntime, alone: list[Array]
) -> None:
    ids = sequences(runtime.spec.vocab_size)[0]
    runtime.step(Batch((Chunk(0, 0, tuple(ids[:50]), 0),)))
    data = runtime.read_kv(0, 0, 50)
    runtime.release(0)
    runtime.write_kv(3, 0, data)
    runtime.move(3, 1)
    (logits,) = runtime.step(Batch((Chunk(1, 50, tuple(ids[50:55]), 5),))).logits
    assert np.array_equal(logits, alone[0][50:55])
    runtime.release(1)


def test_the_last_position_of_a_slot_can_be_used(runtime: OnnxRuntime) -> None:
    needs_row_invariance()
    capacity = runtime.spec.capacity
    ids = (sequences(runtime.spec.vocab_size)[0] * 2)[:capacity]
    whole = all_logits(runtime, ids, chunk=capacity)
    assert np.array_equal(all_logits(runtime, ids, chunk=capacity - 1)[-1], whole[-1])


def test_a_slot_that_is_nearly_full_is_computed_beside_wide_chunks_of_others(
    runtime: OnnxRuntime, alone: list[Array]
) -> None:
    capacity = runtime.spec.capacity
    full = sequences(runtime.spec.vocab_size)[1] * 2
    others = [sequences(runtime.spec.vocab_size)[slot] for slot in (0, 2, 3)]
    last = all_logits(runtime, full[:capacity], chunk=capacity)[-1]
    runtime.step(Batch((Chunk(1, 0, tuple(full[: capacity - 1]), 0),)))
    wide = [Chunk(slot, 0, tuple(ids[:20]), 3) for slot, ids in zip((0, 2, 3), others, strict=True)]
    nearly = Chunk(1, capacity - 1, (full[capacity - 1],))
    result = runtime.step(Batch((wide[0], nearly, *wide[1:])))
    assert np.array_equal(result.logits[1][0], last)
    for place, slot in ((0, 0), (2, 2), (3, 3)):
        assert np.array_equal(result.logits[place], alone[slot][17:20])
    for slot in range(SEQUENCES):
        runtime.release(slot)


@pytest.mark.parametrize("quant", ["fp32", "int8"])
def test_every_position_that_the_model_knows_can_be_used(quant: Quant) -> None:
    needs_row_invariance()
    runtime = tiny_runtime(tiny_package("qwen3", quant, max_position=64), capacity=64)
    ids = sequences(runtime.spec.vocab_size)[0][:64]
    whole = all_logits(runtime, ids, chunk=64)
    for chunk in (63, 7, 1):
        logits = all_logits(runtime, ids, chunk=chunk)
        assert np.array_equal(logits[:-1], whole[:-1])
        assert np.abs(logits[-1] - whole[-1]).max() < 1e-4 * whole.std()


def test_a_slot_may_hold_a_single_token() -> None:
    runtime = tiny_runtime(tiny_package("qwen3", "fp32"), capacity=1)
    assert all_logits(runtime, [5], chunk=1).shape == (1, runtime.spec.vocab_size)


def test_no_logits_are_computed_when_none_are_asked_for(runtime: OnnxRuntime) -> None:
    (logits,) = runtime.step(Batch((Chunk(0, 0, (1, 2, 3), 0),))).logits
    assert logits.shape == (0, runtime.spec.vocab_size)
    runtime.release(0)


def test_a_released_slot_gives_its_memory_back() -> None:
    runtime = tiny_runtime(tiny_package("qwen3", "fp32"), num_slots=2, capacity=2048)
    before = resident_bytes()
    ids = tuple(sequences(runtime.spec.vocab_size)[0] * 22)
    for start in range(0, len(ids), 256):
        runtime.step(Batch((Chunk(0, start, ids[start : start + 256], 0),)))
    held = len(ids) * runtime.spec.kv_bytes_per_token
    full = resident_bytes()
    runtime.release(0)
    assert full - before >= held * 0.9
    assert full - resident_bytes() >= held * 0.9


def test_a_failing_step_is_a_runtime_error_and_the_runtime_goes_on(runtime: OnnxRuntime, alone: list[Array]) -> None:
    ids = sequences(runtime.spec.vocab_size)[0]
    with pytest.raises(RuntimeFailed, match="vocabulary"):
        runtime.step(Batch((Chunk(0, 0, (runtime.spec.vocab_size,)),)))
    runtime.release(0)
    assert np.array_equal(all_logits(runtime, ids, chunk=30), alone[0])


@pytest.mark.parametrize("target", ["any", "vnni"])
def test_both_weight_forms_compute_the_same_bits(target: str) -> None:
    reference = tiny_runtime(tiny_package("qwen3", "int8"))
    other = tiny_runtime(tiny_package("qwen3", "int8", target="any" if target == "any" else "vnni"))
    ids = sequences(reference.spec.vocab_size)[0]
    assert np.array_equal(all_logits(reference, ids, chunk=30), all_logits(other, ids, chunk=30))


@pytest.mark.parametrize("damage", ["empty", "cut", "noise"])
def test_a_broken_graph_is_named(damage: str) -> None:
    folder = scratch() / f"broken-{damage}"
    shutil.copytree(tiny_package("qwen3", "fp32"), folder)
    content = (folder / GRAPH).read_bytes()
    broken = {"empty": b"", "cut": content[: len(content) // 2], "noise": bytes(len(content))}[damage]
    (folder / GRAPH).write_bytes(broken)
    package = open_package(tiny_package("qwen3", "fp32"))
    with pytest.raises(ModelInvalid, match=GRAPH):
        OnnxRuntime.load(type(package)(folder, package.manifest, {}), OnnxOptions(num_threads=1))


@pytest.mark.parametrize(
    "change",
    [
        {"num_layers": 1},
        {"num_layers": 1 << 40},
        {"num_layers": 0},
        {"num_kv_heads": 7},
        {"head_dim": -3},
        {"vocab_size": 1 << 40},
        {"vocab_size": -1},
    ],
)
def test_a_manifest_of_another_shape_than_the_graph_is_refused_before_it_runs(change: dict[str, int]) -> None:
    package = open_package(tiny_package("qwen3", "fp32"))
    spec = msgspec.structs.replace(package.manifest.spec, **change)
    other = type(package)(package.path, msgspec.structs.replace(package.manifest, spec=spec), {})
    with pytest.raises(ModelInvalid, match=r"model\.json"):
        OnnxRuntime.load(other, OnnxOptions(num_threads=1))


@pytest.mark.parametrize("error", [MemoryError("std::bad_alloc"), RuntimeError("[ONNXRuntimeError] : std::bad_alloc")])
def test_too_little_memory_is_not_blamed_on_the_file(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr("edgeqwen.runtime.session.ort.InferenceSession", fail)
    with pytest.raises(RuntimeFailed, match=r"not enough memory.*--quant int4"):
        open_session(Path("decode.onnx"), session_options(1))
