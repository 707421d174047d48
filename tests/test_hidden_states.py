"""Hidden states: those of transformers, in every form of package, whoever is computed beside them."""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx
import pytest

from edgeqwen.convert.importer import import_model
from edgeqwen.core.model import Family, KVType, Quant
from edgeqwen.core.package import open_package
from edgeqwen.core.step import Batch, Chunk, Runtime
from edgeqwen.runtime.onnx import OnnxOptions, OnnxRuntime
from tests.checkpoints import write_safetensors_model
from tests.models import (
    Array,
    all_logits,
    calibrated_package,
    needs_row_invariance,
    tiny_package,
    tiny_runtime,
)
from tests.record_parity import CASES, DATA, POSITIONS, case_ids
from tests.test_parity import case_package

TOLERANCE = 2e-4  # of states whose elements are about 1
COSINES: dict[Quant, float] = {"int8": 0.998, "int4": 0.9, "hybrid": 0.9}


@functools.cache
def recorded() -> dict[str, Array]:
    with np.load(DATA / "parity_hidden.npz") as file:
        return dict(file)


def states(runtime: Runtime, ids: Sequence[int], *, chunk: int = 256, slot: int = 0) -> Array:
    """Hidden states `[tokens, hidden]` of one sequence, computed in chunks of a size; the slot is released."""
    parts = []
    for start in range(0, len(ids), chunk):
        piece = tuple(ids[start : start + chunk])
        result = runtime.step(Batch((Chunk(slot, start, piece, 0, len(piece)),)))
        assert result.logits[0].shape == (0, runtime.spec.vocab_size)
        parts.append(result.hidden[0].copy())
    runtime.release(slot)
    return np.concatenate(parts)


def cosines(some: Array, others: Array) -> Array:
    norms = np.linalg.norm(some, axis=-1) * np.linalg.norm(others, axis=-1)
    return np.asarray((some * others).sum(axis=-1) / norms)


def runtime_of(package: Path, kv_type: KVType, *, prefill_rows: int = 12) -> OnnxRuntime:
    options = OnnxOptions(num_slots=4, capacity=512, num_threads=1, kv_type=kv_type, prefill_rows=prefill_rows)
    return OnnxRuntime.load(open_package(package), options)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("chunk", [2000, 7])
def test_states_equal_those_recorded_from_transformers(name: str, chunk: int) -> None:
    runtime = tiny_runtime(case_package(name))
    hidden = states(runtime, case_ids(runtime.spec.vocab_size), chunk=chunk)
    wanted = recorded()[name]
    assert np.abs(hidden[list(POSITIONS)] - wanted[:-1]).max() <= TOLERANCE
    assert np.abs(hidden.mean(axis=0) - wanted[-1]).max() <= TOLERANCE


@pytest.mark.parametrize("family", ["qwen3", "qwen2", "llama"])
@pytest.mark.parametrize("quant", ["int8", "int4", "hybrid"])
@pytest.mark.parametrize("kv_type", ["fp32", "int8"])
def test_a_rotated_package_gives_the_states_of_the_model_itself(family: Family, quant: Quant, kv_type: KVType) -> None:
    ids = case_ids(320)[:200]
    plain = states(tiny_runtime(tiny_package(family, "fp32")), ids)
    for prefill_rows in (1, 1 << 30):  # all by the prefill graph, all by the decode graph
        runtime = runtime_of(calibrated_package(family, quant), kv_type, prefill_rows=prefill_rows)
        assert runtime.spec.hidden_size == plain.shape[1]
        hidden = states(runtime, ids)
        assert cosines(hidden, plain).mean() >= COSINES[quant]
        assert cosines(hidden.mean(axis=0), plain.mean(axis=0)) >= COSINES[quant]
        assert np.allclose(np.linalg.norm(hidden, axis=1), np.linalg.norm(plain, axis=1), rtol=0.1)


@pytest.mark.parametrize("tie", [True, False])
@pytest.mark.parametrize("quant", ["int8", "int4"])
def test_a_package_rounded_to_nearest_gives_the_states_of_the_model_itself(quant: Quant, tie: bool) -> None:
    ids = case_ids(320)[:200]
    plain = states(tiny_runtime(tiny_package("qwen3", "fp32", tie=tie)), ids)
    hidden = states(tiny_runtime(tiny_package("qwen3", quant, tie=tie)), ids)
    assert cosines(hidden, plain).mean() >= COSINES[quant]


@pytest.mark.parametrize("kind", ["fp32", "int8", "rotated"])
def test_states_are_the_same_bits_in_any_company_and_in_any_pieces(kind: str) -> None:
    needs_row_invariance()
    package = {
        "fp32": lambda: tiny_package("qwen3", "fp32"),
        "int8": lambda: tiny_package("qwen3", "int8"),
        "rotated": lambda: calibrated_package("qwen3", "int8"),
    }[kind]()
    runtime = runtime_of(package, "fp32")
    texts = [tuple(case_ids(320)[start : start + size]) for start, size in ((0, 23), (40, 1), (60, 40), (110, 8))]
    alone = [states(runtime, text) for text in texts]
    chunks = [Chunk(slot, 0, text, num_logits=slot % 2, num_hidden=len(text)) for slot, text in enumerate(texts)]
    result = runtime.step(Batch(tuple(chunks)))
    for hidden, wanted in zip(result.hidden, alone, strict=True):
        assert np.array_equal(hidden, wanted)
    for slot in range(4):
        runtime.release(slot)
    assert np.array_equal(states(runtime, texts[2], chunk=7), alone[2])
    last = runtime.step(Batch((Chunk(2, 0, texts[2], 0, 1),))).hidden[0]
    assert np.array_equal(last[0], alone[2][-1])


def test_logits_are_the_same_bits_whether_states_are_wanted_or_not() -> None:
    runtime = runtime_of(calibrated_package("qwen3", "hybrid"), "int8")
    ids = tuple(case_ids(320)[:30])
    plain = runtime.step(Batch((Chunk(0, 0, ids, 2),))).logits[0].copy()
    both = runtime.step(Batch((Chunk(1, 0, ids, 2, 30),)))
    assert np.array_equal(both.logits[0], plain)
    assert both.hidden[0].shape == (30, runtime.spec.hidden_size)


def test_a_package_whose_graphs_give_no_states_runs_and_says_so(tmp_path: Path) -> None:
    write_safetensors_model(tmp_path / "source", family="qwen3")
    import_model(tmp_path / "source", tmp_path / "old", quant="fp32", target="any", name="old")
    without_states(tmp_path / "old")
    runtime = tiny_runtime(tmp_path / "old")
    assert runtime.spec.hidden_size == 0
    whole, old = (all_logits(each, range(30), chunk=30) for each in (tiny_runtime(tiny_package("qwen3")), runtime))
    assert np.array_equal(whole, old)


def without_states(package: Path) -> None:
    """Make the graph one as packages had before there were hidden states."""
    path = package / "decode.onnx"
    model = onnx.load(str(path), load_external_data=False)
    graph, names = model.graph, {"hidden_rows", "hidden", "hidden_rows.count"}
    for values in (graph.node, graph.input, graph.output):
        for value in [each for each in values if each.name in names]:
            values.remove(value)
    for node in graph.node:
        for ends in (node.input, node.output):
            for name in names & set(ends):
                ends.remove(name)
        if node.op_type == "Split":
            node.output.remove("hidden.input")
    onnx.save(model, str(path))
    members = json.loads((package / "model.json").read_text())
    members["sizes"]["decode.onnx"] = path.stat().st_size
    (package / "model.json").write_text(json.dumps(members))
