"""Texts that are to be vectors, or short prompts: several in one step.

A step computes as many rows as its widest chunk has tokens, times the slots from its first to its last; so texts are
gathered while that stays within the size of a chunk. Only what is whole is: one that takes several steps goes by
itself.

    slot 2  | a a a a a a a . |
    slot 3  | b b b b . . . . |     width 8, 4 slots: 32 rows, of which 19 are of use
    slot 4  | . . . . . . . . |     taken by somebody who decodes
    slot 5  | c c c c c c c c |

Weights are read once for all of them, and those who came last need not wait for a step of each who came before. That
saves about `STEP_ROWS` a text, so more rows of no use than that are too many. A prompt of which something is known, or
will be once another in the step has been computed, goes by itself: to load or to copy is cheaper than to compute.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import Final

from edgeqwen.core.step import Chunk
from edgeqwen.kvcache.blocks import common_length
from edgeqwen.scheduler.entry import WORTH_WAITING, Entered, Entry
from edgeqwen.scheduler.groups import Groups
from edgeqwen.scheduler.line import Line
from edgeqwen.scheduler.pieces import Piece, cut_piece
from edgeqwen.scheduler.residents import Residents
from edgeqwen.scheduler.sequence import Sequence, State

STEP_ROWS: Final = 16
"""Rows that take as long as a step costs before it has any, about."""


class Gathering:
    """Finds what may be computed beside a piece. `begin` is called for each sequence that gets its slot here."""

    def __init__(
        self,
        *,
        entry: Entry,
        residents: Residents,
        groups: Groups,
        line: Line,
        begin: Callable[[Sequence, float], None],
    ) -> None:
        self._entry = entry
        self._residents = residents
        self._groups = groups
        self._line = line
        self._begin = begin

    def beside(self, sequence: Sequence, piece: Piece, size: int, now: float) -> list[tuple[Chunk, Sequence]]:
        """Others to be computed with the piece of a sequence in a step of `size` rows, as they come. One whose slot
        lies too far off keeps it.
        """
        first = piece.chunk
        if first is None or piece.loads or piece.copy is not None or not _is_whole(sequence, first):
            return []
        parts = [(first, sequence)]
        standing = (*self._residents.prefilling, *self._residents.waiting)
        for other in self._line.order(standing, now):
            if not self._may_join(other, parts, size):
                continue
            if other.state is State.WAITING:
                if self._entry.enter(other) is not Entered.YES:
                    break
                self._begin(other, now)
            chunk = None if other.loads else cut_piece(other, size=size).chunk
            if chunk is not None and _is_whole(other, chunk) and fits(_chunks(parts), chunk, size):
                self._line.note_piece(other)
                parts.append((chunk, other))
        return parts[1:]

    def _may_join(self, other: Sequence, parts: Seq[tuple[Chunk, Sequence]], size: int) -> bool:
        """Whether a sequence can be computed beside these, if its slot is next to theirs."""
        present = [sequence for _, sequence in parts]
        if other in present or other.is_embedding != present[0].is_embedding:
            return False
        num_new, width = other.num_tokens - other.num_computed, max(len(chunk.ids) for chunk in _chunks(parts))
        if not _is_worth(width * len(parts), max(width, num_new) * (len(parts) + 1), num_new, size):
            return False
        if other.is_embedding:
            return True
        is_known = bool(other.loads or other.num_known) or self._groups.donor(other) is not None
        return not is_known and not any(_is_alike(other, each) for each in present)


def num_rows(chunks: Seq[Chunk]) -> int:
    """Rows that a step of these chunks computes, those of no use included."""
    slots = [chunk.slot for chunk in chunks]
    return (max(slots) - min(slots) + 1) * max(len(chunk.ids) for chunk in chunks) if chunks else 0


def fits(chunks: Seq[Chunk], chunk: Chunk, size: int) -> bool:
    """Whether one more chunk beside these keeps the step within `size` rows, and costs few of no use."""
    return _is_worth(num_rows(chunks), num_rows([*chunks, chunk]), len(chunk.ids), size)


def _is_worth(num_before: int, num_after: int, num_new: int, size: int) -> bool:
    return num_after <= size and num_after - num_before <= num_new + STEP_ROWS


def _chunks(parts: Seq[tuple[Chunk, Sequence]]) -> list[Chunk]:
    return [chunk for chunk, _ in parts]


def _is_whole(sequence: Sequence, chunk: Chunk) -> bool:
    """Whether a chunk is all that was to be computed of its sequence."""
    is_all = len(chunk.ids) == sequence.num_tokens if sequence.is_embedding else chunk.stop == sequence.num_tokens
    return is_all and not sequence.is_background


def _is_alike(one: Sequence, other: Sequence) -> bool:
    """Whether what is computed for one will serve the other."""
    if one.request.rid == other.request.rid:
        return True
    may_share = one.request.owner == other.request.owner and one.request.may_cache and other.request.may_cache
    return may_share and common_length(one.prompt_ids, other.prompt_ids) >= WORTH_WAITING
