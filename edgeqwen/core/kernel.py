"""The products by which a processor proves that it multiplies quantised weights rightly.

A package carries a small graph with one product for each kernel that its own graphs use (`convert.kernel_graph` writes
it), and before anything else is loaded that graph is run and compared with exact arithmetic
(`runtime.kernel_check`). Both sides take the numbers from here; an output of the graph is named after its kernel.

The numbers are extreme on purpose: the largest activations (255 around 128) meet whole columns of the largest weights
(-127 and 127; the first and last code of a block format), so sums that saturate or overflow do so here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from edgeqwen.core.model import WeightForm

KERNEL_CHECK: Final = "kernel_check.onnx"
DEPTH: Final = 256
WIDTH: Final = 64

CODES: Final = "codes"
ACTIVATIONS: Final = "activations"
SIGNED_WEIGHTS: Final = "weights.signed"
UNSIGNED_WEIGHTS: Final = "weights.unsigned"
"""Inputs of the check graph; it has those that its kernels need."""


@dataclass(frozen=True, slots=True)
class RowKernel:
    """Unsigned 8-bit activations around 128 times 8-bit weights, summed as integers: the result must be exact.

    `is_computed`: the second factor is itself an activation, so no kernel can pack or rewrite it at load.
    """

    form: WeightForm
    is_computed: bool = False

    @property
    def name(self) -> str:
        return f"rows-{self.form}" + ("-computed" if self.is_computed else "")

    def __str__(self) -> str:
        return f"{self.form} 8-bit " + ("activations" if self.is_computed else "weights")


@dataclass(frozen=True, slots=True)
class BlockKernel:
    """Float activations times weights in blocks (`MatMulNBits`, accuracy level 4).

    The kernel may quantise the activations to 8 bits, by block or by row and around 0 or not. The check's activations
    are whole numbers that most do exactly; the rest stays within one step of the grid for each activation.
    """

    bits: int
    block_size: int
    has_zero_points: bool = False

    @property
    def name(self) -> str:
        return f"blocks-{self.bits}-{self.block_size}" + ("-zeros" if self.has_zero_points else "")

    def __str__(self) -> str:
        return f"{self.bits}-bit weights in blocks of {self.block_size}"


Kernel: TypeAlias = RowKernel | BlockKernel


def parse_kernel(name: str) -> Kernel:
    """The kernel of a name; raises `ValueError` if there is none such."""
    match name.split("-"):
        case ["rows", ("signed" | "unsigned") as form, *rest] if rest in ([], ["computed"]):
            return RowKernel(form, bool(rest))
        case ["blocks", ("4" | "8") as bits, size, *rest] if size.isdecimal() and rest in ([], ["zeros"]):
            return BlockKernel(int(bits), int(size), bool(rest))
    raise ValueError(f"unknown kernel {name!r}")


def check_codes(rows: int) -> NDArray[np.uint8]:
    """Activations as codes around 128, uint8 `[rows, DEPTH]`: rows of extremes, of the highest code, of all codes.

    128 less they are the whole numbers of [-127, 127], and each row reaches 127 in every 16 of them.
    """
    column = np.arange(DEPTH)
    kinds = np.stack([
        np.where(column % 7 == 3, 1, 255),
        np.full(DEPTH, 255),
        np.where(column % 16 == 0, 255, (column * 101) % 255 + 1),
    ])
    return kinds[np.arange(rows) % len(kinds)].astype(np.uint8)


def row_weights(form: WeightForm) -> NDArray[np.int8] | NDArray[np.uint8]:
    """Weights of a `RowKernel` `[DEPTH, WIDTH]`: all of [-127, 127] and whole columns of the extremes.

    Unsigned ones are the same around 128.
    """
    index = np.arange(DEPTH * WIDTH).reshape(DEPTH, WIDTH)
    weights = (index * 37) % 255 - 127
    weights[:, ::4] = 127
    weights[:, 1::4] = -127
    return weights.astype(np.int8) if form == "signed" else (weights + 128).astype(np.uint8)


def block_codes(bits: int) -> NDArray[np.uint8]:
    """Codes of a `BlockKernel` `[WIDTH, DEPTH]`, one a byte: all there are and whole rows of the first and last."""
    index = np.arange(DEPTH * WIDTH).reshape(WIDTH, DEPTH)
    codes = (index * 37) % (1 << bits)
    codes[::4] = (1 << bits) - 1
    codes[1::4] = 0
    return codes.astype(np.uint8)


def block_zero_points(kernel: BlockKernel) -> NDArray[np.uint8]:
    """Zero point of each block `[WIDTH, DEPTH / block_size]`: the middle, or different ones where it has them."""
    shape = (WIDTH, DEPTH // kernel.block_size)
    middle = 1 << (kernel.bits - 1)
    spread = np.arange(WIDTH * shape[1]).reshape(shape) % 5 - 2 if kernel.has_zero_points else np.zeros(shape, int)
    return (middle + spread).astype(np.uint8)


def exact_weights(kernel: Kernel) -> NDArray[np.int64]:
    """The whole numbers that the weights of `kernel` mean, `[DEPTH, WIDTH]`."""
    if isinstance(kernel, RowKernel):
        return row_weights("signed").astype(np.int64)
    zero_points = np.repeat(block_zero_points(kernel).astype(np.int64), kernel.block_size, axis=1)
    return (block_codes(kernel.bits).astype(np.int64) - zero_points).T


def tolerances(kernel: Kernel) -> NDArray[np.int64]:
    """How far from exact each of the `WIDTH` results may be."""
    if isinstance(kernel, RowKernel):
        return np.zeros(WIDTH, np.int64)
    sums: NDArray[np.int64] = np.abs(exact_weights(kernel)).sum(axis=0)
    return sums
