"""The states of a sequence, and a sequence.

    WAITING ----> PREFILLING ----> DECODING
       |              |                |
       +--------------+----------------+----> FINISHED

A sequence holds a slot from PREFILLING on. While a step that contains it runs it is marked *in flight*: it may finish
then (a cancellation, a deadline), but its slot stays taken until the step is committed.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Final

from edgeqwen.core.request import Request
from edgeqwen.sampling.speculation import Drafter


class State(Enum):
    """Where a sequence stands; the drawing above."""

    WAITING = auto()
    PREFILLING = auto()
    DECODING = auto()
    FINISHED = auto()


TRANSITIONS: Final[dict[State, frozenset[State]]] = {
    State.WAITING: frozenset({State.PREFILLING, State.FINISHED}),
    State.PREFILLING: frozenset({State.DECODING, State.FINISHED}),
    State.DECODING: frozenset({State.FINISHED}),
    State.FINISHED: frozenset(),
}


@dataclass(eq=False, slots=True)
class Sequence:
    """One choice of a request. Only the scheduler changes it; `num_computed` tokens of it are in the slot.

    `drafter` guesses its next tokens; None as long as nothing is to be guessed.
    """

    request: Request
    choice: int
    state: State = State.WAITING
    slot: int | None = None
    is_in_flight: bool = False
    num_computed: int = 0
    num_generated: int = 0
    last_token: int = -1
    drafter: Drafter | None = None

    @property
    def num_unprefilled(self) -> int:
        return len(self.request.prompt_ids) - self.num_computed

    def enter(self, state: State) -> None:
        """Change state; a transition that the table does not have is a fault of the scheduler and raises first."""
        assert state in TRANSITIONS[self.state], f"{self.state.name} -> {state.name}"
        self.state = state


@dataclass(eq=False, slots=True)
class Group:
    """The sequences of one request; `started_at` is when the first of them had its first step."""

    request: Request
    sequences: list[Sequence] = field(default_factory=list)
    started_at: float | None = None

    def donor(self) -> Sequence | None:
        """A choice whose slot holds the whole prompt, so that another need not compute it."""
        return next((each for each in self.sequences if each.state is State.DECODING), None)

    @property
    def has_started(self) -> bool:
        return self.started_at is not None

    @property
    def is_over(self) -> bool:
        return all(sequence.state is State.FINISHED for sequence in self.sequences)
