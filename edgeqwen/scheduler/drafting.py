"""Which sequences guess how many tokens in the next decode step: as many as pay for the step as a whole.

A step costs what its widest sequence makes it cost (see `scheduler.costs`), so there is one thing to choose, the width.
For each width the expected tokens of all sequences together, one each and the guesses that are likely to be right, are
held against the cost; the best ratio wins, and width 1, no guesses at all, where no other is better by `_LEAST_GAIN`.
Guesses up to the width are then free but for their row of logits, so those that are hardly ever right are left out.

Nothing has to be tried in order to find out that guessing pays again: drafters learn from every token.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Final

from edgeqwen.core.step import Chunk, RuntimeSpec
from edgeqwen.sampling.speculation import Drafter
from edgeqwen.scheduler.costs import WIDTHS, StepCosts, place_of
from edgeqwen.scheduler.sequence import Sequence

MAX_ROWS: Final = 64
"""Rows of a step with guesses, for the memory that their logits take (0.6 MB a row for 152k ids)."""

_LEAST_CHANCE: Final = 0.05
_LEAST_GAIN: Final = 1.05


@dataclass(frozen=True, slots=True)
class _Guess:
    """A draft, and the expected number of right tokens in its first 0, 1, 2, ..."""

    draft: tuple[int, ...] = ()
    gains: tuple[float, ...] = (0.0,)

    def gain(self, most: int) -> float:
        return self.gains[min(most, len(self.gains) - 1)]


_NOTHING: Final = _Guess()


class Drafting:
    """Gives drafts to decoding sequences, learns what steps cost, and counts. Does nothing unless `is_on`."""

    def __init__(self, spec: RuntimeSpec, *, eos_token_ids: frozenset[int], is_on: bool) -> None:
        self._spec = spec
        self._eos = eos_token_ids
        self._is_on = is_on
        self._costs = StepCosts(spec.row_costs)
        self.num_drafted = 0
        self.num_accepted = 0

    def begin(self, sequence: Sequence) -> None:
        """The sequence's prompt has been computed; its first token is to follow."""
        request = sequence.request
        if self._is_on and request.may_speculate and request.max_tokens > 2:
            never = frozenset() if request.ignore_eos else self._eos
            sequence.drafter = Drafter(request.prompt_ids, num_tokens=self._spec.num_tokens, never=never)

    def drafts(self, sequences: Seq[Sequence]) -> list[tuple[int, ...]]:
        """A draft, perhaps empty, for each of the decoding `sequences`, which are in slot order."""
        first, last = sequences[0].slot, sequences[-1].slot
        assert first is not None
        assert last is not None
        span = last - first + 1
        widest = min(WIDTHS[-1], max(1, min(MAX_ROWS, self._spec.max_chunk) // span))
        guesses = [self._guess(sequence, widest - 1) for sequence in sequences]
        most = self._best_width(guesses, span, widest) - 1
        return [guess.draft[:most] for guess in guesses]

    def _guess(self, sequence: Sequence, most: int) -> _Guess:
        # A step gives one token more than guesses are right, so the last token of the budget is never guessed.
        most = min(most, sequence.request.max_tokens - sequence.num_generated - 1)
        if sequence.drafter is None or most < 1:
            return _NOTHING
        chances = sequence.drafter.chances(most, least=_LEAST_CHANCE)
        draft = sequence.drafter.draft(len(chances))
        total, gains = 0.0, [0.0]
        for chance in chances[: len(draft)]:
            total += chance
            gains.append(total)
        return _Guess(draft, tuple(gains))

    def _best_width(self, guesses: Seq[_Guess], span: int, widest: int) -> int:
        longest = max(len(guess.draft) for guess in guesses)
        best_width, best = 1, len(guesses) * _LEAST_GAIN
        if not longest or self._costs.needs_narrow(span):
            return best_width
        ratios = self._costs.ratios(span)
        for place in range(1, place_of(longest + 1) + 1):
            width = min(WIDTHS[place], widest)
            value = sum(1.0 + guess.gain(width - 1) for guess in guesses) / ratios[place]
            if value > best:
                best_width, best = width, value
        return best_width

    def observe(self, chunks: Seq[Chunk], num_drawn: Seq[int], duration_s: float) -> None:
        """A decode step is over: the tokens drawn of each chunk, and what the step took."""
        self._costs.observe(chunks[-1].slot - chunks[0].slot + 1, max(len(chunk.ids) for chunk in chunks), duration_s)
        self.num_drafted += sum(len(chunk.ids) - 1 for chunk in chunks)
        self.num_accepted += sum(max(0, drawn - 1) for drawn in num_drawn)
