"""A compiled grammar as the sampler walks through it: masks as lists of ids, worked out while the model computes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np
from numpy.typing import NDArray

from edgeqwen.errors import RuntimeFailed

if TYPE_CHECKING:
    from llguidance import LLMatcher

_NEVER: Final = np.float32(-np.inf)


class GrammarConstraint:
    """Implements `core.constraint.Constraint`. `matcher` stands at the start and stays there; `vocab_size` is that of
    its vocabulary.
    """

    def __init__(self, matcher: LLMatcher, *, vocab_size: int, field: str) -> None:
        self._matcher = matcher
        self._vocab_size = vocab_size
        self._field = field

    def begin(self) -> GrammarState:
        """The state before the first token."""
        return GrammarState(self._matcher.deep_copy(), vocab_size=self._vocab_size, field=self._field)


class GrammarState:
    """Implements `core.constraint.ConstraintState`."""

    def __init__(self, matcher: LLMatcher, *, vocab_size: int, field: str) -> None:
        self._matcher = matcher
        self._field = field
        self._bits = np.zeros((vocab_size + 31) // 32, np.int32)
        self._ids: NDArray[np.int64] | None = None
        self._is_list_of_allowed = False
        self.is_over = False

    def prepare(self) -> None:
        """Work out which tokens may come next. What goes wrong shows in `mask`."""
        if self._ids is not None:
            return
        self._matcher.unsafe_compute_mask_ptr(self._bits.ctypes.data, self._bits.nbytes)  # without the interpreter lock
        allowed = np.unpackbits(self._bits.view(np.uint8), bitorder="little").view(np.bool_)
        # The shorter list of the two: within a string nearly everything may come, elsewhere hardly anything.
        self._is_list_of_allowed = bool(2 * np.count_nonzero(allowed) < allowed.size)
        self._ids = np.flatnonzero(allowed if self._is_list_of_allowed else ~allowed)

    def mask(self, row: NDArray[np.float32]) -> None:
        """Set the logits of what may not come to -inf. Raises `RuntimeFailed` if that cannot be told."""
        self.prepare()
        if self._matcher.is_error():
            raise self._failure()
        assert self._ids is not None
        ids = self._ids[: np.searchsorted(self._ids, row.size)]
        if not self._is_list_of_allowed:
            row[ids] = _NEVER
            return
        kept = row[ids]
        row.fill(_NEVER)
        row[ids] = kept

    def take(self, token: int) -> None:
        """The next token has been drawn. Raises `RuntimeFailed` if it cannot follow."""
        self._ids = None
        if not self._matcher.consume_token(token):
            raise self._failure()
        self.is_over = self._matcher.is_stopped()

    def _failure(self) -> RuntimeFailed:
        message = f"{self._field} is too complex: the answer cannot be held to it any further"
        return RuntimeFailed(message, code="bad_request", field=self._field)
