"""The linear layers of a decoder in their forms, behind one interface (`Linears`): stage two, graphs over the store.

All activations are `[rows, width]`: rows of all sequences of a step one below the other, so a row's result cannot
depend on its neighbours.

**Rows of 8 bits** quantise activations to unsigned bytes around 128 with one scale a *row* (one scale for the whole
tensor costs 17 times the divergence) and multiply them with `MatMulIntegerToFloat`, whose own scale input is the
weights' alone. The row scale stays outside, as a `Product`: where the next operation divides it out again (RMS norm of
q and k) or can take it along (`up` into `down`), it is never multiplied at all. Signed activations would take a kernel
20 times slower, hence 128. A row is one block of `QuantizeLinear`, whose scales are then `[rows, 1]` as they come.

Signed weights are the fast form where the processor sums products in 32 bits (VNNI, AMX, ARM). On x86 with AVX2 alone
the signed kernel saturates at 16 bits and is silently wrong; there weights are unsigned around 128, which is exact.

**Blocks** leave the quantisation of activations to `MatMulNBits` (accuracy level 4: 8 bits a block). Tensors that
multiply the same input are one matrix there (`block_writer`), whose product is split.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal, Protocol, TypeAlias

import numpy as np

from edgeqwen.convert.block_writer import StoredBlocks
from edgeqwen.convert.checkpoint import Float32Array
from edgeqwen.convert.graph import MICROSOFT, GraphBuilder
from edgeqwen.convert.head import Head, multiply_blocks
from edgeqwen.convert.weights import StoredWeights
from edgeqwen.core.tensor_names import EMBEDDING

LinearForm: TypeAlias = Literal["fp32", "rows", "blocks"]

WANTED: Final = "wanted"  # begins the names of activations that have the wanted rows only
WIDE_ROW: Final = 1500  # from here on maximum and minimum apart are faster than the maximum of the absolute values


@dataclass(frozen=True, slots=True)
class Product:
    """A linear layer's output `[rows, out]` and the scale `[rows, 1]` still to be multiplied in, if any."""

    name: str
    row_scale: str | None = None


class Linears(Protocol):
    """How one form stores and multiplies weights. Tensor names are those of the checkpoint."""

    def project(self, x: str, tensor: str, output: str, *, column_scale: Float32Array | None = None) -> Product:
        """`x` times the transpose of `tensor`, and times a factor `[out]` if given; activations are quantised once for
        each `x`.
        """
        ...

    def embed(self, ids: str, output: str) -> str:
        """Rows of the embedding for `ids` (int64, any shape)."""
        ...

    def logits(self, x: str, output: str) -> str:
        """`x` times the transpose of the output matrix (the embedding where tied)."""
        ...


def scaled(build: GraphBuilder, product: Product) -> str:
    """The product with its row scale multiplied in."""
    if product.row_scale is None:
        return product.name
    return build.node("Mul", [product.name, product.row_scale], product.name + ".scaled")


def make_linears(form: LinearForm, builder: GraphBuilder, stored: StoredWeights) -> Linears:
    """The implementation of a form."""
    if form == "fp32":
        return Fp32Linears(builder, stored)
    return RowLinears(builder, stored) if form == "rows" else BlockLinears(builder, stored)


class Fp32Linears:
    """Weights as they are; a tied matrix is stored once and read by both its users."""

    def __init__(self, builder: GraphBuilder, stored: StoredWeights) -> None:
        self._builder = builder
        self._stored = stored

    def project(self, x: str, tensor: str, output: str, *, column_scale: Float32Array | None = None) -> Product:
        product = self._builder.node("Gemm", [x, self._builder.stored(tensor)], output, transB=1)
        return Product(_column_scaled(self._builder, product, column_scale))

    def embed(self, ids: str, output: str) -> str:
        return self._builder.node("Gather", [self._builder.stored(EMBEDDING), ids], output, axis=0)

    def logits(self, x: str, output: str) -> str:
        return self.project(x, self._stored.output, output).name


