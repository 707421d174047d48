"""Stage one of an import: every tensor of a checkpoint into the store, in the forms that the package's graphs read.

The output matrix is a quarter of a small model's weights, and all of it is read for every token. So a large one is
stored twice: in 4-bit blocks, from which all logits are computed, and in 8-bit blocks, from which the rows of the
likeliest tokens are read to compute those again (see `linear.Head`). The 8-bit rows are only touched where they are
needed, so they cost address space more than memory; where embedding and output are tied they are the embedding's own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final, Literal

import numpy as np

from edgeqwen.convert.checkpoint import EMBEDDING, OUTPUT, Checkpoint, Float32Array, Uint8Array
from edgeqwen.convert.quantize import (
    BlockWeights,
    Form,
    QuantizedTensor,
    RowWeights,
    block_size_for,
    pack_nibbles,
    quantize_blocks,
    quantize_rows,
    widen_codes,
)
from edgeqwen.convert.store import TensorStore
from edgeqwen.core.model import WeightForm
from edgeqwen.errors import ModelInvalid

ROWS_AT_ONCE: Final = 4096
MATRIX_BLOCK: Final = 32  # of embedding and output matrix, and of a file's own blocks
LAYER_BLOCK: Final = 64  # of the layers in 4 bits: a third faster for one row than blocks of 32
COARSE_FROM_ROWS: Final = 16_384  # from this vocabulary on the output matrix is stored coarse and fine

Bits = Literal[4, 8]


@dataclass(frozen=True, slots=True)
class StoredBlocks:
    """A matrix `[rows, columns]` of the store in blocks: names of its codes, scales and (if it has any) zero points."""

    codes: str
    scales: str
    bits: Bits
    block_size: int
    rows: int
    columns: int
    zero_points: str | None = None


@dataclass(frozen=True, slots=True)
class StoredRows:
    """A matrix of the store in rows of 8 bits: name of its codes `[in, out]`, and scales float32 `[out]`."""

    codes: str
    scales: Float32Array


@dataclass(slots=True)
class StoredWeights:
    """What the store holds. `blocks` and `rows` are by tensor name, `coarse_output` is there for a large vocabulary."""

    is_tied: bool
    is_signed: bool
    blocks: dict[str, StoredBlocks] = field(default_factory=dict)
    rows: dict[str, StoredRows] = field(default_factory=dict)
    coarse_output: StoredBlocks | None = None

    @property
    def output(self) -> str:
        """Name of the output matrix: the embedding where the two are tied."""
        return EMBEDDING if self.is_tied else OUTPUT


class WeightWriter:
    """Fills a store from a checkpoint."""

    def __init__(self, store: TensorStore, checkpoint: Checkpoint, form: WeightForm) -> None:
        self._store = store
        self._checkpoint = checkpoint
        self.stored = StoredWeights(is_tied=checkpoint.spec.tie_embeddings, is_signed=form == "signed")

    def write_matrices(self, *, is_quantized: bool) -> None:
        """Embedding and output matrix: as they are, or in 8-bit blocks (and coarse, if there are many rows)."""
        output = self.stored.output
        for tensor in dict.fromkeys((EMBEDDING, output)):
            if is_quantized:
                self.stored.blocks[tensor] = self._write_streamed(tensor, bits=8, preferred=MATRIX_BLOCK)
            else:
                self._write_plain(tensor)
        if is_quantized and self._checkpoint.tensors[output].shape[0] >= COARSE_FROM_ROWS:
            coarse = self._write_streamed(output, bits=4, preferred=MATRIX_BLOCK, label=".coarse")
            self.stored.coarse_output = coarse

    def write_layer(self, tensor: str, form: Form) -> None:
        """A linear layer, rounded to nearest; what its file has in the same form stays as it is."""
        if form == "fp32":
            self._write_plain(tensor)
        elif form == "rows8":
            self.write_quantized(QuantizedTensor(tensor, form, quantize_rows(self._checkpoint.read(tensor))))
        else:
            bits: Bits = 4 if form == "blocks4" else 8
            self.stored.blocks[tensor] = self._write_streamed(tensor, bits=bits, preferred=LAYER_BLOCK)

    def write_quantized(self, quantized: QuantizedTensor) -> None:
        """One layer: rows as codes `[in, out]` (the layout that the kernel packs) and scales `[out]`, or blocks."""
        tensor, weights = quantized.tensor, quantized.weights
        if isinstance(weights, RowWeights):
            codes = np.ascontiguousarray(weights.codes.T)
            kept = codes if self.stored.is_signed else (codes.astype(np.int16) + 128).astype(np.uint8)
            self.stored.rows[tensor] = StoredRows(self._store.add(f"{tensor}.rows.codes", kept), weights.scales)
        else:
            bits: Bits = 4 if quantized.form == "blocks4" else 8
            self.stored.blocks[tensor] = self._write_blocks(tensor, bits, weights)

    def _write_plain(self, tensor: str) -> None:
        shape = self._checkpoint.tensors[tensor].shape
        pieces = (self._checkpoint.read(tensor, *bounds) for bounds in row_ranges(shape[0]))
        self._store.stream(tensor, pieces, dtype=np.dtype(np.float32), shape=shape)

    def _write_blocks(self, tensor: str, bits: Bits, weights: BlockWeights) -> StoredBlocks:
        rows, columns = weights.codes.shape
        size = columns // weights.scales.shape[1]
        names = (f"{tensor}.codes", f"{tensor}.scales")
        packed = pack_nibbles(weights.codes) if bits == 4 else weights.codes
        self._store.add(names[0], packed.reshape(rows, columns // size, size * bits // 8))
        self._store.add(names[1], weights.scales)
        zero_points = None
        if weights.zero_points is not None:
            points = pack_nibbles(_even(weights.zero_points)) if bits == 4 else weights.zero_points
            zero_points = self._store.add(f"{tensor}.zero_points", points)
        return StoredBlocks(*names, bits, size, rows, columns, zero_points)

    def _write_streamed(self, tensor: str, *, bits: Bits, preferred: int, label: str = "") -> StoredBlocks:
        """Blocks of a matrix, some rows at a time: the file's own where they fit unrounded, else quantised here."""
        rows, columns = self._checkpoint.tensors[tensor].shape
        is_exact = not label and is_repackable(self._checkpoint, tensor, bits=bits)
        size = block_size_for(columns, preferred=MATRIX_BLOCK if is_exact else preferred)
        if columns % size:
            raise ModelInvalid(f"tensor {tensor}: {columns} columns are not a multiple of 16; use --quant fp32")
        scales = np.empty((rows, columns // size), np.float32)

        def pieces() -> Iterator[Uint8Array]:
            for start, stop in row_ranges(rows):
                codes, scales[start:stop] = self._blocks(
                    tensor, start, stop, bits=bits, size=size, is_exact=is_exact, is_searched=not label
                )
                yield pack_nibbles(codes) if bits == 4 else codes

        names = (f"{tensor}{label}.codes", f"{tensor}{label}.scales")
        shape = (rows, columns // size, size * bits // 8)
        self._store.stream(names[0], pieces(), dtype=np.dtype(np.uint8), shape=shape)
        self._store.add(names[1], scales)
        return StoredBlocks(*names, bits, size, rows, columns)

    def _blocks(
        self, tensor: str, start: int, stop: int, *, bits: Bits, size: int, is_exact: bool, is_searched: bool
    ) -> tuple[Uint8Array, Float32Array]:
        stored = self._checkpoint.read_blocks(tensor, start, stop) if is_exact else None
        if stored is not None:
            return (stored.codes if stored.bits == bits else widen_codes(stored.codes)), stored.scales
        values = self._checkpoint.read(tensor, start, stop)
        quantized = quantize_blocks(values, bits=bits, block_size=size, searches=is_searched)
        return quantized.codes, quantized.scales


def is_repackable(checkpoint: Checkpoint, tensor: str, *, bits: Bits) -> bool:
    """Whether the file holds the tensor in blocks that fit `bits` unrounded."""
    if checkpoint.tensors[tensor].shape[1] % MATRIX_BLOCK:
        return False
    sample = checkpoint.read_blocks(tensor, 0, 1)
    return sample is not None and sample.bits in {bits, 4}


def _even(codes: Uint8Array) -> Uint8Array:
    """With a column of zeros at the end if their number is odd."""
    return np.pad(codes, ((0, 0), (0, codes.shape[1] % 2)))


def layer_tensors(tensors: Mapping[str, object]) -> tuple[str, ...]:
    """Names of the linear layers among a checkpoint's tensors, in the order of the layers."""
    return tuple(name for name in tensors if name.endswith("_proj.weight"))


def row_ranges(rows: int) -> Iterator[tuple[int, int]]:
    """Ranges of at most `ROWS_AT_ONCE` rows that cover a tensor."""
    for start in range(0, rows, ROWS_AT_ONCE):
        yield start, min(rows, start + ROWS_AT_ONCE)
