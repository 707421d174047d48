"""What of a prompt goes into the next step.

    tokens   |<--- loads --->|<- chunk ->|<- later chunks ->|     what is known is loaded, what is not is computed
    tokens   |<-------------- copy ------------->|<-chunk-->|     another choice has computed the prompt: its last token

A piece loads at most `MAX_BYTES`, so that nobody waits long for the copying; when that is not all, nothing is computed
yet. Only the last token of a prompt needs logits. Of a text that is to be a vector the hidden states are wanted, all of
them or that of its last token.
"""

from __future__ import annotations

from dataclasses import dataclass

from edgeqwen.core.step import Chunk
from edgeqwen.scheduler.plan import SlotCopy, SlotLoad
from edgeqwen.scheduler.sequence import Sequence
from edgeqwen.scheduler.transfers import MAX_BYTES


@dataclass(frozen=True, slots=True)
class Piece:
    """Loads and the copy come before the chunk; without a chunk nothing is computed."""

    loads: tuple[SlotLoad, ...] = ()
    copy: SlotCopy | None = None
    chunk: Chunk | None = None


def cut_piece(sequence: Sequence, *, size: int, donor: Sequence | None = None) -> Piece:
    """The next piece of a sequence that has a slot, with a chunk of at most `size` tokens.

    The slot of `donor` holds the same prompt: it is copied, unless some of it is here already.
    """
    copy = None
    if donor is not None and not sequence.num_computed and not sequence.loads:
        copy = _copy_prompt(sequence, donor)
    loads = _take_loads(sequence)
    start = loads[-1].stop if loads else sequence.num_computed
    is_all_known = start + 1 == sequence.num_tokens and sequence.num_generated > 0  # it was preempted
    if sequence.loads or is_all_known:
        return Piece(loads, copy)
    return Piece(loads, copy, _chunk(sequence, start, size))


def _copy_prompt(sequence: Sequence, donor: Sequence) -> SlotCopy | None:
    """The copy that leaves only the prompt's last token to compute; None if there is no more than that."""
    assert donor.slot is not None
    assert sequence.slot is not None
    length = len(sequence.request.prompt_ids) - 1
    if not length:
        return None
    sequence.num_computed = length
    return SlotCopy(donor.slot, sequence.slot, length)


def _take_loads(sequence: Sequence) -> tuple[SlotLoad, ...]:
    taken: list[SlotLoad] = []
    num_bytes = 0
    while sequence.loads and (not taken or num_bytes + sequence.loads[0].num_bytes <= MAX_BYTES):
        num_bytes += sequence.loads[0].num_bytes
        taken.append(sequence.loads.popleft())
    return tuple(taken)


def _chunk(sequence: Sequence, start: int, size: int) -> Chunk:
    assert sequence.slot is not None
    stop = min(start + size, sequence.num_tokens)
    ids, is_last = sequence.tokens(start, stop), stop == sequence.num_tokens
    if sequence.is_embedding:
        num_hidden = len(ids) if sequence.request.pooling == "mean" else int(is_last)
        return Chunk(sequence.slot, start, ids, num_logits=0, num_hidden=num_hidden)
    return Chunk(sequence.slot, start, ids, num_logits=int(is_last and not sequence.is_background))
