"""Embedding and output matrix in blocks.

**A large output matrix is read coarsely, and the likeliest rows once more finely.** All logits come from 4-bit blocks;
the `fine_rows` largest of each position are then computed again from 8-bit blocks and put in their place:

    coarse = x W4^T                     [R, vocabulary]     MatMulNBits, half the bytes of 8 bits
    ids    = the fine_rows largest      [R, k]              TopK
    fine   = x W8[ids]^T                [R, k]              GatherBlockQuantized, MatMul in float
    logits = coarse with fine at ids                        ScatterElements

What decides the next token has 8-bit weights (and float activations); the tail keeps 4 bits, where a small error of a
small probability is little. It costs a millisecond and saves four on a vocabulary of 150,000. Rounded to nearest, the
blocks are small and their scales plain: a search for the least squared error shrinks them, and a tail that is too flat
was twice as far off. Rounded for what reaches the matrix, larger blocks and fewer fine rows lose less.
"""

from __future__ import annotations

import numpy as np

from edgeqwen.convert.block_writer import StoredBlocks
from edgeqwen.convert.graph import MICROSOFT, GraphBuilder
from edgeqwen.convert.weights import StoredWeights
from edgeqwen.core.tensor_names import EMBEDDING


def multiply_blocks(build: GraphBuilder, x: str, matrix: StoredBlocks, output: str) -> str:
    """`x` times the transpose of a matrix in blocks, with int8 activations (accuracy level 4)."""
    names = [matrix.codes, matrix.scales] + ([matrix.zero_points] if matrix.zero_points else [])
    return build.node(
        "MatMulNBits",
        [x, *(build.stored(name) for name in names)],
        output,
        domain=MICROSOFT,
        K=matrix.columns,
        N=matrix.rows,
        bits=matrix.bits,
        block_size=matrix.block_size,
        accuracy_level=4,
    )


class Head:
    """The two ends of a quantised decoder."""

    def __init__(self, builder: GraphBuilder, stored: StoredWeights) -> None:
        self._builder = builder
        self._stored = stored

    def embed(self, ids: str, output: str) -> str:
        """Rows of the embedding for `ids` (int64, any shape)."""
        return self._gather(EMBEDDING, ids, output)

    def logits(self, x: str, output: str) -> str:
        """`x` `[R, hidden]` times the transpose of the output matrix."""
        if self._stored.output_turn is not None:
            x = multiply_blocks(self._builder, x, self._stored.output_turn, "logits.turned")
        matrix = self._stored.blocks[self._stored.output]
        coarse_matrix = self._stored.coarse_output
        if coarse_matrix is None:
            return multiply_blocks(self._builder, x, matrix, output)
        build = self._builder
        coarse = multiply_blocks(build, x, coarse_matrix, "logits.coarse")
        count = min(self._stored.fine_rows, matrix.rows)
        wanted = build.constant("fine_rows", [count], np.int64)
        ids = build.node_many("TopK", [coarse, wanted], ["logits.coarse.best", "logits.ids"], axis=-1, sorted=0)[1]
        rows = self._gather(self._stored.output, ids, "logits.fine_rows")
        column = build.node("Unsqueeze", [x, build.constant("last_axis", [-1], np.int64)], "logits.column")
        fine = build.node("MatMul", [rows, column], "logits.fine.column")
        shape = build.constant("fine_shape", [-1, count], np.int64)
        fine = build.node("Reshape", [fine, shape], "logits.fine")
        return build.node("ScatterElements", [coarse, ids, fine], output, axis=-1)

    def _gather(self, tensor: str, ids: str, output: str) -> str:
        matrix = self._stored.blocks[tensor]
        flat = self._builder.alias(f"{tensor}.flat_codes", matrix.codes, [matrix.rows, matrix.columns])
        return self._builder.node(
            "GatherBlockQuantized",
            [flat, ids, self._builder.stored(matrix.scales)],
            output,
            domain=MICROSOFT,
            bits=8,
            block_size=matrix.block_size,
            gather_axis=0,
            quantize_axis=1,
        )
