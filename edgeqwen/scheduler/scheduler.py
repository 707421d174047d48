"""The scheduler: sequences in, planned steps out, results in, events out.

Life of a step, all of it on one thread:

    plan(now) -> StepPlan    the sequences in it are in flight, their slots are fixed
    ... the step runs elsewhere; submit, cancel, stop and expire may be called meanwhile ...
    commit(plan, ...)        or fail(plan, ...): nothing is in flight any more

A step may give a sequence several tokens, where guesses proved right (`scheduler.drafting`). They are taken in rounds,
one token of each sequence a round, and events are delivered between rounds: so what ends a sequence at one token (the
end token, the budget, a stop string in the text, a receiver that cancels) ends it there, and the rest is dropped, as if
there had been a step for each.

A piece of one prompt and a decode step of all decoding sequences alternate, so a long prompt slows the others down but
never stops them. Whose prompt comes next is for `scheduler.line` to say, how a sequence gets its slot and what is known
of its tokens for `scheduler.entry`, what becomes of a slot that is left for `scheduler.transfers`. When slots or room
run out, a sequence may be preempted for one that has more right to them.

A request of n choices is n sequences; the prompt is computed for the first, and those that start while one of them
decodes get its cache copied and compute the last token alone. They share their fate when one of them fails.

Freed slots are collected for `take_releases`; the engine must have the runtime release those before the next step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Seq
from itertools import count
from typing import Final

from edgeqwen.core.request import FinishReason, Request
from edgeqwen.core.step import Batch, Chunk, KVData, RuntimeSpec
from edgeqwen.errors import EdgeqwenError
from edgeqwen.kvcache import Block, BlockStore, SlotTable
from edgeqwen.scheduler.admission import Admission
from edgeqwen.scheduler.background import Background
from edgeqwen.scheduler.chunking import ChunkSizer
from edgeqwen.scheduler.drafting import Drafting
from edgeqwen.scheduler.entry import Entered, Entry, Fetch
from edgeqwen.scheduler.groups import Groups
from edgeqwen.scheduler.kept import KeptPrompts
from edgeqwen.scheduler.line import Line, choose_victim
from edgeqwen.scheduler.plan import (
    Begun,
    Outcome,
    RequestFailed,
    SchedulerEvent,
    SequenceEnded,
    SlotCopy,
    SlotLoad,
    StepPlan,
    TokenDrawn,
)
from edgeqwen.scheduler.sequence import Sequence, State
from edgeqwen.scheduler.transfers import MAX_BYTES, WRITE_DELAY_S, Transfers

BACKGROUND: Final = (("", 0),)
"""`StepPlan.sequences` of a step in the background: nobody's request."""


