"""Texts that are to be vectors, several in one step.

A step computes as many rows as its widest chunk has tokens, times the slots from its first to its last; so texts are
gathered while that stays within the size of a chunk. Only whole texts are: one that takes several steps goes by itself.

    slot 2  | a a a a a a a . |
    slot 3  | b b b b . . . . |     width 8, 4 slots: 32 rows, of which 19 are of use
    slot 4  | . . . . . . . . |     taken by somebody who decodes
    slot 5  | c c c c c c c c |
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

from edgeqwen.core.step import Chunk
from edgeqwen.scheduler.sequence import Sequence


def num_rows(chunks: Seq[Chunk]) -> int:
    """Rows that a step of these chunks computes, those of no use included."""
    slots = [chunk.slot for chunk in chunks]
    return (max(slots) - min(slots) + 1) * max(len(chunk.ids) for chunk in chunks) if chunks else 0


def is_whole(sequence: Sequence, chunk: Chunk) -> bool:
    """Whether a chunk is all of a text."""
    return sequence.is_embedding and len(chunk.ids) == sequence.num_tokens


def fits(chunks: Seq[Chunk], chunk: Chunk, size: int) -> bool:
    """Whether one more chunk fits beside these in a step of `size` rows."""
    return num_rows([*chunks, chunk]) <= size


def may_fit(sequence: Sequence, chunks: Seq[Chunk], size: int) -> bool:
    """Whether a text that has no slot yet fits beside these chunks in a step of `size` rows, if its slot is next to
    theirs.
    """
    widest = max(sequence.num_tokens, *(len(chunk.ids) for chunk in chunks))
    return sequence.is_embedding and widest * (len(chunks) + 1) <= size
