"""The tokens of a sequence as the penalties see them: in the prompt or generated, and how often."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from edgeqwen.core.request import SamplingParams

_FLOAT32: Final = np.finfo(np.float32)


class History:
    """Distinct tokens of prompt and answer, with the number of times each was generated.

    Two parallel arrays that grow by doubling: a penalty touches the tokens seen, not the vocabulary.
    """

    def __init__(self, prompt_ids: Sequence[int]) -> None:
        seen = sorted(set(prompt_ids))  # np.unique would import numpy.ma, with a request waiting
        self._ids = np.zeros(max(64, 2 * len(seen)), np.int64)
        self._ids[: len(seen)] = seen
        self._counts = np.zeros(self._ids.size, np.float32)
        self._places = {token: place for place, token in enumerate(seen)}

    def add(self, token: int) -> None:
        """Count a generated token."""
        place = self._places.setdefault(token, len(self._places))
        if place == self._ids.size:
            self._ids = np.resize(self._ids, 2 * place)
            self._counts = np.concatenate((self._counts, np.zeros(place, np.float32)))
        self._ids[place] = token
        self._counts[place] += 1

    def penalise(self, row: NDArray[np.float32], params: SamplingParams) -> None:
        """Apply the penalties to `row` in place.

        Repetition (Keskar et al., "CTRL"): positive logits of seen tokens are divided, negative ones multiplied.
        Frequency and presence, of generated tokens alone: minus the count times the one, minus the other once.
        """
        ids, counts = self._ids[: len(self._places)], self._counts[: len(self._places)]
        values = row[ids]
        if params.repetition_penalty != 1.0:
            values = _repeated(values, params.repetition_penalty)
        values -= counts * np.float32(params.frequency_penalty)
        values -= (counts > 0) * np.float32(params.presence_penalty)
        row[ids] = values


def _repeated(values: NDArray[np.float32], penalty: float) -> NDArray[np.float32]:
    """The repetition penalty. What it would carry beyond the largest number stays there: a logit has to be finite."""
    scale = np.float32(max(penalty, float(_FLOAT32.tiny)))
    with np.errstate(over="ignore"):
        scaled = np.where(values > 0, values / scale, values * scale)
    return np.where(np.isfinite(values), np.clip(scaled, _FLOAT32.min, _FLOAT32.max), scaled)
