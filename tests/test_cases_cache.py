"""A real daemon that knows what was said before: no answer differs for it, and what it says of reuse is true."""

from __future__ import annotations

import asyncio
import json
import random
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from edgeqwen.core.model import Quant
from edgeqwen.core.request import Failed
from edgeqwen.core.step import Batch, Chunk
from edgeqwen.runtime.fake import FakeScript
from tests.daemons import DaemonProcess, running_daemon, script_of
from tests.engines import running
from tests.fronts import CHAT_PATH, WITHOUT_ASK, Answer, Front, call, chat, post, stream, write_qwen_model
from tests.models import needs_row_invariance, smollm2_package, tiny_package, tiny_runtime
from tests.processes import anonymous_bytes
from tests.qwen_files import END_THINK, IM_END, THINK, qwen_builder, qwen_tokenizer
from tests.wire import WireClient

Ids = tuple[int, ...]
Message = dict[str, Any]
COUNTING: tuple[Front, ...] = ("socket", "socket stream", "http")
"""Those whose answer says how much of the prompt was known."""


def user(content: str) -> Message:
    return {"role": "user", "content": content}


def assistant(content: str) -> Message:
    return {"role": "assistant", "content": content}


def system(content: str) -> Message:
    return {"role": "system", "content": content}


def common_length(left: Ids, right: Ids) -> int:
    return len(list(takewhile(lambda pair: pair[0] == pair[1], zip(left, right, strict=False))))


def cached(answer: Answer) -> int:
    """Tokens of the prompt that were not computed, as the front says it."""
    if isinstance(answer.raw, list):
        return int(answer.raw[-1]["usage"]["cached"])
    return int(answer.raw["usage"]["prompt_tokens_details"]["cached_tokens"])


@dataclass
class Reference:
    """Answers that were computed from nothing, and the sequences that a daemon must know after others."""

    daemon: DaemonProcess
    known: list[Ids] = field(default_factory=list)

    def of(self, messages: list[Message], **options: Any) -> tuple[Ids, Ids, str]:
        """Ids of the prompt, ids and text of the answer."""
        given = {"messages": messages, "temperature": 0, "verbose": True, "logprobs": True, "cache": False, **options}
        final = call(self.daemon, "chat", **given)
        assert final["usage"]["cached"] == 0
        return tuple(final["prompt_ids"]), tuple(entry["token"] for entry in final["logprobs"]), final["text"]

    def check(self, front: Front, messages: list[Message], **options: Any) -> str:
        """Ask once more with all that is known: the same answer, and exactly the common beginning is reused."""
        prompt, answer, text = self.of(messages, **options)
        expected = min(max((common_length(prompt, each) for each in self.known), default=0), len(prompt) - 1)
        got = chat(self.daemon, front, messages=messages, temperature=0, **options)
        assert (got.content, got.prompt, got.completion) == (text, len(prompt), len(answer))
        assert cached(got) == expected, (len(prompt), front)
        self.known.append((*prompt, *answer[:-1]))  # the last token was said and not computed
        return text


@pytest.fixture(scope="module")
def daemon() -> Iterator[DaemonProcess]:
    """What it says depends on every token before, so a wrong reuse is another answer."""
    with running_daemon("fake:", environ={"EDGEQWEN_KV_DISK_MB": "0", "EDGEQWEN_KV_MEMORY_MB": "200"}) as started:
        yield started
        assert "Traceback" not in started.log


# Edits of a conversation.


def test_after_any_edit_the_answer_is_that_of_a_fresh_daemon_and_the_common_beginning_is_reused() -> None:
    with running_daemon("fake:", environ={"EDGEQWEN_KV_DISK_MB": "0"}) as daemon:
        reference = Reference(daemon)
        for front in COUNTING:
            edit_a_conversation(reference, front)


