"""How many requests may be there: a bound on those that wait (`busy`), a share for each owner (`quota`)."""

from __future__ import annotations

from collections import Counter

from edgeqwen.errors import EdgeqwenError

_SLOWEST_RETRY_MS = 60_000
_FASTEST_RETRY_MS = 100


class Admission:
    """Counts requests from before they are tokenised until they are over.

    At most `queue` wait for their first step, at most `per_owner` of one owner wait or run. `num_added` grows with each
    that is counted in.
    """

    def __init__(self, *, queue: int, per_owner: int) -> None:
        self.set_limits(queue=queue, per_owner=per_owner)
        self.num_queued = 0
        self.num_running = 0
        self.num_added = 0
        self._owners: Counter[str] = Counter()
        self._service_s = 1.0

    def set_limits(self, *, queue: int, per_owner: int) -> None:
        """From the next request on; those that are counted stay."""
        assert queue > 0
        assert per_owner > 0
        self.queue = queue
        self.per_owner = per_owner

    def add(self, owner: str, *, had_place: bool = False) -> None:
        """Count a waiting request in. Raises `EdgeqwenError` (`quota` before `busy`) with `retry_ms`, unless it was
        counted until a moment ago: for that limits which were lowered meanwhile do not count.
        """
        if not had_place:
            self._check_room(owner)
        self._owners[owner] += 1
        self.num_queued += 1
        self.num_added += 1

    def _check_room(self, owner: str) -> None:
        if self._owners[owner] >= self.per_owner:
            message = f"this user already has {self.per_owner} requests queued or running"
            raise EdgeqwenError(message, code="quota", retry_ms=self._retry_ms())
        if self.num_queued >= self.queue:
            raise EdgeqwenError(f"queue full ({self.queue})", code="busy", retry_ms=self._retry_ms())

    def count_of(self, owner: str) -> int:
        """Requests of `owner` that wait or run."""
        return self._owners.get(owner, 0)

    def _retry_ms(self) -> int:
        """When a place should be free: the time that one request takes, shared by those that run at once."""
        wait_ms = round(1000 * self._service_s / max(1, self.num_running))
        return min(max(wait_ms, _FASTEST_RETRY_MS), _SLOWEST_RETRY_MS)

    def start(self) -> None:
        """One waiting request runs from now on."""
        assert self.num_queued > 0
        self.num_queued -= 1
        self.num_running += 1

    def remove(self, owner: str, *, has_started: bool, service_s: float | None = None) -> None:
        """Count a request out; `service_s` is how long it ran."""
        assert self._owners[owner] > 0
        self._owners[owner] -= 1
        if not self._owners[owner]:
            del self._owners[owner]
        if has_started:
            self.num_running -= 1
        else:
            self.num_queued -= 1
        assert self.num_running >= 0
        assert self.num_queued >= 0
        if service_s is not None:
            self._service_s += 0.2 * (service_s - self._service_s)