class Scheduler:
    """Owns the sequences and the slots. `eos_token_ids` end a sequence unless its request ignores them; `speculates`
    allows guesses. `store` keeps what is known; without one it is as large as all slots.
    """

    def __init__(
        self,
        spec: RuntimeSpec,
        *,
        admission: Admission,
        eos_token_ids: Iterable[int] = (),
        store: BlockStore | None = None,
        speculates: bool = True,
        shared_chunk_s: float = 0.2,
        alone_chunk_s: float = 1.0,
        write_delay_s: float = WRITE_DELAY_S,
    ) -> None:
        self._spec = spec
        self._eos = frozenset(eos_token_ids)
        self._sizer = ChunkSizer(
            max_chunk=spec.max_chunk, shared_s=shared_chunk_s, alone_s=alone_chunk_s, row_costs=spec.row_costs
        )
        self.drafting = Drafting(spec, eos_token_ids=self._eos, is_on=speculates)
        self.background = Background()
        self.num_preempted = 0
        self._store = store or default_store(spec)
        self._slots = SlotTable(spec.num_slots, spec.capacity)
        self._groups = Groups(admission)
        self._line = Line(self._sizer.seconds)
        self._transfers = Transfers(self._store, write_delay_s=write_delay_s)
        self._entry = Entry(spec, self._store, self._slots, self._transfers)
        self._numbers = count()
        self._waiting: dict[Sequence, None] = {}
        self._prefilling: dict[Sequence, None] = {}
        self._decoding: dict[int, Sequence] = {}
        self._in_flight: tuple[Sequence, ...] = ()
        self._loading: Sequence | None = None
        self._releases: list[int] = []
        self._begun: list[Begun] = []
        self._kept = KeptPrompts(self._store)
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
        """Nothing waits, runs or is in flight; blocks may still be on their way."""
        return not self._groups and not self._in_flight

    def submit(self, request: Request, *, now: float = 0.0) -> int:
        """Queue a request; returns how many wait before it.

        Raises `EdgeqwenError` and changes nothing: `too_long` (prompt and answer exceed a slot, or the cache's whole
        budget), `quota`, `busy`.
        """
        assert request.rid not in self._groups
        assert min(len(request.prompt_ids), request.max_tokens, request.n) > 0
        self._check_size(request)
        num_before = self.num_queued
        num_known = self._entry.num_known(request)
        for sequence in self._groups.add(request).sequences:
            sequence.number, sequence.since, sequence.num_known = next(self._numbers), now, num_known
            self._waiting[sequence] = None
        self._interrupt_background()
        return num_before

    def _check_size(self, request: Request) -> None:
        num_tokens = len(request.prompt_ids) + request.max_tokens
        sizes = f"a prompt of {len(request.prompt_ids)} tokens and an answer of {request.max_tokens}"
        excess = num_tokens - self._spec.capacity
        if excess > 0:
            message = f"{sizes} are {excess} more than the context of {self._spec.capacity}"
            raise EdgeqwenError(message, code="too_long")
        needed, budget = num_tokens * self._spec.kv_bytes_per_token, self._store.budget_bytes
        if needed > budget:
            message = f"{sizes} take {needed} bytes of cache, and all there is to have is {budget} (kv.memory_mb)"
            raise EdgeqwenError(message, code="too_long")

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

    # Background.

    def want(self, key: str, request: Request, *, now: float = 0.0, computes: bool = True) -> None:
        """The prompt of `request` (of 0 `max_tokens`) will be wanted: what is known of it is lasting from now on, and
        what is not is computed when there is nothing else to do, if `computes`.
        """
        assert not request.rid
        self.forget(key)
        self._transfers.make_lasting(request.owner, request.prompt_ids, now)
        if computes and len(request.prompt_ids) <= self._spec.capacity:
            self.background.want(key, request)

    def forget(self, key: str) -> None:
        """Nobody wants that any more."""
        if self.background.forget(key):
            self._end_background(is_done=False)

    def keep_for_good(self, owner: str, prompt_ids: tuple[int, ...]) -> None:
        """Once this prompt is known, it stays."""
        self._kept.add(owner, prompt_ids)

    def _interrupt_background(self) -> None:
        if self.background.running is not None:
            self._end_background(is_done=False)

    def _end_background(self, *, is_done: bool) -> None:
        sequence = self.background.running
        assert sequence is not None
        self.background.end(sequence, is_done=is_done)
        self._leave(sequence)

    # Planning.

    def plan(self, now: float) -> StepPlan | None:
        """The next step, or None if there is nothing to do now. No step may be in flight."""
        assert not self._in_flight, "a step is in flight"
        saves, done = self._transfers.plan(is_shared=bool(self._decoding))
        for slot in done:
            self._free_slot(slot)
        self._line.keep(sequence.request.owner for sequence in (*self._waiting, *self._running()))
        step = self._plan_step(now)
        if step is None and not saves:
            return None
        step = step or StepPlan(Batch(()), (), is_prefill=False)
        begun, self._begun = tuple(self._begun), []
        return StepPlan(step.batch, step.sequences, step.is_prefill, step.copy, saves, step.loads, begun)

    def _plan_step(self, now: float) -> StepPlan | None:
        if not (self._was_prefill and self._decoding):
            sequence = self._next_prefill(now)
            if sequence is not None:
                return self._launch_prefill(sequence)
        if not self._decoding:
            return None
        slots = sorted(self._decoding)
        sequences = [self._decoding[slot] for slot in slots]
        chunks = [
            Chunk(slot, sequence.num_computed, (sequence.last_token, *draft), num_logits=1 + len(draft))
            for slot, sequence, draft in zip(slots, sequences, self.drafting.drafts(sequences), strict=True)
        ]
        return self._launch(chunks, sequences, is_prefill=False)

    def _running(self) -> list[Sequence]:
        return [*self._prefilling, *self._decoding.values()]

    def _next_prefill(self, now: float) -> Sequence | None:
        """The sequence whose prompt is computed next: one that has a slot, or that gets one now."""
        is_full = False
        for sequence in self._line.order((*self._prefilling, *self._waiting), now):
            if sequence in self._prefilling:
                return sequence
            if not is_full:
                is_full = self._enter(sequence, now)
                if sequence in self._prefilling:
                    return sequence
        return self._next_background() if not self._groups else None

    def _enter(self, sequence: Sequence, now: float) -> bool:
        """Try to give a waiting sequence its slot; True if there is none, and others must not overtake it either."""
        group = self._groups[sequence.request.rid]
        donor = group.donor() if not sequence.generated else None
        entered = self._entry.enter(sequence, self._running(), has_donor=donor is not None)
        if entered is Entered.NO_ROOM:
            is_released = not self._preempt_for(sequence, now) and self._release_pins()
            return self._enter(sequence, now) if is_released else True
        if entered is Entered.ROOM_SOON:
            return True
        if entered is Entered.YES:
            del self._waiting[sequence]
            self._prefilling[sequence] = None
            if not group.has_started:
                self._groups.start(sequence.request.rid, now)
                self._begun.append(Begun(sequence.request.rid, sequence.num_cached or 0))
        return False

    def _release_pins(self) -> bool:
        """If nothing runs, what is kept for those that wait keeps all of them from running: let it go, or if that is
        not it, what is kept for good. False if nothing was let go.
        """
        if self._running() or self._transfers.slots:
            return False
        holders = [sequence for sequence in self._waiting if sequence.pins and not sequence.is_fetching]
        for sequence in holders:
            self._store.unpin(sequence.pins)
            sequence.pins = []
        if holders:
            return True
        released = self._kept.release()
        for key, request in released.items():
            self.background.want(key, request)
        return bool(released)

    def _preempt_for(self, candidate: Sequence, now: float) -> bool:
        """Have a running sequence make place, if one should; its slot is free when what it holds has been saved."""
        if self._transfers.slots:
            return False
        held = Counter(sequence.request.owner for sequence in self._running())
        victim = choose_victim(candidate, self._running(), held.__getitem__, now)
        if victim is None or victim.slot is None:
            return False
        slot, length = victim.slot, victim.num_computed
        if not self._transfers.park(slot, victim, reserved_bytes=victim.reserved_bytes, length=length):
            return False
        del self._decoding[slot]
        victim.slot, victim.reserved_bytes, victim.num_computed, victim.since = None, 0, 0, now
        victim.num_known = length
        victim.enter(State.WAITING)
        self._waiting[victim] = None
        self.num_preempted += 1
        return True

    def _next_background(self) -> Sequence | None:
        while (sequence := self.background.next()) is not None:
            if sequence.state is State.PREFILLING:
                return sequence
            if self._entry.is_known(sequence):
                self._end_background(is_done=True)
                continue
            entered = self._entry.enter(sequence, [])
            if entered is not Entered.NO_ROOM:
                return sequence if entered is Entered.YES else None
            self.background.drop(sequence)
            self._leave(sequence)
        return None

    def _launch_prefill(self, sequence: Sequence) -> StepPlan:
        """What is known of the sequence goes into its slot, then a piece of what is not is computed."""
        self._line.note_piece(sequence)
        copy = self._shared_prompt(sequence)
        loads = self._take_loads(sequence)
        self._loading = sequence if loads else None
        if sequence.loads:  # more than one step should copy
            return self._launch([], [sequence], is_prefill=True, loads=loads)
        start = loads[-1].stop if loads else sequence.num_computed
        if start + 1 == sequence.num_tokens and sequence.generated:  # preempted, and all of it was known
            return self._launch([], [sequence], is_prefill=True, loads=loads)
        return self._launch([self._prefill_chunk(sequence, start)], [sequence], is_prefill=True, copy=copy, loads=loads)

    def _take_loads(self, sequence: Sequence) -> tuple[SlotLoad, ...]:
        taken: list[SlotLoad] = []
        num_bytes = 0
        while sequence.loads and (not taken or num_bytes + sequence.loads[0].num_bytes <= MAX_BYTES):
            num_bytes += sequence.loads[0].num_bytes
            taken.append(sequence.loads.popleft())
        return tuple(taken)

    def _shared_prompt(self, sequence: Sequence) -> SlotCopy | None:
        """For a sequence that has computed nothing: the copy that leaves only the prompt's last token to compute."""
        if sequence.is_background or sequence.num_computed or sequence.loads or sequence.generated:
            return None
        length = len(sequence.request.prompt_ids) - 1
        donor = self._groups[sequence.request.rid].donor()
        if donor is None or length < 1:
            return None
        assert donor.slot is not None
        assert sequence.slot is not None
        sequence.num_computed = length
        return SlotCopy(donor.slot, sequence.slot, length)

    def _prefill_chunk(self, sequence: Sequence, start: int) -> Chunk:
        # tokens   |<- start ->|<- size ->|<- later chunks ->|     only the last row needs logits
        assert sequence.slot is not None
        size = self._sizer.size(is_shared=bool(self._decoding) or sequence.is_background)
        stop = min(start + size, sequence.num_tokens)
        is_last = stop == sequence.num_tokens and not sequence.is_background
        return Chunk(sequence.slot, start, sequence.tokens(start, stop), num_logits=int(is_last))

    def _launch(
        self,
        chunks: list[Chunk],
        sequences: list[Sequence],
        *,
        is_prefill: bool,
        copy: SlotCopy | None = None,
        loads: tuple[SlotLoad, ...] = (),
    ) -> StepPlan:
        for sequence in sequences:
            sequence.is_in_flight = True
        self._in_flight = tuple(sequences)
        self._was_prefill = is_prefill
        owners = tuple((sequence.request.rid, sequence.choice) for sequence in sequences)
        return StepPlan(Batch(tuple(chunks)), owners, is_prefill, copy, loads=loads)

    # Results.

    def commit(
        self,
        plan: StepPlan,
        outcomes: Seq[Outcome],
        *,
        duration_s: float,
        now: float,
        saved: tuple[KVData, ...] | None = (),
    ) -> Iterator[list[SchedulerEvent]]:
        """Take in the results of the step in flight, one outcome a chunk; `duration_s` is what the runtime took for it,
        `saved` what the plan's saves gave, None if it could not be read.

        Gives the events round by round; each is to be delivered before the next is asked for, and all must be taken.
        """
        if saved is None:
            self._give_up_saving()
        else:
            self._transfers.commit(saved, now)
        self._kept.pin_known()
        sequences = self._land(plan)
        self._take_in_loads(plan)
        chunks = plan.batch.chunks
        self._observe(plan, outcomes, duration_s)
        self._line.charge(sequences, duration_s)
        for sequence, chunk in zip(sequences, chunks, strict=False):
            # What guesses left behind what is sure is overwritten in time.
            self._hold(sequence, chunk.stop if plan.is_prefill else chunk.start + 1)
        for sequence in sequences:
            if sequence.state is State.FINISHED:
                self._give_slot_back(sequence)
            elif not chunks or sequence.is_background:
                self._end_prefill(sequence)
        return self._rounds(sequences, outcomes, now)

    def _observe(self, plan: StepPlan, outcomes: Seq[Outcome], duration_s: float) -> None:
        chunks = plan.batch.chunks
        if plan.is_prefill and chunks:
            self._sizer.observe(len(chunks[0].ids), duration_s)
            if not chunks[0].num_logits and plan.sequences == BACKGROUND:
                self.background.num_tokens += len(chunks[0].ids)
        elif chunks:
            self.drafting.observe(chunks, [len(outcome) for outcome in outcomes], duration_s)

    def _take_in_loads(self, plan: StepPlan) -> None:
        sequence, self._loading = self._loading, None
        if sequence is None:
            return
        self._hold(sequence, plan.loads[-1].stop)
        if not sequence.loads:
            self._store.unpin(sequence.pins)
            sequence.pins = []

    def _end_prefill(self, sequence: Sequence) -> None:
        """Nothing was drawn: a step that only loaded, or one in the background. Perhaps that was all there was."""
        if sequence.is_background:
            if sequence is self.background.running and not sequence.num_pending and not sequence.loads:
                self._end_background(is_done=True)
        elif not sequence.loads and sequence.num_pending == 1 and sequence.generated:
            self._begin_decoding(sequence)

    def _rounds(self, sequences: Seq[Sequence], outcomes: Seq[Outcome], now: float) -> Iterator[list[SchedulerEvent]]:
        for number in range(max((len(outcome) for outcome in outcomes), default=0)):
            events: list[SchedulerEvent] = []
            for index, (sequence, outcome) in enumerate(zip(sequences, outcomes, strict=True)):
                if number >= len(outcome) or sequence.state is State.FINISHED:
                    continue
                result = outcome[number]
                if isinstance(result, EdgeqwenError):
                    events += self._fail_request(sequence.request.rid, result, now)
                else:
                    if number:
                        self._hold(sequence, sequence.num_computed + 1)
                    events += self._take_token(sequence, index, result, now)
            yield events

    def _hold(self, sequence: Sequence, length: int) -> None:
        """The sequence's slot holds `length` tokens of it."""
        assert sequence.slot is not None
        sequence.num_computed = length
        self._slots.set_length(sequence.slot, length)

    def fail(self, plan: StepPlan, error: EdgeqwenError, *, now: float) -> list[SchedulerEvent]:
        """The step in flight failed as a whole: every request that had a part in it ends with `error`."""
        self._give_up_saving()
        self._loading = None
        events: list[SchedulerEvent] = []
        for sequence in self._land(plan):
            sequence.is_spoilt = True
            if sequence.state is State.FINISHED:
                self._give_slot_back(sequence)
            elif sequence is self.background.running:
                self.background.drop(sequence)
                self._leave(sequence)
            else:
                events += self._fail_request(sequence.request.rid, error, now)
        return events

    def _give_up_saving(self) -> None:
        for slot in self._transfers.fail():
            self._free_slot(slot)

    def take_releases(self) -> tuple[int, ...]:
        """Slots freed since the last call, which the runtime must release before it runs another step."""
        releases = tuple(self._releases)
        self._releases.clear()
        return releases

    def take_fetches(self) -> tuple[Fetch, ...]:
        """Blocks to be read from disk; each is to be reported with `fetched`."""
        fetches = tuple(self._entry.fetches)
        self._entry.fetches.clear()
        return fetches

    def fetched(self, fetch: Fetch, data: Seq[KVData | None]) -> list[Block]:
        """What was read, None for files that are damaged or gone; returns the blocks whose files are of no use now."""
        useless: list[Block] = []
        for block, content in zip(fetch.blocks, data, strict=True):
            if content is None:
                useless += self._store.unstore(block)
            elif block.data is None and block.is_stored and self._store.make_room(block.num_bytes):
                self._store.fill(block, content)
        sequence = fetch.sequence
        sequence.is_fetching = False
        if sequence.state is State.FINISHED:
            self._store.unpin(sequence.pins)
            sequence.pins = []
        return useless

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
            self._begin_decoding(sequence)
        sequence.generated.append(token)
        sequence.num_since_begin += 1
        if sequence.drafter is not None:
            sequence.drafter.push(token)
        is_end = token in self._eos and not request.ignore_eos
        events: list[SchedulerEvent] = [TokenDrawn(request.rid, sequence.choice, index, token, is_end)]
        if is_end:
            events += self._finish(sequence, "stop", now)
        elif sequence.num_generated == request.max_tokens:
            events += self._finish(sequence, "length", now)
        return events

    def _begin_decoding(self, sequence: Sequence) -> None:
        assert sequence.slot is not None
        sequence.enter(State.DECODING)
        del self._prefilling[sequence]
        self._decoding[sequence.slot] = sequence
        if sequence.drafter is None and not sequence.generated:
            self.drafting.begin(sequence)

    def _fail_request(self, rid: str, error: EdgeqwenError, now: float) -> list[SchedulerEvent]:
        if rid not in self._groups:  # another choice in the same step has failed it already
            return []
        for sequence in self._groups.live(rid):
            sequence.is_spoilt = True
        self.cancel(rid, now=now)
        return [RequestFailed(rid, error)]

    def _finish(self, sequence: Sequence, reason: FinishReason, now: float) -> list[SchedulerEvent]:
        """The one way out of every state. The slot of a sequence in flight is given back when its step lands."""
        self._leave(sequence)
        self._groups.forget_if_over(sequence.request, now)
        return [SequenceEnded(sequence.request.rid, sequence.choice, reason)]

    def _leave(self, sequence: Sequence) -> None:
        if sequence.state is State.WAITING:
            self._waiting.pop(sequence, None)
        elif sequence.state is State.PREFILLING:
            self._prefilling.pop(sequence, None)
        elif sequence.slot is not None:
            del self._decoding[sequence.slot]
        if sequence.is_parking:
            self._transfers.forget_parked(sequence)
        sequence.enter(State.FINISHED)
        sequence.drafter = None
        if not sequence.is_fetching and not sequence.is_in_flight:
            self._store.unpin(sequence.pins)
            sequence.pins = []
        if sequence.slot is not None and not sequence.is_in_flight:
            self._give_slot_back(sequence)

    def _give_slot_back(self, sequence: Sequence) -> None:
        """What the slot holds is kept, if it is worth anything."""
        assert sequence.state is State.FINISHED
        assert not sequence.is_in_flight
        slot = sequence.slot
        if slot is None:  # given back before, when another choice of its request failed in the same step
            return
        sequence.slot = None
        self._store.unpin(sequence.pins)
        sequence.pins = []
        sequence.loads.clear()
        reserved_bytes, sequence.reserved_bytes = sequence.reserved_bytes, 0
        if sequence.request.may_cache and sequence.num_computed and not sequence.is_spoilt:
            self._transfers.take_slot(slot, sequence, reserved_bytes=reserved_bytes, length=sequence.num_computed)
        else:
            self._store.unreserve(reserved_bytes)
            self._free_slot(slot)

    def _free_slot(self, slot: int) -> None:
        self._slots.release(slot)
        self._releases.append(slot)

    def check(self) -> None:
        """Assert the invariants: every slot has one holder, every sequence stands where its state says, and all that is
        reserved is somebody's.
        """
        self._slots.check()
        self._store.check()
        self._transfers.check()
        live = list(self._groups.sequences())
        background = [] if self.background.running is None else [self.background.running]
        holders = {s for s in (*live, *background, *self._in_flight) if s.slot is not None}
        held = sorted([*(s.slot for s in holders if s.slot is not None), *self._transfers.slots])
        assert tuple(held) == self._slots.taken(), f"held {held}, taken {self._slots.taken()}"
        reserved = sum(s.reserved_bytes for s in holders) + self._transfers.reserved_bytes
        assert reserved == self._store.reserved_bytes, f"{reserved} of {self._store.reserved_bytes} reserved"
        by_state = {state: [s for s in live if s.state is state] for state in State}
        assert set(by_state[State.WAITING]) == set(self._waiting)
        assert set(by_state[State.PREFILLING]) == set(self._prefilling)
        assert set(by_state[State.DECODING]) == set(self._decoding.values())
        assert all(sequence.slot == slot for slot, sequence in self._decoding.items())
        assert all(sequence.is_in_flight for sequence in self._in_flight)
        self._groups.check()

    def __repr__(self) -> str:
        counts = f"{len(self._waiting)} waiting, {len(self._prefilling)} prefilling, {len(self._decoding)} decoding"
        return f"<Scheduler [{counts} | {self._slots!r}]>"


def default_store(spec: RuntimeSpec) -> BlockStore:
    """One that holds as much as all slots, beside them."""
    num_bytes = 2 * spec.num_slots * spec.capacity * spec.kv_bytes_per_token
    return BlockStore(budget_bytes=num_bytes, token_bytes=spec.kv_bytes_per_token, capacity=spec.capacity)
