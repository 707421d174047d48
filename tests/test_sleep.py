"""A model that is given back while nothing is to be done, and comes back with the next request, with nothing lost."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from pathlib import Path
from typing import Any

import pytest

from edgeqwen.core.request import Done
from edgeqwen.engine import life as life_module
from edgeqwen.engine.embeddings import EmbeddingInput
from edgeqwen.engine.settings import EngineLimits, KvSettings
from edgeqwen.errors import EdgeqwenError, ModelReplaced, RuntimeFailed
from edgeqwen.runtime.fake import FakeScript
from tests.engines import Rig, eos, ids, make_rig, running

HISTORY = "a" * 150
"""More than two blocks of tokens, one for each letter."""


def says(text: str, **more: Any) -> FakeScript:
    return FakeScript(tokens=(*ids(text), eos()), **more)


def files_of(path: Path) -> list[Path]:
    return sorted(path.rglob("*.kv"))


def on_disk(path: Path) -> KvSettings:
    return KvSettings(memory_bytes=1 << 20, folder=path, write_delay_s=0.0)


async def test_the_next_request_wakes_the_model_and_is_answered() -> None:
    async with running(says("yes")) as rig:
        await rig.run()
        await rig.asleep()
        assert rig.inference.state == "asleep"
        assert rig.runtime.is_closed
        done, listener = await rig.run()
        assert (done.finishes, listener.text()) == (("stop",), "yes")
        assert len(rig.runtimes) == 2


async def test_nothing_holds_the_runtime_of_a_model_that_sleeps() -> None:
    async with running() as rig:
        await rig.run()
        runtime = weakref.ref(rig.runtimes.pop())
        await rig.asleep()
        gc.collect()
        assert runtime() is None


async def test_it_stays_awake_while_anything_is_to_be_done() -> None:
    async with running(FakeScript(step_s=0.01, tokens=(5,) * 40)) as rig:
        await rig.idle()
        _, listener = await rig.submit(max_tokens=20)
        assert not rig.inference.is_idle
        assert not rig.inference.fall_asleep()
        await listener.done()
        rig.inference.settle("key", "1000", ids(HISTORY))
        assert not rig.inference.fall_asleep(), "a prompt is computed beforehand"
        await rig.asleep()
        assert not rig.inference.fall_asleep(), "it sleeps already"


async def test_requests_that_come_together_wake_it_once() -> None:
    async with running(says("yes", load_s=0.05)) as rig:
        await rig.run()
        await rig.asleep()
        done = await asyncio.gather(*(rig.run(owner=str(number)) for number in range(5)))
        assert [listener.text() for _, listener in done] == ["yes"] * 5
        assert len(rig.runtimes) == 2


async def test_a_request_that_comes_while_it_falls_asleep_is_answered() -> None:
    async with running(says("yes")) as rig:
        await rig.run()
        await rig.idle()
        assert rig.inference.fall_asleep()
        _, listener = await rig.run()
        assert listener.text() == "yes"
        assert rig.runtimes[0].is_closed
        assert not rig.runtimes[1].is_closed


async def test_who_does_not_wait_is_told_that_it_loads_and_has_it_woken() -> None:
    async with running(FakeScript(load_s=0.05)) as rig:
        await rig.run()
        await rig.asleep()
        with pytest.raises(EdgeqwenError) as caught:
            await rig.submit(wait=False)
        assert caught.value.code == "loading"
        assert caught.value.retry_ms
        await rig.inference.until_settled()
        assert rig.inference.state == "ready"
        await rig.run(wait=False)


async def test_a_deadline_may_come_before_the_model() -> None:
    async with running(FakeScript(load_s=0.3)) as rig:
        await rig.run()
        await rig.asleep()
        done, _ = await rig.run(deadline_ms=20)
        assert done.finishes == ("deadline",)
        await rig.inference.until_settled()
        assert rig.inference.state == "ready"


async def test_embeddings_wake_it_too() -> None:
    async with running(pooling="mean") as rig:
        await rig.asleep()
        vectors = await rig.inference.embed(EmbeddingInput(texts=("a",)), owner="1000")
        assert len(vectors.vectors) == 1


async def test_text_is_made_into_tokens_without_waking_it() -> None:
    async with running() as rig:
        await rig.asleep()
        tokens = await rig.inference.tokenize("hi", special=False)
        assert await rig.inference.detokenize(tokens) == b"hi"
        assert rig.inference.state == "asleep"


async def test_what_was_known_of_a_conversation_is_read_from_disk_after_waking(tmp_path: Path) -> None:
    async with running(says("yes"), kv=on_disk(tmp_path)) as rig:
        await rig.run(prompt=HISTORY)
        rig.inference.settle("key", "1000", ids(HISTORY))
        await rig.asleep()
        done, _ = await rig.run(prompt=HISTORY + "b")
        assert done.usage.cached >= 128
        computed = sum(len(chunk.ids) for batch in rig.runtimes[1].batches for chunk in batch.chunks)
        assert computed < 40


async def test_a_conversation_deleted_while_it_sleeps_leaves_nothing_on_disk(tmp_path: Path) -> None:
    async with running(says("yes"), kv=on_disk(tmp_path)) as rig:
        for owner in ("1000", "1001"):
            await rig.run(prompt=HISTORY, owner=owner)
            rig.inference.settle(owner, owner, ids(HISTORY))
        await rig.asleep()
        before = files_of(tmp_path)
        rig.inference.discard("1000", ids(HISTORY))
        assert not rig.inference.is_idle
        await rig.idle()
        after = files_of(tmp_path)
        assert 0 < len(after) < len(before)
        assert rig.inference.state == "asleep"
        assert len(rig.runtimes) == 1
        done, _ = await rig.run(prompt=HISTORY + "b", owner="1001")
        assert done.usage.cached >= 128
        done, _ = await rig.run(prompt=HISTORY + "b", owner="1000")
        assert done.usage.cached == 0


async def test_a_conversation_deleted_while_it_wakes_leaves_nothing_on_disk(tmp_path: Path) -> None:
    async with running(says("yes", load_s=0.2), kv=on_disk(tmp_path)) as rig:
        await rig.run(prompt=HISTORY)
        rig.inference.settle("key", "1000", ids(HISTORY))
        await rig.asleep()
        assert files_of(tmp_path)
        waiting = asyncio.create_task(rig.submit(owner="1001"))
        while rig.inference.state != "loading":  # noqa: ASYNC110 -- there is no event for it
            await asyncio.sleep(0)
        rig.inference.discard("1000", ids(HISTORY))
        _, listener = await waiting
        await listener.done()
        done, _ = await rig.run(prompt=HISTORY + "b")
        assert done.usage.cached == 0


async def test_a_request_comes_after_what_is_being_removed_from_disk(tmp_path: Path) -> None:
    async with running(says("yes"), kv=on_disk(tmp_path)) as rig:
        await rig.run(prompt=HISTORY)
        rig.inference.settle("key", "1000", ids(HISTORY))
        await rig.asleep()
        rig.inference.discard("1000", ids(HISTORY))
        done, _ = await rig.run(prompt=HISTORY + "b")
        assert done.usage.cached == 0


async def test_what_is_counted_goes_on_across_sleep() -> None:
    async with running(says("yes")) as rig:
        await rig.run(prompt=HISTORY)
        await rig.idle()
        before = rig.inference.stats()
        await rig.asleep()
        sleeping = rig.inference.stats()
        assert sleeping.totals == before.totals
        assert sleeping.kv["computed"] == before.kv["computed"] > 0
        assert sleeping.kv_bytes == sleeping.kv["block_bytes"] == 0
        assert rig.inference.owner_stats("1000").totals == before.totals
        await rig.run(prompt=HISTORY)
        after = rig.inference.stats()
        assert after.totals["requests"] == 2
        assert after.kv["computed"] > before.kv["computed"]


async def test_what_a_model_can_do_stays_known_while_it_sleeps() -> None:
    async with running(pooling="mean") as rig:
        facts = (rig.inference.context, rig.inference.hidden_size, rig.inference.kv_bytes_per_token)
        assert all(facts)
        await rig.asleep()
        assert (rig.inference.context, rig.inference.hidden_size, rig.inference.kv_bytes_per_token) == facts


async def test_system_prompts_are_kept_again_after_waking() -> None:
    kv = KvSettings(memory_bytes=1 << 20, system_prompts=("Be brief.",))
    async with running(says("yes"), kv=kv) as rig:
        await rig.run()
        await rig.asleep()
        await rig.run()
        await rig.idle()
        messages = ({"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"})
        done, _ = await rig.run(messages=messages, owner="1001")
        assert done.usage.cached > 0


class Failing:
    """A load that fails as often as it is told to."""

    def __init__(self, rig: Rig) -> None:
        self.num_failures = 0
        self.error: Exception = RuntimeFailed("no memory for the cache")
        self._load = rig.inference._life._factory
        rig.inference._life._factory = self

    def __call__(self, progress: Any) -> Any:
        if self.num_failures:
            self.num_failures -= 1
            raise self.error
        return self._load(progress)


@pytest.mark.parametrize("error", [RuntimeFailed("no memory for the cache"), MemoryError("text of a library")])
async def test_a_failed_wake_is_told_to_who_waits_and_the_next_request_tries_again(error: Exception) -> None:
    rig = make_rig(says("yes"))
    failing = Failing(rig)
    await rig.inference.start()
    await rig.run()
    await rig.asleep()
    failing.num_failures, failing.error = 1, error
    with pytest.raises(EdgeqwenError) as caught:
        await rig.submit()
    assert caught.value.code == "engine"
    assert "library" not in caught.value.message
    assert rig.inference.state == "asleep"
    _, listener = await rig.run()
    assert listener.text() == "yes"
    await rig.inference.close()


async def test_a_model_that_was_replaced_while_it_slept_ends_the_daemon_and_who_waits_is_told() -> None:
    rig = make_rig()
    failing = Failing(rig)
    await rig.inference.start()
    await rig.asleep()
    failing.num_failures, failing.error = 1, ModelReplaced("/models/m: is another model now")
    with pytest.raises(EdgeqwenError, match="another model now") as caught:
        await rig.submit()
    assert caught.value.code == "engine"
    async with asyncio.timeout(20):
        assert await rig.inference.wait_until_broken() is failing.error
    await rig.inference.close()


async def test_the_end_may_come_while_it_sleeps_or_wakes() -> None:
    for wakes in (False, True):
        async with running(FakeScript(load_s=0.05)) as rig:
            await rig.run()
            await rig.asleep()
            waiting = asyncio.create_task(rig.submit()) if wakes else None
            await asyncio.sleep(0)
            await rig.inference.drain(1.0)
            if waiting is not None:
                with pytest.raises(EdgeqwenError) as caught:
                    await waiting
                assert caught.value.code == "draining"
        async with asyncio.timeout(20):
            while not all(runtime.is_closed for runtime in rig.runtimes):  # noqa: ASYNC110 -- they have no event
                await asyncio.sleep(0.001)


async def test_requests_wait_for_what_is_on_disk_but_not_for_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk that does not answer costs a moment at the start, and the prompt is computed."""
    monkeypatch.setattr(life_module, "DISK_TIMEOUT_S", 0.01)
    rig = make_rig(says("yes"), kv=on_disk(tmp_path))
    await rig.inference.start()
    await rig.run(prompt=HISTORY)
    await rig.inference.close()


