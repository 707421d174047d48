"""Stop strings: found across tokens, and nothing is held back that could not become one.

The occurrence that is complete first ends the text; of several that are complete at the same character the longest.
This does not depend on how the text was cut into tokens, and generation can end at that token. Held back is the
longest end of the text that is a beginning of some stop string, not a fixed window.
"""

from __future__ import annotations

from collections.abc import Sequence


class StopMatcher:
    """Lets text through up to the first stop string."""

    def __init__(self, stops: Sequence[str]) -> None:
        assert all(stops), "an empty stop string would match everywhere"
        self._stops = tuple(stops)
        self._held = ""
        self.stop: str | None = None  # the one that was found

    @property
    def is_stopped(self) -> bool:
        return self.stop is not None

    def push(self, text: str, *, is_armed: bool = True) -> str:
        """The part of what was held and `text` that certainly precedes any stop string; empty after a stop.

        A stop string that `text` completes while not `is_armed` is text.
        """
        if self.is_stopped or not text:
            return ""
        num_old = len(self._held)
        text = self._held + text
        if is_armed and (found := self._first_stop(text, num_old)) is not None:
            start, self.stop = found
            self._held = ""
            return text[:start]
        split = len(text) - self._held_len(text)
        self._held = text[split:]
        return text[:split]

    def flush(self) -> str:
        """What is held back: the text ended, so it is no stop string."""
        held, self._held = self._held, ""
        return held

    def _first_stop(self, text: str, num_old: int) -> tuple[int, str] | None:
        """Where the stop string begins that ends first behind the first `num_old` characters, and which it is."""
        found = [
            (at + len(stop), at, stop)
            for stop in self._stops
            if (at := text.find(stop, max(0, num_old + 1 - len(stop)))) >= 0
        ]
        return min(found)[1:] if found else None

    def _held_len(self, text: str) -> int:
        lengths = (_overlap_len(text, stop) for stop in self._stops)
        return max(lengths, default=0)


def _overlap_len(text: str, stop: str) -> int:
    """Length of the longest proper beginning of `stop` that `text` ends with."""
    for size in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:size]):
            return size
    return 0
