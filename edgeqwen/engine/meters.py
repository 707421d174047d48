"""What is measured while the engine works, and outlives each engine: a model that sleeps and wakes is another one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, Literal, TypeAlias

from edgeqwen.engine.outcomes import Outcomes
from edgeqwen.metrics import Histogram
from edgeqwen.scheduler import StepPlan

StepKind: TypeAlias = Literal["prefill", "decode"]

GAP_BOUNDS_S: Final = (0.001, 0.005, 0.01, 0.02, 0.03, 0.04, 0.06, 0.08, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.5, 10.0)
"""From guesses that come with another token to a decode step behind a long piece of somebody's prompt."""

STEP_BOUNDS_S: Final = (0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)

SEQUENCE_BOUNDS: Final = (1, 2, 3, 4, 6, 8, 12, 16, 32, 64)


class Meters:
    """`token_gap_s`: seconds between two tokens of one choice; a token that was guessed right comes with the one before
    it. `step_s` and `step_sequences`, by kind of step: seconds that steps took, and the sequences in them.
    """

    def __init__(self) -> None:
        self.outcomes = Outcomes()
        self.token_gap_s = Histogram(GAP_BOUNDS_S)
        self.step_s: Mapping[StepKind, Histogram] = {
            "prefill": Histogram(STEP_BOUNDS_S),
            "decode": Histogram(STEP_BOUNDS_S),
        }
        self.step_sequences: Mapping[StepKind, Histogram] = {
            "prefill": Histogram(SEQUENCE_BOUNDS),
            "decode": Histogram(SEQUENCE_BOUNDS),
        }

    def count_step(self, plan: StepPlan, duration_s: float) -> None:
        """A step has run; one that only moved keys and values is none."""
        if plan.batch.chunks:
            kind: StepKind = "prefill" if plan.is_prefill else "decode"
            self.step_s[kind].observe(duration_s)
            self.step_sequences[kind].observe(len(plan.batch.chunks))
