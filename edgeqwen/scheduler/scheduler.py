"""The scheduler: sequences in, planned steps out, results in, events out.

Life of a step, all of it on one thread:

    plan(now) -> StepPlan    the sequences in it are in flight, their slots are fixed
    ... the step runs elsewhere; submit, cancel, stop and expire may be called meanwhile ...
    commit(plan, ...)        or fail(plan, ...): nothing is in flight any more

A prefill chunk and a decode step of all decoding sequences alternate, so a long prompt slows the others down but never
stops them. One prompt is prefilled at a time, in order of arrival: rows of different prompts would have to be padded to
one length. A request of n choices is n sequences; the prompt is computed for the first, and those that start while one
of them decodes get its cache copied and compute the last token alone. They share their fate when one of them fails.

Freed slots are collected for `take_releases`; the engine must have the runtime release those before the next step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from collections.abc import Sequence as Seq

from edgeqwen.core.request import FinishReason, Request
from edgeqwen.core.step import Batch, Chunk, RuntimeSpec
from edgeqwen.errors import EdgeqwenError
from edgeqwen.kvcache import SlotTable
from edgeqwen.scheduler.admission import Admission
from edgeqwen.scheduler.chunking import ChunkSizer
from edgeqwen.scheduler.plan import RequestFailed, SchedulerEvent, SequenceEnded, SlotCopy, StepPlan, TokenDrawn
from edgeqwen.scheduler.sequence import Group, Sequence, State

Outcome = int | EdgeqwenError | None
"""What came of one chunk: a token, an error of that row alone, or nothing (a chunk without logits)."""


class Scheduler:
    """Owns the sequences and the slots. `eos_token_ids` end a sequence unless its request ignores them."""

    def __init__(
        self,
        spec: RuntimeSpec,
        *,
        admission: Admission,
        eos_token_ids: Iterable[int] = (),
        shared_chunk_s: float = 0.2,
        alone_chunk_s: float = 1.0,
    ) -> None:
        self._spec = spec
        self._admission = admission
        self._eos = frozenset(eos_token_ids)
        self._sizer = ChunkSizer(max_chunk=spec.max_chunk, shared_s=shared_chunk_s, alone_s=alone_chunk_s)
        self._slots = SlotTable(spec.num_slots, spec.capacity)
        self._groups: dict[str, Group] = {}
        self._waiting: deque[Sequence] = deque()
        self._prefilling: Sequence | None = None
        self._decoding: dict[int, Sequence] = {}
        self._in_flight: tuple[Sequence, ...] = ()
        self._releases: list[int] = []
        self._was_prefill = False

    @property
    def num_running(self) -> int:
        """Requests that have had a step, or are in their first."""
        return sum(group.has_started for group in self._groups.values())

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
        self._admission.add(request.owner)
        num_before = self.num_queued
        group = Group(request)
        group.sequences.extend(Sequence(request, choice) for choice in range(request.n))
        self._groups[request.rid] = group
        self._waiting.extend(group.sequences)
        return num_before

    def cancel(self, rid: str, *, now: float, reason: FinishReason = "cancelled") -> list[SchedulerEvent]:
        """End what is left of a request; nothing happens if there is no such request."""
        group = self._groups.get(rid)
        if group is None:
            return []
        live = [sequence for sequence in group.sequences if sequence.state is not State.FINISHED]
        return [event for sequence in live for event in self._finish(sequence, reason, now)]

    def stop(self, rid: str, choice: int, *, now: float) -> list[SchedulerEvent]:
        """End one choice with reason `stop` (its text is complete); nothing happens if it has already ended."""
        group = self._groups.get(rid)
        if group is None or group.sequences[choice].state is State.FINISHED:
            return []
        return self._finish(group.sequences[choice], "stop", now)

    def expire(self, now: float) -> list[SchedulerEvent]:
        """End every request whose deadline has come."""
        late = [rid for rid, group in self._groups.items() if group.request.deadline_at <= now]
        return [event for rid in late for event in self.cancel(rid, now=now, reason="deadline")]

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
        chunks = [Chunk(slot, seq.num_computed, (seq.last_token,)) for slot, seq in zip(slots, sequences, strict=True)]
        return self._launch(chunks, sequences, is_prefill=False)

    def _next_prefill(self, now: float) -> Sequence | None:
        """The sequence whose prompt is being computed; the next waiting one if there is none and a slot is free."""
        if self._prefilling is None and self._waiting and self._slots.num_free:
            sequence = self._waiting.popleft()
            sequence.slot = self._slots.acquire()
            sequence.enter(State.PREFILLING)
            self._prefilling = sequence
            group = self._groups[sequence.request.rid]
            if not group.has_started:
                group.started_at = now
                self._admission.start()
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

    def commit(self, plan: StepPlan, outcomes: Seq[Outcome], *, duration_s: float, now: float) -> list[SchedulerEvent]:
        """Take in the results of the step in flight, one outcome a chunk; `duration_s` is what the runtime took."""
        sequences = self._land(plan)
        assert len(outcomes) == len(sequences)
        if plan.is_prefill:
            self._sizer.observe(len(plan.batch.chunks[0].ids), duration_s)
        events: list[SchedulerEvent] = []
        for index, (sequence, chunk, outcome) in enumerate(zip(sequences, plan.batch.chunks, outcomes, strict=True)):
            if sequence.state is State.FINISHED:
                self._free_slot(sequence)
                continue
            sequence.num_computed = chunk.stop
            self._slots.set_length(chunk.slot, chunk.stop)
            if isinstance(outcome, EdgeqwenError):
                events += self._fail_request(sequence.request.rid, outcome, now)
            elif outcome is not None:
                events += self._take_token(sequence, index, outcome, now)
        return events

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
        sequence.num_generated += 1
        sequence.last_token = token
        is_end = token in self._eos and not request.ignore_eos
        events: list[SchedulerEvent] = [TokenDrawn(request.rid, sequence.choice, index, token, is_end)]
        if is_end:
            events += self._finish(sequence, "stop", now)
        elif sequence.num_generated == request.max_tokens:
            events += self._finish(sequence, "length", now)
        return events

    def _fail_request(self, rid: str, error: EdgeqwenError, now: float) -> list[SchedulerEvent]:
        group = self._groups.get(rid)
        if group is None:  # another choice in the same step has failed it already
            return []
        for sequence in group.sequences:
            if sequence.state is not State.FINISHED:
                self._finish(sequence, "cancelled", now)
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
        self._forget_if_over(sequence.request, now)
        return [SequenceEnded(sequence.request.rid, sequence.choice, reason)]

    def _free_slot(self, sequence: Sequence) -> None:
        assert sequence.state is State.FINISHED
        assert not sequence.is_in_flight
        if sequence.slot is None:  # freed before, when another choice of its request failed in the same step
            return
        self._slots.release(sequence.slot)
        self._releases.append(sequence.slot)
        sequence.slot = None

    def _forget_if_over(self, request: Request, now: float) -> None:
        group = self._groups[request.rid]
        if not group.is_over:
            return
        del self._groups[request.rid]
        service_s = None if group.started_at is None else now - group.started_at
        self._admission.remove(request.owner, has_started=group.has_started, service_s=service_s)

    def check(self) -> None:
        """Assert the invariants: every slot has one holder, every sequence stands where its state says."""
        self._slots.check()
        live = [sequence for group in self._groups.values() for sequence in group.sequences]
        holders = {s for s in (*live, *self._in_flight) if s.slot is not None}
        held = sorted(s.slot for s in holders if s.slot is not None)
        assert tuple(held) == self._slots.taken(), f"held {held}, taken {self._slots.taken()}"
        by_state = {state: [s for s in live if s.state is state] for state in State}
        assert set(by_state[State.WAITING]) == set(self._waiting)
        assert by_state[State.PREFILLING] == ([] if self._prefilling is None else [self._prefilling])
        assert set(by_state[State.DECODING]) == set(self._decoding.values())
        assert all(sequence.slot == slot for slot, sequence in self._decoding.items())
        assert all(sequence.is_in_flight for sequence in self._in_flight)
        assert all(not group.is_over for group in self._groups.values())

    def __repr__(self) -> str:
        prefilling = int(self._prefilling is not None)
        counts = f"{len(self._waiting)} waiting, {prefilling} prefilling, {len(self._decoding)} decoding"
        return f"<Scheduler [{counts} | {self._slots!r}]>"
