"""What a decode step costs when its sequences compute several rows each, relative to one row each: learnt from steps.

A step is a rectangle: sequences from the first slot to the last, times the rows of the widest. How its time grows with
the width differs by machine, quantisation and number of sequences, and has steps where kernels change, so it is not
modelled but measured, for each number of sequences and each of the `WIDTHS`, with what is known beforehand as a start:
what the runtime found by timing (`RuntimeSpec.row_costs`), else the cautiously hopeful guess of `_PRIOR_SLOPE`.

Time also drifts for reasons that all widths share: contexts grow, the machine is busy. So an observation moves two
things, the level (seconds of a step of width 1) and the ratio of its width to it; steps of width 1 move the level
alone. A ratio counts for more the oftener it was seen and less the longer ago; a single strange step is clipped.

A wider step never costs less than a narrower one. Where measured ratios say so, the lower one is believed: a cost that
is taken for too low is tried and corrected at once, one that is taken for too high would never be measured again.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from typing import Final

WIDTHS: Final = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
"""Widths that are planned; what lies between costs as much as the next."""

_PRIOR_SLOPE: Final = 0.02
_LEVEL_GAIN: Final = 0.25
_LEAST_GAIN: Final = 0.1
_MOST_SEEN: Final = 20.0
_FORGETTING: Final = 0.998
_CLIP: Final = 1.0


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

    def _curve(self, span: int) -> _Curve:
        if span not in self._curves:
            self._curves[span] = _Curve([math.log(self._prior(span, width)) for width in WIDTHS])
        return self._curves[span]

    def _prior(self, span: int, width: int) -> float:
        if not self._row_costs:
            return 1.0 + _PRIOR_SLOPE * span * (width - 1)
        return max(1.0, _interpolated(self._row_costs, span * width) / _interpolated(self._row_costs, span))


class _Curve:
    """The costs of one number of sequences, in logarithms: of the level's seconds, and of the ratios."""

    def __init__(self, prior: list[float]) -> None:
        self._prior = prior
        self._change = [0.0] * len(prior)  # measured less prior
        self._seen = [0.0] * len(prior)
        self._level: float | None = None
        self._ratios: tuple[float, ...] | None = None

    def observe(self, place: int, seconds: float) -> None:
        ratio = self._prior[place] + self._believed(place)
        if self._level is None:
            self._level = seconds - ratio
        excess = min(max(seconds - self._level - ratio, -_CLIP), _CLIP)
        self._level += _LEVEL_GAIN * excess
        self._seen = [seen * _FORGETTING for seen in self._seen]
        if place:
            seen = min(self._seen[place] + 1.0, _MOST_SEEN)
            measured = ratio + excess - self._prior[place]
            self._change[place] += max(1.0 / seen, _LEAST_GAIN) * (measured - self._change[place])
            self._seen[place] = seen
        self._ratios = None

    def _believed(self, place: int) -> float:
        """The prior counts for one observation."""
        return self._change[place] * self._seen[place] / (self._seen[place] + 1.0)

    def ratios(self) -> tuple[float, ...]:
        if self._ratios is None:
            lowest, found = math.inf, []
            for value in reversed([self._prior[place] + self._filled(place) for place in range(len(WIDTHS))]):
                lowest = min(lowest, value)
                found.append(math.exp(max(lowest, 0.0)))
            self._ratios = tuple(reversed(found))
        return self._ratios

    def _filled(self, place: int) -> float:
        """The change at `place`, or where nothing was seen what lies between those of its seen neighbours."""
        if self._seen[place] >= 0.5 or not place:
            return self._believed(place)
        left = next(i for i in range(place, -1, -1) if self._seen[i] >= 0.5 or i == 0)
        right = next((i for i in range(place, len(WIDTHS)) if self._seen[i] >= 0.5), left)
        if right == left:
            return self._believed(left)
        share = (place - left) / (right - left)
        return self._believed(left) * (1.0 - share) + self._believed(right) * share


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
