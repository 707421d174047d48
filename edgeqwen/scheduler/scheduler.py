"""The scheduler: sequences in, planned steps out, results in, events out.

Life of a step, all of it on one thread:

    plan(now) -> StepPlan    the sequences in it are in flight, their slots are fixed
    ... the step runs elsewhere; submit, cancel, stop and expire may be called meanwhile ...
    commit(plan, ...)        or fail(plan, ...): nothing is in flight any more

Pieces of prompts and a decode step of all decoding sequences alternate, so a long prompt slows the others down but
never stops them. Others say whose prompt comes next (`scheduler.line`), how a sequence gets its slot and what is known
of its tokens (`entry`), how room is made for it (`room`), what of its prompt goes into a step (`pieces`), which short
prompts and texts are computed together (`gathering`), what comes of the tokens that a step gives (`answers`), and what
becomes of a slot that is left (`transfers`). `residents` knows where each sequence stands.

A request of n choices is n sequences; the prompt is computed for the first, and those that start while one of them
decodes get its cache copied and compute the last token alone. They share their fate when one of them fails.

Freed slots are collected for `take_releases`; the engine must have the runtime release those before the next step.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import replace
from itertools import chain, count

from edgeqwen.core.request import FinishReason, Request
from edgeqwen.core.step import Batch, Chunk, KVData, RuntimeSpec
from edgeqwen.errors import EdgeqwenError
from edgeqwen.kvcache import Block, BlockStore
from edgeqwen.scheduler.admission import Admission
from edgeqwen.scheduler.answers import Answers
from edgeqwen.scheduler.background import Background, BackgroundWork
from edgeqwen.scheduler.chunking import ChunkSizer
from edgeqwen.scheduler.drafting import Drafting
from edgeqwen.scheduler.entry import Entered, Entry, Fetch
from edgeqwen.scheduler.gathering import Gathering, num_rows
from edgeqwen.scheduler.groups import Groups
from edgeqwen.scheduler.kept import KeptPrompts
from edgeqwen.scheduler.line import Line
from edgeqwen.scheduler.pieces import Piece, cut_piece
from edgeqwen.scheduler.plan import Begun, Outcome, SchedulerEvent, StepPlan
from edgeqwen.scheduler.residents import Residents
from edgeqwen.scheduler.room import RoomMaker
from edgeqwen.scheduler.sequence import Sequence, State
from edgeqwen.scheduler.transfers import WRITE_DELAY_S, Transfers


class Scheduler:
    """Who computes what in which step. `eos_token_ids` end a sequence unless its request ignores them; `speculates`
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
        longest_step_s: float | None = None,
        write_delay_s: float = WRITE_DELAY_S,
    ) -> None:
        eos = frozenset(eos_token_ids)
        self._sizer = ChunkSizer(
            max_chunk=spec.max_chunk,
            shared_s=min(shared_chunk_s, longest_step_s or shared_chunk_s),
            alone_s=min(alone_chunk_s, longest_step_s or alone_chunk_s),
            row_costs=spec.row_costs,
        )
        self.drafting = Drafting(spec, eos_token_ids=eos, is_on=speculates)
        self.background = Background()
        self._store = store or default_store(spec)
        self._groups = Groups(admission)
        self._line = Line(self._sizer.seconds)
        self._transfers = Transfers(self._store, write_delay_s=write_delay_s)
        self._residents = Residents(spec.num_slots, spec.capacity, self._store, self._transfers)
        self._entry = Entry(spec, self._store, self._residents, self._transfers)
        self._kept = KeptPrompts(self._store, self.background)
        self._room = RoomMaker(self._store, self._residents, self._transfers, self._kept)
        self._answers = Answers(self._groups, self._residents, self.drafting, eos_token_ids=eos)
        self._gathering = Gathering(
            entry=self._entry, residents=self._residents, groups=self._groups, line=self._line, begin=self._begin
        )
        self._work = BackgroundWork(self.background, self._entry, self._residents)
        self._capacity = spec.capacity
        self._numbers = count()
        self._in_flight: tuple[Sequence, ...] = ()
        self._was_prefill = False
        self._begun: list[Begun] = []

    @property
    def num_running(self) -> int:
        """Requests that have had a step, or are in their first."""
        return self._groups.num_running

    @property
    def num_queued(self) -> int:
        return len(self._groups) - self.num_running

    @property
    def num_taken_slots(self) -> int:
        """Slots that somebody holds, spare ones not among them."""
        return self._residents.num_taken_slots

    @property
    def num_held_tokens(self) -> int:
        """Tokens in all taken slots."""
        return self._residents.num_held_tokens

    @property
    def num_preempted(self) -> int:
        """How often a sequence had to make place for another."""
        return self._room.num_preempted

    @property
    def is_idle(self) -> bool:
        """Nothing waits, runs or is in flight; blocks may still be on their way."""
        return not self._groups and not self._in_flight

    def submit(self, request: Request, *, now: float = 0.0, had_place: bool = False) -> int:
        """Queue a request; returns how many wait before it. `had_place`: it was let in before (`Admission.add`).

        Raises `EdgeqwenError` and changes nothing: `too_long` (prompt and answer exceed a slot, or the cache's whole
        budget), `quota`, `busy`.
        """
        assert request.rid not in self._groups
        assert request.n > 0
        if request.pooling is None:
            assert min(len(request.prompt_ids), request.max_tokens) > 0
        else:
            assert min(map(len, request.texts)) > 0 == request.max_tokens
            assert len(request.texts) == request.n
        self._entry.check_size(request)
        num_before = self.num_queued
        sequences = self._groups.add(request, had_place=had_place).sequences
        num_known = self._entry.num_known(sequences[0])
        for sequence in sequences:
            sequence.number, sequence.since, sequence.num_known = next(self._numbers), now, num_known
            self._residents.wait(sequence)
        self._work.give_up()
        return num_before

    def cancel(self, rid: str, *, now: float, reason: FinishReason = "cancelled") -> list[SchedulerEvent]:
        """End what is left of a request; nothing happens if there is no such request."""
        return [self._answers.end(sequence, reason, now) for sequence in self._groups.live(rid)]

    def stop(self, rid: str, choice: int, *, now: float) -> list[SchedulerEvent]:
        """End one choice with reason `stop` (its text is complete); nothing happens if it has already ended."""
        meant = [sequence for sequence in self._groups.live(rid) if sequence.choice == choice]
        return [self._answers.end(sequence, "stop", now) for sequence in meant]

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
        if computes and len(request.prompt_ids) <= self._capacity:
            self.background.want(key, request)

    def forget(self, key: str) -> None:
        """Nobody wants that any more."""
        if self.background.forget(key):
            self._work.give_up()

    def keep_for_good(self, owner: str, prompt_ids: tuple[int, ...]) -> None:
        """Once this prompt is known, it stays."""
        self._kept.add(owner, prompt_ids)

    def keep_no_longer(self, owner: str, prompt_ids: tuple[int, ...]) -> None:
        """It need not stay: `keep_for_good` was said of it before."""
        self._kept.remove(owner, prompt_ids)

    # Planning.

    def plan(self, now: float) -> StepPlan | None:
        """The next step, or None if there is nothing to do now. No step may be in flight."""
        assert not self._in_flight, "a step is in flight"
        saves, done = self._transfers.plan(is_shared=self._residents.is_decoding)
        for left in done:
            self._residents.leave_spare(left, now)
        self._store.spares.expire(now)
        standing = (*self._residents.waiting, *self._residents.running)
        self._line.keep(sequence.request.owner for sequence in standing)
        step = self._plan_step(now)
        if step is None and not saves:
            return None
        step = step or StepPlan(Batch(()), (), is_prefill=False)
        begun, self._begun = tuple(self._begun), []
        return replace(step, saves=saves, begun=begun)

    def _plan_step(self, now: float) -> StepPlan | None:
        if not (self._was_prefill and self._residents.is_decoding):
            sequence = self._next_prefill(now)
            if sequence is not None:
                return self._launch_prefill(sequence, now)
        sequences = self._residents.decoding
        if not sequences:
            return None
        chunks: list[Chunk] = []
        for sequence, draft in zip(sequences, self.drafting.drafts(sequences), strict=True):
            assert sequence.slot is not None
            ids = (sequence.last_token, *draft)
            chunks.append(Chunk(sequence.slot, sequence.num_computed, ids, num_logits=len(ids)))
        return self._launch(chunks, sequences)

    def _next_prefill(self, now: float) -> Sequence | None:
        """The sequence whose prompt is computed next: one that has a slot, or that gets one now."""
        is_full = False
        for sequence in self._line.order((*self._residents.prefilling, *self._residents.waiting), now):
            if sequence.state is State.PREFILLING:
                return sequence
            if not is_full:
                entered = self._enter(sequence, now)
                if entered is Entered.YES:
                    return sequence
                is_full = entered is not Entered.SOON
        return self._work.next() if not self._groups else None

    def _enter(self, sequence: Sequence, now: float) -> Entered:
        """Try to give a waiting sequence its slot."""
        entered = self._entry.enter(sequence, has_donor=self._groups.donor(sequence) is not None)
        if entered is Entered.NO_ROOM and self._room.make_for(sequence, now):
            return self._enter(sequence, now)
        if entered is Entered.YES:
            self._begin(sequence, now)
        return entered

    def _begin(self, sequence: Sequence, now: float) -> None:
        rid = sequence.request.rid
        if self._groups.start(rid, now):
            self._begun.append(Begun(rid, sequence.num_cached or 0))

    def _launch_prefill(self, sequence: Sequence, now: float) -> StepPlan:
        self._line.note_piece(sequence)
        size = self._sizer.size(is_shared=self._residents.is_decoding or sequence.is_background)
        piece = cut_piece(sequence, size=size, donor=self._groups.donor(sequence))
        if piece.chunk is None:
            return self._launch([], [sequence], piece)
        parts = [(piece.chunk, sequence), *self._gathering.beside(sequence, piece, size, now)]
        chunks, sequences = zip(*sorted(parts, key=lambda part: part[0].slot), strict=True)
        return self._launch(chunks, sequences, piece)

    def _launch(self, chunks: Seq[Chunk], sequences: Seq[Sequence], piece: Piece | None = None) -> StepPlan:
        """With a piece of a prompt, or without one a decode step."""
        for sequence in sequences:
            sequence.is_in_flight = True
        self._in_flight = tuple(sequences)
        self._was_prefill = piece is not None
        piece = piece or Piece()
        names = tuple((sequence.request.rid, sequence.choice) for sequence in sequences)
        return StepPlan(Batch(tuple(chunks)), names, self._was_prefill, piece.copy, loads=piece.loads)

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
        if plan.loads:
            self._take_in_loads(sequences[0], plan.loads[-1].stop)
        chunks = plan.batch.chunks
        self._observe(plan, sequences, outcomes, duration_s)
        self._line.charge(sequences, duration_s)
        for sequence, chunk in zip(sequences, chunks, strict=False):
            # What guesses left behind what is sure is overwritten in time.
            self._residents.hold(sequence, chunk.stop if plan.is_prefill else chunk.start + 1)
        for sequence in sequences:
            if sequence.state is State.FINISHED:
                self._residents.give_slot_back(sequence)
            elif not chunks or sequence.is_background:
                self._end_prefill(sequence)
        ended = [*self._end_texts(sequences, outcomes, now)]
        rounds = self._answers.rounds(sequences, outcomes, now)
        return chain([ended], rounds) if ended else rounds

    def _end_texts(self, sequences: Seq[Sequence], outcomes: Seq[Outcome], now: float) -> Iterator[SchedulerEvent]:
        """Texts that have been computed to their end; an outcome of one is an error."""
        for sequence, outcome in zip(sequences, outcomes, strict=False):
            is_live = sequence.is_embedding and sequence.state is State.PREFILLING
            if is_live and not outcome and not sequence.num_pending:
                yield self._answers.end(sequence, "stop", now)

    def _observe(self, plan: StepPlan, sequences: Seq[Sequence], outcomes: Seq[Outcome], duration_s: float) -> None:
        chunks = plan.batch.chunks
        if plan.is_prefill and chunks:
            self._sizer.observe(num_rows(chunks), duration_s)
            if sequences[0].is_background:
                self.background.num_tokens += len(chunks[0].ids)
        elif chunks:
            self.drafting.observe(chunks, [len(outcome) for outcome in outcomes], duration_s)

    def _take_in_loads(self, sequence: Sequence, length: int) -> None:
        self._residents.hold(sequence, length)
        if not sequence.loads:
            self._store.unpin(sequence.take_pins())

    def _end_prefill(self, sequence: Sequence) -> None:
        """Nothing was drawn: a step that only loaded, or one in the background. Perhaps that was all there was."""
        if sequence.is_background:
            self._work.end_if_done(sequence)
        elif not sequence.loads and sequence.num_pending == 1 and sequence.generated:
            self._answers.begin(sequence)

    def fail(self, plan: StepPlan, error: EdgeqwenError, *, now: float) -> list[SchedulerEvent]:
        """The step in flight failed as a whole: every request that had a part in it ends with `error`."""
        self._give_up_saving()
        events: list[SchedulerEvent] = []
        for sequence in self._land(plan):
            sequence.is_spoilt = True
            if sequence.state is State.FINISHED:
                self._residents.give_slot_back(sequence)
            elif sequence.is_background:
                self._work.drop(sequence)
            else:
                events += self._answers.fail(sequence.request.rid, error, now)
        return events

    def _land(self, plan: StepPlan) -> tuple[Sequence, ...]:
        sequences = self._in_flight
        assert tuple((s.request.rid, s.choice) for s in sequences) == plan.sequences, "not the step in flight"
        self._in_flight = ()
        for sequence in sequences:
            sequence.is_in_flight = False
        return sequences

    def _give_up_saving(self) -> None:
        for slot in self._transfers.fail():
            self._residents.free(slot)

    def take_releases(self) -> tuple[int, ...]:
        """Slots freed since the last call, which the runtime must release before it runs another step."""
        return self._store.spares.take_releases()

    @property
    def next_release_at(self) -> float | None:
        """When `plan` will have slots to release although nothing else is to do; None if it will not."""
        return self._store.spares.next_expiry_at

    def take_fetches(self) -> tuple[Fetch, ...]:
        """Blocks to be read from disk; each is to be reported with `fetched`."""
        return self._entry.take_fetches()

    def fetched(self, fetch: Fetch, data: Seq[KVData | None]) -> list[Block]:
        """What was read, None for files that are damaged or gone; returns the blocks whose files are of no use now."""
        return self._entry.fetched(fetch, data)

    def check(self) -> None:
        """Assert the invariants: every slot has one holder, every sequence stands where its state says, and all that is
        reserved is somebody's.
        """
        background = [] if self.background.running is None else [self.background.running]
        self._residents.check(self._groups.sequences(), (*background, *self._in_flight))
        assert all(sequence.is_in_flight for sequence in self._in_flight)
        self._groups.check()

    def __repr__(self) -> str:
        return f"<Scheduler [{self._residents!r}]>"


def default_store(spec: RuntimeSpec) -> BlockStore:
    """One that holds as much as all slots, beside them."""
    num_bytes = 2 * spec.num_slots * spec.capacity * spec.kv_bytes_per_token
    return BlockStore(budget_bytes=num_bytes, token_bytes=spec.kv_bytes_per_token, capacity=spec.capacity)
