"""What a decode step costs when its sequences compute several rows each, relative to one row each: learnt from steps.

A step is a rectangle: sequences from the first slot to the last, times the rows of the widest. How its time grows with
the width differs by machine, quantisation and number of sequences, and has steps where kernels change, so it is not
modelled but measured, for each number of sequences and each of the `WIDTHS`, with what is known beforehand as a start:
what the runtime found by timing (`RuntimeSpec.row_costs`), else a guess: a row more is a tenth of a step more, which is
too much for most machines and is soon put right by copies, where wide steps pay even so.

Time also drifts for reasons that all widths share: contexts grow, the machine is busy. So what is kept of a wide step
is its ratio to the steps of width 1 about it, of which there must be some now and then (`needs_narrow`). A ratio is the
median of the last few seen and of what was known beforehand, so one strange step does not count and three that agree
do; what was seen long ago no longer counts at all.

A wider step never costs less than a narrower one. Where measured ratios say so, the lower one is believed: a cost that
is taken for too low is tried and corrected at once, one that is taken for too high would never be measured again.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import deque
from statistics import median
from typing import Final

WIDTHS: Final = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
"""Widths that are planned; what lies between costs as much as the next."""

_PRIOR_SLOPE: Final = 0.1
_HOPE: Final = 0.4
"""Costs rise in cliffs as well as evenly, and a width that is never tried stays unknown."""

_KEPT_WIDE: Final = 5
_KEPT_NARROW: Final = 3
_LIFETIME: Final = 2000
_WIDE_IN_A_ROW: Final = 64


class StepCosts:
    """Ratios by number of sequences and width. `row_costs` as in `RuntimeSpec`."""

    def __init__(self, row_costs: tuple[tuple[int, float], ...] = ()) -> None:
        self._row_costs = row_costs
        self._curves: dict[int, _Curve] = {}

    def ratios(self, span: int) -> tuple[float, ...]:
        """For steps of `span` sequences: the cost of each of `WIDTHS` over that of width 1, never falling."""
        return self._curve(span).ratios()

    def observe(self, span: int, width: int, duration_s: float) -> None:
        """A step of `span` sequences, the widest of `width` rows (one of `WIDTHS`, or less wide), took so long."""
        if duration_s > 0.0:
            self._curve(span).observe(place_of(width), math.log(duration_s))

    def needs_narrow(self, span: int) -> bool:
        """The next step of `span` sequences should be of width 1: without such steps nothing can be compared."""
        return self._curve(span).needs_narrow

    def _curve(self, span: int) -> _Curve:
        if span not in self._curves:
            self._curves[span] = _Curve([math.log(self._prior(span, width)) for width in WIDTHS])
        return self._curves[span]

    def _prior(self, span: int, width: int) -> float:
        if not self._row_costs:
            return 1.0 + _PRIOR_SLOPE * span * (width - 1)
        return max(1.0, _interpolated(self._row_costs, span * width) / _interpolated(self._row_costs, span))


class _Curve:
    """The costs of one number of sequences, in logarithms."""

    def __init__(self, prior: list[float]) -> None:
        self._prior = prior
        self._wide: list[deque[tuple[int, float]]] = [deque(maxlen=_KEPT_WIDE) for _ in prior]  # (step, ratio)
        self._narrow: deque[float] = deque(maxlen=_KEPT_NARROW)
        self._num_steps = 0
        self._num_wide_in_a_row = 0
        self._ratios: tuple[float, ...] | None = None

    @property
    def needs_narrow(self) -> bool:
        return len(self._narrow) < _KEPT_NARROW or self._num_wide_in_a_row >= _WIDE_IN_A_ROW

    def observe(self, place: int, seconds: float) -> None:
        self._num_steps += 1
        if place or self._num_steps % _WIDE_IN_A_ROW == 0:  # narrow steps change nothing, but what is seen grows old
            self._ratios = None
        if place:
            self._num_wide_in_a_row += 1
            if self._narrow:
                self._wide[place].append((self._num_steps, seconds - median(self._narrow)))
            return
        if self._num_wide_in_a_row >= _WIDE_IN_A_ROW:  # those before are of another time
            self._narrow.extend([seconds] * _KEPT_NARROW)
        self._narrow.append(seconds)
        self._num_wide_in_a_row = 0

    def ratios(self) -> tuple[float, ...]:
        if self._ratios is None:
            changes = {0: 0.0}
            for place, seen in enumerate(self._wide):
                recent = [ratio for step, ratio in seen if self._num_steps - step < _LIFETIME]
                if recent:
                    changes[place] = median([*recent, self._prior[place]]) - self._prior[place]
            lowest, found = math.inf, []
            for place in reversed(range(len(WIDTHS))):
                lowest = min(lowest, self._prior[place] + _filled(changes, place))
                found.append(math.exp(max(lowest, 0.0)))
            self._ratios = tuple(reversed(found))
        return self._ratios


def _filled(changes: dict[int, float], place: int) -> float:
    """The change at `place`; where nothing was seen what lies between those of its neighbours, less `_HOPE`."""
    left = max(seen for seen in changes if seen <= place)
    right = min((seen for seen in changes if seen >= place), default=left)
    if left == right:
        return changes[left]
    share = (place - left) / (right - left)
    return (1.0 - _HOPE) * (changes[left] * (1.0 - share) + changes[right] * share)


def place_of(width: int) -> int:
    """The place in `WIDTHS` of the least width that is not less than `width`."""
    return min(bisect_left(WIDTHS, width), len(WIDTHS) - 1)


def _interpolated(points: tuple[tuple[int, float], ...], rows: int) -> float:
    """Seconds of a step of `rows`: on the line between the measured points on its two sides; beyond the last, further
    on the last line.
    """
    place = bisect_left([measured for measured, _ in points], rows)
    if len(points) == 1 or not place:
        return points[0][1]
    (low, low_s), (high, high_s) = points[min(place, len(points) - 1) - 1], points[min(place, len(points) - 1)]
    return low_s + max(0.0, (high_s - low_s) / (high - low)) * (rows - low)
