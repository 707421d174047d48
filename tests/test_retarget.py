"""A package remade for another processor: the same numbers, and refused where that cannot be had."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import get_args

import msgspec
import numpy as np
import onnx
import pytest
from onnx import TensorProto

from edgeqwen.convert.importer import Target
from edgeqwen.convert.kernel_graph import kernels_of
from edgeqwen.convert.retarget import retarget_package, turn_weights
from edgeqwen.core.kernel import RowKernel
from edgeqwen.core.model import Quant
from edgeqwen.core.package import GRAPH, MANIFEST, WEIGHTS, open_package, verify_digests
from edgeqwen.errors import CannotWrite, ModelInvalid
from tests.models import all_logits, calibrated_package, tiny_package, tiny_runtime

WITH_ROWS: list[Quant] = [quant for quant in get_args(Quant) if quant in {"int8", "hybrid"}]
IDS = [3, 14, 15, 92, 65, 35, 89, 79, 32, 38]


def row_kernels(package: Path) -> set[RowKernel]:
    """The row products that a package's graphs use."""
    graphs = [path for path in package.glob("*.onnx") if path.name in open_package(package).manifest.sizes]
    used = {kernel for path in graphs for kernel in kernels_of(onnx.load(str(path), load_external_data=False).graph)}
    return {kernel for kernel in used if isinstance(kernel, RowKernel)}


@pytest.mark.parametrize("quant", WITH_ROWS)
@pytest.mark.parametrize(("before", "after"), [("any", "vnni"), ("vnni", "any")])
def test_remade_package_is_what_an_import_for_that_processor_makes(
    quant: Quant, before: Target, after: Target, tmp_path: Path
) -> None:
    made, imported = tmp_path / "made", tiny_package("qwen3", quant, target=after)
    manifest = retarget_package(tiny_package("qwen3", quant, target=before), made, target=after)
    assert (manifest.target, manifest.weight_form) == (after, "signed" if after == "vnni" else "unsigned")
    assert (made / WEIGHTS).read_bytes() == (imported / WEIGHTS).read_bytes()
    assert row_kernels(made) == row_kernels(imported) == {RowKernel(manifest.weight_form)}
    verify_digests(open_package(made))
    again = tmp_path / "again"
    retarget_package(made, again, target=before)
    assert (again / WEIGHTS).read_bytes() == (tiny_package("qwen3", quant, target=before) / WEIGHTS).read_bytes()
    assert row_kernels(again) == row_kernels(tiny_package("qwen3", quant, target=before))


@pytest.mark.parametrize(("before", "after"), [("any", "vnni"), ("vnni", "any")])
def test_remade_package_computes_the_same_bits(before: Target, after: Target, tmp_path: Path) -> None:
    package = tiny_package("qwen3", "int8", target=before)
    retarget_package(package, tmp_path / "made", target=after)
    expected = all_logits(tiny_runtime(package), IDS, chunk=4)
    assert np.array_equal(all_logits(tiny_runtime(tmp_path / "made"), IDS, chunk=4), expected)


@pytest.mark.parametrize("quant", ["fp32", "int4"])
def test_what_is_in_blocks_or_float_is_copied_as_it_is(quant: Quant, tmp_path: Path) -> None:
    package = tiny_package("qwen3", quant, target="vnni")
    manifest = retarget_package(package, tmp_path / "made", target="any", name="copy")
    assert manifest.name == "copy"
    old = open_package(package).manifest.digests
    assert {name: old[name] for name in old if not name.endswith(".onnx")} == {
        name: digest for name, digest in manifest.digests.items() if not name.endswith(".onnx")
    }
    assert np.array_equal(
        all_logits(tiny_runtime(tmp_path / "made"), IDS, chunk=10), all_logits(tiny_runtime(package), IDS, chunk=10)
    )


def test_faster_cache_of_the_new_processor_is_the_default(tmp_path: Path) -> None:
    """Integer attention over an int8 cache is right with signed products only."""
    package = calibrated_package("qwen3", "hybrid", "vnni")
    assert open_package(package).manifest.kv_types == ("int8", "fp32")
    assert retarget_package(package, tmp_path / "second", target="any").kv_types == ("fp32", "int8")
    assert retarget_package(tmp_path / "second", tmp_path / "third", target="arm").kv_types == ("int8", "fp32")
    graphs = {path.name for path in (tmp_path / "second").glob("*.kv8.onnx")}
    assert graphs == {"decode.kv8.onnx", "prefill.kv8.onnx"}
    first, third = (all_logits(tiny_runtime(path), IDS, chunk=10) for path in (package, tmp_path / "third"))
    assert np.array_equal(first, third)


