"""How room is made for a sequence that finds none: others are preempted, or what is kept for later is let go."""

from __future__ import annotations

from collections import Counter

from edgeqwen.kvcache import BlockStore
from edgeqwen.scheduler.kept import KeptPrompts
from edgeqwen.scheduler.line import choose_victim
from edgeqwen.scheduler.residents import Residents
from edgeqwen.scheduler.sequence import Sequence
from edgeqwen.scheduler.transfers import Transfers


class RoomMaker:
    """`num_preempted` counts the times that a sequence had to make place for another."""

    def __init__(self, store: BlockStore, residents: Residents, transfers: Transfers, kept: KeptPrompts) -> None:
        self._store = store
        self._residents = residents
        self._transfers = transfers
        self._kept = kept
        self.num_preempted = 0

    def make_for(self, candidate: Sequence, now: float) -> bool:
        """Make room for a sequence that waits, if that is right. True if there may be some at once: the slot of one
        that was preempted is free only when what it holds has been saved, and then nothing is to be done now.
        """
        if self._transfers.slots:
            return False
        running = self._residents.running
        if running:
            self._preempt_for(candidate, running, now)
            return False
        return self._let_go()

    def _preempt_for(self, candidate: Sequence, running: list[Sequence], now: float) -> None:
        held = Counter(sequence.request.owner for sequence in running)
        victim = choose_victim(candidate, running, held.__getitem__, now)
        if victim is not None and self._residents.park(victim, now):
            self.num_preempted += 1

    def _let_go(self) -> bool:
        """Nothing runs, so what is kept for those that wait keeps all of them from running: let it go, or if that is
        not it, what is kept for good. False if there was nothing to let go.
        """
        holders = [each for each in self._residents.waiting if each.pins and not each.is_fetching]
        for sequence in holders:
            self._store.unpin(sequence.take_pins())
        return bool(holders) or self._kept.release()
