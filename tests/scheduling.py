"""What the tests of the scheduler share: a scheduler at work over the scripted runtime, on a clock of its own.

The next token of that runtime is a function of all tokens before it, and it refuses positions that a slot does not
hold. So an answer that is that of a fresh scheduler shows that what was loaded and computed was right.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from edgeqwen.core.request import FinishReason, Request, SamplingParams
from edgeqwen.core.step import Chunk, KVData, Logits
from edgeqwen.kvcache import Block, BlockStore
from edgeqwen.runtime.fake import FakeRuntime, FakeScript
from edgeqwen.scheduler import (
    Admission,
    Fetch,
    RequestFailed,
    Scheduler,
    SchedulerEvent,
    SequenceEnded,
    StepPlan,
    TokenDrawn,
)

TOKEN_BYTES = 4
NUM_TOKENS = 200
CHUNK = 64
TOKEN_S = 0.001
"""What a token of a prompt takes: chunks are as long as the runtime allows, and 1,000 tokens are a long prompt."""

STEP_S = 0.01
SCRIPT = FakeScript(kv_bytes_per_token=TOKEN_BYTES, max_chunk=CHUNK)

Ids = tuple[int, ...]


def text(seed: int, length: int) -> Ids:
    """Tokens that begin differently for each seed."""
    return (seed % NUM_TOKENS, *np.random.default_rng(seed).integers(0, NUM_TOKENS, length - 1).tolist())


@dataclass(eq=False)
class Desk:
    """Submits, steps and notes what happened. Budgets are in tokens; `budget` None is plenty.

    `plans` holds all plans, `drawn` the tokens by request (of its first choice), `ends` why each ended (by request and
    choice), `cached` the reported number of known tokens. With `answers_fetches` the disk is read at once.
    """

    num_slots: int = 4
    capacity: int = 8192
    budget: int | None = None
    disk: int = 0
    script: FakeScript = SCRIPT
    answers_fetches: bool = True
    now: float = 0.0
    plans: list[StepPlan] = field(default_factory=list)
    drawn: defaultdict[str, list[int]] = field(default_factory=lambda: defaultdict(list))
    ends: dict[tuple[str, int], FinishReason] = field(default_factory=dict)
    failed: set[str] = field(default_factory=set)
    cached: dict[str, int] = field(default_factory=dict)
    computed: Counter[str] = field(default_factory=Counter)
    fetches: list[Fetch] = field(default_factory=list)
    files: dict[Block, KVData] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.runtime = FakeRuntime(
            self.script, vocab_size=NUM_TOKENS, num_slots=self.num_slots, capacity=self.capacity, sleep=self._sleep
        )
        self.spec = self.runtime.spec
        self.store = BlockStore(
            budget_bytes=TOKEN_BYTES * (10 * self.capacity if self.budget is None else self.budget),
            token_bytes=self.spec.kv_bytes_per_token,
            capacity=self.capacity,
            disk_limit_bytes=TOKEN_BYTES * self.disk,
        )
        self.scheduler = Scheduler(
            self.spec, admission=Admission(queue=100, per_owner=100), store=self.store, write_delay_s=5.0
        )

    def _sleep(self, _: float) -> None:
        chunks = self.runtime.batches[-1].chunks
        self.now += STEP_S + TOKEN_S * sum(len(chunk.ids) for chunk in chunks if len(chunk.ids) > 1)

    def submit(self, rid: str, prompt: Ids, max_tokens: int = 4, *, owner: str = "a", **given: Any) -> None:
        request = Request(rid, owner, prompt, SamplingParams(), max_tokens, **given)
        self.scheduler.submit(request, now=self.now)

    def want(self, key: str, prompt: Ids, *, owner: str = "a") -> None:
        self.scheduler.want(key, Request("", owner, prompt, SamplingParams(), 0, is_lasting=True))

    def step(self) -> StepPlan | None:
        """Plan and carry out a step; None if there is nothing to do."""
        plan = self.begin()
        if plan is not None:
            self.land(plan)
        return plan

    def begin(self) -> StepPlan | None:
        """Plan a step, its loads and saves done; `land` computes it."""
        plan = self.scheduler.plan(self.now)
        self.scheduler.check()
        assert self.store.free_bytes >= 0
        for slot in self.scheduler.take_releases():
            self.runtime.release(slot)
        self.fetches += self.scheduler.take_fetches()
        if self.answers_fetches:
            self.read()
        if plan is not None:
            self.plans.append(plan)
            for begun in plan.begun:
                assert begun.rid not in self.cached, "it begins once"
                self.cached[begun.rid] = begun.num_cached
        return plan

    def land(self, plan: StepPlan) -> None:
        runtime = self.runtime
        saved = tuple(runtime.read_kv(save.slot, save.start, save.stop) for save in plan.saves)
        for load in plan.loads:
            runtime.write_kv(load.slot, load.start, np.asarray(load.data)[: load.stop - load.start])
        if (copy := plan.copy) is not None:
            runtime.write_kv(copy.dst, 0, runtime.read_kv(copy.src, 0, copy.length))
        began_at = self.now
        logits: tuple[Logits, ...] = ()
        if plan.batch.chunks:
            logits = runtime.step(plan.batch).logits
            for chunk, (rid, _) in zip(plan.batch.chunks, plan.sequences, strict=True):
                self.computed[rid] += len(chunk.ids) if plan.is_prefill else 0
        outcomes = [draws(chunk, rows) for chunk, rows in zip(plan.batch.chunks, logits, strict=True)]
        rounds = self.scheduler.commit(plan, outcomes, duration_s=self.now - began_at, now=self.now, saved=saved)
        for events in rounds:
            self.take(events)
        self.scheduler.check()

    def take(self, events: Sequence[SchedulerEvent]) -> None:
        for event in events:
            match event:
                case TokenDrawn():
                    if event.choice == 0:
                        self.drawn[event.rid].append(event.token)
                case SequenceEnded():
                    assert (event.rid, event.choice) not in self.ends
                    self.ends[event.rid, event.choice] = event.reason
                case RequestFailed():
                    self.failed.add(event.rid)

    def cancel(self, rid: str) -> None:
        self.take(self.scheduler.cancel(rid, now=self.now))
        self.scheduler.check()

    def until(self, is_met: Callable[[], bool], *, most: int = 5000) -> int:
        """Step until that is so; the number of steps."""
        for number in range(most):
            if is_met():
                return number
            assert self.step() is not None, "nothing is planned, and it never will be so"
        raise AssertionError("it has not come to that")

    def finish(self) -> None:
        """Step until nothing is to be done, and see that nothing is left in a slot or reserved."""
        for _ in range(20_000):
            if self.step() is None and not self.fetches:
                break
        assert self.scheduler.is_idle, repr(self.scheduler)
        assert self.runtime.held_slots == tuple(sorted(self.store.spares.slots))
        assert not self.store.reserved_bytes

    def run(self, rid: str, prompt: Ids, max_tokens: int = 4, **given: Any) -> int:
        """Submit, finish; how many tokens of the prompt were computed."""
        self.submit(rid, prompt, max_tokens, **given)
        self.finish()
        return self.computed[rid]

    def conversation(self, rid: str, prompt: Ids) -> Ids:
        """The tokens of a request that has ended, answer included."""
        return (*prompt, *self.drawn[rid])

    # The disk.

    def write(self) -> int:
        """Write all that is due; how many blocks that were."""
        num = 0
        while (block := self.store.next_write(self.now)) is not None:
            for old in self.store.surplus(block.num_bytes):
                self.store.unstore(old)
                del self.files[old]
            self.files[block] = block.data
            assert self.store.written(block, is_stored=True)
            num += 1
        return num

    def read(self, *, is_damaged: bool = False) -> None:
        """Read what is to be fetched, or find all of it damaged."""
        fetches, self.fetches = self.fetches, []
        for fetch in fetches:
            useless = self.scheduler.fetched(fetch, [None if is_damaged else self.files[each] for each in fetch.blocks])
            for block in (*useless, *(fetch.blocks if is_damaged else ())):
                self.files.pop(block, None)
            self.scheduler.check()


def draws(chunk: Chunk, rows: Logits) -> list[int]:
    """The likeliest token of each row, as long as the guesses were right."""
    guesses = chunk.ids[len(chunk.ids) - len(rows) + 1 :]
    tokens: list[int] = []
    for number, row in enumerate(rows):
        tokens.append(int(np.argmax(row)))
        if number < len(guesses) and tokens[-1] != guesses[number]:
            break
    return tokens


def alone(prompt: Ids, max_tokens: int, **given: Any) -> list[int]:
    """The answer of a fresh scheduler that keeps nothing."""
    desk = Desk(num_slots=1)
    desk.run("alone", prompt, max_tokens, may_cache=False, **given)
    return desk.drawn["alone"]


def pieces(plans: Sequence[StepPlan]) -> list[str]:
    """Whose prompt each plan computes a piece of, decode steps left out."""
    return [plan.sequences[0][0] for plan in plans if plan.is_prefill and plan.batch.chunks]
