"""Packages of several graphs over one cache: integer attention for prompts, an int8 cache, and who takes which step."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from edgeqwen.core.model import Family, KVType, Quant
from edgeqwen.core.package import open_package
from edgeqwen.core.step import Batch, Chunk
from edgeqwen.errors import ConfigInvalid
from edgeqwen.runtime import step_graph
from edgeqwen.runtime.onnx import OnnxOptions, OnnxRuntime
from edgeqwen.runtime.step_graph import BatchGraph, ChunkGraph
from tests.models import all_logits, calibrated_package, needs_row_invariance, tiny_package

FAMILIES: tuple[Family, ...] = ("qwen3", "qwen2", "llama")
IDS = [int(token) for token in np.random.default_rng(5).integers(0, 250, 90)]


def loaded(family: Family, quant: Quant, kv_type: KVType, **options: Any) -> OnnxRuntime:
    wanted = OnnxOptions(num_slots=4, capacity=256, num_threads=1, kv_type=kv_type, **options)
    return OnnxRuntime.load(open_package(calibrated_package(family, quant)), wanted)


def distance(one: np.ndarray, other: np.ndarray) -> float:
    """Root mean square of the difference, in standard deviations of the logits."""
    return float(np.sqrt(np.square(one - other).mean()) / other.std())


@pytest.mark.parametrize("family", FAMILIES)
def test_integer_attention_is_as_close_to_fp32_as_the_fused_operator_over_the_same_cache(family: Family) -> None:
    reference = all_logits(loaded(family, "fp32", "fp32"), IDS, chunk=90)
    fused = all_logits(loaded(family, "int8", "int8"), IDS, chunk=90)
    integer = all_logits(loaded(family, "hybrid", "int8", prefill_rows=1), IDS, chunk=90)
    assert distance(fused, reference) < 0.12
    assert distance(integer, reference) < 0.12


@pytest.mark.parametrize("family", FAMILIES)
def test_chunks_of_any_length_add_up_to_the_same_prompt(family: Family) -> None:
    runtime = loaded(family, "hybrid", "int8", prefill_rows=1)
    whole = all_logits(runtime, IDS, chunk=90)
    for chunk in (1, 7, 32):
        assert distance(all_logits(runtime, IDS, chunk=chunk), whole) < 0.06


def test_prompts_of_several_sequences_in_one_step_are_those_of_each_alone() -> None:
    runtime = loaded("qwen3", "hybrid", "int8", prefill_rows=4)
    pieces = {0: IDS[:40], 2: IDS[40:47], 3: IDS[50:55]}
    alone = {slot: all_logits(runtime, ids, chunk=90, slot=slot) for slot, ids in pieces.items()}
    together = runtime.step(Batch(tuple(Chunk(slot, 0, tuple(ids), len(ids)) for slot, ids in pieces.items())))
    for logits, expected in zip(together.logits, alone.values(), strict=True):
        assert np.array_equal(logits, expected)


def test_the_graphs_go_on_from_each_others_cache() -> None:
    """A prompt by the one, answers by the other, and back."""
    runtime = loaded("qwen3", "hybrid", "int8", prefill_rows=8)
    narrow = loaded("qwen3", "hybrid", "int8", is_single=True)
    expected = all_logits(narrow, IDS, chunk=1)
    parts = [(0, 40), (40, 41), (41, 42), (42, 80), (80, 90)]
    rows = [runtime.step(Batch((Chunk(0, a, tuple(IDS[a:b]), b - a),))).logits[0].copy() for a, b in parts]
    assert distance(np.concatenate(rows), expected) < 0.4  # 4-bit weights against 8-bit ones; a wrong cache: 1.1


def test_scores_within_bounds_cut_a_chunk_without_changing_which_rows_have_logits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runtime = loaded("qwen3", "hybrid", "int8", prefill_rows=1)
    whole = runtime.step(Batch((Chunk(0, 0, tuple(IDS), 20),))).logits[0].copy()
    monkeypatch.setattr(step_graph, "SCORES_AT_ONCE", 900)  # ten rows of ninety keys
    cut = runtime.step(Batch((Chunk(0, 0, tuple(IDS), 20),))).logits[0]
    assert cut.shape == whole.shape
    assert distance(cut, whole) < 0.06


@pytest.mark.parametrize("kv_type", ["fp32", "int8"])
def test_int8_gives_the_same_bits_however_a_sequence_is_cut_over_either_cache(kv_type: KVType) -> None:
    needs_row_invariance()
    runtime = loaded("qwen3", "int8", kv_type)
    whole = all_logits(runtime, IDS, chunk=90)
    for chunk in (1, 2, 7, 64):
        assert np.array_equal(all_logits(runtime, IDS, chunk=chunk), whole)


def test_an_int8_cache_takes_a_quarter_of_the_memory() -> None:
    sizes = {kv: loaded("qwen3", "int8", kv).spec.kv_bytes_per_token for kv in ("fp32", "int8")}
    assert sizes["fp32"] == 4 * sizes["int8"]


def test_what_an_int8_cache_holds_can_be_read_written_and_moved() -> None:
    runtime = loaded("llama", "hybrid", "int8")
    runtime.step(Batch((Chunk(0, 0, tuple(IDS[:30])),)))
    expected = runtime.step(Batch((Chunk(0, 30, (7,)),))).logits[0].copy()
    runtime.write_kv(2, 0, runtime.read_kv(0, 0, 30))
    runtime.move(2, 3)
    assert np.array_equal(runtime.step(Batch((Chunk(3, 30, (7,)),))).logits[0], expected)


@pytest.mark.parametrize(("quant", "kv_type"), [("int8", "fp32"), ("int8", "int8"), ("hybrid", "int8")])
def test_graphs_that_give_memory_back_leave_the_cache_alone(quant: Quant, kv_type: KVType) -> None:
    runtime = loaded("qwen3", quant, kv_type, prefill_rows=8)
    graphs = {runtime._decode, runtime._prefill}
    for slot in range(4):
        runtime.step(Batch((Chunk(slot, 0, tuple(IDS[:40])),)))
        runtime.step(Batch((Chunk(slot, 40, tuple(IDS[40:44]), 4),)))
    before = [bytes(runtime.read_kv(slot, 0, 44)) for slot in range(4)]
    expected = runtime.step(Batch((Chunk(3, 44, (7,)),))).logits[0].copy()
    assert all(graph.is_worn for graph in graphs)
    for graph in graphs:
        graph.give_back()
        assert not graph.is_worn
    assert [bytes(runtime.read_kv(slot, 0, 44)) for slot in range(4)] == before
    assert np.array_equal(runtime.step(Batch((Chunk(3, 44, (7,)),))).logits[0], expected)
    runtime.close()


def test_a_package_without_scales_has_no_int8_cache_and_says_how_to_get_one() -> None:
    package = open_package(tiny_package("qwen3", "int8"))
    with pytest.raises(ConfigInvalid, match=r"kv\.type.*without --fast"):
        OnnxRuntime.load(package, OnnxOptions(capacity=64, kv_type="int8"))


def test_one_graph_alone_is_kept_to_where_that_is_asked_for() -> None:
    both, single = (loaded("qwen3", "hybrid", "int8", is_single=only) for only in (False, True))
    assert isinstance(both._prefill, ChunkGraph)
    assert isinstance(single._prefill, BatchGraph)


def test_a_hybrid_package_holds_its_weights_once_for_four_graphs() -> None:
    manifest = open_package(calibrated_package("qwen3", "hybrid")).manifest
    graphs = {name for name in manifest.sizes if name.endswith(".onnx")} - {"kernel_check.onnx"}
    assert graphs == {"decode.onnx", "decode.kv8.onnx", "prefill.onnx", "prefill.kv8.onnx"}
    assert set(manifest.kv_types) == {"fp32", "int8"}


def test_options_of_a_runtime_are_values() -> None:
    assert dataclasses.replace(OnnxOptions(), kv_type="int8") == OnnxOptions(kv_type="int8")
