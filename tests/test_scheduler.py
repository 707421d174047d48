"""The scheduler against a model of a runtime: who computes what, and that nothing is lost, leaked or done twice."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any
from unittest import mock

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from edgeqwen.core.request import Request, SamplingParams
from edgeqwen.core.step import Chunk, RuntimeSpec
from edgeqwen.errors import EdgeqwenError, RuntimeFailed
from edgeqwen.kvcache import Block, BlockStore
from edgeqwen.kvcache.spares import SPARE_S
from edgeqwen.scheduler import (
    Admission,
    Begun,
    Fetch,
    Outcome,
    RequestFailed,
    Scheduler,
    SchedulerEvent,
    SequenceEnded,
    SlotCopy,
    StepPlan,
    TokenDrawn,
)
from edgeqwen.scheduler import line as scheduler_line
from edgeqwen.scheduler.chunking import FIRST_CHUNK, MIN_CHUNK, ChunkSizer
from edgeqwen.scheduler.sequence import TRANSITIONS, State
from edgeqwen.scheduler.sequence import Sequence as Seq

EOS = 9
CAPACITY = 96


def make(
    *, num_slots: int = 4, capacity: int = 512, max_chunk: int = 256, queue: int = 8, per_owner: int = 8
) -> Scheduler:
    spec = RuntimeSpec(num_slots, capacity, 100, 100, 1, max_chunk)
    return Scheduler(spec, admission=Admission(queue=queue, per_owner=per_owner), eos_token_ids=(EOS,))


def request(rid: str = "a", *, prompt_len: int = 4, max_tokens: int = 8, owner: str = "o", **given: Any) -> Request:
    """Nothing of it is kept unless that is asked for: most tests here are of scheduling alone."""
    given.setdefault("may_cache", False)
    return Request(rid, owner, tuple(range(10, 10 + prompt_len)), SamplingParams(), max_tokens, **given)


def launch(scheduler: Scheduler, now: float = 0.0) -> StepPlan:
    plan = scheduler.plan(now)
    assert plan is not None
    scheduler.check()
    return plan


def finish_step(
    scheduler: Scheduler, plan: StepPlan, token: int = 1, *, duration_s: float = 0.0, now: float = 0.0
) -> list[SchedulerEvent]:
    outcomes = [[token] if chunk.num_logits else [] for chunk in plan.batch.chunks]
    return commit(scheduler, plan, outcomes, duration_s=duration_s, now=now)


def commit(
    scheduler: Scheduler, plan: StepPlan, outcomes: Sequence[Outcome], *, duration_s: float = 0.0, now: float = 0.0
) -> list[SchedulerEvent]:
    """All rounds together, the invariants looked at between them."""
    events: list[SchedulerEvent] = []
    for some in scheduler.commit(plan, outcomes, duration_s=duration_s, now=now):
        scheduler.check()
        events += some
    scheduler.check()
    return events


def run_step(scheduler: Scheduler, token: int = 1, **given: Any) -> list[SchedulerEvent]:
    return finish_step(scheduler, launch(scheduler), token, **given)


def sizes(plan: StepPlan) -> list[int]:
    return [len(chunk.ids) for chunk in plan.batch.chunks]


def test_a_request_is_prefilled_then_decoded_until_its_budget_ends() -> None:
    scheduler = make()
    assert scheduler.submit(request(max_tokens=3)) == 0
    plan = launch(scheduler)
    assert plan == StepPlan(plan.batch, (("a", 0),), is_prefill=True, begun=(Begun("a", 0),))
    assert plan.batch.chunks == (Chunk(0, 0, (10, 11, 12, 13), num_logits=1),)
    assert finish_step(scheduler, plan, 5) == [TokenDrawn("a", 0, 0, 5, is_end=False)]
    plan = launch(scheduler)
    assert plan.batch.chunks == (Chunk(0, 4, (5,)),)
    finish_step(scheduler, plan, 6)
    assert run_step(scheduler, 7) == [TokenDrawn("a", 0, 0, 7, is_end=False), SequenceEnded("a", 0, "length")]
    assert scheduler.plan(0.0) is None
    assert scheduler.is_idle
    assert scheduler.take_releases() == (0,)
    assert scheduler.take_releases() == ()


def test_an_end_token_ends_a_sequence_unless_it_is_ignored() -> None:
    scheduler = make()
    scheduler.submit(request("a"))
    assert run_step(scheduler, EOS) == [TokenDrawn("a", 0, 0, EOS, is_end=True), SequenceEnded("a", 0, "stop")]
    scheduler.submit(request("b", ignore_eos=True))
    assert run_step(scheduler, EOS) == [TokenDrawn("b", 0, 0, EOS, is_end=False)]


def test_an_end_token_on_the_last_of_the_budget_is_a_stop() -> None:
    scheduler = make()
    scheduler.submit(request(max_tokens=1))
    assert run_step(scheduler, EOS)[-1] == SequenceEnded("a", 0, "stop")


def test_all_decoding_sequences_go_in_one_step_in_slot_order() -> None:
    scheduler = make()
    for rid in "abc":
        scheduler.submit(request(rid))
    while scheduler.num_queued:
        run_step(scheduler)
    run_step(scheduler)
    plan = launch(scheduler)
    assert [chunk.slot for chunk in plan.batch.chunks] == [0, 1, 2]
    assert plan.sequences == (("a", 0), ("b", 0), ("c", 0))


def test_prefill_chunks_and_decode_steps_alternate() -> None:
    scheduler = make(max_chunk=16)
    scheduler.submit(request("a", max_tokens=50))
    run_step(scheduler)
    scheduler.submit(request("b", prompt_len=40))
    kinds = []
    for _ in range(7):
        plan = launch(scheduler)
        kinds.append("".join(sorted({rid for rid, _ in plan.sequences})) + ("+" if plan.is_prefill else ""))
        finish_step(scheduler, plan)
    assert kinds == ["a", "b+", "a", "b+", "a", "b+", "ab"]


def test_only_the_last_chunk_of_a_prompt_asks_for_logits() -> None:
    scheduler = make(max_chunk=16)
    scheduler.submit(request(prompt_len=40))
    chunks: list[Chunk] = []
    for _ in range(3):
        plan = launch(scheduler)
        chunks += plan.batch.chunks
        events = finish_step(scheduler, plan)
    assert [(c.start, c.stop, c.num_logits) for c in chunks] == [(0, 16, 0), (16, 32, 0), (32, 40, 1)]
    assert sum((c.ids for c in chunks), ()) == tuple(range(10, 50))
    assert events == [TokenDrawn("a", 0, 0, 1, is_end=False)]


def test_the_choices_of_a_request_compute_its_prompt_once() -> None:
    scheduler = make(max_chunk=16)
    scheduler.submit(request(prompt_len=40, n=3))
    plans = []
    while scheduler.num_held_tokens < 3 * 40:
        plans.append(launch(scheduler))
        finish_step(scheduler, plans[-1])
    prefills = [plan for plan in plans if plan.is_prefill]
    assert [sizes(plan) for plan in prefills] == [[16], [16], [8], [1], [1]]
    assert [plan.copy for plan in prefills[:3]] == [None, None, None]
    assert [plan.copy for plan in prefills[3:]] == [SlotCopy(0, 1, 39), SlotCopy(0, 2, 39)]


def test_a_choice_that_starts_after_the_others_have_ended_computes_its_own_prompt() -> None:
    scheduler = make(num_slots=1)
    scheduler.submit(request(prompt_len=20, n=2, max_tokens=1))
    for _ in range(2):
        plan = launch(scheduler)
        assert (sizes(plan), plan.copy) == ([20], None)
        finish_step(scheduler, plan)
    assert scheduler.is_idle


def test_prompts_are_prefilled_one_at_a_time_in_order_of_arrival() -> None:
    scheduler = make(max_chunk=16)
    for rid in "abc":
        scheduler.submit(request(rid, prompt_len=20))
    order: list[str] = []
    while len(order) < 6:
        plan = launch(scheduler)
        order += [rid for rid, _ in plan.sequences] if plan.is_prefill else []
        finish_step(scheduler, plan)
    assert order == ["a", "a", "b", "b", "c", "c"]


def test_chunks_are_sized_by_time() -> None:
    sizer = ChunkSizer(max_chunk=512, shared_s=0.2, alone_s=1.0)
    assert sizer.size(is_shared=False) == FIRST_CHUNK, "nothing is known yet"
    sizer.observe(64, 0.32)
    assert sizer.size(is_shared=True) == 32, "40 tokens fit into 200 ms at 5 ms each"
    assert sizer.size(is_shared=False) == 192
    sizer.observe(MIN_CHUNK - 1, 100.0)
    assert sizer.size(is_shared=True) == 32, "a short chunk says little about the cost of a token"
    sizer.observe(32, 32 * 0.1)
    assert sizer.size(is_shared=True) == MIN_CHUNK, "never less"
    for _ in range(20):
        sizer.observe(64, 0.0)
    assert sizer.size(is_shared=True) == 512, "never more than the runtime takes"
    assert ChunkSizer(max_chunk=5, shared_s=0.2, alone_s=1.0).size(is_shared=True) == 5


def test_the_first_chunk_is_sized_by_what_the_runtime_has_timed() -> None:
    def first(*row_costs: tuple[int, float]) -> int:
        return ChunkSizer(max_chunk=256, shared_s=0.2, alone_s=1.0, row_costs=row_costs).size(is_shared=False)

    assert first((1, 0.03), (32, 0.16)) == 192, "5 ms a token"
    assert first((1, 0.03), (32, 3.2)) == MIN_CHUNK
    assert first((1, 0.03), (8, 0.05)) == FIRST_CHUNK, "a few rows say little"


def test_a_prompt_is_prefilled_in_smaller_chunks_while_others_decode() -> None:
    scheduler = make(max_chunk=256)
    scheduler.submit(request("a", prompt_len=64, max_tokens=50))
    run_step(scheduler, duration_s=0.32)
    scheduler.submit(request("b", prompt_len=300))
    run_step(scheduler)
    assert sizes(launch(scheduler)) == [32]


def test_requests_wait_for_a_slot_and_get_the_first_that_is_free() -> None:
    scheduler = make(num_slots=1)
    scheduler.submit(request("a", max_tokens=2))
    assert scheduler.submit(request("b")) == 1
    run_step(scheduler)
    assert (scheduler.num_running, scheduler.num_queued) == (1, 1)
    run_step(scheduler)
    assert launch(scheduler).sequences == (("b", 0),)
    assert scheduler.take_releases() == (0,), "what a left there goes before b's first step"


def test_choices_are_sequences_of_one_request() -> None:
    scheduler = make()
    scheduler.submit(request(n=3, max_tokens=2))
    ended = []
    while not scheduler.is_idle:
        ended += [event for event in run_step(scheduler) if isinstance(event, SequenceEnded)]
    assert sorted(event.choice for event in ended) == [0, 1, 2]


def test_a_request_that_cannot_fit_is_refused_with_the_excess() -> None:
    scheduler = make(capacity=64)
    with pytest.raises(EdgeqwenError, match="5 more than the context of 64") as caught:
        scheduler.submit(request(prompt_len=60, max_tokens=9))
    assert caught.value.code == "too_long"
    assert scheduler.is_idle
    scheduler.submit(request(prompt_len=60, max_tokens=4))


def test_a_full_queue_is_busy_and_a_full_share_is_quota() -> None:
    scheduler = make(num_slots=1, queue=2, per_owner=2)
    scheduler.submit(request("a", owner="x"))
    launch(scheduler)
    scheduler.submit(request("b", owner="x"))
    with pytest.raises(EdgeqwenError, match="2 requests") as caught:
        scheduler.submit(request("c", owner="x"))
    assert caught.value.code == "quota"
    scheduler.submit(request("d", owner="y"))
    with pytest.raises(EdgeqwenError, match=r"queue full \(2\)") as caught:
        scheduler.submit(request("e", owner="z"))
    assert caught.value.code == "busy"
    assert caught.value.retry_ms is not None
    assert caught.value.retry_ms > 0
    scheduler.cancel("b", now=0.0)
    scheduler.submit(request("e", owner="x"))


@pytest.mark.parametrize("num_steps", [0, 1, 2, 4], ids=["waiting", "mid-prompt", "prompt done", "decoding"])
def test_a_cancelled_request_ends_at_once_and_frees_its_slot(num_steps: int) -> None:
    scheduler = make(max_chunk=16)
    scheduler.submit(request(prompt_len=30))
    for _ in range(num_steps):
        run_step(scheduler)
    assert scheduler.cancel("a", now=0.0) == [SequenceEnded("a", 0, "cancelled")]
    scheduler.check()
    assert scheduler.is_idle
    assert scheduler.take_releases() == ((0,) if num_steps else ())
    assert scheduler.cancel("a", now=0.0) == []


@pytest.mark.parametrize("num_steps", [0, 2], ids=["prefilling", "decoding"])
def test_a_slot_in_flight_is_not_freed_before_its_step_lands(num_steps: int) -> None:
    scheduler = make(num_slots=1, max_chunk=16)
    scheduler.submit(request("a", prompt_len=30))
    for _ in range(num_steps):
        run_step(scheduler)
    plan = launch(scheduler)
    scheduler.submit(request("b"))
    assert scheduler.cancel("a", now=0.0) == [SequenceEnded("a", 0, "cancelled")]
    scheduler.check()
    assert scheduler.take_releases() == ()
    assert not scheduler.is_idle
    assert finish_step(scheduler, plan) == [], "what a step computed for the cancelled is dropped"
    assert launch(scheduler).sequences == (("b", 0),)
    assert scheduler.take_releases() == (0,)


def test_deadlines_end_running_and_waiting_requests() -> None:
    scheduler = make(num_slots=1)
    scheduler.submit(request("a", deadline_at=5.0))
    scheduler.submit(request("b", deadline_at=4.0))
    plan = launch(scheduler)
    assert scheduler.expire(3.9) == []
    assert scheduler.expire(4.0) == [SequenceEnded("b", 0, "deadline")]
    assert scheduler.expire(9.0) == [SequenceEnded("a", 0, "deadline")]
    assert finish_step(scheduler, plan) == []
    assert scheduler.is_idle


def test_one_choice_can_be_stopped_for_its_text() -> None:
    scheduler = make()
    scheduler.submit(request(n=2))
    run_step(scheduler)
    assert scheduler.stop("a", 0, now=0.0) == [SequenceEnded("a", 0, "stop")]
    assert scheduler.stop("a", 0, now=0.0) == []
    scheduler.check()
    assert launch(scheduler).sequences == (("a", 1),)
    assert scheduler.stop("none", 0, now=0.0) == []


def test_a_failed_step_ends_the_requests_in_it_and_no_other() -> None:
    scheduler = make()
    scheduler.submit(request("a", n=2))
    run_step(scheduler)
    run_step(scheduler)
    plan = launch(scheduler)
    scheduler.submit(request("b"))
    assert {rid for rid, _ in plan.sequences} == {"a"}
    error = RuntimeFailed("boom")
    assert scheduler.fail(plan, error, now=0.0) == [RequestFailed("a", error)]
    scheduler.check()
    assert sorted(scheduler.take_releases()) == [0, 1]
    assert launch(scheduler).sequences == (("b", 0),)


@pytest.mark.parametrize("fails", [True, False], ids=["whole step", "first row"])
def test_choices_in_one_failed_step_fail_together(fails: bool) -> None:
    scheduler = make()
    scheduler.submit(request(n=3))
    plan = launch(scheduler)
    while len(plan.sequences) < 3:
        finish_step(scheduler, plan)
        plan = launch(scheduler)
    error = RuntimeFailed("boom")
    events = scheduler.fail(plan, error, now=0.0) if fails else commit(scheduler, plan, [[error], [1], [2]])
    scheduler.check()
    assert events == [RequestFailed("a", error)]
    assert sorted(scheduler.take_releases()) == [0, 1, 2]


def test_a_failed_row_ends_its_request_alone() -> None:
    scheduler = make()
    for rid in "ab":
        scheduler.submit(request(rid, n=2))
    plan = launch(scheduler)
    while len(plan.sequences) < 4:
        finish_step(scheduler, plan)
        plan = launch(scheduler)
    error = RuntimeFailed("nan")
    assert plan.sequences == (("a", 0), ("b", 0), ("a", 1), ("b", 1))
    events = commit(scheduler, plan, [[1], [2], [error], [3]])
    assert events == [
        TokenDrawn("a", 0, 0, 1, is_end=False),
        TokenDrawn("b", 0, 1, 2, is_end=False),
        RequestFailed("a", error),
        TokenDrawn("b", 1, 3, 3, is_end=False),
    ]
    assert sorted(scheduler.take_releases()) == [0, 2]


def test_illegal_transitions_raise_before_anything_changes() -> None:
    for state, allowed in TRANSITIONS.items():
        for other in State:
            sequence = Seq(request(), 0, state=state)
            if other in allowed:
                sequence.enter(other)
                assert sequence.state is other
            else:
                with pytest.raises(AssertionError, match=f"{state.name} -> {other.name}"):
                    sequence.enter(other)
                assert sequence.state is state


def test_a_plan_that_is_not_in_flight_is_refused() -> None:
    scheduler = make()
    scheduler.submit(request())
    plan = launch(scheduler)
    with pytest.raises(AssertionError, match="in flight"):
        scheduler.plan(0.0)
    finish_step(scheduler, plan)
    with pytest.raises(AssertionError, match="not the step in flight"):
        scheduler.commit(plan, [[1]], duration_s=0.0, now=0.0)


def test_repr_shows_the_state() -> None:
    scheduler = make()
    for rid in "abcde":
        scheduler.submit(request(rid))
    run_step(scheduler)
    assert repr(scheduler) == "<Scheduler [1 waiting, 0 prefilling, 4 decoding | <SlotTable [4/4 taken, 16 tokens]>]>"


class SchedulerMachine(RuleBasedStateMachine):
    """Random operations. The model: what each slot holds, what each choice was given, who has ended.

    Sequences may be preempted soon and grow old fast, so that it happens.
    """

    def __init__(self) -> None:
        super().__init__()
        self.patches = ExitStack()
        self.patches.enter_context(mock.patch.object(scheduler_line, "MIN_TOKENS", 2))
        self.patches.enter_context(mock.patch.object(scheduler_line, "AGING_S", 4.0))
        spec = RuntimeSpec(3, CAPACITY, 100, 100, 1, 20)
        self.store = BlockStore(budget_bytes=300, token_bytes=1, capacity=CAPACITY, disk_limit_bytes=200)
        self.scheduler = Scheduler(
            spec, admission=Admission(queue=5, per_owner=4), eos_token_ids=(EOS,), store=self.store, write_delay_s=2.0
        )
        self.files: dict[Block, tuple[int, ...]] = {}
        self.fetches: list[Fetch] = []
        self.num_loaded = 0
        self.now = 0.0
        self.num = 0
        self.requests: dict[str, Request] = {}
        self.plan: StepPlan | None = None
        self.held: dict[int, list[int]] = {}
        self.holders: dict[int, tuple[str, int]] = {}
        self.saved: tuple[tuple[int, ...], ...] = ()
        self.drawn: defaultdict[tuple[str, int], list[int]] = defaultdict(list)
        self.ended: Counter[tuple[str, int]] = Counter()
        self.failed: set[str] = set()
        self.num_guessed = 0

    @rule(
        prompt_len=st.integers(1, 84),
        max_tokens=st.integers(1, 12),
        n=st.integers(1, 3),
        deadline_s=st.one_of(st.just(float("inf")), st.integers(1, 20)),
        owner=st.sampled_from("xy"),
        priority=st.integers(-1, 1),
        may_cache=st.booleans(),
        is_lasting=st.booleans(),
    )
    def submit(
        self,
        prompt_len: int,
        max_tokens: int,
        n: int,
        deadline_s: float,
        owner: str,
        priority: int,
        may_cache: bool,
        is_lasting: bool,
    ) -> None:
        self.num += 1
        new = request(
            f"r{self.num}",
            prompt_len=prompt_len,
            max_tokens=max_tokens,
            n=n,
            deadline_at=self.now + deadline_s,
            owner=owner,
            priority=priority,
            may_cache=may_cache,
            is_lasting=is_lasting,
        )
        num_of_owner = sum(self.requests[rid].owner == owner for rid in self.live())
        if num_of_owner == 4 or self.scheduler.num_queued == 5:
            with pytest.raises(EdgeqwenError) as caught:
                self.scheduler.submit(new)
            assert caught.value.code == ("quota" if num_of_owner == 4 else "busy")
            return
        self.scheduler.submit(new)
        self.requests[new.rid] = new

    @precondition(lambda self: self.plan is None)
    @rule()
    def start_step(self) -> None:
        self.plan = self.scheduler.plan(self.now)
        for slot in self.scheduler.take_releases():
            self.held.pop(slot, None)
        self.fetches += self.scheduler.take_fetches()
        if self.plan is None:
            is_waiting_for_disk = self.fetches or self.store.is_writing
            assert not self.live() or is_waiting_for_disk, "something lives and nothing is planned"
            return
        self.saved = tuple(tuple(self.held[save.slot][save.start : save.stop]) for save in self.plan.saves)
        assert all(len(data) == save.stop - save.start for data, save in zip(self.saved, self.plan.saves, strict=True))
        for load in self.plan.loads:
            tokens = self.take_slot(load.slot, self.plan.sequences[0], load.start)
            if load is self.plan.loads[0]:  # one that was preempted may go on in the slot that it had
                del tokens[load.start :]
            assert len(tokens) == load.start, "loads fill a slot without a gap"
            tokens += load.data[: load.stop - load.start]
            self.num_loaded += load.stop - load.start
        slots = [chunk.slot for chunk in self.plan.batch.chunks]
        assert slots == sorted(set(slots))
        if (copy := self.plan.copy) is not None:
            assert copy.dst in slots
            assert not self.take_slot(copy.dst, self.plan.sequences[0], 0), "only an empty slot is copied to"
            assert len(self.held[copy.src]) >= copy.length
            self.held[copy.dst] = self.held[copy.src][: copy.length]
        assert len(self.plan.batch.chunks) == len(self.plan.sequences) or not self.plan.batch.chunks
        for chunk, (rid, choice) in zip(self.plan.batch.chunks, self.plan.sequences, strict=False):
            tokens = self.take_slot(chunk.slot, (rid, choice), chunk.start)
            assert chunk.start == len(tokens), "every token exactly once, in order"
            assert len(chunk.ids) <= 20
            tokens += chunk.ids
            if not rid:
                assert tokens == list(range(10, 10 + len(tokens)))
                assert not chunk.num_logits
                continue
            whole = [*self.requests[rid].prompt_ids, *self.drawn[rid, choice]]
            guesses = tokens[len(whole) :]
            assert tokens == [*whole, *guesses][: len(tokens)], "the slot holds this sequence and no other"
            assert chunk.num_logits == (1 + len(guesses) if len(tokens) >= len(whole) else 0)
            assert EOS not in guesses
            most = self.requests[rid].max_tokens - len(self.drawn[rid, choice]) - 1
            assert len(guesses) <= most, "the last token of the budget is never guessed"
            self.num_guessed += len(guesses)

    def take_slot(self, slot: int, sequence: tuple[str, int], start: int) -> list[int]:
        """What the slot holds: a sequence that is new there may go on from any token of what another left."""
        tokens = self.held.setdefault(slot, [])
        if self.holders.get(slot) != sequence or not sequence[0]:
            self.holders[slot] = sequence
            del tokens[start:]
        return tokens

    @precondition(lambda self: self.plan is not None)
    @rule(
        tokens=st.lists(st.integers(1, 9), min_size=3, max_size=3),
        num_right=st.integers(0, 12),
        bad_row=st.integers(0, 12),
        fails=st.integers(0, 9).map(lambda number: number == 9),
        cancel_after=st.integers(0, 6),
    )
    def land(self, tokens: list[int], num_right: int, bad_row: int, fails: bool, cancel_after: int) -> None:
        """`num_right` guesses are right, then each row gives its token; a request is cancelled between two rounds."""
        assert self.plan is not None
        plan, self.plan = self.plan, None
        if fails:
            live = {rid for rid, choice in plan.sequences if rid in self.live() and not self.ended[rid, choice]}
            events = self.scheduler.fail(plan, RuntimeFailed("boom"), now=self.now)
            assert {event.rid for event in events} == live
            self.take(events)
            return
        outcomes: list[list[int | EdgeqwenError]] = []
        for i, chunk in enumerate(plan.batch.chunks):
            last = RuntimeFailed("nan") if i == bad_row else tokens[i]
            right = chunk.ids[1 : chunk.num_logits][:num_right]
            outcomes.append([*right, last] if chunk.num_logits else [])
        rounds = self.scheduler.commit(plan, outcomes, duration_s=0.05, now=self.now, saved=self.saved)
        for number, events in enumerate(rounds, 1):
            self.take(events)
            self.scheduler.check()
            if number == cancel_after:
                self.take(self.scheduler.cancel(plan.sequences[0][0], now=self.now))
        for chunk, (rid, choice) in zip(plan.batch.chunks, plan.sequences, strict=False):
            if not rid:
                continue
            if not plan.is_prefill and chunk.slot in self.held:  # what is behind the last but one is wrong guesses
                num_sure = len(self.requests[rid].prompt_ids) + len(self.drawn[rid, choice]) - 1
                del self.held[chunk.slot][max(num_sure, chunk.start + 1) :]

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        rid = data.draw(st.sampled_from(sorted(self.requests)))
        was_live = rid in self.live()
        events = self.scheduler.cancel(rid, now=self.now)
        assert bool(events) == was_live
        self.take(events)
        assert rid not in self.live()

    @precondition(lambda self: self.drawn)
    @rule(data=st.data())
    def stop(self, data: st.DataObject) -> None:
        rid, choice = data.draw(st.sampled_from(sorted(self.drawn)))
        self.take(self.scheduler.stop(rid, choice, now=self.now))

    @rule(prompt_len=st.integers(1, CAPACITY), key=st.sampled_from("kl"), owner=st.sampled_from("xy"))
    def want(self, prompt_len: int, key: str, owner: str) -> None:
        wish = request("", prompt_len=prompt_len, max_tokens=0, owner=owner, may_cache=True, is_lasting=True)
        self.scheduler.want(key, wish)

    @rule(key=st.sampled_from("kl"))
    def forget(self, key: str) -> None:
        self.scheduler.forget(key)

    @rule(works=st.booleans())
    def write(self, works: bool) -> None:
        """The disk thread writes a block, or cannot."""
        block = self.store.next_write(self.now)
        if block is None:
            return
        for old in self.store.surplus(block.num_bytes):
            self.store.unstore(old)
            del self.files[old]
        works = works and self.store.disk_bytes + block.num_bytes <= self.store.disk_limit_bytes
        if works:
            assert block.data is not None
            self.files[block] = tuple(block.data)
        assert self.store.written(block, is_stored=works)

    @precondition(lambda self: self.fetches)
    @rule(is_damaged=st.integers(0, 9).map(lambda number: number == 9))
    def fetch(self, is_damaged: bool) -> None:
        fetch = self.fetches.pop()
        data = [None if is_damaged else self.files[block] for block in fetch.blocks]
        useless = self.scheduler.fetched(fetch, data)
        for block in (*useless, *(fetch.blocks if is_damaged else ())):
            self.files.pop(block, None)

    @rule(seconds=st.integers(1, 5))
    def pass_time(self, seconds: int) -> None:
        self.now += seconds
        self.take(self.scheduler.expire(self.now))
        assert all(self.requests[rid].deadline_at > self.now for rid in self.live())

    def take(self, events: Sequence[SchedulerEvent]) -> None:
        for event in events:
            assert event.rid not in self.failed, f"{event} after the failure"
            match event:
                case TokenDrawn():
                    assert not self.ended[event.rid, event.choice], f"{event} after the end"
                    self.drawn[event.rid, event.choice].append(event.token)
                    assert len(self.drawn[event.rid, event.choice]) <= self.requests[event.rid].max_tokens
                case SequenceEnded():
                    self.ended[event.rid, event.choice] += 1
                    assert self.ended[event.rid, event.choice] == 1, f"{event} twice"
                case RequestFailed():
                    self.failed.add(event.rid)

    def live(self) -> set[str]:
        return {
            rid
            for rid, new in self.requests.items()
            if rid not in self.failed and any(not self.ended[rid, choice] for choice in range(new.n))
        }

    @invariant()
    def accounts_are_in_order(self) -> None:
        self.scheduler.check()
        assert self.scheduler.num_running + self.scheduler.num_queued == len(self.live())

    def teardown(self) -> None:
        """Left alone, everything ends by itself and every slot comes back."""
        with self.patches:
            self.end_all()

    def end_all(self) -> None:
        for _ in range(2000):
            while self.fetches:
                self.fetch(is_damaged=False)
            self.write(works=True)
            if self.plan is not None:
                self.land([1, 2, 3], 12, 12, fails=False, cancel_after=0)
            self.start_step()
            if self.plan is None and not self.store.is_writing and not self.fetches:
                break
        assert not self.live()
        assert self.scheduler.is_idle
        self.now += SPARE_S
        assert self.scheduler.plan(self.now) is None
        for slot in self.scheduler.take_releases():
            self.held.pop(slot, None)
        assert not self.held


TestRandomOperations = SchedulerMachine.TestCase
TestRandomOperations.settings = settings(max_examples=100, stateful_step_count=50, deadline=None)
