"""Who computes a piece of a prompt next: by urgency, then by what each owner has had, then by arrival.

*Urgency* is the priority that a request was given, and one more for each `AGING_S` that it has waited: so nothing waits
for ever. *What an owner has had* is engine time, its share of each step (start-time fair queueing: Goyal, Vin, Cheng
1996, for owners instead of flows): an owner that comes back starts where the one that had least stands, and cannot save
up. So two owners get the same, whatever the number of their requests or connections.

Among the requests of one owner it is first come, first served, in two lanes. A prompt that takes longer than
`LONG_PROMPT_S` is in the slow lane; pieces of both lanes alternate. So a short question waits for one piece of a long
text at most, and the long text goes on at half its speed at least.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final, TypeAlias

from edgeqwen.scheduler.sequence import Sequence, State

AGING_S: Final = 30.0
LONG_PROMPT_S: Final = 1.0
MIN_TOKENS: Final = 32
"""Tokens that a sequence may generate before it is preempted: moving it out and in must stay a small part of it."""

_Key: TypeAlias = tuple[float, float, bool, bool, int]


class Shares:
    """Engine seconds by owner, of those that have something to do. An owner that leaves is forgotten."""

    def __init__(self) -> None:
        self._had_s: dict[str, float] = {}

    def keep(self, owners: Iterable[str]) -> None:
        """These owners have something to do now."""
        present = set(owners)
        floor_s = min((had for owner, had in self._had_s.items() if owner in present), default=0.0)
        self._had_s = {owner: max(self._had_s.get(owner, floor_s), floor_s) for owner in present}

    def charge(self, owner: str, seconds: float) -> None:
        if owner in self._had_s:
            self._had_s[owner] += seconds

    def had_s(self, owner: str) -> float:
        return self._had_s.get(owner, 0.0)


class Line:
    """The order of sequences that wait or have a prompt to compute. `prompt_s` tells how long so many tokens take."""

    def __init__(self, prompt_s: Callable[[int], float]) -> None:
        self._prompt_s = prompt_s
        self._shares = Shares()
        self._had_slow: set[str] = set()  # owners whose last piece was of the slow lane

    def order(self, sequences: Iterable[Sequence], now: float) -> list[Sequence]:
        """Those that may have a piece now, first things first."""
        return sorted(sequences, key=lambda sequence: self._key(sequence, now))

    def _key(self, sequence: Sequence, now: float) -> _Key:
        owner = sequence.request.owner
        is_slow = self._is_slow(sequence)
        is_waiting = sequence.state is State.WAITING
        had_turn = is_slow == (owner in self._had_slow)
        return (-urgency(sequence, now), self._shares.had_s(owner), had_turn, is_waiting, sequence.number)

    def _is_slow(self, sequence: Sequence) -> bool:
        return self._prompt_s(sequence.num_pending) > LONG_PROMPT_S

    def keep(self, owners: Iterable[str]) -> None:
        """The owners of all that lives."""
        owners = set(owners)
        self._shares.keep(owners)
        self._had_slow &= owners

    def note_piece(self, sequence: Sequence) -> None:
        """A piece of this sequence's prompt is computed now."""
        owner = sequence.request.owner
        if self._is_slow(sequence):
            self._had_slow.add(owner)
        else:
            self._had_slow.discard(owner)

    def charge(self, sequences: Iterable[Sequence], duration_s: float) -> None:
        """A step of these sequences took so long."""
        served = list(sequences)
        for sequence in served:
            self._shares.charge(sequence.request.owner, duration_s / len(served))


def urgency(sequence: Sequence, now: float) -> int:
    """The priority of a sequence, raised by its age while it waits."""
    waited_s = now - sequence.since if sequence.state is not State.DECODING else 0.0
    return sequence.request.priority + int(max(0.0, waited_s) // AGING_S)


def choose_victim(
    candidate: Sequence, running: Iterable[Sequence], held: Callable[[str], int], now: float
) -> Sequence | None:
    """Which running sequence makes place for `candidate`, which waits: one that is less urgent, or one of an owner that
    holds at least two slots more (`held`). Of those the one that came last; never the one that came first of all, so
    that there is progress, and never one that has just begun.
    """
    later = sorted(running, key=lambda sequence: sequence.number)[1:]
    wanted, num_held = urgency(candidate, now), held(candidate.request.owner)
    able = [each for each in later if _may_be_preempted(each)]
    less_urgent = [each for each in able if urgency(each, now) < wanted]
    if less_urgent:
        return min(less_urgent, key=lambda each: (urgency(each, now), -held(each.request.owner), -each.number))
    richer = [each for each in able if held(each.request.owner) >= num_held + 2 and urgency(each, now) == wanted]
    return min(richer, key=lambda each: (-held(each.request.owner), -each.number), default=None)


def _may_be_preempted(sequence: Sequence) -> bool:
    return sequence.state is State.DECODING and sequence.num_since_begin >= MIN_TOKENS and sequence.request.may_cache
