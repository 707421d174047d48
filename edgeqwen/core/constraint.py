"""What an answer must look like, as the sampler sees it: which tokens may come next.

A `Constraint` is made once for a request and never changes; each choice walks through it in a `ConstraintState` of its
own. Whoever draws calls, token by token:

    state.prepare()                the mask of the next token; may run on another thread while the graph computes
    state.mask(row)                what may not come gets -inf
    state.take(token)              what was drawn, which the mask allowed
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:  # commands read requests too, and need no numpy for it
    import numpy as np
    from numpy.typing import NDArray


class ConstraintState(Protocol):
    """One choice on its way. Used by one thread at a time."""

    @property
    def is_over(self) -> bool:
        """All that is wanted has been said: nothing but an end token may follow."""
        ...

    def prepare(self) -> None:
        """Work out which tokens may come next, if that is not known yet."""
        ...

    def mask(self, row: NDArray[np.float32]) -> None:
        """Set the logits of what may not come to -inf, in place; float32 `[tokens]`. Raises `RuntimeFailed`."""
        ...

    def take(self, token: int) -> None:
        """The next token has been drawn. Raises `RuntimeFailed` if it cannot follow."""
        ...


class Constraint(Protocol):
    """What every choice of a request must look like."""

    def begin(self) -> ConstraintState:
        """The state before the first token of a choice. Raises `RuntimeFailed`."""
        ...
