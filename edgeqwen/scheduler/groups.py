"""The requests that live, by rid, each with its sequences; counted in and out with `Admission`."""

from __future__ import annotations

from collections.abc import Iterator

from edgeqwen.core.request import Request
from edgeqwen.scheduler.admission import Admission
from edgeqwen.scheduler.sequence import Group, Sequence, State


class Groups:
    """A request is here from its submission until all its choices have ended."""

    def __init__(self, admission: Admission) -> None:
        self._admission = admission
        self._groups: dict[str, Group] = {}

    def __len__(self) -> int:
        return len(self._groups)

    def __contains__(self, rid: str) -> bool:
        return rid in self._groups

    def sequences(self) -> Iterator[Sequence]:
        """All sequences of all requests, ended ones too."""
        return (sequence for group in self._groups.values() for sequence in group.sequences)

    def live(self, rid: str) -> list[Sequence]:
        """The sequences of a request that have not ended; none if there is no such request."""
        group = self._groups.get(rid)
        return [] if group is None else [each for each in group.sequences if each.state is not State.FINISHED]

    @property
    def num_running(self) -> int:
        """Requests that have had a step, or are in their first."""
        return sum(group.has_started for group in self._groups.values())

    def add(self, request: Request, *, had_place: bool) -> Group:
        """Count a request in and make its sequences. Raises what `Admission.add` raises, and changes nothing then."""
        self._admission.add(request.owner, had_place=had_place)
        group = Group(request)
        group.sequences.extend(Sequence(request, choice) for choice in range(request.n))
        self._groups[request.rid] = group
        return group

    def start(self, rid: str, now: float) -> bool:
        """A sequence of the request begins now; False if one has begun before."""
        group = self._groups[rid]
        if group.has_started:
            return False
        group.started_at = now
        self._admission.start()
        return True

    def donor(self, sequence: Sequence) -> Sequence | None:
        """Another choice whose slot holds the whole prompt, so that `sequence` need not compute it."""
        if sequence.is_background or sequence.generated:
            return None
        return self._groups[sequence.request.rid].donor()

    def late(self, now: float) -> list[str]:
        """The requests whose deadline has come."""
        return [rid for rid, group in self._groups.items() if group.request.deadline_at <= now]

    def forget_if_over(self, request: Request, now: float) -> None:
        """Count a request out if all its choices have ended."""
        group = self._groups[request.rid]
        if not group.is_over:
            return
        del self._groups[request.rid]
        service_s = None if group.started_at is None else now - group.started_at
        self._admission.remove(request.owner, has_started=group.has_started, service_s=service_s)

    def check(self) -> None:
        """Assert that none has outstayed its end."""
        assert all(not group.is_over for group in self._groups.values())