class BlockLinears:
    """Blocks of 4 bits, some tensors in 8."""

    def __init__(self, builder: GraphBuilder, stored: StoredWeights) -> None:
        self._builder = builder
        self._stored = stored
        self._head = Head(builder, stored)
        self._parts: dict[str, str] = {}

    def project(self, x: str, tensor: str, output: str, *, column_scale: Float32Array | None = None) -> Product:
        matrix = self._stored.blocks[tensor]
        if not matrix.parts:
            product = multiply_blocks(self._builder, x, matrix, output)
        else:
            if tensor not in self._parts:
                self._multiply_joined(x, matrix)
            product = self._parts[tensor]
        return Product(_column_scaled(self._builder, product, column_scale))

    def _multiply_joined(self, x: str, matrix: StoredBlocks) -> None:
        """One product for all tensors of a joined matrix."""
        tensors, rows = zip(*matrix.parts, strict=True)
        whole = multiply_blocks(self._builder, x, matrix, f"{x}.products")
        sizes = self._builder.constant("parts." + "_".join(map(str, rows)), rows, np.int64)
        names = [f"{x}.products.{index}" for index in range(len(rows))]
        self._builder.node_many("Split", [whole, sizes], names, axis=-1)
        self._parts.update(zip(tensors, names, strict=True))

    def embed(self, ids: str, output: str) -> str:
        return self._head.embed(ids, output)

    def logits(self, x: str, output: str) -> str:
        return self._head.logits(x, output)


class RowLinears:
    """8-bit weights with a scale a row, 8-bit activations with a scale a row."""

    def __init__(self, builder: GraphBuilder, stored: StoredWeights) -> None:
        self._builder = builder
        self._stored = stored
        self._head = Head(builder, stored)
        self._quantized: dict[str, tuple[str, str]] = {}

    def embed(self, ids: str, output: str) -> str:
        return self._head.embed(ids, output)

    def logits(self, x: str, output: str) -> str:
        return self._head.logits(x, output)

    def project(self, x: str, tensor: str, output: str, *, column_scale: Float32Array | None = None) -> Product:
        build = self._builder
        stored = self._stored.rows[tensor]
        weights, columns = build.stored(stored.codes), build.shape(stored.codes)[0]
        scales = build.tensor(f"{tensor}.rows.scales", stored.scales)
        if column_scale is not None:
            scales = build.tensor(f"{tensor}.rows.folded_scales", stored.scales * column_scale)
        codes, row_scale = self._quantize_activations(x, columns)
        zero_point = build.constant("zero_point", 128, np.uint8)
        inputs = [codes, weights, build.constant("one", 1.0), scales, zero_point]
        inputs += [] if self._stored.is_signed else [zero_point]
        return Product(build.node("MatMulIntegerToFloat", inputs, output, domain=MICROSOFT), row_scale)

    def _quantize_activations(self, x: str, width: int) -> tuple[str, str]:
        """(codes uint8 `[rows, width]`, scales `[rows, 1]`) of an activation, emitted once."""
        if x not in self._quantized:
            build = self._builder
            scale = build.node("Mul", [self._row_maximum(x, width), build.constant("per_127", 1 / 127)], x + ".scale")
            inputs = [x, scale, self._zero_points(scale, x)]
            codes = build.node("QuantizeLinear", inputs, x + ".codes", axis=1, block_size=width)
            self._quantized[x] = (codes, scale)
        return self._quantized[x]

    def _row_maximum(self, x: str, width: int) -> str:
        """Largest magnitude of each row, `[rows, 1]`. That of a row of zeros is zero, and so is its product: whatever
        codes come of 0 / 0, they are whole numbers, and their sum is multiplied by the scale 0.
        """
        build = self._builder
        last = build.constant("last_axis", [-1], np.int64)
        if width < WIDE_ROW:
            magnitudes = build.node("Abs", [x], x + ".abs")
            return build.node("ReduceMax", [magnitudes, last], x + ".max", keepdims=1)
        highest = build.node("ReduceMax", [x, last], x + ".high", keepdims=1)
        lowest = build.node("ReduceMin", [x, last], x + ".low", keepdims=1)
        return build.node("Max", [highest, build.node("Neg", [lowest], x + ".depth")], x + ".max")

    def _zero_points(self, scales: str, x: str) -> str:
        """128 for each row, shaped as `scales` (the rows that are wanted at the end are fewer than all)."""
        build = self._builder
        name = f"{WANTED}.zero_points" if x.startswith(WANTED) else "zero_points"
        if not build.has_value(name):
            count = build.node("Shape", [scales], name + ".count")
            build.filled(name, count, np.uint8(128))
        return name


def _column_scaled(build: GraphBuilder, product: str, column_scale: Float32Array | None) -> str:
    if column_scale is None:
        return product
    factor = build.tensor(f"{product}.column_scale", column_scale)
    return build.node("Mul", [product, factor], f"{product}.column_scaled")
