"""What has come of requests, owner by owner.

Owners come from outside (user ids, keys), so only so many are remembered; what all of them had together is never lost.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Final

MOST_OWNERS: Final = 1024


@dataclass(slots=True)
class Tally:
    """Requests accepted, and those of them that failed; tokens generated, and tokens of prompts that were known."""

    num_requests: int = 0
    num_failed: int = 0
    num_tokens: int = 0
    num_cached: int = 0


class Tallies:
    """A tally for each of the `most` owners that asked last, and `total`, that of everybody since the start."""

    def __init__(self, *, most: int = MOST_OWNERS) -> None:
        assert most > 0
        self.total = Tally()
        self._most = most
        self._tallies: OrderedDict[str, Tally] = OrderedDict()  # who asked last stands last

    def __len__(self) -> int:
        return len(self._tallies)

    def of(self, owner: str) -> Tally:
        """The owner's own; that of one who never asked, or so long ago that it is forgotten, is all zeros."""
        return self._tallies.get(owner) or Tally()

    def add_request(self, owner: str) -> None:
        self.total.num_requests += 1
        self._tallies.setdefault(owner, Tally()).num_requests += 1
        self._tallies.move_to_end(owner)
        if len(self._tallies) > self._most:
            self._tallies.popitem(last=False)

    # Of a request that was added. Its owner may have been forgotten since, and then only the total counts it.

    def add_failure(self, owner: str) -> None:
        self.total.num_failed += 1
        self.of(owner).num_failed += 1

    def add_token(self, owner: str) -> None:
        self.total.num_tokens += 1
        self.of(owner).num_tokens += 1

    def add_cached(self, owner: str, num_tokens: int) -> None:
        self.total.num_cached += num_tokens
        self.of(owner).num_cached += num_tokens
