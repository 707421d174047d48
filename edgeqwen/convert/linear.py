"""The linear layers of a decoder in the three quants, behind one interface (`Linears`).

All activations are `[rows, width]`: rows of all sequences of a step one below the other, so a row's result cannot
depend on its neighbours.

`int8` quantises activations to unsigned bytes around 128 with one scale a *row* (one scale for the whole tensor costs
17 times the divergence) and multiplies them with `MatMulIntegerToFloat`, whose own scale input is the weights' alone.
The row scale stays outside, as a `Product`: where the next operation divides it out again (RMS norm of q and k) or
can take it along (`GatedAdd` on the residual, `up` into `down`), it is never multiplied at all. Signed activations
would take a kernel 20 times slower, hence 128.

Signed weights are the fast form where the processor sums products in 32 bits (VNNI, AMX, ARM). On x86 with AVX2 alone
the signed kernel saturates at 16 bits and is silently wrong; there weights are unsigned around 128, which is exact.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, Literal, Protocol

import numpy as np
from onnx import numpy_helper

from edgeqwen.convert.checkpoint import EMBEDDING, OUTPUT, Checkpoint, Float32Array, Uint8Array
from edgeqwen.convert.graph import MICROSOFT, GraphBuilder
from edgeqwen.convert.quantize import (
    block_size_for,
    pack_nibbles,
    quantize_blocks,
    quantize_rows,
    widen_codes,
)
from edgeqwen.core.model import Quant, WeightForm
from edgeqwen.errors import ModelInvalid

ROWS_AT_ONCE: Final = 4096
BLOCK_SIZE: Final = 32
WIDE_ROW: Final = 1500  # from here on maximum and minimum apart are faster than the maximum of the absolute values


@dataclass(frozen=True, slots=True)
class Product:
    """A linear layer's output `[rows, out]` and the scale `[rows, 1]` still to be multiplied in, if any."""

    name: str
    row_scale: str | None = None


class Linears(Protocol):
    """How one quant stores and multiplies weights. Tensor names are those of the checkpoint."""

    def project(self, x: str, tensor: str, output: str) -> Product:
        """`x` times the transpose of `tensor`; activations are quantised once for each `x`."""
        ...

    def embed(self, ids: str, output: str) -> str:
        """Rows of the embedding for `ids` (int64, any shape)."""
        ...

    def logits(self, x: str, output: str) -> str:
        """`x` times the transpose of the output matrix (the embedding where tied)."""
        ...


def make_linears(quant: Quant, builder: GraphBuilder, checkpoint: Checkpoint, *, weight_form: WeightForm) -> Linears:
    """The implementation of a quant."""
    if quant == "fp32":
        return Fp32Linears(builder, checkpoint)
    if quant == "int8":
        return Int8Linears(builder, checkpoint, weight_form)
    return Int4Linears(builder, checkpoint)


def output_tensor(checkpoint: Checkpoint) -> str:
    """Name of the output matrix: the embedding where the two are tied."""
    return EMBEDDING if checkpoint.spec.tie_embeddings else OUTPUT


class Fp32Linears:
    """Weights as they are; a tied matrix is stored once and read by both its users."""

    def __init__(self, builder: GraphBuilder, checkpoint: Checkpoint) -> None:
        self._builder = builder
        self._checkpoint = checkpoint
        self._stored: set[str] = set()

    def project(self, x: str, tensor: str, output: str) -> Product:
        return Product(self._builder.node("Gemm", [x, self._store(tensor)], output, transB=1))

    def embed(self, ids: str, output: str) -> str:
        return self._builder.node("Gather", [self._store(EMBEDDING), ids], output, axis=0)

    def logits(self, x: str, output: str) -> str:
        return self._builder.node("Gemm", [x, self._store(output_tensor(self._checkpoint))], output, transB=1)

    def _store(self, tensor: str) -> str:
        if tensor not in self._stored:
            shape = self._checkpoint.tensors[tensor].shape
            pieces = (self._checkpoint.read(tensor, *bounds) for bounds in row_ranges(shape[0]))
            self._builder.stream(tensor, pieces, dtype=np.dtype(np.float32), shape=shape)
            self._stored.add(tensor)
        return tensor