def edit_a_conversation(reference: Reference, front: Front) -> None:
    rules = f"{front} " + "rule " * 120
    talk = [system(rules)]
    for question in ("What is one?", "What is two?", "And three?"):
        talk.append(user(question))
        talk.append(assistant(reference.check(front, talk, max_tokens=30)))
    edited = [*talk[:3], user("What is too?"), *talk[4:6]]
    other_rules = [system(rules[:300] + "R" + rules[301:]), *talk[1:4]]
    for messages in (edited, talk[:4], [*talk[:3], user("anew")], other_rules, talk[:2], talk[:1]):
        reference.check(front, messages, max_tokens=10)
    long = [*talk, user("Tell all.")]
    long.append(assistant(reference.check(front, long, max_tokens=300)))
    reference.check(front, [*long, user("Go on")], max_tokens=10)


def test_a_session_that_is_forked_or_reset_answers_as_its_whole_transcript(daemon: DaemonProcess) -> None:
    reference = Reference(daemon)
    talk = [system("Rules " * 100)]
    session = call(daemon, "session.create", system=talk[0]["content"])["session"]

    def turn(session: str, past: list[Message], question: str) -> list[Message]:
        now = [*past, user(question)]
        prompt, _, text = reference.of(now, max_tokens=20)
        final = call(daemon, "chat", session=session, prompt=question, temperature=0, max_tokens=20, verbose=True)
        assert (final["text"], tuple(final["prompt_ids"])) == (text, prompt)
        least = max((common_length(prompt, each) for each in reference.known), default=0)
        assert min(least, len(prompt) - 1) <= final["usage"]["cached"] < len(prompt)
        reference.known.append(prompt)
        return [*now, assistant(text)]

    for question in ("one", "two", "three"):
        talk = turn(session, talk, question)
    edited = call(daemon, "session.fork", session=session, at=1)["session"]
    turn(edited, talk[:3], "two, otherwise")
    dropped = call(daemon, "session.fork", session=session, at=2)["session"]
    turn(dropped, talk[:5], "three, otherwise")
    call(daemon, "session.reset", session=edited)
    turn(edited, talk[:1], "one")
    turn(session, talk, "four")


# Many at once.


