"""The states of a sequence, and a sequence.

       +------- preempted -------+
       v                         |
    WAITING ----> PREFILLING ----> DECODING
       |              |                |
       +--------------+----------------+----> FINISHED

A sequence holds a slot from PREFILLING on. What of its tokens is known already is loaded into the slot first, the rest
is computed; a preempted sequence comes back by the same way, its own tokens being known. While a step that contains it
runs it is marked *in flight*: it may finish then (a cancellation, a deadline), but its slot stays taken until the step
is committed.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Final

from edgeqwen.core.request import Request
from edgeqwen.kvcache import Block
from edgeqwen.sampling.speculation import Drafter
from edgeqwen.scheduler.plan import SlotLoad


class State(Enum):
    """Where a sequence stands; the drawing above."""

    WAITING = auto()
    PREFILLING = auto()
    DECODING = auto()
    FINISHED = auto()


TRANSITIONS: Final[dict[State, frozenset[State]]] = {
    State.WAITING: frozenset({State.PREFILLING, State.FINISHED}),
    State.PREFILLING: frozenset({State.DECODING, State.FINISHED}),
    State.DECODING: frozenset({State.WAITING, State.FINISHED}),
    State.FINISHED: frozenset(),
}


@dataclass(eq=False, slots=True)
class Sequence:
    """One choice of a request. Only the scheduler changes it; `num_computed` tokens of it are in the slot.

    `number` is its place in the order of arrival, `since` when it began to wait; `num_known` tokens of it were known
    when it came, `num_cached` when it got its slot; `num_since_begin` were generated since it last got one.
    `reserved_bytes` of the cache's budget are its own, `pins` are blocks kept for it, `loads` what is still to go from
    them into its slot. `is_fetching`: some of them are read from disk. `is_parking`: it was preempted, and its slot is
    being saved. `is_spoilt`: what its slot holds is not to be kept. `has_asked`: what others have computed of its
    beginning was asked for once. `drafter` guesses its next tokens; None as long as nothing is to be guessed.
    """

    request: Request
    choice: int
    number: int = 0
    since: float = 0.0
    state: State = State.WAITING
    slot: int | None = None
    is_in_flight: bool = False
    num_computed: int = 0
    num_known: int = 0
    num_cached: int | None = None
    generated: list[int] = field(default_factory=list)
    num_since_begin: int = 0
    reserved_bytes: int = 0
    pins: list[Block] = field(default_factory=list)
    loads: deque[SlotLoad] = field(default_factory=deque)
    is_fetching: bool = False
    is_parking: bool = False
    is_spoilt: bool = False
    has_asked: bool = False
    drafter: Drafter | None = None

    @property
    def is_background(self) -> bool:
        """Nothing is generated: a prompt is computed so that it is known later."""
        return self.request.max_tokens == 0 and not self.is_embedding

    @property
    def is_embedding(self) -> bool:
        """Nothing is generated: the hidden states of a text are wanted."""
        return self.request.pooling is not None

    @property
    def prompt_ids(self) -> tuple[int, ...]:
        """What is to be computed before anything is generated: the request's prompt, or the one of its texts."""
        return self.request.texts[self.choice] if self.is_embedding else self.request.prompt_ids

    @property
    def num_generated(self) -> int:
        return len(self.generated)

    @property
    def last_token(self) -> int:
        return self.generated[-1]

    @property
    def num_tokens(self) -> int:
        """Of the prompt and what was generated."""
        return len(self.prompt_ids) + len(self.generated)

    @property
    def num_pending(self) -> int:
        """Tokens that must be computed before another can be drawn; of one that waits, as it seemed when it came."""
        if self.state is State.WAITING:
            return max(1, self.num_tokens - self.num_known)
        return self.num_tokens - (self.loads[-1].stop if self.loads else self.num_computed)

    def tokens(self, start: int, stop: int) -> tuple[int, ...]:
        """Those from position `start` to `stop`, prompt and answer as one."""
        prompt = self.prompt_ids
        skipped = len(prompt)
        if stop <= skipped:
            return prompt[start:stop]
        return prompt[start:] + tuple(self.generated[max(0, start - skipped) : stop - skipped])

    def take_pins(self) -> list[Block]:
        """The blocks that were kept for it; they are not its own any more."""
        pins, self.pins = self.pins, []
        return pins

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
