"""Matrices in blocks, as the store keeps them.

Matrices that multiply the same input stand one below the other and are stored, packed and multiplied as one: with a
single row a product takes a tenth of a millisecond, and starting it a good part of that. So q, k and v are one matrix
and gate and up another, wherever their blocks are alike.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, MutableMapping
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

import numpy as np

from edgeqwen.convert.checkpoint import Float32Array, Uint8Array
from edgeqwen.convert.quantize import BlockWeights, pack_nibbles
from edgeqwen.convert.store import TensorStore

Bits: TypeAlias = Literal[4, 8]

JOINED: Final = {
    "self_attn.qkv": ("self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight"),
    "mlp.gate_up": ("mlp.gate_proj.weight", "mlp.up_proj.weight"),
}


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


class BlockWriter:
    """Writes matrices into a store; `add` says in `blocks`, by tensor, where it put one."""

    def __init__(self, store: TensorStore, blocks: MutableMapping[str, StoredBlocks]) -> None:
        self._store = store
        self._blocks = blocks
        self._waiting: dict[str, dict[str, tuple[BlockWeights, Bits]]] = {}

    def add(self, tensor: str, weights: BlockWeights, bits: Bits) -> None:
        """One linear layer; it is written when those that it is joined with have come too."""
        label, members = _group(tensor)
        waiting = self._waiting.setdefault(label, {})
        waiting[tensor] = weights, bits
        if len(waiting) < len(members):
            return
        del self._waiting[label]
        alone = [[name] for name in members]
        for names in [list(members)] if _are_alike(waiting.values()) else alone:
            matrices = [waiting[name][0] for name in names]
            rows = [len(matrix.codes) for matrix in matrices]
            shape = sum(rows), matrices[0].codes.shape[1]
            size = shape[1] // matrices[0].scales.shape[1]
            stored = self.stream(label if len(names) > 1 else names[0], matrices, bits=bits, size=size, shape=shape)
            if len(names) > 1:
                stored = dataclasses.replace(stored, parts=tuple(zip(names, rows, strict=True)))
            self._blocks.update(dict.fromkeys(names, stored))

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
    for label, members in JOINED.items():
        for member in members:
            if tensor.endswith(member):
                prefix = tensor.removesuffix(member)
                return prefix + label, tuple(prefix + name for name in members)
    return tensor, (tensor,)


def _are_alike(matrices: Iterable[tuple[BlockWeights, Bits]]) -> bool:
    return len({(bits, matrix.scales.shape[1], matrix.zero_points is None) for matrix, bits in matrices}) == 1


def _even(codes: Uint8Array) -> Uint8Array:
    """With a column of zeros at the end if their number is odd."""
    return np.pad(codes, ((0, 0), (0, codes.shape[1] % 2)))
