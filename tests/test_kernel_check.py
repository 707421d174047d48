"""The check of kernels at load: what it covers, that it passes here, and that a wrong product does not get through."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray
from onnx import numpy_helper

from edgeqwen.convert.kernel_graph import check_model, kernels_of
from edgeqwen.core.kernel import (
    DEPTH,
    KERNEL_CHECK,
    WIDTH,
    BlockKernel,
    Kernel,
    RowKernel,
    block_codes,
    check_codes,
    exact_weights,
    parse_kernel,
    row_weights,
    tolerances,
)
from edgeqwen.core.model import Quant
from edgeqwen.core.package import GRAPH
from edgeqwen.errors import ModelInvalid
from edgeqwen.runtime.kernel_check import ROWS, KernelChoice, choose_kernels, examine
from tests.models import tiny_package

KERNELS: list[Kernel] = [
    RowKernel("signed"),
    RowKernel("unsigned"),
    RowKernel("signed", is_computed=True),
    RowKernel("unsigned", is_computed=True),
    *(BlockKernel(bits, size, has) for bits in (4, 8) for size in (16, 32, 64, 128, 256) for has in (False, True)),
]


def write_check(folder: Path, kernels: list[Kernel], **changes: NDArray[Any]) -> Path:
    """A check graph, constants in it replaced."""
    model = check_model(kernels)
    for tensor in model.graph.initializer:
        if tensor.name in changes:
            tensor.CopyFrom(numpy_helper.from_array(changes[tensor.name], tensor.name))
    onnx.save(model, str(folder / KERNEL_CHECK))
    return folder / KERNEL_CHECK


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
def test_name_of_a_kernel_is_read_back(kernel: Kernel) -> None:
    assert parse_kernel(kernel.name) == kernel


@pytest.mark.parametrize("name", ["", "rows", "rows-other", "blocks-3-32", "blocks-4-x", "rows-signed-zeros", "logits"])
def test_name_of_no_kernel_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="unknown kernel"):
        parse_kernel(name)


def test_check_multiplies_the_largest_activations_with_the_largest_weights() -> None:
    codes, weights = check_codes(3), row_weights("signed")
    assert (codes[1] == 255).all()
    assert (codes.min(), codes.max()) == (1, 255)
    assert (weights[:, 0] == 127).all()
    assert (weights[:, 1] == -127).all()
    assert (weights.min(), weights.max()) == (-127, 127)
    assert (row_weights("unsigned").astype(int) - 128 == weights).all()
    for bits in (4, 8):
        assert (block_codes(bits)[0] == (1 << bits) - 1).all()
        assert (block_codes(bits)[1] == 0).all()


def test_activations_reach_the_end_of_the_grid_in_every_block() -> None:
    blocks = (check_codes(64).astype(int) - 128).reshape(64, DEPTH // 16, 16)
    assert (np.abs(blocks).max(axis=-1) == 127).all()


def test_exact_results_are_whole_numbers_that_float32_holds() -> None:
    for kernel in KERNELS:
        largest = 127 * (np.abs(exact_weights(kernel)) + 128).sum(axis=0).max()
        assert largest < 1 << 24


def test_sums_of_pairs_in_16_bits_would_be_told() -> None:
    """What an x86 processor without VNNI does with signed weights: each pair of products saturates."""
    codes, weights = check_codes(1).astype(np.int64), exact_weights(RowKernel("signed"))
    products = (codes[0][:, None] * weights).reshape(DEPTH // 2, 2, WIDTH).sum(axis=1)
    saturated = np.clip(products, -32768, 32767).sum(axis=0) - 128 * weights.sum(axis=0)
    exact = (codes[0] - 128) @ weights
    assert (np.abs(saturated - exact) > np.abs(exact).max() / 5).any()


def test_every_kernel_that_can_be_made_exact_is_right_here(tmp_path: Path) -> None:
    precise = [kernel for kernel in KERNELS if not (isinstance(kernel, RowKernel) and kernel.is_computed)]
    assert examine(write_check(tmp_path, precise), is_precise=True).wrong == ()


@pytest.mark.parametrize("kernel", [RowKernel("signed"), RowKernel("unsigned")], ids=lambda kernel: kernel.name)
def test_integer_product_that_is_one_off_is_told(kernel: RowKernel, tmp_path: Path) -> None:
    weights = row_weights(kernel.form).copy()
    weights[17, 5] ^= 1
    path = write_check(tmp_path, [kernel], **{f"{kernel.name}.weights": weights})
    assert examine(path).wrong == (kernel,)
    with pytest.raises(ModelInvalid, match="--target any" if kernel.form == "signed" else "another --quant"):
        choose_kernels(path)


@pytest.mark.parametrize("bits", [4, 8])
def test_block_product_with_a_shifted_zero_point_is_told_and_others_are_not(bits: int, tmp_path: Path) -> None:
    shifted, right = BlockKernel(bits, 32, has_zero_points=True), BlockKernel(bits, 32)
    zeros = np.full((WIDTH, DEPTH // 32 * bits // 8), 0x99 if bits == 4 else 0x81, np.uint8)
    path = write_check(tmp_path, [right, shifted], **{f"{shifted.name}.zeros": zeros})
    assert examine(path).wrong == (shifted,)
    with pytest.raises(ModelInvalid, match=f"{bits}-bit weights in blocks of 32 wrongly.*another --quant"):
        choose_kernels(path)


def test_block_products_may_be_off_by_what_rounding_activations_to_8_bits_can_do() -> None:
    for kernel in KERNELS:
        if isinstance(kernel, BlockKernel):
            weights = exact_weights(kernel)
            assert (tolerances(kernel) == np.abs(weights).sum(axis=0)).all()  # one step of [-127, 127] for each
            assert tolerances(kernel).max() < 0.02 * np.abs(weights.T * 127).sum(axis=1).max()


@pytest.mark.parametrize(
    ("quant", "row_products", "bits"),
    [("fp32", set(), set()), ("int8", {RowKernel("unsigned")}, {8}), ("int4", set(), {4, 8})],
)
def test_package_checks_the_kernels_that_its_graph_uses(
    quant: Quant, row_products: set[Kernel], bits: set[int]
) -> None:
    package = tiny_package("qwen3", quant)
    used = set(kernels_of(onnx.load(str(package / GRAPH), load_external_data=False).graph))
    assert {kernel for kernel in used if isinstance(kernel, RowKernel)} == row_products
    assert {kernel.bits for kernel in used if isinstance(kernel, BlockKernel)} == bits
    assert (package / KERNEL_CHECK).exists() == bool(used)
    if used:
        assert set(examine(package / KERNEL_CHECK).kernels) == used
    assert choose_kernels(package / KERNEL_CHECK).is_precise is False


def test_wrong_product_of_two_activations_costs_integer_attention_and_no_more(tmp_path: Path) -> None:
    attention, weights = RowKernel("signed", is_computed=True), RowKernel("unsigned")
    model = check_model([attention, weights])
    node = next(node for node in model.graph.node if node.output[0] == attention.name)
    node.input[4] = "shifted"  # the zero point of the activations
    model.graph.initializer.append(numpy_helper.from_array(np.array(127, np.uint8), "shifted"))
    onnx.save(model, str(tmp_path / KERNEL_CHECK))
    assert examine(tmp_path / KERNEL_CHECK).wrong == (attention,)
    assert choose_kernels(tmp_path / KERNEL_CHECK) == KernelChoice(is_precise=False, has_integer_attention=False)


def test_product_of_two_activations_is_a_kernel_of_its_own() -> None:
    graph = onnx.parser.parse_graph("""
        products (uint8[r, 64] a, int8[1, 8, 64] keys, float[64, 8] values, float scale, uint8 zero)
            => (int32[r, 8] scores, int32[r, 8] mixed)
        {
            turned = Transpose <perm = [0, 2, 1]> (keys)
            codes = QuantizeLinear (values, scale, zero)
            scores = MatMulInteger (a, turned, zero)
            mixed = MatMulInteger (a, codes, zero, zero)
        }
    """)
    assert list(kernels_of(graph)) == [
        RowKernel("signed", is_computed=True),
        RowKernel("unsigned", is_computed=True),
    ]


def test_graph_that_is_no_check_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelInvalid, match=f"{GRAPH}: not a check of kernels: unknown kernel"):
        examine(tiny_package("qwen3", "fp32") / GRAPH)
    (tmp_path / KERNEL_CHECK).write_bytes(b"noise")
    with pytest.raises(ModelInvalid, match=KERNEL_CHECK):
        choose_kernels(tmp_path / KERNEL_CHECK)


def test_all_numbers_of_rows_are_tried() -> None:
    assert min(ROWS) == 1
    assert max(ROWS) >= 64