class BlockMatrices:
    """Embedding and output matrix in 8-bit blocks, shared by the quantised forms.

    Both read the same bytes of the weights file when tied: the product's kernel packs its own copy at load, and the few
    rows that the embedding touches are paged in from the file.
    """

    def __init__(self, builder: GraphBuilder, checkpoint: Checkpoint) -> None:
        self._builder = builder
        self._checkpoint = checkpoint
        self._block_size: dict[str, int] = {}

    def embed(self, ids: str, output: str) -> str:
        codes, scales = self._store(EMBEDDING, bits=8)
        flat = self._builder.alias("embedding.codes", codes, self._checkpoint.tensors[EMBEDDING].shape)
        return self._builder.node(
            "GatherBlockQuantized",
            [flat, ids, scales],
            output,
            domain=MICROSOFT,
            bits=8,
            block_size=self._block_size[EMBEDDING],
            gather_axis=0,
            quantize_axis=1,
        )

    def logits(self, x: str, output: str) -> str:
        return self.multiply(x, output_tensor(self._checkpoint), output, bits=8)

    def multiply(self, x: str, tensor: str, output: str, *, bits: Literal[4, 8]) -> str:
        """`MatMulNBits` with int8 activations (accuracy level 4)."""
        rows, columns = self._checkpoint.tensors[tensor].shape
        codes, scales = self._store(tensor, bits=bits)
        return self._builder.node(
            "MatMulNBits",
            [x, codes, scales],
            output,
            domain=MICROSOFT,
            K=columns,
            N=rows,
            bits=bits,
            block_size=self._block_size[tensor],
            accuracy_level=4,
        )

    def _store(self, tensor: str, *, bits: Literal[4, 8]) -> tuple[str, str]:
        codes_name, scales_name = f"{tensor}.codes", f"{tensor}.scales"
        if tensor in self._block_size:
            return codes_name, scales_name
        rows, columns = self._checkpoint.tensors[tensor].shape
        block_size = block_size_for(columns, preferred=BLOCK_SIZE)
        if columns % block_size:
            raise ModelInvalid(f"tensor {tensor}: {columns} columns are not a multiple of 16; use --quant fp32")
        self._block_size[tensor] = block_size
        scales = np.empty((rows, columns // block_size), np.float32)

        def pieces() -> Iterator[Uint8Array]:
            for start, stop in row_ranges(rows):
                codes, scales[start:stop] = self._blocks(tensor, start, stop, bits=bits, block_size=block_size)
                yield pack_nibbles(codes) if bits == 4 else codes

        shape = (rows, columns // block_size, block_size * bits // 8)
        self._builder.stream(codes_name, pieces(), dtype=np.dtype(np.uint8), shape=shape)
        self._builder.tensor(scales_name, scales)
        return codes_name, scales_name

    def _blocks(
        self, tensor: str, start: int, stop: int, *, bits: Literal[4, 8], block_size: int
    ) -> tuple[Uint8Array, Float32Array]:
        """Codes and scales of some rows: the file's own where they fit unrounded, else quantised here."""
        stored = self._checkpoint.read_blocks(tensor, start, stop) if block_size == BLOCK_SIZE else None
        if stored is not None and stored.bits == bits:
            return stored.codes, stored.scales
        if stored is not None and stored.bits == 4:
            return widen_codes(stored.codes), stored.scales
        quantized = quantize_blocks(self._checkpoint.read(tensor, start, stop), bits=bits, block_size=block_size)
        return quantized.codes, quantized.scales


class Int4Linears:
    """4-bit blocks for the layers, 8-bit blocks for embedding and output matrix."""

    def __init__(self, builder: GraphBuilder, checkpoint: Checkpoint) -> None:
        self._matrices = BlockMatrices(builder, checkpoint)

    def project(self, x: str, tensor: str, output: str) -> Product:
        return Product(self._matrices.multiply(x, tensor, output, bits=4))

    def embed(self, ids: str, output: str) -> str:
        return self._matrices.embed(ids, output)

    def logits(self, x: str, output: str) -> str:
        return self._matrices.logits(x, output)


class Int8Linears:
    """8-bit weights with a scale a row, 8-bit activations with a scale a row; blocks for embedding and output."""

    def __init__(self, builder: GraphBuilder, checkpoint: Checkpoint, weight_form: WeightForm) -> None:
        self._builder = builder
        self._checkpoint = checkpoint
        self._is_signed = weight_form == "signed"
        self._matrices = BlockMatrices(builder, checkpoint)
        self._quantized: dict[str, tuple[str, str]] = {}

    def embed(self, ids: str, output: str) -> str:
        return self._matrices.embed(ids, output)

    def logits(self, x: str, output: str) -> str:
        return self._matrices.logits(x, output)

    def project(self, x: str, tensor: str, output: str) -> Product:
        columns = self._checkpoint.tensors[tensor].shape[1]
        codes, row_scale = self._quantize_activations(x, columns)
        one = self._builder.constant("one", 1.0)
        zero_point = self._builder.constant("zero_point", 128, np.uint8)
        weights, scales = self._store(tensor)
        inputs = [codes, weights, one, scales, zero_point] + ([] if self._is_signed else [zero_point])
        raw = self._builder.node("MatMulIntegerToFloat", inputs, output, domain=MICROSOFT)
        return Product(raw, row_scale)

    def _store(self, tensor: str) -> tuple[str, str]:
        """Codes `[in, out]` (the layout that the kernel packs) and scales `[out]`."""
        weights = quantize_rows(self._checkpoint.read(tensor))
        codes = np.ascontiguousarray(weights.codes.T)
        stored = codes if self._is_signed else (codes.astype(np.int16) + 128).astype(np.uint8)
        return self._builder.tensor(f"{tensor}.codes", stored), self._builder.tensor(f"{tensor}.scales", weights.scales)

    def _quantize_activations(self, x: str, width: int) -> tuple[str, str]:
        """(codes uint8 `[rows, width]`, scales `[rows, 1]`) of an activation, emitted once."""
        if x not in self._quantized:
            build = self._builder
            scale = build.node("Mul", [self._row_maximum(x, width), build.constant("per_127", 1 / 127)], x + ".scale")
            flat = build.node("Reshape", [scale, build.constant("flat", [-1], np.int64)], x + ".scales")
            zero_points = self._row_zero_points(flat)
            codes = build.node("QuantizeLinear", [x, flat, zero_points], x + ".codes", axis=0)
            self._quantized[x] = (codes, scale)
        return self._quantized[x]

    def _row_maximum(self, x: str, width: int) -> str:
        """Largest magnitude of each row, `[rows, 1]`, never zero."""
        build = self._builder
        last = build.constant("last_axis", [-1], np.int64)
        tiny = build.constant("tiny", 1e-12)
        if width < WIDE_ROW:
            magnitudes = build.node("Abs", [x], x + ".abs")
            largest = [build.node("ReduceMax", [magnitudes, last], x + ".max", keepdims=1)]
        else:
            highest = build.node("ReduceMax", [x, last], x + ".high", keepdims=1)
            lowest = build.node("ReduceMin", [x, last], x + ".low", keepdims=1)
            largest = [highest, build.node("Neg", [lowest], x + ".depth")]
        return build.node("Max", [*largest, tiny], x + ".peak")

    def _row_zero_points(self, scales: str) -> str:
        """128 for each row, as many as `scales` has: every activation of a step has the same rows."""
        build = self._builder
        if not build.has_value("row_zero_points"):
            count = build.node("Shape", [scales], "row_count")
            value = numpy_helper.from_array(np.array([128], np.uint8))
            build.node("ConstantOfShape", [count], "row_zero_points", value=value)
        return "row_zero_points"


def row_ranges(rows: int) -> Iterator[tuple[int, int]]:
    """Ranges of at most `ROWS_AT_ONCE` rows that cover a tensor."""
    for start in range(0, rows, ROWS_AT_ONCE):
        yield start, min(rows, start + ROWS_AT_ONCE)
