"""Whether memory grows, told from looks at it that vary: caches are full or not, heaps have holes.

What leaks does so with each request and stays, so the least that was seen rises too: `slope` holds the least of the
last quarter of the looks against that of the third. The first half does not count, for then allocators and caches come
to their size. `growth` is what a user sees in the end.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

QUARTERS: Final = 4


def growth(looks: Sequence[int]) -> float:
    """The last of the looks against the one when half of them was over, as a share of that."""
    return looks[-1] / looks[len(looks) // 2 - 1] - 1


def slope(looks: Sequence[int], requests_per_look: float) -> float:
    """Bytes that stay of a request. There are at least four looks, so many requests apart."""
    quarter = len(looks) // QUARTERS
    assert quarter > 0, "too few looks"
    third, fourth = looks[-2 * quarter : -quarter], looks[-quarter:]
    return (min(fourth) - min(third)) / (quarter * requests_per_look)