def test_no_answer_holds_anything_of_another_clients_and_the_living_are_told_what_they_would_hear_alone(
    daemon: DaemonProcess,
) -> None:
    draw = random.Random(29)
    heard: list[tuple[dict[str, Any], dict[str, Any]]] = []

    async def one(number: int) -> None:
        for turn in range(4):
            reader, writer = await asyncio.open_unix_connection(str(daemon.socket_path), limit=1 << 22)
            client = WireClient(reader, writer)
            marker = f"<{number}.{turn}>"
            requests: list[dict[str, Any]] = [
                {
                    "op": "chat",
                    "id": f"{marker}{part}",
                    "prompt": marker * (draw.randint(20, 1500) // len(marker)) + str(part),
                    "max_tokens": draw.randint(1, 60),
                    "temperature": 0,
                    "stream": True,
                }
                for part in range(3)
            ]
            client.send(*requests)
            if draw.random() < 1 / 3:
                await asyncio.sleep(draw.random() * 0.1)
                client.close()
                continue
            texts = {request["id"]: "" for request in requests}
            finals: dict[str, dict[str, Any]] = {}
            while len(finals) < len(requests):
                frame = await client.read(60)
                assert frame is not None
                assert frame["id"] in texts, "a frame for somebody else"
                texts[frame["id"]] += frame.get("delta", "")
                if frame["done"]:
                    finals[frame["id"]] = {**frame, "text": texts[frame["id"]]}
            heard.extend((request, finals[request["id"]]) for request in requests)
            client.close()

    async def all_at_once() -> None:
        await asyncio.gather(*(one(number) for number in range(16)))

    asyncio.run(all_at_once())
    assert len(heard) > 40
    for request, final in draw.sample(heard, 40):
        again = {name: value for name, value in request.items() if name not in ("op", "id", "stream")}
        alone = call(daemon, "chat", **again, cache=False)
        assert (final["text"], final["finish"]) == (alone["text"], alone["finish"])
    daemon.wait_for(running=0, queued=0)


# Real arithmetic: rows beside others, known beginnings, cuts.

SHORT = tuple(range(40, 47))
LONG = tuple(30 + (7 * position) % 200 for position in range(900))


def spoken(frames: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [entry for frame in frames for entry in frame.get("logprobs") or ()]


def say(daemon: DaemonProcess, tokens: Ids, count: int, **options: Any) -> list[dict[str, Any]]:
    """Greedy tokens with the logprobs of the five best of each."""
    given = {"tokens": tokens, "max_tokens": count, "ignore_eos": True, "temperature": 0}
    return spoken(stream(daemon, "generate", **given, logprobs=True, top_logprobs=5, **options))


def assert_close(got: list[dict[str, Any]], reference: list[dict[str, Any]], tolerance: float) -> None:
    """The same tokens with logprobs that differ by no more; after a choice between two that are as good, nothing."""
    for here, there in zip(got, reference, strict=True):
        first, second = (logprob for _, logprob in there["top"][:2])
        is_tied = first - second <= 2 * tolerance
        if here["token"] != there["token"]:
            assert is_tied, (here, there)
            return
        assert abs(here["logprob"] - there["logprob"]) <= tolerance


TOLERANCES: dict[Quant, float] = {"int8": 0.0, "int4": 0.15}
"""Of a logprob of the tiny model. int8 gives the same bits in whatever company; with int4 another last bit may round an
activation to the next of its 8-bit values."""


@pytest.fixture(scope="module", params=TOLERANCES)
def real(request: pytest.FixtureRequest) -> Iterator[tuple[DaemonProcess, float]]:
    """A tiny model of random weights, and by how much its logprobs may differ."""
    quant: Quant = request.param
    if quant == "int8":
        needs_row_invariance()
    flags = ("--threads", "1", "--slots", "4", "--kv", "fp32")
    with running_daemon("onnx", *flags, model=tiny_package("qwen3", quant)) as started:
        yield started, TOLERANCES[quant]
        assert "Traceback" not in started.log


@pytest.mark.parametrize("is_short_first", [True, False], ids=["short first", "long first"])
def test_a_short_prompt_says_the_same_beside_a_long_one_and_after_that_has_left(
    real: tuple[DaemonProcess, float], is_short_first: bool
) -> None:
    daemon, tolerance = real
    options: dict[str, Any] = {"cache": False, "speculate": False}
    alone, long_alone = say(daemon, SHORT, 100, **options), say(daemon, LONG, 20, **options)
    results: dict[str, list[dict[str, Any]]] = {}
    roles = {"short": (SHORT, 100), "long": (LONG, 20)}

    def run(name: str) -> None:
        results[name] = say(daemon, *roles[name], **options)

    threads = [threading.Thread(target=run, args=[name]) for name in sorted(roles, reverse=is_short_first)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results["short"]) == 100
    assert_close(results["short"], alone, tolerance)
    assert_close(results["long"], long_alone, tolerance)


def test_cold_warm_and_batched_runs_say_the_same(real: tuple[DaemonProcess, float]) -> None:
    daemon, tolerance = real
    draw = random.Random(31)
    prompts = [tuple(draw.choices(range(30, 200), k=draw.randint(5, 400))) for _ in range(12)]
    cold = [say(daemon, prompt, 24, cache=False, speculate=False) for prompt in prompts]
    for _ in ("first", "known"):
        for prompt, reference in zip(prompts, cold, strict=True):
            assert_close(say(daemon, prompt, 24), reference, tolerance)
    edited = [(*prompt[:-3], 31, 32) for prompt in prompts]
    cold_edited = [say(daemon, prompt, 8, cache=False) for prompt in edited]
    results: dict[int, list[dict[str, Any]]] = {}

    def run(number: int) -> None:
        for each in range(number, len(edited), 4):
            results[each] = say(daemon, edited[each], 8)

    threads = [threading.Thread(target=run, args=[number]) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number, reference in enumerate(cold_edited):
        assert_close(results[number], reference, tolerance)


def test_a_seed_means_the_same_answer_whoever_else_is_busy(real: tuple[DaemonProcess, float]) -> None:
    daemon, tolerance = real
    given = {"tokens": SHORT, "temperature": 0.8, "top_k": 0, "top_p": 1, "max_tokens": 40, "ignore_eos": True}

    def drawn(seed: int) -> str:
        return str(call(daemon, "generate", **given, seed=seed)["text"])

    once, other = drawn(7), drawn(8)
    assert once != other
    if tolerance:
        return  # its last bits depend on who is beside it, and a draw may fall between
    with daemon.client() as busy:
        frames = busy.stream("generate", tokens=LONG, max_tokens=800, ignore_eos=True, stream=True)
        next(frames)
        assert [drawn(7), drawn(8), drawn(7)] == [once, other, once]
    assert drawn(7) == once


def test_an_edited_conversation_with_a_real_model_has_the_logits_of_a_fresh_one() -> None:
    needs_row_invariance()
    flags = ("--threads", "2", "--slots", "2", "--context", "1024", "--kv", "fp32")
    with running_daemon("onnx", *flags, model=smollm2_package("int8")) as daemon:
        talk = [system("You name things. " * 10), user("Name a fruit."), assistant("Apple."), user("Name another.")]
        variants = [talk, [*talk[:3], user("Name a colour.")], [system("You name thinks."), *talk[1:2]], talk[:2]]
        options = {"temperature": 0, "max_tokens": 8, "logprobs": True, "top_logprobs": 5}
        for messages in variants:
            warm = call(daemon, "chat", messages=messages, **options)
            cold = call(daemon, "chat", messages=messages, **options, cache=False)
            assert warm["logprobs"] == cold["logprobs"]
        assert warm["usage"]["cached"] > 50


def test_in_a_batch_of_any_order_every_row_counts_its_positions_from_zero() -> None:
    """Beside a long prompt, at the prompt and at the fiftieth step, in either order of slots."""
    needs_row_invariance()
    runtime = tiny_runtime(tiny_package("qwen3", "int8"))

    def logits(slot: int | None) -> list[bytes]:
        """Of the short sequence in `slot`, the long one in the other; None: alone in slot 0."""
        own, other = (0, None) if slot is None else (slot, 1 - slot)
        got = []
        for step in range(50):
            start, ids = (0, SHORT) if step == 0 else (len(SHORT) + step - 1, (50 + step,))
            chunks = [Chunk(own, start, ids, 1)]
            if other is not None and step < 40:  # then it leaves
                long = LONG[:256] if step == 0 else (60 + step,)
                chunks.append(Chunk(other, 0 if step == 0 else 255 + step, long, 1))
            chunks.sort(key=lambda chunk: chunk.slot)
            result = runtime.step(Batch(tuple(chunks)))
            got.append(result.logits[[chunk.slot for chunk in chunks].index(own)].tobytes())
            if other is not None and step == 39:
                runtime.release(other)
        runtime.release(own)
        return got

    assert logits(0) == logits(1) == logits(None)


# The length of a context, and of memory.


def test_a_prompt_that_does_not_fit_is_refused_with_both_numbers_and_never_cut() -> None:
    with running_daemon("fake:", "--context", "2048") as daemon:
        fits = call(daemon, "generate", tokens=[7] * 2047, ignore_eos=True)
        assert (fits["finish"], fits["usage"]["prompt"], fits["usage"]["completion"]) == ("length", 2047, 1)
        for count in (2048, 2049, 40_000):
            error = call(daemon, "generate", tokens=[7] * count)
            assert error["error"] == "too_long"
            assert str(count) in error["message"]
            assert "2048" in error["message"]
            code, data = post(daemon, "/eqp/generate", {"tokens": [7] * count})
            assert (code, json.loads(data)["error"]["code"]) == (413, "too_long")
        around = chat(daemon, "socket", messages=[user("x")], max_tokens=1).prompt
        assert around is not None
        for front in WITHOUT_ASK:
            for length, is_accepted in ((2047, True), (2048, False), (2049, False)):
                answer = chat(daemon, front, messages=[user("x" * (length - around + 1))], ignore_eos=True)
                assert (answer.refused is None) == is_accepted, (front, length)
                if is_accepted:
                    assert answer.prompt in (2047, None)
                else:
                    assert str(length) in answer.raw["message"]
        assert chat(daemon, "http", messages=[user("x" * 40_000)]).refused == (413, None)


def test_a_conversation_grows_until_it_is_refused_and_stays_as_it_was() -> None:
    with running_daemon(script_of("a" * 300), "--context", "2048") as daemon:
        number = 0
        while True:
            body = {"messages": [user("b" * 100)], "conversation_id": "c", "max_tokens": 400}
            code, data = post(daemon, CHAT_PATH, body)
            if code != 200:
                break
            number += 1
        assert (code, number > 2) == (413, True)
        error = json.loads(data)["error"]
        assert error["code"] == "too_long"
        assert "2048" in error["message"]
        kept = call(daemon, "session.get", session="@c", messages=True)
        assert [message["content"] for message in kept["messages"]] == ["b" * 100, "a" * 300] * number
        assert call(daemon, "chat", session="@c", prompt="b" * 100, max_tokens=400)["error"] == "too_long"
        assert call(daemon, "session.get", session="@c")["rev"] == number


@pytest.mark.parametrize("front", WITHOUT_ASK)
def test_a_model_that_never_ends_ends_with_its_context(front: Front) -> None:
    with running_daemon(script_of("abc", loop=True), "--context", "512") as daemon:
        for limit in ({}, {"max_tokens": None}):
            answer = chat(daemon, front, messages=[user("x")], **limit)
            assert answer.finish == "length"
            prompt = chat(daemon, "socket", messages=[user("x")], max_tokens=1).prompt or 0
            assert len(answer.content) == 512 - prompt
        huge = chat(daemon, front, messages=[user("x")], max_tokens=10**9)
        assert huge.refused is not None or len(huge.content) <= 512
        for wrong in (-1, 0):
            refusal = chat(daemon, front, messages=[user("x")], max_tokens=wrong).refused
            assert refusal == (400 if front.startswith("http") else "bad_request", "max_tokens")
        assert chat(daemon, front, messages=[user("x")], max_tokens=3).content == "abc"


def test_memory_follows_the_tokens_in_use_and_not_the_context() -> None:
    context = 40_960
    package = tiny_package("qwen3", "int8", max_position=context)
    with running_daemon("onnx", "--threads", "1", "--kv", "fp32", "--context", str(context), model=package) as daemon:
        with daemon.client() as client:
            client.request("chat", prompt="hi", max_tokens=1)
        begun = anonymous_bytes(daemon.process.pid)
        short_bytes = call(daemon, "stats")["kv_bytes"]
        for number in range(8):
            call(daemon, "chat", session=f"@{number}", prompt=f"{number}" * 50, max_tokens=4)
        grown = anonymous_bytes(daemon.process.pid) - begun
        held = call(daemon, "stats")
        assert held["kv_bytes"] <= held["kv"]["budget_bytes"]
        assert 0 < short_bytes < held["kv_bytes"] < 4 << 20
        assert grown < held["kv_bytes"] + (6 << 20)


@pytest.mark.parametrize("name", ["write_kv", "step"])
async def test_memory_that_cannot_be_had_fails_one_request_and_no_other(name: str) -> None:
    async with running() as rig:
        given: dict[str, Any] = {"prompt": "a" * 150, "max_tokens": 4, "ignore_eos": True}
        first, _ = await rig.run(**given)
        second, _ = await rig.run(**given)

        setattr(rig.runtime, name, Mock(side_effect=MemoryError))
        _, listener = await rig.submit(**given)
        failed = await listener.end()
        delattr(rig.runtime, name)
        assert isinstance(failed, Failed)
        assert failed.error.code == "engine"
        again, _ = await rig.run(**given)
        assert (again.finishes, again.usage.prompt) == (first.finishes, first.usage.prompt)
        assert second.usage.cached == again.usage.prompt - 1
        assert rig.inference.state == "ready"


async def test_memory_that_cannot_be_had_to_save_a_conversation_fails_nobody() -> None:
    async with running(FakeScript(num_slots=2, capacity=512)) as rig:
        given: dict[str, Any] = {"max_tokens": 4, "ignore_eos": True}

        reading = Mock(side_effect=MemoryError)
        vars(rig.runtime)["read_kv"] = reading
        _, busy = await rig.submit(prompt="busy", max_tokens=200, ignore_eos=True)
        for number in range(4):
            await rig.run(prompt=f"{number}" * 150, **given)
        assert (await busy.done()).finishes == ("length",)
        assert reading.called
        del rig.runtime.read_kv
        for cached in (0, 149):
            again, _ = await rig.run(prompt="9" * 150, **given)
            assert again.usage.cached == cached
        assert rig.inference.state == "ready"


# Sessions.


def test_two_at_once_in_one_session_are_one_after_another_or_told_that_it_is_busy() -> None:
    environ = {"EDGEQWEN_SESSIONS_PER_UID": "2", "EDGEQWEN_ENGINE_SPECULATION": "false"}
    with running_daemon(script_of("abcde" * 8, step_s=0.05), environ=environ) as daemon, daemon.client() as client:
        call(daemon, "chat", session="@other", prompt="x", max_tokens=1)
        frames = client.stream("chat", session="@s", prompt="first", stream=True)
        while "delta" not in next(frames):
            pass
        body = {"messages": [user("second")], "conversation_id": "s"}
        assert post(daemon, CHAT_PATH, body)[0] == 409
        assert call(daemon, "chat", session="@s", prompt="second")["error"] == "session_busy"
        assert call(daemon, "session.delete", session="@s")["error"] == "session_busy"
        assert call(daemon, "chat", session="@third", prompt="x", max_tokens=1)["error"] == "quota"
        assert [*frames][-1]["rev"] == 1
        code, data = post(daemon, CHAT_PATH, {**body, "max_tokens": 2})
        assert (code, json.loads(data)["choices"][0]["message"]["content"]) == (200, "ab")
        kept = call(daemon, "session.get", session="@s", messages=True)
        assert [message["content"] for message in kept["messages"]] == ["first", "abcde" * 8, "second", "ab"]
        assert call(daemon, "session.delete", session="@s")["deleted"] == 1
        assert call(daemon, "session.get", session="@s")["error"] == "not_found"


def test_of_two_that_come_together_both_are_in_the_history_or_one_is_told(daemon: DaemonProcess) -> None:
    for number in range(10):
        results: list[dict[str, Any]] = []

        def turn(name: str, session: str = f"@together {number}") -> None:
            results.append(call(daemon, "chat", session=session, prompt=name, max_tokens=3))  # noqa: B023 -- joined below

        threads = [threading.Thread(target=turn, args=[name]) for name in ("a", "b")]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        kept = [result for result in results if "error" not in result]
        assert {result["error"] for result in results if "error" in result} <= {"session_busy"}
        frame = call(daemon, "session.get", session=f"@together {number}", messages=True)
        assert frame["rev"] == len(kept) == len(frame["messages"]) // 2 >= 1
        assert {message["content"] for message in frame["messages"][1::2]} == {result["text"] for result in kept}


@dataclass
class Talk:
    """A session of a daemon over Qwen3's tokenizer, by either front, and what the stock template makes of it."""

    daemon: DaemonProcess
    name: str
    front: Front
    messages: list[Message] = field(default_factory=list)

    def turn(self, *new: Message, **options: Any) -> Answer:
        """The answer to new messages; its prompt must be the stock template's of all there is."""
        reference = {"session": f"@{self.name}", "verbose": True}
        member = reference if self.front.startswith("socket") else {"conversation_id": self.name}
        answer = chat(self.daemon, self.front, messages=list(new), **member, **options)
        assert answer.refused is None, answer.raw
        self.messages += new
        expected = qwen_builder().build(self.messages, think=options.get("think")).ids
        assert answer.prompt == len(expected)
        if self.front.startswith("socket"):
            assert answer.prompt_ids == expected
        said = {"role": "assistant", "content": answer.content}
        is_whole = answer.reasoning and answer.finish == "stop"
        self.messages.append({**said, "reasoning_content": answer.reasoning} if is_whole else said)
        return answer

    def text(self, **options: Any) -> str:
        """The prompt that comes next, without asking."""
        built = qwen_builder().build([*self.messages, user("next")], **options).ids
        return qwen_tokenizer().decode_bytes(built).decode()


def encode(text: str) -> list[int]:
    return qwen_tokenizer().encode(text, special=False)


QWEN = {"vocab_size": 151936, "num_tokens": 151669, "eos": IM_END}
BOTH: tuple[Front, ...] = ("socket", "http")


def qwen_daemon(folder: Path, *scripts: list[int], **environ: str) -> Any:
    script = json.dumps({"scripts": scripts, **QWEN}) if scripts else json.dumps(QWEN)
    (folder / "script").write_text(script)
    return running_daemon(f"fake:{folder / 'script'}", model=write_qwen_model(folder / "model"), environ=environ)


def test_thoughts_of_a_sessions_past_go_and_those_of_a_running_chain_stay(tmp_path: Path) -> None:
    thought = [THINK, *encode("\nSECRET\n"), END_THINK, *encode("\n\nyo"), IM_END]
    calls = [{"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}]
    chain = {"role": "assistant", "content": "", "reasoning_content": "KEPT", "tool_calls": calls}
    tools = [{"role": "tool", "content": "one"}, {"role": "tool", "content": "two"}]
    with qwen_daemon(tmp_path, thought, EDGEQWEN_KV_SETTLE="false") as daemon:
        for front in BOTH:
            talk = Talk(daemon, f"thoughts {front}", front)
            answer = talk.turn(user("hi"))
            assert (answer.content, answer.reasoning) == ("yo", "SECRET")
            assert "SECRET" not in talk.text()
            talk.turn(user("more"))
            talk.turn(user("use f"), chain, *tools)
            assert "KEPT" in qwen_tokenizer().decode_bytes(qwen_builder().build(talk.messages[:-1]).ids).decode()
            assert "KEPT" not in talk.text()
            talk.turn(user("and now?"))


def test_a_turn_without_thinking_is_reused_up_to_where_its_rendering_differs(tmp_path: Path) -> None:
    """The block that thinking off leaves behind the prompt is not there once the turn is past."""
    for settles in ("false", "true"):
        folder = tmp_path / settles
        folder.mkdir()
        with (
            qwen_daemon(folder, EDGEQWEN_KV_SETTLE=settles, EDGEQWEN_KV_DISK_MB="0") as daemon,
            daemon.client() as client,
        ):
            first = client.request("chat", session="@a", prompt="hi", think=False, max_tokens=30, verbose=True)
            assert tuple(first["prompt_ids"][-4:]) == (THINK, 271, END_THINK, 271)
            history = [user("hi"), assistant(first["text"])]
            if settles == "true":
                while call(daemon, "stats")["kv"]["settled"] < 1:
                    pass
            second = client.request("chat", session="@a", prompt="b", max_tokens=10, temperature=0, verbose=True)
            fresh = call(daemon, "chat", messages=[*history, user("b")], max_tokens=10, temperature=0, cache=False)
            expected = qwen_builder().build([*history, user("b")]).ids
            assert tuple(second["prompt_ids"]) == expected
            assert second["text"] == fresh["text"]
            same = common_length(tuple(first["prompt_ids"]), expected)
            assert same == len(first["prompt_ids"]) - 4
            if settles == "false":
                assert second["usage"]["cached"] == same
            else:
                other = qwen_builder().build([*history, user("Go on.")]).ids
                assert second["usage"]["cached"] >= common_length(expected, other) > same


def test_a_marker_spelt_in_an_answer_is_text_in_the_next_turn_too(tmp_path: Path) -> None:
    spelt = "In XML, close with </think> and go on"
    pieces = [token for part in ("In XML, close with ", "</", "think", ">", " and go on") for token in encode(part)]
    with qwen_daemon(tmp_path, [*pieces, IM_END]) as daemon:
        for front in BOTH:
            talk = Talk(daemon, f"spelt {front}", front)
            answer = talk.turn(user("how?"))
            assert (answer.content, answer.reasoning) == (spelt, "")
            assert f"assistant\n{spelt}\nuser" in talk.text()
            talk.turn(user("and then?"))


def test_a_thought_that_the_budget_tore_is_not_carried_on(tmp_path: Path) -> None:
    with qwen_daemon(tmp_path, [THINK, *[64] * 50]) as daemon:
        for front in BOTH:
            talk = Talk(daemon, f"torn {front}", front)
            answer = talk.turn(user("why?"), think=True, max_tokens=20)
            assert (answer.content, answer.reasoning, answer.finish) == ("", "a" * 19, "length")
            assert "aaa" not in talk.text()
            talk.turn(user("again"), think=True, max_tokens=20)
