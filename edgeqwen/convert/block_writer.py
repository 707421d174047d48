"""Matrices in blocks, as the store keeps them.

Matrices that multiply the same input stand one below the other and are stored, packed and multiplied as one: with a
single row a product takes a tenth of a millisecond, and starting it a good part of that. So q, k and v are one matrix
and gate and up another, wherever their blocks are alike.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np

from edgeqwen.convert.checkpoint import Float32Array, Uint8Array
from edgeqwen.convert.quantize import BlockWeights, pack_nibbles
from edgeqwen.convert.store import TensorStore
from edgeqwen.core.tensor_names import STEP_TENSORS

Bits: TypeAlias = Literal[4, 8]


@dataclass(frozen=True, slots=True)
class StoredBlocks:
    """A matrix `[rows, columns]` of the store in blocks: names of its codes, scales and (if it has any) zero points.

    `parts` are the tensors that stand in it, with the rows of each, if they are several.
    """

    codes: str
    scales: str
    bits: Bits
    block_size: int
    rows: int
    columns: int
    zero_points: str | None = None
    parts: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True, slots=True)
class _Matrix:
    """A linear layer that waits to be written."""

    pieces: Sequence[BlockWeights]
    bits: Bits

    @property
    def num_rows(self) -> int:
        return sum(len(piece.codes) for piece in self.pieces)

    @property
    def kind(self) -> tuple[Bits, int, int, bool]:
        """(bits, columns of a block, columns, whether there are zero points): what joined matrices have in common."""
        first = self.pieces[0]
        columns = first.codes.shape[1]
        return self.bits, columns // first.scales.shape[1], columns, first.zero_points is not None


class BlockWriter:
    """Writes matrices into a store; `add` says in `blocks`, by tensor, where it put one."""

    def __init__(self, store: TensorStore, blocks: MutableMapping[str, StoredBlocks]) -> None:
        self._store = store
        self._blocks = blocks
        self._waiting: dict[str, dict[str, _Matrix]] = {}

    def add(self, tensor: str, pieces: Sequence[BlockWeights], bits: Bits) -> None:
        """One linear layer, some rows in each piece; it is written when those that it is joined with have come too."""
        label, members = _group(tensor)
        waiting = self._waiting.setdefault(label, {})
        waiting[tensor] = _Matrix(pieces, bits)
        if len(waiting) < len(members):
            return
        found = self._waiting.pop(label)
        matrices = {name: found[name] for name in members}
        if len({matrix.kind for matrix in matrices.values()}) > 1:
            for name, matrix in matrices.items():
                self._blocks[name] = self._write(name, [matrix])
            return
        stored = self._write(label, list(matrices.values()))
        if len(matrices) > 1:
            parts = tuple((name, matrix.num_rows) for name, matrix in matrices.items())
            stored = dataclasses.replace(stored, parts=parts)
        self._blocks.update(dict.fromkeys(matrices, stored))

    def _write(self, name: str, matrices: Sequence[_Matrix]) -> StoredBlocks:
        """Matrices of one kind, one below the other."""
        bits, size, columns, _ = matrices[0].kind
        shape = sum(matrix.num_rows for matrix in matrices), columns
        pieces = [piece for matrix in matrices for piece in matrix.pieces]
        return self.stream(name, pieces, bits=bits, size=size, shape=shape)

    def stream(
        self, name: str, pieces: Iterable[BlockWeights], *, bits: Bits, size: int, shape: tuple[int, int]
    ) -> StoredBlocks:
        """A matrix of `shape` (rows, columns) that comes some rows at a time, in blocks of `size` columns."""
        rows, columns = shape
        scales: list[Float32Array] = []
        zero_points: list[Uint8Array] = []

        def packed() -> Iterator[Uint8Array]:
            for piece in pieces:
                scales.append(piece.scales)
                if piece.zero_points is not None:
                    zero_points.append(piece.zero_points)
                yield pack_nibbles(piece.codes) if bits == 4 else piece.codes

        names = (f"{name}.codes", f"{name}.scales")
        stored_shape = (rows, columns // size, size * bits // 8)
        self._store.stream(names[0], packed(), dtype=np.dtype(np.uint8), shape=stored_shape)
        self._store.add(names[1], np.concatenate(scales))
        points = self._add_zero_points(name, np.concatenate(zero_points), bits) if zero_points else None
        return StoredBlocks(*names, bits, size, rows, columns, points)

    def _add_zero_points(self, name: str, zero_points: Uint8Array, bits: Bits) -> str:
        packed = pack_nibbles(_even(zero_points)) if bits == 4 else zero_points
        return self._store.add(f"{name}.zero_points", packed)


def _group(tensor: str) -> tuple[str, tuple[str, ...]]:
    """(name of the joined matrix, tensors in it) for a linear layer; of one that stands alone its own name twice."""
    for step, members in STEP_TENSORS.items():
        member = next((name for name in members if tensor.endswith(name)), None)
        if member is not None and len(members) > 1:
            prefix = tensor.removesuffix(member)
            return f"{prefix}{member.partition('.')[0]}.{step}", tuple(prefix + name for name in members)
    return tensor, (tensor,)


def _even(codes: Uint8Array) -> Uint8Array:
    """With a column of zeros at the end if their number is odd."""
    return np.pad(codes, ((0, 0), (0, codes.shape[1] % 2)))
