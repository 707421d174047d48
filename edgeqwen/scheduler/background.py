"""Prompts that are computed while there is nothing else to do, so that they are known when they are wanted.

One at a time, the oldest wish first. When a request arrives the one that runs is given up at the end of its step: what
it has computed is kept like that of any sequence, and it goes on from there when the engine is idle again.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

from edgeqwen.core.request import Request
from edgeqwen.scheduler.entry import Entered, Entry
from edgeqwen.scheduler.residents import Residents
from edgeqwen.scheduler.sequence import Sequence, State

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
        if is_done:
            self.num_done += 1
            self._remove(sequence.request)
        else:
            self.num_given_up += 1

    def drop(self, sequence: Sequence) -> None:
        """The running sequence failed: so would its wish the next time."""
        self.end(sequence, is_done=False)
        self._remove(sequence.request)

    def _remove(self, request: Request) -> None:
        """Perhaps it was forgotten or replaced meanwhile."""
        for key in [key for key, wish in self._wishes.items() if wish is request]:
            del self._wishes[key]


class BackgroundWork:
    """Carries the wishes of `background` out."""

    def __init__(self, background: Background, entry: Entry, residents: Residents) -> None:
        self._background = background
        self._entry = entry
        self._residents = residents

    def next(self) -> Sequence | None:
        """The sequence to go on with, which has a slot; None if there is nothing to do now. No request may be there."""
        while (sequence := self._background.next()) is not None:
            if sequence.state is State.PREFILLING:
                return sequence
            if self._entry.num_known(sequence) == sequence.num_tokens:
                self._end(sequence, is_done=True)
                continue
            entered = self._entry.enter(sequence)
            if entered is not Entered.NO_ROOM:
                return sequence if entered is Entered.YES else None
            self.drop(sequence)
        return None

    def give_up(self) -> None:
        """Whatever runs leaves now; its wish, if there is one still, waits for the next idle time."""
        if self._background.running is not None:
            self._end(self._background.running, is_done=False)

    def end_if_done(self, sequence: Sequence) -> None:
        """The running sequence has had a step."""
        if not sequence.num_pending and not sequence.loads:
            self._end(sequence, is_done=True)

    def drop(self, sequence: Sequence) -> None:
        """The running sequence cannot be computed: neither could it be the next time."""
        self._background.drop(sequence)
        self._residents.leave(sequence)

    def _end(self, sequence: Sequence, *, is_done: bool) -> None:
        self._background.end(sequence, is_done=is_done)
        self._residents.leave(sequence)
