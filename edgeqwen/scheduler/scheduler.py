"""The scheduler: sequences in, planned steps out, results in, events out.

Life of a step, all of it on one thread:

    plan(now) -> StepPlan    the sequences in it are in flight, their slots are fixed
    ... the step runs elsewhere; submit, cancel, stop and expire may be called meanwhile ...
    commit(plan, ...)        or fail(plan, ...): nothing is in flight any more

A step may give a sequence several tokens, where guesses proved right (`scheduler.drafting`). They are taken in rounds,
one token of each sequence a round, and events are delivered between rounds: so what ends a sequence at one token (the
end token, the budget, a stop string in the text, a receiver that cancels) ends it there, and the rest is dropped, as if
there had been a step for each.

A prefill chunk and a decode step of all decoding sequences alternate, so a long prompt slows the others down but never
stops them. One prompt is prefilled at a time, in order of arrival: rows of different prompts would have to be padded to
one length. A request of n choices is n sequences; the prompt is computed for the first, and those that start while one
of them decodes get its cache copied and compute the last token alone. They share their fate when one of them fails.

Freed slots are collected for `take_releases`; the engine must have the runtime release those before the next step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Seq

from edgeqwen.core.request import FinishReason, Request
from edgeqwen.core.step import Batch, Chunk, RuntimeSpec
from edgeqwen.errors import EdgeqwenError
from edgeqwen.kvcache import SlotTable
from edgeqwen.scheduler.admission import Admission
from edgeqwen.scheduler.chunking import ChunkSizer
from edgeqwen.scheduler.drafting import Drafting
from edgeqwen.scheduler.groups import Groups
from edgeqwen.scheduler.plan import (
    Outcome,
    RequestFailed,
    SchedulerEvent,
    SequenceEnded,
    SlotCopy,
    StepPlan,
    TokenDrawn,
)
from edgeqwen.scheduler.sequence import Sequence, State


class Scheduler:
    """Owns the sequences and the slots. `eos_token_ids` end a sequence unless its request ignores them; `speculates`
    allows guesses.
    """

    def __init__(
        self,
        spec: RuntimeSpec,
        *,
        admission: Admission,
        eos_token_ids: Iterable[int] = (),
        speculates: bool = True,
        shared_chunk_s: float = 0.2,
        alone_chunk_s: float = 1.0,
    ) -> None:
        self._spec = spec
        self._eos = frozenset(eos_token_ids)
        self._sizer = ChunkSizer(
            max_chunk=spec.max_chunk, shared_s=shared_chunk_s, alone_s=alone_chunk_s, row_costs=spec.row_costs
        )
        self.drafting = Drafting(spec, eos_token_ids=self._eos, is_on=speculates)
        self._slots = SlotTable(spec.num_slots, spec.capacity)
        self._groups = Groups(admission)
        self._waiting: deque[Sequence] = deque()
        self._prefilling: Sequence | None = None
        self._decoding: dict[int, Sequence] = {}
        self._in_flight: tuple[Sequence, ...] = ()
        self._releases: list[int] = []
        self._was_prefill = False

    @property
    def num_running(self) -> int:
        """Requests that have had a step, or are in their first."""
        return self._groups.num_running

    @property
    def num_queued(self) -> int:
        return len(self._groups) - self.num_running

    @property
    def num_held_tokens(self) -> int:
        """Tokens in all taken slots."""
        return self._slots.num_held_tokens

    @property
    def is_idle(self) -> bool:
        """Nothing waits, runs or is in flight."""
        return not self._groups and not self._in_flight

    def submit(self, request: Request) -> int:
        """Queue a request; returns how many wait before it.

        Raises `EdgeqwenError` and changes nothing: `too_long` (prompt and answer exceed a slot), `quota`, `busy`.
        """
        assert request.rid not in self._groups
        assert min(len(request.prompt_ids), request.max_tokens, request.n) > 0
        excess = len(request.prompt_ids) + request.max_tokens - self._spec.capacity
        if excess > 0:
            message = (
                f"a prompt of {len(request.prompt_ids)} tokens and an answer of {request.max_tokens} are {excess} more"
                f" than the context of {self._spec.capacity}"
            )
            raise EdgeqwenError(message, code="too_long")
        num_before = self.num_queued
        self._waiting.extend(self._groups.add(request).sequences)
        return num_before

    def cancel(self, rid: str, *, now: float, reason: FinishReason = "cancelled") -> list[SchedulerEvent]:
        """End what is left of a request; nothing happens if there is no such request."""
        return [event for sequence in self._groups.live(rid) for event in self._finish(sequence, reason, now)]

    def stop(self, rid: str, choice: int, *, now: float) -> list[SchedulerEvent]:
        """End one choice with reason `stop` (its text is complete); nothing happens if it has already ended."""
        meant = [sequence for sequence in self._groups.live(rid) if sequence.choice == choice]
        return [event for sequence in meant for event in self._finish(sequence, "stop", now)]

    def expire(self, now: float) -> list[SchedulerEvent]:
        """End every request whose deadline has come."""
        return [event for rid in self._groups.late(now) for event in self.cancel(rid, now=now, reason="deadline")]

    def plan(self, now: float) -> StepPlan | None:
        """The next step, or None if there is nothing to compute. No step may be in flight."""
        assert not self._in_flight, "a step is in flight"
        sequence = self._next_prefill(now)
        if sequence is not None and not (self._was_prefill and self._decoding):
            copy = self._shared_prompt(sequence)
            return self._launch([self._prefill_chunk(sequence)], [sequence], is_prefill=True, copy=copy)
        if not self._decoding:
            return None
        slots = sorted(self._decoding)
        sequences = [self._decoding[slot] for slot in slots]
        chunks = [
            Chunk(slot, sequence.num_computed, (sequence.last_token, *draft), num_logits=1 + len(draft))
            for slot, sequence, draft in zip(slots, sequences, self.drafting.drafts(sequences), strict=True)
        ]
        return self._launch(chunks, sequences, is_prefill=False)

    def _next_prefill(self, now: float) -> Sequence | None:
        """The sequence whose prompt is being computed; the next waiting one if there is none and a slot is free."""
        if self._prefilling is None and self._waiting and self._slots.num_free:
            sequence = self._waiting.popleft()
            sequence.slot = self._slots.acquire()
            sequence.enter(State.PREFILLING)
            self._prefilling = sequence
            self._groups.start(sequence.request.rid, now)
        return self._prefilling

    def _shared_prompt(self, sequence: Sequence) -> SlotCopy | None:
        """For a sequence that has computed nothing: the copy that leaves only the prompt's last token to compute."""
        length = len(sequence.request.prompt_ids) - 1
        donor = self._groups[sequence.request.rid].donor()
        if donor is None or sequence.num_computed or length < 1:
            return None
        assert donor.slot is not None
        assert sequence.slot is not None
        sequence.num_computed = length
        return SlotCopy(donor.slot, sequence.slot, length)

    def _prefill_chunk(self, sequence: Sequence) -> Chunk:
        # prompt   |<- num_computed ->|<- size ->|<- later chunks ->|     only the prompt's last row needs logits
        assert sequence.slot is not None
        start = sequence.num_computed
        stop = start + min(self._sizer.size(is_shared=bool(self._decoding)), sequence.num_unprefilled)
        prompt = sequence.request.prompt_ids
        return Chunk(sequence.slot, start, prompt[start:stop], num_logits=int(stop == len(prompt)))

    def _launch(
        self, chunks: list[Chunk], sequences: list[Sequence], *, is_prefill: bool, copy: SlotCopy | None = None
    ) -> StepPlan:
        for sequence in sequences:
            sequence.is_in_flight = True
        self._in_flight = tuple(sequences)
        self._was_prefill = is_prefill
        owners = tuple((sequence.request.rid, sequence.choice) for sequence in sequences)
        return StepPlan(Batch(tuple(chunks)), owners, is_prefill, copy)

    def commit(
        self, plan: StepPlan, outcomes: Seq[Outcome], *, duration_s: float, now: float
    ) -> Iterator[list[SchedulerEvent]]:
        """Take in the results of the step in flight, one outcome a chunk; `duration_s` is what the runtime took.

        Gives the events round by round; each is to be delivered before the next is asked for, and all must be taken.
        """
        sequences = self._land(plan)
        chunks = plan.batch.chunks
        if plan.is_prefill:
            self._sizer.observe(len(chunks[0].ids), duration_s)
        else:
            self.drafting.observe(chunks, [len(outcome) for outcome in outcomes], duration_s)
        for sequence, chunk in zip(sequences, chunks, strict=True):
            if sequence.state is State.FINISHED:
                self._free_slot(sequence)
            else:
                self._hold(sequence, chunk.stop - chunk.num_logits)
        return self._rounds(sequences, outcomes, now)

    def _rounds(self, sequences: Seq[Sequence], outcomes: Seq[Outcome], now: float) -> Iterator[list[SchedulerEvent]]:
        for number in range(max(len(outcome) for outcome in outcomes)):
            events: list[SchedulerEvent] = []
            for index, (sequence, outcome) in enumerate(zip(sequences, outcomes, strict=True)):
                if number >= len(outcome) or sequence.state is State.FINISHED:
                    continue
                result = outcome[number]
                if isinstance(result, EdgeqwenError):
                    events += self._fail_request(sequence.request.rid, result, now)
                else:
                    self._hold(sequence, sequence.num_computed + 1)
                    events += self._take_token(sequence, index, result, now)
            yield events

    def _hold(self, sequence: Sequence, length: int) -> None:
        """The sequence's slot holds `length` tokens of it; what guesses left behind those is overwritten in time."""
        assert sequence.slot is not None
        sequence.num_computed = length
        self._slots.set_length(sequence.slot, length)

    def fail(self, plan: StepPlan, error: EdgeqwenError, *, now: float) -> list[SchedulerEvent]:
        """The step in flight failed as a whole: every request that had a chunk in it ends with `error`."""
        events: list[SchedulerEvent] = []
        for sequence in self._land(plan):
            if sequence.state is State.FINISHED:
                self._free_slot(sequence)
            else:
                events += self._fail_request(sequence.request.rid, error, now)
        return events

    def take_releases(self) -> tuple[int, ...]:
        """Slots freed since the last call, which the runtime must release before it runs another step."""
        releases = tuple(self._releases)
        self._releases.clear()
        return releases

    def _land(self, plan: StepPlan) -> tuple[Sequence, ...]:
        sequences = self._in_flight
        assert tuple((s.request.rid, s.choice) for s in sequences) == plan.sequences, "not the step in flight"
        self._in_flight = ()
        for sequence in sequences:
            sequence.is_in_flight = False
        return sequences

    def _take_token(self, sequence: Sequence, index: int, token: int, now: float) -> list[SchedulerEvent]:
        request = sequence.request
        if sequence.state is State.PREFILLING:
            assert sequence.slot is not None
            sequence.enter(State.DECODING)
            self._prefilling = None
            self._decoding[sequence.slot] = sequence
            self.drafting.begin(sequence)
        sequence.num_generated += 1
        sequence.last_token = token
        if sequence.drafter is not None:
            sequence.drafter.push(token)
        is_end = token in self._eos and not request.ignore_eos
        events: list[SchedulerEvent] = [TokenDrawn(request.rid, sequence.choice, index, token, is_end)]
        if is_end:
            events += self._finish(sequence, "stop", now)
        elif sequence.num_generated == request.max_tokens:
            events += self._finish(sequence, "length", now)
        return events

    def _fail_request(self, rid: str, error: EdgeqwenError, now: float) -> list[SchedulerEvent]:
        if rid not in self._groups:  # another choice in the same step has failed it already
            return []
        self.cancel(rid, now=now)
        return [RequestFailed(rid, error)]

    def _finish(self, sequence: Sequence, reason: FinishReason, now: float) -> list[SchedulerEvent]:
        """The one way out of every state. The slot of a sequence in flight is freed when its step lands."""
        if sequence.state is State.WAITING:
            self._waiting.remove(sequence)
        elif sequence.state is State.PREFILLING:
            self._prefilling = None
        elif sequence.slot is not None:
            del self._decoding[sequence.slot]
        sequence.enter(State.FINISHED)
        if sequence.slot is not None and not sequence.is_in_flight:
            self._free_slot(sequence)
        sequence.drafter = None
        self._groups.forget_if_over(sequence.request, now)
        return [SequenceEnded(sequence.request.rid, sequence.choice, reason)]

    def _free_slot(self, sequence: Sequence) -> None:
        assert sequence.state is State.FINISHED
        assert not sequence.is_in_flight
        if sequence.slot is None:  # freed before, when another choice of its request failed in the same step
            return
        self._slots.release(sequence.slot)
        self._releases.append(sequence.slot)
        sequence.slot = None

    def check(self) -> None:
        """Assert the invariants: every slot has one holder, every sequence stands where its state says."""
        self._slots.check()
        live = list(self._groups.sequences())
        holders = {s for s in (*live, *self._in_flight) if s.slot is not None}
        held = sorted(s.slot for s in holders if s.slot is not None)
        assert tuple(held) == self._slots.taken(), f"held {held}, taken {self._slots.taken()}"
        by_state = {state: [s for s in live if s.state is state] for state in State}
        assert set(by_state[State.WAITING]) == set(self._waiting)
        assert by_state[State.PREFILLING] == ([] if self._prefilling is None else [self._prefilling])
        assert set(by_state[State.DECODING]) == set(self._decoding.values())
        assert all(sequence.slot == slot for slot, sequence in self._decoding.items())
        assert all(sequence.is_in_flight for sequence in self._in_flight)
        self._groups.check()

    def __repr__(self) -> str:
        prefilling = int(self._prefilling is not None)
        counts = f"{len(self._waiting)} waiting, {prefilling} prefilling, {len(self._decoding)} decoding"
        return f"<Scheduler [{counts} | {self._slots!r}]>"