def test_package_can_be_remade_in_its_place(tmp_path: Path) -> None:
    place = tmp_path / "model"
    shutil.copytree(tiny_package("qwen3", "int8", target="any"), place)
    retarget_package(place, place, target="vnni")
    assert open_package(place).manifest.weight_form == "signed"
    assert row_kernels(place) == {RowKernel("signed")}
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


@pytest.mark.parametrize("file", [WEIGHTS, GRAPH])
def test_damaged_package_is_refused_and_nothing_is_left(file: str, tmp_path: Path) -> None:
    damaged = tmp_path / "damaged"
    shutil.copytree(tiny_package("qwen3", "int8"), damaged)
    content = bytearray((damaged / file).read_bytes())
    content[len(content) // 2] ^= 4
    (damaged / file).write_bytes(content)
    with pytest.raises(ModelInvalid, match=f"{file}: content differs"):
        retarget_package(damaged, tmp_path / "made", target="vnni")
    assert [path.name for path in tmp_path.iterdir()] == ["damaged"]


def test_place_that_holds_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "notes").write_text("mine")
    with pytest.raises(CannotWrite, match="not a model package"):
        retarget_package(tiny_package("qwen3", "int8"), tmp_path, target="vnni")
    assert (tmp_path / "notes").read_text() == "mine"


def test_progress_never_falls_and_ends_at_one(tmp_path: Path) -> None:
    seen: list[float] = []
    retarget_package(tiny_package("qwen3", "int8"), tmp_path / "made", target="vnni", progress=seen.append)
    assert seen == sorted(seen)
    assert seen[-1] == 1.0


def graph_of(text: str) -> onnx.GraphProto:
    return onnx.parser.parse_graph(text)


def test_small_weights_inside_a_graph_are_turned_there() -> None:
    graph = graph_of("""
        small (uint8[1, 2] a) => (int32[1, 2] out) <uint8[2, 2] w = {0, 128, 129, 255}, uint8 z = {128}> {
            out = MatMulInteger (a, w, z, z)
        }
    """)
    assert turn_weights(graph, "signed") == set()
    weights = next(tensor for tensor in graph.initializer if tensor.name == "w")
    assert weights.data_type == TensorProto.INT8
    assert onnx.numpy_helper.to_array(weights).tolist() == [[-128, 0], [1, 127]]
    assert list(graph.node[0].input) == ["a", "w", "z"]
    turn_weights(graph, "unsigned")
    assert onnx.numpy_helper.to_array(weights).tolist() == [[0, 128], [129, 255]]
    assert len(graph.node[0].input) == 4


def test_weights_around_another_zero_point_are_refused() -> None:
    graph = graph_of("""
        shifted (uint8[1, 2] a) => (int32[1, 2] out) <uint8[2, 2] w = {0, 128, 129, 255}, uint8 z = {120}> {
            out = MatMulInteger (a, w, z, z)
        }
    """)
    with pytest.raises(ModelInvalid, match="not around 128"):
        turn_weights(graph, "signed")


def test_weights_that_another_operator_reads_are_refused() -> None:
    graph = graph_of("""
        shared (uint8[1, 2] a) => (int32[1, 2] out, float[2, 2] again)
            <int8[2, 2] w = {0, 12, -1, 25}, uint8 z = {128}> {
            out = MatMulInteger (a, w, z)
            again = Cast <to = 1> (w)
        }
    """)
    with pytest.raises(ModelInvalid, match="tensor w: Cast reads it too"):
        turn_weights(graph, "unsigned")


def test_one_tensor_of_two_products_is_turned_once() -> None:
    graph = graph_of("""
        twice (uint8[1, 2] a, uint8[1, 2] b) => (int32[1, 2] first, int32[1, 2] second)
            <int8[2, 2] w = {0, 12, -1, 25}, uint8 z = {128}> {
            first = MatMulInteger (a, w, z)
            second = MatMulInteger (b, w, z)
        }
    """)
    turn_weights(graph, "unsigned")
    weights = next(tensor for tensor in graph.initializer if tensor.name == "w")
    assert onnx.numpy_helper.to_array(weights).tolist() == [[128, 140], [127, 153]]
    assert [len(node.input) for node in graph.node] == [4, 4]


def test_manifest_of_a_remade_package_keeps_what_it_says_of_the_model(tmp_path: Path) -> None:
    package = tiny_package("qwen3", "int8")
    retarget_package(package, tmp_path / "made", target="vnni")
    old, new = (msgspec.json.decode((folder / MANIFEST).read_bytes()) for folder in (package, tmp_path / "made"))
    changed = {key for key in old if old[key] != new[key]}
    assert changed == {"target", "weight_form", "sizes", "digests"}
