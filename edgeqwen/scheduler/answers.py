"""What the sequences of requests are given: tokens, and an end.

A step may give a sequence several tokens, where guesses proved right (`scheduler.drafting`). They are taken in rounds,
one token of each sequence a round, and events are delivered between rounds: so what ends a sequence at one token (the
end token, the budget, a stop string in the text, a receiver that cancels) ends it there, and the rest is dropped, as if
there had been a step for each.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Seq

from edgeqwen.core.request import FinishReason
from edgeqwen.errors import EdgeqwenError
from edgeqwen.scheduler.drafting import Drafting
from edgeqwen.scheduler.groups import Groups
from edgeqwen.scheduler.plan import Outcome, RequestFailed, SchedulerEvent, SequenceEnded, TokenDrawn
from edgeqwen.scheduler.residents import Residents
from edgeqwen.scheduler.sequence import Sequence, State


class Answers:
    """`eos_token_ids` end a sequence unless its request ignores them."""

    def __init__(
        self, groups: Groups, residents: Residents, drafting: Drafting, *, eos_token_ids: frozenset[int]
    ) -> None:
        self._groups = groups
        self._residents = residents
        self._drafting = drafting
        self._eos = eos_token_ids

    def begin(self, sequence: Sequence) -> None:
        """All but its last token has been computed: from now on it is decoded."""
        self._residents.begin_decoding(sequence)
        if sequence.drafter is None and not sequence.generated:
            self._drafting.begin(sequence)

    def rounds(self, sequences: Seq[Sequence], outcomes: Seq[Outcome], now: float) -> Iterator[list[SchedulerEvent]]:
        """Give the sequences of a step what came of it; the events of each round, before the next begins."""
        for number in range(max((len(outcome) for outcome in outcomes), default=0)):
            events: list[SchedulerEvent] = []
            for index, (sequence, outcome) in enumerate(zip(sequences, outcomes, strict=True)):
                if number >= len(outcome) or sequence.state is State.FINISHED:
                    continue
                result = outcome[number]
                if isinstance(result, EdgeqwenError):
                    events += self.fail(sequence.request.rid, result, now)
                else:
                    if number:
                        self._residents.hold(sequence, sequence.num_computed + 1)
                    events += self._take_token(sequence, index, result, now)
            yield events

    def _take_token(self, sequence: Sequence, index: int, token: int, now: float) -> list[SchedulerEvent]:
        request = sequence.request
        if sequence.state is State.PREFILLING:
            self.begin(sequence)
        sequence.generated.append(token)
        sequence.num_since_begin += 1
        if sequence.drafter is not None:
            sequence.drafter.push(token)
        is_end = token in self._eos and not request.ignore_eos
        events: list[SchedulerEvent] = [TokenDrawn(request.rid, sequence.choice, index, token, is_end)]
        if is_end:
            events.append(self.end(sequence, "stop", now))
        elif sequence.num_generated == request.max_tokens:
            events.append(self.end(sequence, "length", now))
        return events

    def end(self, sequence: Sequence, reason: FinishReason, now: float) -> SequenceEnded:
        """The one way out of every state. The slot of a sequence in flight is given back when its step lands."""
        self._residents.leave(sequence)
        self._groups.forget_if_over(sequence.request, now)
        return SequenceEnded(sequence.request.rid, sequence.choice, reason)

    def fail(self, rid: str, error: EdgeqwenError, now: float) -> list[RequestFailed]:
        """End a request with an error, unless another choice in the same step has failed it already."""
        sequences = self._groups.live(rid)
        for sequence in sequences:
            sequence.is_spoilt = True
            self.end(sequence, "cancelled", now)
        return [RequestFailed(rid, error)] if sequences else []
