"""Stage one of an import: every tensor of a checkpoint into the store, in the forms that the package's graphs read.

The output matrix is a quarter of a small model's weights, and all of it is read for every token. So a large one is
stored twice: in 4-bit blocks, from which all logits are computed, and in 8-bit blocks, from which the rows of the
likeliest tokens are read to compute those again (see `linear.Head`). The 8-bit rows are only touched where they are
needed, so they cost address space more than memory; where embedding and output are tied they are the embedding's own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from edgeqwen.convert.block_writer import Bits, BlockWriter, StoredBlocks
from edgeqwen.convert.checkpoint import Checkpoint, Float32Array
from edgeqwen.convert.quantize import (
    BlockWeights,
    Form,
    QuantizedTensor,
    RowWeights,
    block_size_for,
    quantize_blocks,
    quantize_rows,
    widen_codes,
)
from edgeqwen.convert.rounding import MatrixRounder
from edgeqwen.convert.store import TensorStore
from edgeqwen.core.model import WeightForm
from edgeqwen.core.tensor_names import EMBEDDING, HIDDEN_TURN, OUTPUT, OUTPUT_TURN
from edgeqwen.errors import ModelInvalid

ROWS_AT_ONCE: Final = 4096
MATRIX_BLOCK: Final = 32  # of embedding and output matrix, and of a file's own blocks
LAYER_BLOCK: Final = 64  # of the layers rounded to nearest: a seventh faster for one row than blocks of 32
COARSE_BLOCK: Final = 64  # of the coarse output matrix, rounded for what reaches it
FINE_ROWS: Final = 512
FEWER_FINE_ROWS: Final = 128  # with a coarse matrix that is rounded for what reaches it, for the same divergence
COARSE: Final = ".coarse"  # ends the names of the coarse output matrix
COARSE_FROM_ROWS: Final = 16_384  # from this vocabulary on the output matrix is stored coarse and fine


@dataclass(frozen=True, slots=True)
class StoredRows:
    """A matrix of the store in rows of 8 bits: name of its codes `[in, out]`, and scales float32 `[out]`."""

    codes: str
    scales: Float32Array


@dataclass(slots=True)
class StoredWeights:
    """What the store holds. `blocks` and `rows` are by tensor name.

    `output_turn` is what the final norm's rows are multiplied with before the output matrix (of a rotated model whose
    matrices are tied). `hidden_turn` names what they are multiplied with to be the model's own hidden states (of a
    rotated model). `coarse_output` is there for a large vocabulary, and then the `fine_rows` best rows by it are to
    be computed again.
    """

    is_tied: bool
    is_signed: bool
    blocks: dict[str, StoredBlocks] = field(default_factory=dict)
    rows: dict[str, StoredRows] = field(default_factory=dict)
    output_turn: StoredBlocks | None = None
    hidden_turn: str | None = None
    coarse_output: StoredBlocks | None = None
    fine_rows: int = 0

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
        self._block_writer = BlockWriter(store, self.stored.blocks)

    def write_matrices(self, *, is_quantized: bool) -> None:
        """Embedding and output matrix: as they are, or in 8-bit blocks."""
        for tensor in dict.fromkeys((EMBEDDING, self.stored.output)):
            if is_quantized:
                self.stored.blocks[tensor] = self._write_streamed(tensor, bits=8, preferred=MATRIX_BLOCK)
            else:
                self._write_plain(tensor)
        if is_quantized and OUTPUT_TURN in self._checkpoint.tensors:
            self.stored.output_turn = self._write_streamed(OUTPUT_TURN, bits=8, preferred=MATRIX_BLOCK)
        if HIDDEN_TURN in self._checkpoint.tensors:
            self.stored.hidden_turn = HIDDEN_TURN
            self._write_plain(HIDDEN_TURN)

    @property
    def has_coarse_output(self) -> bool:
        """Whether a quantised output matrix is large enough to be stored coarse as well."""
        return self._checkpoint.tensors[self.stored.output].shape[0] >= COARSE_FROM_ROWS

    def write_coarse_output(self, rounder: MatrixRounder | None) -> None:
        """The output matrix once more in 4-bit blocks, rounded for what reaches it, or (None) to nearest."""
        output = self.stored.output
        rows, columns = self._checkpoint.tensors[output].shape
        if rounder is None:
            self.stored.coarse_output = self._write_streamed(output, bits=4, preferred=MATRIX_BLOCK, is_coarse=True)
            self.stored.fine_rows = FINE_ROWS
            return
        pieces = (rounder.round_blocks(self._checkpoint.read(output, *bounds), 4) for bounds in row_ranges(rows))
        self.stored.coarse_output = self._block_writer.stream(
            output + COARSE, pieces, bits=4, size=rounder.block_size, shape=(rows, columns)
        )
        self.stored.fine_rows = FEWER_FINE_ROWS

    def write_layer(self, tensor: str, form: Form) -> None:
        """A linear layer, rounded to nearest; what its file has in the same form stays as it is."""
        if form == "fp32":
            self._write_plain(tensor)
        elif form == "rows8":
            self.write_quantized(QuantizedTensor(tensor, form, quantize_rows(self._checkpoint.read(tensor))))
        else:
            bits: Bits = 4 if form == "blocks4" else 8
            _, pieces = self._rounded(tensor, bits=bits, preferred=LAYER_BLOCK)
            self._block_writer.add(tensor, list(pieces), bits)

    def write_quantized(self, quantized: QuantizedTensor) -> None:
        """One layer: rows as codes `[in, out]` (the layout that the kernel packs) and scales `[out]`, or blocks."""
        tensor, weights = quantized.tensor, quantized.weights
        if isinstance(weights, RowWeights):
            codes = np.ascontiguousarray(weights.codes.T)
            kept = codes if self.stored.is_signed else (codes.astype(np.int16) + 128).astype(np.uint8)
            self.stored.rows[tensor] = StoredRows(self._store.add(f"{tensor}.rows.codes", kept), weights.scales)
        else:
            bits: Bits = 4 if quantized.form == "blocks4" else 8
            self._block_writer.add(tensor, [weights], bits)

    def _write_plain(self, tensor: str) -> None:
        shape = self._checkpoint.tensors[tensor].shape
        pieces = (self._checkpoint.read(tensor, *bounds) for bounds in row_ranges(shape[0]))
        self._store.stream(tensor, pieces, dtype=np.dtype(np.float32), shape=shape)

    def _write_streamed(self, tensor: str, *, bits: Bits, preferred: int, is_coarse: bool = False) -> StoredBlocks:
        """Blocks of a matrix, some rows at a time."""
        rows, columns = self._checkpoint.tensors[tensor].shape
        size, pieces = self._rounded(tensor, bits=bits, preferred=preferred, is_coarse=is_coarse)
        name = tensor + COARSE if is_coarse else tensor
        return self._block_writer.stream(name, pieces, bits=bits, size=size, shape=(rows, columns))

    def _rounded(
        self, tensor: str, *, bits: Bits, preferred: int, is_coarse: bool = False
    ) -> tuple[int, Iterator[BlockWeights]]:
        """(columns of a block, rows by rows in such blocks): the file's own where they fit, else rounded to nearest."""
        rows, columns = self._checkpoint.tensors[tensor].shape
        is_exact = not is_coarse and is_repackable(self._checkpoint, tensor, bits=bits)
        size = block_size_for(columns, preferred=MATRIX_BLOCK if is_exact else preferred)
        if columns % size:
            raise ModelInvalid(f"tensor {tensor}: {columns} columns are not a multiple of 16; use --quant fp32")

        def piece(start: int, stop: int) -> BlockWeights:
            stored = self._checkpoint.read_blocks(tensor, start, stop) if is_exact else None
            if stored is not None:
                return BlockWeights(stored.codes if stored.bits == bits else widen_codes(stored.codes), stored.scales)
            values = self._checkpoint.read(tensor, start, stop)
            return quantize_blocks(values, bits=bits, block_size=size, searches=not is_coarse)

        return size, (piece(*bounds) for bounds in row_ranges(rows))


def is_repackable(checkpoint: Checkpoint, tensor: str, *, bits: Bits) -> bool:
    """Whether the file holds the tensor in blocks that fit `bits` unrounded."""
    if checkpoint.tensors[tensor].shape[1] % MATRIX_BLOCK:
        return False
    sample = checkpoint.read_blocks(tensor, 0, 1)
    return sample is not None and sample.bits in {bits, 4}


def layer_tensors(tensors: Mapping[str, object]) -> tuple[str, ...]:
    """Names of the linear layers among a checkpoint's tensors, in the order of the layers."""
    return tuple(name for name in tensors if name.endswith("_proj.weight"))


def row_ranges(rows: int) -> Iterator[tuple[int, int]]:
    """Ranges of at most `ROWS_AT_ONCE` rows that cover a tensor."""
    for start in range(0, rows, ROWS_AT_ONCE):
        yield start, min(rows, start + ROWS_AT_ONCE)