async def test_a_queue_that_was_full_before_sleep_is_empty_after_it() -> None:
    async with running(says("yes"), limits=EngineLimits(queue=1, per_owner=1)) as rig:
        for _ in range(3):
            _, listener = await rig.submit()
            done = await listener.end()
            assert isinstance(done, Done)
            await rig.asleep()


async def test_a_form_is_compiled_again_after_sleep() -> None:
    async with running(says('"b"')) as rig:
        form = {"type": "regex", "regex": '"[ab]"'}
        for _ in range(2):
            _, listener = await rig.run(response_format=form)
            assert listener.text() == '"b"'
            await rig.asleep()
            assert rig.inference._intake._forms._compiler._vocabulary is None


async def test_the_thread_that_made_tokens_ends_with_sleep_and_what_the_library_kept_for_it() -> None:
    def text_threads() -> set[int | None]:
        return {thread.ident for thread in threading.enumerate() if thread.name.startswith("text")}

    others = text_threads()
    async with running(says("yes")) as rig:
        await rig.run()
        before = text_threads() - others
        assert len(before) == 1
        await rig.asleep()
        async with asyncio.timeout(20):
            while text_threads() & before:  # noqa: ASYNC110 -- a thread has no event
                await asyncio.sleep(0.001)
        await rig.run()
        assert len(text_threads() - others) == 1
