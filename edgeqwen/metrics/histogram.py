"""How often something took how long, in classes whose bounds are fixed.

Taking in a value finds its class by bisection and adds to two numbers, so it costs the same after a week, and may be
done for every token. Classes are counted on their own and added up when they are read: what is read then is Prometheus'
form, where each class holds the ones below it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate, pairwise


class Histogram:
    """Counts values by class. `bounds` are the upper ends of the classes, which belong to them, in ascending order;
    above the last there is one more.
    """

    def __init__(self, bounds: Sequence[float]) -> None:
        assert bounds
        assert all(low < high for low, high in pairwise(bounds)), "bounds must ascend"
        self.bounds = tuple(bounds)
        self.sum = 0.0
        self._counts = [0] * (len(bounds) + 1)

    def observe(self, value: float) -> None:
        """Take in one value."""
        self._counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    @property
    def count(self) -> int:
        """Values taken in."""
        return sum(self._counts)

    def cumulative(self) -> tuple[int, ...]:
        """For each bound the number of values up to it, and last of all the number of all values."""
        return tuple(accumulate(self._counts))
