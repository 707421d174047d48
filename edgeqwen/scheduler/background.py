"""Prompts that are computed while there is nothing else to do, so that they are known when they are wanted.

One at a time, the oldest wish first. When a request arrives the one that runs is given up at the end of its step: what
it has computed is kept like that of any sequence, and it goes on from there when the engine is idle again.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

from edgeqwen.core.request import Request
from edgeqwen.scheduler.sequence import Sequence

MOST_WISHES: Final = 256
"""More than these are forgotten, the oldest first: nobody has come back to them for long."""


class Background:
    """Wishes by key, and the one that is being fulfilled."""

    def __init__(self) -> None:
        self._wishes: OrderedDict[str, Request] = OrderedDict()
        self.running: Sequence | None = None
        self.num_done = 0
        self.num_tokens = 0
        self.num_given_up = 0

    def __len__(self) -> int:
        return len(self._wishes)

    def want(self, key: str, request: Request) -> None:
        """Have the prompt of `request` known; replaces an earlier wish of the same key."""
        assert request.max_tokens == 0
        self._wishes.pop(key, None)
        self._wishes[key] = request
        if len(self._wishes) > MOST_WISHES:
            self._wishes.popitem(last=False)

    def forget(self, key: str) -> bool:
        """Whether the running sequence was for this wish, and is to be given up."""
        request = self._wishes.pop(key, None)
        return request is not None and self.running is not None and self.running.request is request

    def next(self) -> Sequence | None:
        """The sequence to go on with, made for the oldest wish if none runs."""
        if self.running is None and self._wishes:
            self.running = Sequence(next(iter(self._wishes.values())), 0)
        return self.running

    def end(self, sequence: Sequence, *, is_done: bool) -> None:
        """The running sequence has ended; its wish is fulfilled, or waits for the next idle time."""
        assert self.running is sequence
        self.running = None
        request = sequence.request
        key = next((key for key, wish in self._wishes.items() if wish is request), None)
        if not is_done:
            self.num_given_up += 1
            return
        self.num_done += 1
        if key is not None:
            del self._wishes[key]

    def drop(self, sequence: Sequence) -> None:
        """The running sequence failed: so would its wish the next time."""
        self.end(sequence, is_done=False)
        for key in [key for key, wish in self._wishes.items() if wish is sequence.request]:
            del self._wishes[key]
