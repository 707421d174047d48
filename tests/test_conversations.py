"""Conversations over the scripted runtime: nothing of them is computed twice, and no answer is another for it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from edgeqwen.core.request import Done, Event
from edgeqwen.engine.generation import GenerationInput
from edgeqwen.engine.settings import EngineLimits, KvSettings
from edgeqwen.errors import ConfigInvalid, EdgeqwenError
from edgeqwen.kvcache.blocks import common_length
from edgeqwen.runtime.fake import FakeScript
from edgeqwen.scheduler.line import MIN_TOKENS
from tests.engines import Listener, Rig, eos, ids, make_rig, running

TOKEN_BYTES = 64
LARGE = FakeScript(capacity=2048, kv_bytes_per_token=TOKEN_BYTES, max_chunk=64)
"""Says what the whole history leads to."""

SAYS = FakeScript(
    tokens=(*ids("Hello, world. The fox is in its own den."), eos()),
    capacity=1024,
    kv_bytes_per_token=TOKEN_BYTES,
    max_chunk=64,
)
Messages = tuple[Mapping[str, Any], ...]


def tokens_of(listener: Listener) -> list[int]:
    """What was generated, of a request with `logprobs`."""
    return [each.token for delta in listener.deltas for each in delta.logprobs]


async def answer(rig: Rig, given: Mapping[str, Any], *, owner: str = "1000") -> tuple[Done, list[int]]:
    _, listener = await rig.submit(owner=owner, logprobs=True, **{"ignore_eos": True, "max_tokens": 12, **given})
    return await listener.done(), tokens_of(listener)


async def fresh(given: Mapping[str, Any], script: FakeScript = LARGE) -> list[int]:
    """What an engine says that knows nothing, keeps nothing and guesses nothing."""
    async with running(script, speculates=False) as rig:
        return (await answer(rig, {**given, "cache": False}))[1]


async def until(is_met: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not is_met():  # noqa: ASYNC110 -- the engine has no event for it
            await asyncio.sleep(0.001)


def said(*turns: str) -> Messages:
    """Turns of the user and the assistant, beginning and ending with the user."""
    return tuple({"role": "user" if i % 2 == 0 else "assistant", "content": text} for i, text in enumerate(turns))


SYSTEM = {"role": "system", "content": "You are brief. " * 8}
FIRST = (SYSTEM, *said("What is a fox? " * 6))
LONG_ANSWER = {"role": "assistant", "content": "It is an animal of its own. " * 4}
FURTHER: tuple[Messages, ...] = (
    (*FIRST, LONG_ANSWER, *said("And a wolf?")),
    (*FIRST, LONG_ANSWER, *said("And a wolf, then? " * 9)),
    (*FIRST, {"role": "assistant", "content": "An animal."}, *said("And a wolf?")),
    FIRST,
    (SYSTEM, *said("What is a wolf?")),
    ({**SYSTEM, "content": "You are Brief. " * 8}, *said("What is a fox? " * 6)),
    (SYSTEM,),
    (*FIRST, {"role": "assistant", "content": "Long. " * 60}, *said("Why so?")),
)


async def test_every_further_prompt_has_cached_what_any_before_it_began_with() -> None:
    """Edited turns, dropped ones, another system text, shorter prompts: to the token."""
    async with running(LARGE, kv=KvSettings(settles=False)) as rig:
        known: list[tuple[int, ...]] = []
        for messages in (FIRST, *FURTHER):
            given = {"messages": messages}
            prompt = (await rig.inference.prompt(GenerationInput(messages=messages))).ids
            done, drawn = await answer(rig, given)
            best = max((common_length(prompt, each) for each in known), default=0)
            assert done.usage.cached == min(best, len(prompt) - 1)
            assert drawn == await fresh(given)
            known.append((*prompt, *drawn[:-1]))
            await rig.settle()
        kv = rig.inference.stats().kv
        assert kv["cached"] + kv["computed"] == sum(len(each) - 11 for each in known)


async def test_a_long_answer_is_known_when_two_words_follow_it() -> None:
    async with running(LARGE) as rig:
        prompt = ids("Tell me all about the fox. ")
        _, drawn = await answer(rig, {"tokens": prompt, "max_tokens": 700})
        follows = (*prompt, *drawn, *ids(" Why so?"))
        done, further = await answer(rig, {"tokens": follows})
        assert done.usage.cached == len(prompt) + 700 - 1
        assert further == await fresh({"tokens": follows})


async def test_without_the_cache_nothing_is_used_and_nothing_left() -> None:
    async with running(LARGE) as rig:
        given = {"messages": FIRST}
        _, first = await answer(rig, given)
        await rig.settle()
        held = rig.inference.stats().kv["block_bytes"]
        done, drawn = await answer(rig, {**given, "cache": False})
        assert (done.usage.cached, drawn) == (0, first)
        await answer(rig, {"prompt": "nobody knows this " * 20, "cache": False})
        await rig.settle()
        assert rig.inference.stats().kv["block_bytes"] == held
        done, _ = await answer(rig, {"prompt": "nobody knows this " * 20})
        assert done.usage.cached == 0


async def test_an_owner_does_not_learn_what_another_has_asked() -> None:
    async with running(LARGE) as rig:
        given = {"messages": FIRST}
        _, first = await answer(rig, given, owner="1000")
        done, second = await answer(rig, given, owner="1001")
        assert (done.usage.cached, second) == (0, first)


async def test_a_system_prompt_of_the_configuration_is_everybodys() -> None:
    text = str(SYSTEM["content"])
    async with running(LARGE, kv=KvSettings(system_prompts=(text,))) as rig:
        await until(lambda: rig.inference.stats().kv["settled"] == 1)
        num_system = len(await rig.inference.history_ids(GenerationInput(messages=(SYSTEM,))))
        computed = rig.inference.stats().kv["computed"]
        assert computed == num_system
        for owner in ("1000", "1001"):
            done, drawn = await answer(rig, {"messages": FIRST}, owner=owner)
            assert done.usage.cached >= num_system
            assert drawn == await fresh({"messages": FIRST})


async def test_system_prompts_may_be_others_from_now_on() -> None:
    text, other = str(SYSTEM["content"]), "You sail a ship with a crew of nine. " * 4
    async with running(LARGE, kv=KvSettings(system_prompts=("You mend clocks.", text))) as rig:
        await until(lambda: rig.inference.stats().kv["settled"] == 2)
        rig.inference.set_kv(KvSettings(system_prompts=(text, other)))
        await until(lambda: rig.inference.stats().kv["settled"] == 3)
        for system in (text, other):
            message = {"role": "system", "content": system}
            num_system = len(await rig.inference.history_ids(GenerationInput(messages=(message,))))
            done, _ = await answer(rig, {"messages": (message, FIRST[-1])}, owner="1001")
            assert done.usage.cached >= num_system


@pytest.mark.parametrize("sampling", [{"temperature": 0}, {"temperature": 1.0, "seed": 7}], ids=["greedy", "sampled"])
@pytest.mark.parametrize("speculates", [True, False])
async def test_a_preempted_answer_is_the_one_that_it_would_have_been_alone(
    sampling: dict[str, Any], speculates: bool
) -> None:
    script = FakeScript(capacity=1024, kv_bytes_per_token=TOKEN_BYTES, max_chunk=64, num_slots=2, margin=6.0)
    may_step = threading.Event()
    may_step.set()
    listeners = [Listener(), Listener()]

    def pause(_: float) -> None:
        assert may_step.wait(20)

    def hold(_: Event) -> None:
        if may_step.is_set() and all(len(tokens_of(each)) > MIN_TOKENS for each in listeners):
            may_step.clear()

    prompts = [ids(f"{number}. The fox is in its den. " * (3 + number)) for number in range(2)]
    async with running(script, speculates=speculates, sleep=pause) as rig:
        long = {"max_tokens": 600, "ignore_eos": True, "logprobs": True, **sampling}
        for prompt, listener in zip(prompts, listeners, strict=True):
            listener.on_event = hold
            await rig.submit("1000", listener, tokens=prompt, **long)
        await until(lambda: not may_step.is_set())
        for listener in listeners:
            listener.on_event = None
        _, quick = await rig.submit(owner="1001", prompt="quick", max_tokens=5, priority="high")
        may_step.set()
        await quick.done()
        drawn = []
        for listener in listeners:
            await listener.done()
            drawn.append(tokens_of(listener))
        stats = rig.inference.stats()
        assert stats.kv["preempted"] == 1
        assert stats.kv["computed"] == sum(map(len, prompts)) + len(ids("quick")), "nothing was computed twice"
    alone = [await fresh({"tokens": prompt, "max_tokens": 600, **sampling}, script) for prompt in prompts]
    assert drawn == alone


async def test_the_deadline_counts_while_a_request_waits() -> None:
    now = [100.0]
    script = FakeScript(loop=True, tokens=ids("Hello"), num_slots=1, capacity=2048, step_s=0.001)
    async with running(script, clock=lambda: now[0]) as rig:
        running_one, first = await rig.submit(max_tokens=2000)
        await until(lambda: len(first.deltas) > 0)
        _, waiting = await rig.submit(deadline_ms=5000)
        now[0] += 4.9
        await asyncio.sleep(0.02)
        assert not waiting.over.is_set()
        now[0] += 0.2
        done = await waiting.done()
        assert done.finishes == ("deadline",)
        assert (done.usage.completion, done.ms.queue) == (0, done.ms.total)
        running_one.cancel()
        await first.end()


@pytest.mark.parametrize("fault", [{"nan_at_step": 4}, {"fail_at_step": 3}, {"fail_at_step": 1}])
async def test_what_failed_is_not_kept(fault: dict[str, Any]) -> None:
    script = FakeScript(capacity=1024, kv_bytes_per_token=TOKEN_BYTES, max_chunk=64, **fault)
    async with running(script) as rig:
        prompt = ids("x" * 150)
        _, listener = await rig.submit(tokens=prompt, max_tokens=9)
        last = await listener.end()
        assert not isinstance(last, Done)
        await rig.settle()
        assert rig.inference.stats().kv["block_bytes"] == 0
        done, drawn = await answer(rig, {"tokens": prompt})
        assert done.usage.cached == 0
        assert drawn == await fresh({"tokens": prompt})


async def test_the_context_is_what_the_budget_allows() -> None:
    async with running(LARGE, kv=KvSettings(memory_bytes=300 * TOKEN_BYTES)) as rig:
        assert rig.inference.context == 300
        with pytest.raises(EdgeqwenError, match=r"max_tokens 201 .* 100 tokens .* context of 300") as caught:
            await rig.submit(tokens=(1,) * 100, max_tokens=201)
        assert caught.value.code == "too_long"
        requests = [await rig.submit(tokens=(1 + n,) * 100, max_tokens=100, ignore_eos=True) for n in range(6)]
        for _, listener in requests:
            assert (await listener.done()).usage.completion == 100
            kv = rig.inference.stats().kv
            assert kv["block_bytes"] + kv["reserved_bytes"] <= kv["budget_bytes"] == 300 * TOKEN_BYTES


async def test_a_budget_that_holds_nothing_is_a_fault_of_the_configuration() -> None:
    rig = make_rig(LARGE, kv=KvSettings(memory_bytes=10 * TOKEN_BYTES))
    with pytest.raises(ConfigInvalid, match=r"kv.memory_mb: 640 bytes hold 10 tokens"):
        await rig.inference.start()
    await rig.inference.close()


# Idle time.


async def test_a_conversation_is_settled_in_idle_time() -> None:
    async with running(SAYS) as rig:
        talk = Talk(rig, "a")
        done = await talk.turn()
        await talk.settle()
        num_known = len(talk.settled)
        assert num_known > done.usage.prompt + done.usage.completion
        assert rig.inference.cached_tokens("1000", talk.settled) == num_known
        assert (await talk.turn()).usage.cached == num_known


async def test_settling_can_be_taken_back_and_turned_off() -> None:
    async with running(SAYS) as rig:
        rig.inference.settle("k", "1000", ids("y" * 900))
        rig.inference.unsettle("k")
        await rig.run()
        assert rig.inference.stats().kv["settled"] == 0
    async with running(SAYS, kv=KvSettings(settles=False)) as rig:
        rig.inference.settle("k", "1000", ids("y" * 100))
        await rig.run()
        assert rig.inference.stats().kv["settled_tokens"] == 0


async def test_the_engine_stops_in_the_middle_of_settling() -> None:
    script = FakeScript(capacity=2048, max_chunk=16, step_s=0.02)
    async with running(script) as rig:
        rig.inference.settle("k", "1000", (1,) * 2000)
        await until(lambda: rig.inference.stats().kv["settled_tokens"] > 0)
        await rig.inference.drain(5.0)
        await rig.inference.close()
        assert rig.inference.stats().kv["settled"] == 0
    assert rig.runtime.is_closed


# Disk.


@dataclass(eq=False)
class Talk:
    """A conversation that goes on, as a session does: its history is settled after each turn."""

    rig: Rig
    key: str
    messages: Messages = ()
    settled: tuple[int, ...] = ()
    texts: list[str] = field(default_factory=list)

    async def turn(self, num_words: int = 12) -> Done:
        text = f"{self.key} asks {len(self.texts)}: " + " ".join(f"word{n}" for n in range(num_words))
        self.messages = (*self.messages, {"role": "user", "content": text})
        done, listener = await self.rig.run(messages=self.messages, max_tokens=80)
        self.texts.append(listener.text())
        self.messages = (*self.messages, {"role": "assistant", "content": listener.text()})
        return done

    async def settle(self) -> None:
        """Have it settled, and wait for that."""
        inference = self.rig.inference
        self.settled = await inference.history_ids(GenerationInput(messages=self.messages))
        inference.settle(self.key, "1000", self.settled)
        await until(lambda: inference.cached_tokens("1000", self.settled) == len(self.settled))


def on_disk(folder: Path, **given: Any) -> KvSettings:
    return KvSettings(folder=folder, write_delay_s=0.0, **given)


async def test_a_conversation_goes_on_after_a_restart(tmp_path: Path) -> None:
    async with running(SAYS, kv=on_disk(tmp_path)) as rig:
        talk = Talk(rig, "a")
        for _ in range(2):
            await talk.turn()
            await talk.settle()
    async with running(SAYS, kv=on_disk(tmp_path)) as rig:
        talk.rig = rig
        await until(lambda: rig.inference.cached_tokens("1000", talk.settled) == len(talk.settled))
        done = await talk.turn()
        assert done.usage.cached == len(talk.settled)
        assert rig.inference.stats().kv["computed"] == done.usage.prompt - len(talk.settled)
        assert talk.texts[2] == talk.texts[0]


async def test_there_may_be_a_disk_from_now_on_and_none_again(tmp_path: Path) -> None:
    async with running(SAYS) as rig:
        talk = Talk(rig, "a")
        await talk.turn()
        await talk.settle()
        rig.inference.set_kv(on_disk(tmp_path))
        await talk.turn()
        await talk.settle()
        await until(lambda: len(files_in(tmp_path)) > 0)
        rig.inference.set_kv(KvSettings(disk_bytes=0))
        await until(lambda: not files_in(tmp_path))
        done = await talk.turn()
        assert done.usage.cached >= len(talk.settled), "memory has it still"
        await talk.settle()
    assert files_in(tmp_path) == []


async def test_single_requests_leave_nothing_on_disk(tmp_path: Path) -> None:
    async with running(SAYS, kv=on_disk(tmp_path)) as rig:
        await rig.run(messages=FIRST, max_tokens=20)
    assert files_in(tmp_path) == []


async def test_a_file_that_is_damaged_is_computed_again(tmp_path: Path) -> None:
    async with running(SAYS, kv=on_disk(tmp_path)) as rig:
        talk = Talk(rig, "a")
        await talk.turn(30)
        await talk.settle()
    num_files = await asyncio.to_thread(damage, tmp_path)
    assert num_files >= 3
    async with running(SAYS, kv=on_disk(tmp_path)) as rig:
        talk.rig = rig
        await until(lambda: rig.inference.cached_tokens("1000", talk.settled) == len(talk.settled))
        done = await talk.turn()
        assert done.usage.cached < len(talk.settled), "it was found out when it was read"
        assert rig.inference.stats().kv["computed"] == done.usage.prompt - done.usage.cached
        await talk.settle()
        assert (await talk.turn()).usage.cached == len(talk.settled)
        assert talk.texts[2] == talk.texts[0]


def files_in(folder: Path) -> list[Path]:
    return sorted(folder.glob("*/*.kv"))


def damage(folder: Path) -> int:
    files = files_in(folder)
    for path in files:
        data = path.read_bytes()
        path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    return len(files)


async def test_ten_conversations_with_room_for_three_compute_their_own_tokens_alone(tmp_path: Path) -> None:
    """Blocks go to disk before their memory is given up, and come back from there."""
    async with running(SAYS, kv=on_disk(tmp_path, memory_bytes=3 * 700 * TOKEN_BYTES)) as rig:
        talks = [Talk(rig, f"talk {number}") for number in range(10)]
        for number in range(4):
            for talk in talks:
                done = await talk.turn()
                assert done.usage.cached == len(talk.settled) if number else done.usage.cached < 64
                await talk.settle()
        kv = rig.inference.stats().kv
        assert kv["evicted"] > 50
        assert (kv["lost"], kv["failed_writes"]) == (0, 0)
        assert all(text == talks[0].texts[0] for talk in talks for text in talk.texts)


@pytest.mark.parametrize("sees", ["read-only", "held by another"])
async def test_without_a_disk_everything_else_goes_on(tmp_path: Path, sees: str) -> None:
    other = make_rig(SAYS, kv=on_disk(tmp_path))
    folder = tmp_path
    if sees == "read-only":
        folder = tmp_path / "file"
        await asyncio.to_thread(folder.touch)
    else:
        await other.inference.start()
        await Talk(other, "b").turn()
    async with running(SAYS, kv=on_disk(folder, memory_bytes=3 * 500 * TOKEN_BYTES)) as rig:
        talks = [Talk(rig, f"talk {number}") for number in range(6)]
        for talk in talks:
            await talk.turn()
            await talk.settle()
            assert (await talk.turn()).usage.cached == len(talk.settled)
        assert rig.inference.stats().kv["disk_bytes"] == 0
    await other.inference.close()


async def test_a_request_may_be_cancelled_while_its_blocks_are_read(tmp_path: Path) -> None:
    async with running(SAYS, kv=on_disk(tmp_path)) as rig:
        talk = Talk(rig, "a")
        await talk.turn(40)
        await talk.settle()
    async with running(SAYS, kv=on_disk(tmp_path), limits=EngineLimits()) as rig:
        await until(lambda: rig.inference.cached_tokens("1000", talk.settled) > 0)
        for _ in range(5):
            generation, listener = await rig.submit(messages=(*talk.messages, *said("go on")), max_tokens=40)
            await asyncio.sleep(0)
            generation.cancel()
            assert (await listener.done()).finishes == ("cancelled",)
        talk.rig = rig
        done = await talk.turn()
        assert done.usage.cached >= len(talk.settled)
        await rig.settle()
        assert rig.inference.stats().kv["reserved_bytes"] == 0
