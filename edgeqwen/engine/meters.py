"""What is measured while the engine works, and outlives each engine: a model that sleeps and wakes is another one.

A token costs one histogram a look for its class. All else is counted once a step or once a request.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Final, Literal, TypeAlias

from edgeqwen.engine.outcomes import KINDS, Kind, Outcome, Outcomes, Refusal
from edgeqwen.metrics import Histogram
from edgeqwen.scheduler import StepPlan

StepKind: TypeAlias = Literal["prefill", "decode"]

STEP_KINDS: Final[tuple[StepKind, ...]] = ("prefill", "decode")

GAP_BOUNDS_S: Final = (0.001, 0.005, 0.01, 0.02, 0.03, 0.04, 0.06, 0.08, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.5, 10.0)
"""From guesses that come with another token to a decode step behind a long piece of somebody's prompt."""

STEP_BOUNDS_S: Final = (0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)

REQUEST_BOUNDS_S: Final = (
    0.01,
    0.025,
    0.05,
    0.1,
    0.25,
    0.5,
    1.0,
    2.5,
    5.0,
    10.0,
    20.0,
    40.0,
    80.0,
    160.0,
    320.0,
    600.0,
)
"""From a known prompt on a fast machine to the longest deadline that the defaults allow."""

SEQUENCE_BOUNDS: Final = (1, 2, 3, 4, 6, 8, 12, 16, 32, 64)


class Meters:
    """`token_gap_s`: seconds between two tokens of one choice; a token that was guessed right comes with the one before
    it. `step_s` and `step_sequences`, by kind of step: seconds that steps took, and the sequences in them.

    Of requests that are over: `first_token_s` of those that had a token, `queue_s`, `duration_s` by kind, and how many
    came to which end (`ended`); `refused` counts those that were never accepted, by the code of the error.
    """

    def __init__(self) -> None:
        self.outcomes = Outcomes()
        self.outcomes.subscribe(self._count_outcome, self._count_refusal)
        self.token_gap_s = Histogram(GAP_BOUNDS_S)
        self.step_s: Mapping[StepKind, Histogram] = {kind: Histogram(STEP_BOUNDS_S) for kind in STEP_KINDS}
        self.step_sequences: Mapping[StepKind, Histogram] = {kind: Histogram(SEQUENCE_BOUNDS) for kind in STEP_KINDS}
        self.first_token_s = Histogram(REQUEST_BOUNDS_S)
        self.queue_s = Histogram(REQUEST_BOUNDS_S)
        self.duration_s: Mapping[Kind, Histogram] = {kind: Histogram(REQUEST_BOUNDS_S) for kind in KINDS}
        self.ended: Counter[tuple[Kind, str]] = Counter()
        self.refused: Counter[str] = Counter()

    def count_step(self, plan: StepPlan, duration_s: float) -> None:
        """A step has run; one that only moved keys and values is none."""
        if plan.batch.chunks:
            kind: StepKind = "prefill" if plan.is_prefill else "decode"
            self.step_s[kind].observe(duration_s)
            self.step_sequences[kind].observe(len(plan.batch.chunks))

    def _count_outcome(self, outcome: Outcome) -> None:
        self.ended[outcome.kind, outcome.outcome] += 1
        self.queue_s.observe(outcome.queue_s)
        self.duration_s[outcome.kind].observe(outcome.total_s)
        if outcome.first_token_s is not None:
            self.first_token_s.observe(outcome.first_token_s)

    def _count_refusal(self, refusal: Refusal) -> None:
        self.refused[refusal.code] += 1
