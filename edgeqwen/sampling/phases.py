"""Where an answer stands: before its thought, in it, or in what must have a form; and what may come there.

    START ----(opening marker)----> THOUGHT ----(closing marker)----> ANSWER
      |                             ^    |                            |    ^
      +---------------------------- | -- | --(anything else)--------> +    |
                                    +----|---(opening marker)---------+    |
                                         +---(budget spent: forced)--------+

* START is the beginning of an answer whose prompt has opened no thought. What the form lets come may come, and the
  opening marker, unless there is to be no thought.
* In a THOUGHT everything may come but an end token: an answer is to follow.
* A thought of as many tokens as its budget is closed by the tokens that a model writes there itself. They are forced
  one after another, whatever the logits are, and nothing is drawn for them. All thoughts of an answer share the budget.
* In the ANSWER what the form lets come may come. What a model writes behind its closing marker (newlines, which are no
  part of the answer's text) is forced too where a form begins there, since the form would not let it come.
"""

from __future__ import annotations

from collections import deque
from enum import Enum, auto

import numpy as np
from numpy.typing import NDArray

from edgeqwen.core.request import Request


class _Phase(Enum):
    START = auto()
    THOUGHT = auto()
    ANSWER = auto()


class Phases:
    """Of one choice of `request`; `eos` are the ids that end it."""

    def __init__(self, request: Request, eos: NDArray[np.int64]) -> None:
        self._thinking = request.thinking
        self._form = None if request.constraint is None else request.constraint.begin()
        self._eos = eos
        self._ends = frozenset(eos.tolist())
        self._num_thought = 0
        self._forced: deque[int] = deque()
        self._phase = _Phase.START
        if self._thinking is not None and request.starts_in_reasoning:
            self._phase = _Phase.THOUGHT
            self._close_if_spent()

    @property
    def forced(self) -> int | None:
        """The token that comes next, if that is settled."""
        return self._forced[0] if self._forced else None

    @property
    def is_masking(self) -> bool:
        """Not everything may come next."""
        return not self._forced and (self._form is not None or self._phase is _Phase.THOUGHT)

    @property
    def is_over(self) -> bool:
        """The form is complete: nothing but an end token may follow."""
        return self._form is not None and self._form.is_over

    def prepare(self) -> None:
        """Work out what the form lets come next, if it has a say in that."""
        if self._form is not None and self._phase is not _Phase.THOUGHT:
            self._form.prepare()

    def mask(self, row: NDArray[np.float32]) -> None:
        """Set the logits of what may not come to -inf, in place; float32 `[tokens]`. Raises `RuntimeFailed`."""
        if self._phase is _Phase.THOUGHT:
            row[self._eos] = -np.inf
        elif self._form is not None:
            opening = self._opening(row.size)
            kept = row[opening]
            self._form.mask(row)
            row[opening] = kept

    def _opening(self, num_tokens: int) -> list[int]:
        """The marker that may come beside what the form lets come."""
        thinking = self._thinking
        if thinking is None or not thinking.may_open or self._phase is not _Phase.START:
            return []
        return [thinking.opening] if thinking.opening < num_tokens else []

    def take(self, token: int) -> None:
        """The next token is settled. Raises `RuntimeFailed`."""
        is_forced = bool(self._forced)
        if is_forced:
            self._forced.popleft()
        thinking = self._thinking
        if thinking is not None and token == thinking.opening:
            self._phase = _Phase.THOUGHT
        elif self._phase is _Phase.THOUGHT:
            assert thinking is not None
            if token == thinking.closing_marker:
                self._phase = _Phase.ANSWER
                self._force_rest()
            else:
                self._num_thought += 1
        else:
            self._phase = _Phase.ANSWER
            if self._form is not None and not is_forced and token not in self._ends:
                self._form.take(token)
        self._close_if_spent()

    def _force_rest(self) -> None:
        """The thought is closed: what comes behind its marker, if a form begins there."""
        thinking = self._thinking
        assert thinking is not None
        if self._form is not None and not self._forced:
            place = thinking.closing.index(thinking.closing_marker)
            self._forced.extend(thinking.closing[place + 1 :])

    def _close_if_spent(self) -> None:
        thinking = self._thinking
        if thinking is None or thinking.budget is None or self._phase is not _Phase.THOUGHT or self._forced:
            return
        if self._num_thought >= thinking.budget:
            self._forced.extend(thinking.closing)
