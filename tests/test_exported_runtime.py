"""Graphs exported by optimum, run: as transformers computes, alone and in company, cut back, moved, kept elsewhere."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from edgeqwen.core.model import KVType
from edgeqwen.core.package import open_package
from edgeqwen.core.step import Batch, Chunk
from edgeqwen.errors import ConfigInvalid, ModelInvalid, RuntimeFailed
from edgeqwen.evaluate import evaluate
from edgeqwen.runtime import exported
from edgeqwen.runtime.exported import ExportedRuntime
from edgeqwen.runtime.onnx import OnnxOptions
from tests.exported_graphs import (
    changed,
    count_positions,
    exported_package,
    exported_runtime,
    golden_logits,
    imported,
    keep_last_logits,
)
from tests.models import Array, all_logits
from tests.record_exported import FAMILIES, case_ids

SEQUENCES = 4
LENGTH = 90
CLOSE = 1e-4
"""Of the standard deviation: what the order of sums may make of a float32."""


def sequences(vocab_size: int) -> list[list[int]]:
    draw = np.random.default_rng(11)
    return [[int(token) for token in draw.integers(0, vocab_size, LENGTH)] for _ in range(SEQUENCES)]


def distance(found: Array, expected: Array) -> float:
    return float(np.abs(found - expected).max() / expected.std())


@pytest.fixture(scope="module")
def runtime() -> ExportedRuntime:
    return exported_runtime(exported_package(), num_slots=SEQUENCES)


@pytest.fixture(scope="module")
def alone(runtime: ExportedRuntime) -> list[Array]:
    """Logits of each sequence computed by itself in one chunk."""
    return [all_logits(runtime, ids, chunk=LENGTH) for ids in sequences(runtime.spec.vocab_size)]


@pytest.mark.parametrize("chunk", [24, 7, 1])
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_transformers(family: str, chunk: int) -> None:
    runtime = exported_runtime(exported_package(family), num_slots=1)
    assert distance(all_logits(runtime, case_ids(), chunk=chunk), golden_logits(family)) < 1e-3


@pytest.mark.parametrize(("case", "most"), [("qwen3-fp16", 0.02), ("qwen3-int8", 1.0)])
def test_logits_of_a_rounded_export_are_near_those_of_transformers(case: str, most: float) -> None:
    runtime = exported_runtime(exported_package(case), num_slots=1)
    assert distance(all_logits(runtime, case_ids(), chunk=7), golden_logits("qwen3")) < most


def test_an_export_that_is_rounded_by_one_scale_for_all_rows_is_computed_one_sequence_at_a_time() -> None:
    runtime = exported_runtime(exported_package("qwen3-int8"))
    assert not runtime.pads_batches
    ids = case_ids()
    whole = [all_logits(runtime, part, chunk=12) for part in (ids[:12], ids[12:])]
    both = runtime.step(Batch((Chunk(0, 0, tuple(ids[:12]), 12), Chunk(1, 0, tuple(ids[12:]), 12)))).logits
    assert all(np.array_equal(one, other) for one, other in zip(both, whole, strict=True))


def test_logits_are_the_same_alone_and_in_any_ragged_batch(runtime: ExportedRuntime, alone: list[Array]) -> None:
    """Random steps: each moves a random subset of the sequences on by a random number of tokens, 0 to 20."""
    assert runtime.pads_batches
    draw = np.random.default_rng(3)
    ids = sequences(runtime.spec.vocab_size)
    done = [0] * SEQUENCES
    while min(done) < LENGTH:
        counts = [int(draw.integers(0, draw.choice([2, 6, 20]) + 1)) for _ in range(SEQUENCES)]
        chunks = tuple(
            Chunk(
                slot,
                start,
                tuple(ids[slot][start : start + count]),
                int(draw.integers(0, min(count, LENGTH - start) + 1)),
            )
            for slot, (start, count) in enumerate(zip(done, counts, strict=True))
            if count and start < LENGTH
        )
        if not chunks:
            continue
        result = runtime.step(Batch(chunks))
        for chunk, logits in zip(chunks, result.logits, strict=True):
            assert logits.shape == (chunk.num_logits, runtime.spec.vocab_size)
            expected = alone[chunk.slot][chunk.stop - chunk.num_logits : chunk.stop]
            assert not chunk.num_logits or distance(logits, expected) < CLOSE, chunk
            done[chunk.slot] = chunk.stop
    for slot in range(SEQUENCES):
        runtime.release(slot)


def test_sequences_of_very_unequal_length_are_not_padded_to_each_other(
    runtime: ExportedRuntime, alone: list[Array], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exported, "NEAR", 10)
    ids = sequences(runtime.spec.vocab_size)
    starts = (60, 5, 62, 0)
    runtime.step(
        Batch(tuple(Chunk(slot, 0, tuple(ids[slot][:start]), 0) for slot, start in enumerate(starts) if start))
    )
    logits = runtime.step(Batch(tuple(Chunk(slot, at, (ids[slot][at],)) for slot, at in enumerate(starts)))).logits
    for slot, at in enumerate(starts):
        assert distance(logits[slot][0], alone[slot][at]) < CLOSE
        runtime.release(slot)


@pytest.mark.parametrize("in_company", [False, True])
def test_a_sequence_that_is_cut_back_goes_on_as_if_it_had_never_been_longer(
    runtime: ExportedRuntime, alone: list[Array], in_company: bool
) -> None:
    ids = sequences(runtime.spec.vocab_size)
    wrong = tuple(reversed(ids[0][20:60]))
    runtime.step(Batch((Chunk(0, 0, (*ids[0][:20], *wrong), 0), Chunk(1, 0, tuple(ids[1][:30]), 0))))
    others = (Chunk(1, 30, tuple(ids[1][30:35])),) if in_company else ()
    logits = runtime.step(Batch((Chunk(0, 20, tuple(ids[0][20:26]), 6), *others))).logits[0]
    assert distance(logits, alone[0][20:26]) < CLOSE
    (logits,) = runtime.step(Batch((Chunk(0, 26, (ids[0][26],)),))).logits
    assert distance(logits[0], alone[0][26]) < CLOSE
    runtime.release(0)
    runtime.release(1)


def test_kv_that_is_read_and_written_elsewhere_or_moved_carries_the_sequence(
    runtime: ExportedRuntime, alone: list[Array]
) -> None:
    ids = sequences(runtime.spec.vocab_size)[0]
    runtime.step(Batch((Chunk(0, 0, tuple(ids[:50]), 0),)))
    blocks = [runtime.read_kv(0, start, stop) for start, stop in ((0, 16), (16, 32), (32, 50))]
    assert sum(block.nbytes for block in blocks) == 50 * runtime.spec.kv_bytes_per_token
    runtime.release(0)
    runtime.expect_kv(3, 0, 50)
    for start, block in zip((0, 16, 32), blocks, strict=True):
        runtime.write_kv(3, start, block.tobytes())
    runtime.move(3, 1)
    assert np.array_equal(runtime.read_kv(1, 16, 32), blocks[1])
    (logits,) = runtime.step(Batch((Chunk(1, 50, tuple(ids[50:55]), 5),))).logits
    assert distance(logits, alone[0][50:55]) < CLOSE
    runtime.release(1)
    for start, block in zip((0, 16, 32), blocks, strict=True):  # without being told before
        runtime.write_kv(2, start, block)
    (logits,) = runtime.step(Batch((Chunk(2, 50, tuple(ids[50:55]), 5),))).logits
    assert distance(logits, alone[0][50:55]) < CLOSE
    runtime.release(2)


def test_what_was_read_does_not_change_with_the_slot(runtime: ExportedRuntime) -> None:
    ids = sequences(runtime.spec.vocab_size)
    runtime.step(Batch((Chunk(0, 0, tuple(ids[0][:20]), 0),)))
    data = runtime.read_kv(0, 0, 20)
    before = data.copy()
    runtime.step(Batch((Chunk(0, 0, tuple(ids[1][:20]), 0),)))
    runtime.release(0)
    assert np.array_equal(data, before)


def test_the_last_position_of_a_slot_can_be_used(runtime: ExportedRuntime) -> None:
    capacity = runtime.spec.capacity
    ids = (sequences(runtime.spec.vocab_size)[0] * 2)[:capacity]
    whole = all_logits(runtime, ids, chunk=capacity)
    runtime.step(Batch((Chunk(0, 0, tuple(ids[: capacity - 1]), 0), Chunk(1, 0, tuple(ids[:70]), 0))))
    both = Batch((Chunk(0, capacity - 1, (ids[-1],)), Chunk(1, 70, tuple(ids[70:80]), 10)))
    logits = runtime.step(both).logits
    assert distance(logits[0][0], whole[-1]) < CLOSE
    assert distance(logits[1], whole[70:80]) < CLOSE
    runtime.release(0)
    runtime.release(1)


def test_a_failing_step_is_a_runtime_error_and_the_others_go_on(runtime: ExportedRuntime, alone: list[Array]) -> None:
    ids = sequences(runtime.spec.vocab_size)
    runtime.step(Batch((Chunk(0, 0, tuple(ids[0][:20]), 0), Chunk(1, 0, tuple(ids[1][:20]), 0))))
    with pytest.raises(RuntimeFailed, match="outside the vocabulary"):
        runtime.step(Batch((Chunk(0, 20, (runtime.spec.vocab_size,)),)))
    runtime.release(0)
    (logits,) = runtime.step(Batch((Chunk(1, 20, (ids[1][20],)),))).logits
    assert distance(logits[0], alone[1][20]) < CLOSE
    (logits,) = runtime.step(Batch((Chunk(0, 0, tuple(ids[0][:21])),))).logits
    assert distance(logits[0], alone[0][20]) < CLOSE
    runtime.release(0)
    runtime.release(1)


def test_a_graph_that_counts_positions_itself_is_found_not_to_bear_padding(tmp_path: Path, alone: list[Array]) -> None:
    runtime = exported_runtime(imported(changed(tmp_path / "old", count_positions), tmp_path / "package"))
    assert not runtime.pads_batches
    ids = sequences(runtime.spec.vocab_size)
    runtime.step(Batch((Chunk(0, 0, tuple(ids[0][:30]), 0), Chunk(1, 0, tuple(ids[1][:7]), 0))))
    logits = runtime.step(Batch((Chunk(0, 30, (ids[0][30],)), Chunk(1, 7, (ids[1][7],))))).logits
    assert distance(logits[0][0], alone[0][30]) < CLOSE
    assert distance(logits[1][0], alone[1][7]) < CLOSE


def test_a_graph_that_gives_logits_of_the_last_row_alone_gives_as_many_as_are_wanted(
    tmp_path: Path, alone: list[Array]
) -> None:
    runtime = exported_runtime(imported(changed(tmp_path / "last", keep_last_logits), tmp_path / "package"))
    assert runtime.pads_batches
    ids = sequences(runtime.spec.vocab_size)
    counts = ((30, 5), (7, 1), (4, 0))
    first = [Chunk(slot, 0, tuple(ids[slot][:count]), wanted) for slot, (count, wanted) in enumerate(counts)]
    for chunk, logits in zip(first, runtime.step(Batch(tuple(first))).logits, strict=True):
        expected = alone[chunk.slot][chunk.stop - chunk.num_logits : chunk.stop]
        assert logits.shape == expected.shape
        assert not chunk.num_logits or distance(logits, expected) < CLOSE
    chunks = tuple(Chunk(slot, at, tuple(ids[slot][at : at + 2])) for slot, at in ((0, 30), (1, 7), (2, 4)))
    for chunk, logits in zip(chunks, runtime.step(Batch(chunks)).logits, strict=True):
        assert distance(logits[0], alone[chunk.slot][chunk.stop - 1]) < CLOSE


@pytest.mark.parametrize(("case", "kv_type"), [("qwen3", "int8"), ("qwen3-fp16", "fp32"), ("qwen3", "fp16")])
def test_another_type_of_cache_than_the_graph_has_is_refused(case: str, kv_type: KVType) -> None:
    with pytest.raises(ConfigInvalid, match=r"exported by optimum, whose cache is fp\d+ and cannot be"):
        ExportedRuntime.load(open_package(exported_package(case)), OnnxOptions(kv_type=kv_type))


def test_a_graph_with_an_operator_that_there_is_not_is_told_by_its_name(tmp_path: Path) -> None:
    def change(model: object) -> None:
        model.graph.node[-1].op_type = "NoSuchOperator"  # type: ignore[attr-defined]

    package = imported(changed(tmp_path / "odd", change), tmp_path / "package")
    with pytest.raises(ModelInvalid, match=r"decode.onnx: .*NoSuchOperator"):
        exported_runtime(package)


def test_exported_packages_are_scored_against_each_other() -> None:
    report = evaluate(exported_package("qwen3-fp16"), against=exported_package())
    assert report.counted.kl_mean is not None
    assert report.counted.kl_mean < 0.001
