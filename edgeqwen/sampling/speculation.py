"""Prompt-lookup speculation: guess the next tokens by finding where the text has been like this before.

Answers that edit, extract or quote repeat long stretches of what stands before them. A step that checks a few guessed
tokens costs little more than one that computes a single token, so a right guess is a token almost for nothing (Saxena,
"Prompt Lookup Decoding"; the check as in Leviathan et al., "Fast Inference from Transformers via Speculative
Decoding"). Here the check is stricter than theirs: row after row the request's own sampler draws as it always does, and
goes on to the next row only while the token drawn is the one guessed. So guesses change neither the tokens nor the
number of draws: wherever a row's logits do not depend on the rows beside it, greedy and sampled answers are the very
same tokens with and without guessing, not only of the same distribution.

**Finding.** `LookupIndex` chains the places of each pair of tokens as deflate's matcher chains its strings; of the
latest places the one with the longest common past wins, and of equal ones the latest. A `Drafter` then follows that
place, token by token, for as long as it proves right, and looks up anew only when it was wrong. Where a copy departs
from its source (a word is changed, dropped, put in), the place is kept in mind for a while, as the copy is likely to
come back near it long before two tokens in a row match:

    source   ... the harbour of Velmar was built ...
                               |place  |back here at once, by the single token `was`
    answer   ... the harbour of Norhaven was ...

**Trusting.** How likely a guess is right depends above all on how long the past has been the same. Every token drawn
tells whether the place was right, also when nothing was guessed from it: so the chances (by length of the common past,
fading averages) are learned for nothing, guessing stops without a wasted step when the text turns free, and begins
again when it repeats. A guess of several tokens is right as far as each is, and each right one lengthens the past.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import Final

MAX_PAST: Final = 32
"""Longer common pasts are not told apart."""

_CHAIN: Final = 16
_PAIR_SHIFT: Final = 32

_NEAR: Final = 8
"""Tokens behind a place that are searched for the point where a copy comes back to its source."""

_FAITH: Final = 6
"""Tokens for which a place that proved wrong is kept in mind."""

_CLASSES: Final = (0, 1, 2, 3, 4, 6, 9, 16, MAX_PAST)
"""The least lengths of a common past by which chances are told apart."""

_FIRST_CHANCES: Final = (0.25, 0.5, 0.35, 0.5, 0.6, 0.75, 0.85, 0.93, 0.97)
_FIRST_WEIGHT: Final = 4.0
_FADE: Final = 0.93

_CLASS_OF: Final = tuple(bisect_right(_CLASSES, past) - 1 for past in range(MAX_PAST + 1))


class LookupIndex:
    """The tokens of a sequence, and where each pair of neighbours has stood before."""

    def __init__(self, tokens: Sequence[int]) -> None:
        self.tokens: list[int] = []
        self._latest: dict[int, int] = {}  # pair -> the place behind its latest occurrence
        self._before: list[int] = []  # place -> the place behind the occurrence before; 0 is none
        for token in tokens:
            self.append(token)

    def append(self, token: int) -> None:
        """Add the next token. The pair that it completes can be found from the token after it on."""
        tokens = self.tokens
        tokens.append(token)
        if len(tokens) < 3:
            self._before.append(0)
            return
        # The pair that ended one token ago: the newest pair itself would be its own latest occurrence.
        pair = tokens[-3] << _PAIR_SHIFT | tokens[-2]
        place = len(tokens) - 1
        self._before.append(self._latest.get(pair, 0))
        self._latest[pair] = place

    def longest(self) -> tuple[int, int]:
        """The place that the last tokens are most like, and for how many tokens (2 to `MAX_PAST`); 0, 0 if none."""
        tokens = self.tokens
        if len(tokens) < 3:
            return 0, 0
        place = self._latest.get(tokens[-2] << _PAIR_SHIFT | tokens[-1], 0)
        best, longest, tries = 0, 0, 0
        while place and tries < _CHAIN and longest < MAX_PAST:
            past = self._common_past(place, longest)
            if past > longest:
                best, longest = place, past
            place = self._before[place]
            tries += 1
        return best, longest

    def _common_past(self, place: int, longest: int) -> int:
        """Tokens before `place` that equal the last ones; 0 if they cannot be more than `longest`."""
        tokens, end = self.tokens, len(self.tokens)
        if longest >= place or tokens[place - 1 - longest] != tokens[end - 1 - longest]:
            return 0
        past, most = 2, min(place, MAX_PAST)
        while past < most and tokens[place - 1 - past] == tokens[end - 1 - past]:
            past += 1
        return past


class Drafter:
    """Guesses for one sequence; `push` is told every token drawn.

    `never` are ids that no guess holds (a guess ends before them): end tokens, at which nothing follows.
    """

    def __init__(self, prompt_ids: Sequence[int], *, num_tokens: int, never: frozenset[int] = frozenset()) -> None:
        self._index = LookupIndex(prompt_ids)
        self._num_tokens = num_tokens
        self._never = never
        self._place = 0
        self._past = 0
        self._anchor = 0
        self._faith = 0
        self._right = [_FIRST_WEIGHT * chance for chance in _FIRST_CHANCES]
        self._tried = [_FIRST_WEIGHT] * len(_FIRST_CHANCES)

    def push(self, token: int) -> None:
        """A token was drawn: learn from it whether the place was right, and go on from there or look for another."""
        place, tokens = self._place, self._index.tokens
        is_right = place > 0 and tokens[place] == token
        if place:
            self._learn(is_right)
        self._index.append(token)
        if is_right:
            self._place = place + 1
            self._past = min(self._past + 1, MAX_PAST)
        else:
            self._seek(token)

    def _learn(self, is_right: bool) -> None:
        kind = _CLASS_OF[self._past]
        self._right[kind] = self._right[kind] * _FADE + is_right
        self._tried[kind] = self._tried[kind] * _FADE + 1.0

    def _seek(self, token: int) -> None:
        if self._past >= 4:
            self._anchor, self._faith = self._place, _FAITH
        self._place, self._past = self._index.longest()
        if self._past < 3 and self._faith:
            self._return_to_anchor(token)
        self._faith = max(0, self._faith - 1)

    def _return_to_anchor(self, token: int) -> None:
        """Near the place that was right until it was wrong, a single token tells where the copy goes on."""
        anchor = self._anchor
        near = self._index.tokens[anchor : anchor + _NEAR]
        if token in near:
            self._place, self._past = anchor + near.index(token) + 1, 1
        elif not self._place and self._faith > _FAITH - 2:
            self._place, self._past = anchor + 1, 0  # as if one token had been replaced
        if self._place >= len(self._index.tokens):
            self._place = self._past = 0

    def chances(self, most: int, *, least: float) -> list[float]:
        """How likely the first, the first two, ... of at most `most` guesses are all right, as far as it is `least`."""
        if not self._place:
            return []
        chance, found, past = 1.0, [], self._past
        for _ in range(most):
            kind = _CLASS_OF[past]
            chance *= self._right[kind] / self._tried[kind]
            if chance < least:
                break
            found.append(chance)
            past = min(past + 1, MAX_PAST)
        return found

    def draft(self, most: int) -> tuple[int, ...]:
        """The next tokens, at most `most`, as they stand at the place; a place near the end goes round and round."""
        tokens, place = self._index.tokens, self._place
        if not place or most < 1:
            return ()
        found = tokens[place : place + most]
        period = len(tokens) - place
        while len(found) < most:
            found.append(found[-period])
        for count, token in enumerate(found):
            if token in self._never or token >= self._num_tokens:
                return tuple(found[:count])
        return tuple(found)
