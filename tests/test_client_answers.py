"""What both clients make of answers: types, streams, batches, sessions, timeouts; one rig for the two of them."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgeqwen.client import AsyncClient, Client, CutOff, EdgeqwenError, NotFound, TimedOut, TryAgain, text_of
from edgeqwen.client.frames import FrameBuffer
from edgeqwen.client.requests import BATCH_ITEMS, lines_of
from edgeqwen.client.results import Collector, ToolCall, answer_of
from edgeqwen.engine.settings import EngineLimits
from edgeqwen.errors import BadRequest, ConfigInvalid
from tests.tiny_tokenizers import byte_level
from tests.wire import GUARD_S, Gate, Wire, fake_inference, serve, until

T = TypeVar("T")
LONG = "x" * 2000
THOUGHT = "<think>so</think>Hello!"


async def sync(wire: Wire, use: Callable[[Client], T], **settings: Any) -> T:
    """Use a synchronous client in a thread of its own."""

    def run() -> T:
        with Client.connect(wire.path, **settings) as client:
            return use(client)

    return await asyncio.to_thread(run)


@asynccontextmanager
async def connected(wire: Wire, **settings: Any) -> AsyncIterator[AsyncClient]:
    async with await AsyncClient.connect(wire.path, **settings) as client:
        yield client


async def both(wire: Wire, name: str, *args: Any, **options: Any) -> Any:
    """The result of a method, the same from both clients."""
    found = await sync(wire, lambda client: getattr(client, name)(*args, **options))
    async with connected(wire) as client:
        again = await getattr(client, name)(*args, **options)
    assert type(again) is type(found)
    return found, again


# Answers.


async def test_an_answer_has_its_text_and_numbers(wire: Wire) -> None:
    for answer in await both(wire, "chat", "x", seed=7, temperature=1.0):
        assert (answer.text, answer.finish, answer.seed, answer.reasoning) == ("Hello!", "stop", 7, "")
        assert answer.usage.completion > 0
        assert answer.ms.total >= answer.ms.queue >= 0
        assert answer.rid.startswith("r")
        assert answer.frame["text"] == "Hello!"


async def test_a_conversation_is_sent_as_it_is(wire: Wire) -> None:
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "x"}]
    for answer in await both(wire, "chat", messages, max_tokens=1):
        assert answer.finish == "length"


async def test_several_choices_are_all_there(wire: Wire) -> None:
    for answer in await both(wire, "chat", "x", n=2):
        assert [choice.text for choice in answer.choices] == ["Hello!", "Hello!"]
        assert answer.text == "Hello!"


async def test_log_probabilities_are_there_if_asked_for(wire: Wire) -> None:
    for answer in await both(wire, "chat", "x", logprobs=True):
        assert "".join(each["text"] for each in answer.logprobs).startswith("Hello!")


async def test_raw_prompts_are_text_or_tokens(wire: Wire) -> None:
    for answer in await both(wire, "generate", "abc", echo=True):
        assert answer.text == "abcHello!"
    tokens = byte_level().encode("abc", special=False)
    for answer in await both(wire, "generate", tokens, echo=True):
        assert answer.text == "abcHello!"


async def test_text_becomes_tokens_and_again_text(wire: Wire) -> None:
    (tokens, _) = await both(wire, "tokenize", "héllo")
    assert await both(wire, "detokenize", tokens) == ("héllo".encode(), "héllo".encode())
    assert (await both(wire, "detokenize", tokens[:2]))[0] == "héllo".encode()[:2]


async def test_operations_of_the_daemon_give_their_frames(wire: Wire) -> None:
    assert "batch" in (await both(wire, "hello"))[0]["features"]
    assert (await both(wire, "health"))[1]["ok"] is True
    assert (await both(wire, "ready"))[1]["model"] == "scripted"
    assert (await both(wire, "stats"))[0]["conns"] >= 1
    assert (await both(wire, "reload"))[1]["changed"] == ["limits.queue"]
    assert len(wire.reloads) == 2
    await both(wire, "shutdown", drain_s=1.0)
    assert wire.shutdowns == [1.0, 1.0]


async def test_errors_have_types_codes_and_fields(wire: Wire) -> None:
    cases: list[tuple[type[EdgeqwenError], str, str | None, Callable[[Any], Any]]] = [
        (BadRequest, "bad_request", "temperature", lambda client: client.chat("x", temperature=-1.0)),
        (NotFound, "not_found", None, lambda client: client.session_get("s_0000000000000000")),
        (BadRequest, "unknown_op", "op", lambda client: client.request("nothing")),
        (BadRequest, "bad_request", None, lambda client: client.chat("\ud800")),
        (BadRequest, "bad_request", None, lambda client: client.chat("x", temperature=float("nan"))),
    ]
    for kind, code, field, ask in cases:
        with pytest.raises(kind) as caught:
            await sync(wire, ask)
        async with connected(wire) as client:
            with pytest.raises(kind) as again:
                await ask(client)
            assert (await client.health())["ok"] is True
        for error in (caught.value, again.value):
            assert error.code == code
            assert field is None or error.field == field


async def test_what_may_succeed_later_says_when(tmp_path: Path) -> None:
    gate = Gate()
    async with serve(tmp_path, fake_inference(gate=gate, load_s=0.1), is_loaded=False) as wire:
        for ask in (lambda client: client.ready(), lambda client: client.chat("x", wait=False)):
            with pytest.raises(TryAgain) as caught:
                await sync(wire, ask)
            assert (caught.value.code, caught.value.retry_ms) == ("loading", 1500)
        gate.opened.set()


async def test_sessions_go_on_where_they_were(wire: Wire) -> None:
    def talk(client: Client) -> None:
        session = client.session_create("notes", system="s")
        first = client.chat("a", session=session)
        assert (first.session, first.rev, first.saved) == (session, 1, False)
        assert client.chat("b", session="@notes", if_rev=1).rev == 2
        with pytest.raises(EdgeqwenError) as caught:
            client.chat("b", session="@notes", if_rev=1)
        assert caught.value.code == "conflict"
        copy = client.session_fork("@notes", at=1, name="copy")
        assert client.session_get(copy, messages=True)["rev"] == 1
        assert len(client.session_get("@notes", messages=True)["messages"]) == 4
        assert {each["name"] for each in client.session_list()} == {"notes", "copy"}
        assert client.session_reset("@copy") == 2
        client.session_delete("@copy")
        assert [each["name"] for each in client.session_list()] == ["notes"]

    await sync(wire, talk)
    async with connected(wire) as client:
        session = await client.session_create("more")
        assert (await client.chat("a", session=session)).rev == 1
        copy = await client.session_fork(session, name="other")
        assert (await client.session_get(copy))["turns"] == 1
        assert await client.session_reset(copy) == 2
        await client.session_delete(copy)
        assert len(await client.session_list()) == 2


# Streams.


async def test_a_stream_gives_pieces_and_then_the_answer(tmp_path: Path) -> None:
    def ask(client: Client) -> Any:
        stream = client.chat_stream("x", temperature=0.0)
        deltas = list(stream)
        assert client.health()["ok"] is True
        return deltas, stream.answer, stream.rid

    async with serve(tmp_path, fake_inference("龘 own fox")) as wire:
        deltas, answer, rid = await sync(wire, ask)
        async with connected(wire) as client:
            stream = client.chat_stream("x")
            again = [delta async for delta in stream]
            assert (await stream.answer()).text == answer.text
    assert "".join(delta.text for delta in deltas) == "".join(delta.text for delta in again) == "龘 own fox"
    assert (answer.text, answer.finish, answer.rid) == ("龘 own fox", "stop", rid)
    assert answer.usage.completion > 1


async def test_a_thought_is_told_from_the_answer(tmp_path: Path) -> None:
    async with serve(tmp_path, fake_inference(THOUGHT)) as wire:
        whole = await sync(wire, lambda client: client.chat("x"))
        pieces = await sync(wire, lambda client: list(client.chat_stream("x")))
        streamed = await sync(wire, lambda client: client.chat_stream("x").answer)
    for answer in (whole, streamed):
        assert (answer.reasoning, answer.text) == ("so", "Hello!")
    assert "".join(delta.text for delta in pieces if delta.is_reasoning) == "so"
    assert "".join(delta.text for delta in pieces if not delta.is_reasoning) == "Hello!"


async def test_a_stream_that_is_left_is_cancelled_and_the_client_serves_on(tmp_path: Path) -> None:
    def leave(client: Client) -> str:
        with client.chat_stream("x") as stream:
            for _ in stream:
                break
        assert client.health()["ok"] is True
        return stream.rid

    async with serve(tmp_path, fake_inference(LONG, step_s=0.005)) as wire:
        rid = await sync(wire, leave)
        assert rid.startswith("r")
        async with connected(wire) as client:
            async with client.chat_stream("x") as stream:
                async for _ in stream:
                    break
            await until(lambda: wire.inference.stats().running == 0)
            assert (await client.health())["ok"] is True


async def test_cancelling_a_stream_gives_the_answer_so_far(tmp_path: Path) -> None:
    def cut(client: Client) -> Any:
        stream = client.chat_stream("x")
        for number, _ in enumerate(stream):
            if number == 2:
                stream.cancel()
        return stream.answer

    async with serve(tmp_path, fake_inference(LONG, step_s=0.005)) as wire:
        answer = await sync(wire, cut)
    assert answer.finish == "cancelled"
    assert 3 <= len(answer.text) < 2000


def test_calls_of_tools_are_put_together_from_frames_and_the_last_one() -> None:
    collector = Collector()
    for frame in (
        {"done": False, "tool_calls": [{"id": "a", "name": "f", "arguments": '{"x":'}]},
        {"done": False, "tool_calls": [{"id": "a", "arguments": "1}"}]},
        {"done": False, "delta": "text"},
    ):
        collector.take(frame)
    last = {"done": True, "finish": "tool_calls", "tool_calls": [{"id": "b", "name": "g", "arguments": "{}"}]}
    answer = collector.answer(last)
    assert answer.tool_calls == (ToolCall("a", "f", '{"x":1}'), ToolCall("b", "g", "{}"))
    assert (answer.text, answer.finish) == ("text", "tool_calls")


def test_what_a_later_daemon_says_besides_is_kept_in_the_frame_alone() -> None:
    frame = {"done": True, "text": "a", "finish": "new", "usage": {"prompt": 1, "new": 2}, "ms": {"new": 1}, "new": 1}
    answer = answer_of(frame)
    assert (answer.text, answer.usage.prompt, answer.frame["new"]) == ("a", 1, 1)


# Batches.


async def test_a_batch_of_any_number_gives_each_its_result(tmp_path: Path) -> None:
    items = [{"prompt": "a"} if number % 10 else {"prompt": "a", "seed": -1} for number in range(150)]
    async with serve(tmp_path, fake_inference("xyz")) as wire:
        found = await sync(wire, lambda client: list(client.batch(iter(items), common={"max_tokens": 2})))
        async with connected(wire) as client:
            again = [result async for result in client.batch(iter(items), common={"max_tokens": 2})]
    for results in (found, again):
        assert sorted(result.number for result in results) == list(range(150))
        assert {result.number for result in results if result.error} == set(range(0, 150, 10))
        assert {result.answer.text for result in results if not result.error} == {"xy"}
        with pytest.raises(BadRequest):
            _ = next(result for result in results if result.error).answer


@given(st.lists(st.text(max_size=20), max_size=200))
def test_batches_are_cut_where_a_line_is_full(texts: list[str]) -> None:
    groups = list(lines_of({"prompt": text} for text in texts))
    assert [item["prompt"] for group in groups for item in group] == texts
    assert all(1 <= len(group) <= BATCH_ITEMS for group in groups)
    large = list(lines_of({"prompt": "x" * (300 << 10)} for _ in range(4)))
    assert [len(group) for group in large] == [1] * 4


async def test_no_more_of_the_items_are_taken_than_are_in_flight(tmp_path: Path) -> None:
    taken = 0

    def items() -> Any:
        nonlocal taken
        for _ in range(30):
            taken += 1
            yield {"prompt": "a"}

    async with serve(tmp_path, fake_inference("Hello!")) as wire, connected(wire, max_inflight=3) as client:
        num_ended = 0
        async for _ in client.batch(items()):
            num_ended += 1
            assert taken <= num_ended + 3
    assert num_ended == 30


# Many at once.


async def test_many_requests_share_a_connection(tmp_path: Path) -> None:
    async with serve(tmp_path, fake_inference("Hello!", step_s=0.001)) as wire, connected(wire) as client:
        answers = await asyncio.gather(*(client.chat("x", max_tokens=1 + number % 3) for number in range(40)))
        assert (await client.stats())["conns"] == 1
    assert {answer.text for answer in answers} <= {"Hello!", "Hello"}
    assert len(answers) == 40


async def test_control_is_answered_while_as_much_runs_as_may(tmp_path: Path) -> None:
    gate = Gate()
    async with serve(tmp_path, fake_inference("Hi", gate=gate)) as wire, connected(wire) as client:
        asking = [asyncio.create_task(client.chat("x")) for _ in range(12)]
        await until(lambda: wire.inference.stats().running + wire.inference.stats().queued == 8)
        async with asyncio.timeout(GUARD_S):
            assert (await client.health())["ok"] is True
        gate.opened.set()
        assert {answer.text for answer in await asyncio.gather(*asking)} == {"Hi"}


async def test_a_task_that_is_cancelled_cancels_its_request(tmp_path: Path) -> None:
    async with serve(tmp_path, fake_inference(LONG, step_s=0.005)) as wire, connected(wire) as client:
        asking = asyncio.create_task(client.chat("x"))
        await until(lambda: wire.inference.stats().running == 1)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        await until(lambda: wire.inference.stats().running == 0)
        assert (await client.health())["ok"] is True


async def test_a_request_is_cancelled_by_its_rid_from_elsewhere(tmp_path: Path) -> None:
    async with serve(tmp_path, fake_inference(LONG, step_s=0.005)) as wire, connected(wire) as client:
        stream = client.chat_stream("x")
        is_cancelled = False
        async for _ in stream:
            if not is_cancelled:
                is_cancelled = await sync(wire, lambda other: other.cancel_rid(stream.rid))
        assert (await stream.answer()).finish == "cancelled"
        assert await client.cancel_rid(stream.rid) is False


async def test_answers_longer_than_64_kib_come_whole(tmp_path: Path) -> None:
    prompt = "x" * 3000
    async with serve(tmp_path, fake_inference("Hi")) as wire:
        for answer in await both(wire, "generate", prompt, echo=True, verbose=True, logprobs=True, n=8, seed=1):
            assert len(json.dumps(answer.frame)) > 30_000
            assert {choice.text for choice in answer.choices} == {prompt + "Hi"}
    buffer = FrameBuffer()
    line = json.dumps({"done": True, "text": "x" * (1 << 20)}).encode() + b"\n"
    for start in range(0, len(line), 1000):
        buffer.feed(line[start : start + 1000])
    frame = buffer.take()
    assert frame is not None
    assert len(frame["text"]) == 1 << 20


# What goes wrong.


async def test_silence_beyond_the_limit_cancels_the_request(tmp_path: Path) -> None:
    gate = Gate()
    async with serve(tmp_path, fake_inference("Hi", gate=gate)) as wire:

        def wait(client: Client) -> str:
            with pytest.raises(TimedOut):
                client.chat("x")
            gate.opened.set()
            return client.chat("x").text

        assert await sync(wire, wait, silence_s=1.0) == "Hi"
        gate.opened.clear()
        async with connected(wire, silence_s=1.0) as client:
            with pytest.raises(TimedOut):
                await client.chat("x")
            gate.opened.set()
            assert (await client.chat("x")).text == "Hi"


async def test_a_daemon_that_goes_away_cuts_every_request_off(tmp_path: Path) -> None:
    async with serve(tmp_path, fake_inference(LONG, step_s=0.01, speculates=False)) as wire, connected(wire) as client:
        asking = [asyncio.create_task(client.chat("x")) for _ in range(3)]
        await until(lambda: wire.inference.stats().running == 3)
        await wire.server.close(grace_s=0.01)
        for task in asking:
            with pytest.raises(CutOff):
                await task
        with pytest.raises(CutOff):
            await client.health()


async def test_a_refused_connection_tells_why_to_both(tmp_path: Path) -> None:
    async with serve(tmp_path, fake_inference("Hi", limits=EngineLimits(per_owner=1), step_s=0.01)) as wire:
        async with connected(wire) as client:
            found = await asyncio.gather(*(client.chat("x") for _ in range(3)), return_exceptions=True)
        assert {type(each) for each in found} >= {TryAgain}


@pytest.mark.parametrize("data", [b"HTTP/1.1 200 OK\r\n\r\n", b"[]\n", b'{"id":1}\n', b""])
async def test_whatever_is_not_a_frame_cuts_the_asynchronous_client_off(tmp_path: Path, data: bytes) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readline()
        writer.write(data)
        writer.close()

    server = await asyncio.start_unix_server(answer, tmp_path / "s")
    async with server, await AsyncClient.connect(tmp_path / "s") as client:
        with pytest.raises(CutOff):
            await client.chat("x")


async def test_an_error_without_id_ends_what_is_in_flight(tmp_path: Path) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readline()
        writer.write(b'\n{"id":77,"done":true}\n{"done":true,"error":{"code":"too_large","message":"m"}}\n')
        writer.close()

    server = await asyncio.start_unix_server(answer, tmp_path / "s")
    async with server, await AsyncClient.connect(tmp_path / "s") as client:
        with pytest.raises(EdgeqwenError) as caught:
            await client.chat("x")
    assert caught.value.code == "too_large"


async def test_no_daemon_is_told_in_the_same_words(tmp_path: Path) -> None:
    with pytest.raises(EdgeqwenError) as first:
        Client.connect(tmp_path / "none")
    with pytest.raises(EdgeqwenError) as second:
        await AsyncClient.connect(tmp_path / "none")
    assert (first.value.message, first.value.exit_code) == (second.value.message, second.value.exit_code)
    with pytest.raises(ConfigInvalid):
        await AsyncClient.connect("/" + "x" * 200)


async def test_the_socket_is_the_one_that_the_environment_names(wire: Wire, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EDGEQWEN_SOCKET_PATH", str(wire.path))
    async with await AsyncClient.connect() as client:
        assert (await client.health())["ok"] is True


# The text of a reply.

TEXTS = st.text(st.characters(exclude_categories=["Cs"]))


@given(TEXTS, st.booleans())
def test_the_text_of_a_reply_is_what_parsing_all_of_it_gives(text: str, is_ascii: bool) -> None:
    replies = (
        {"id": 1, "done": True, "text": text, "logprobs": [{"text": "no", "top": [[1, -0.5]]}]},
        {"choices": [{"index": 0, "message": {"role": "assistant", "content": text}}, {"message": {"content": "no"}}]},
        {"id": "c", "choices": [{"text": text, "logprobs": None}], "usage": {}},
        {"done": True, "choices": [{"choice": 0, "text": text}, {"choice": 1, "text": "no"}], "finish": "stop"},
    )
    for reply in replies:
        assert text_of(json.dumps(reply, ensure_ascii=is_ascii).encode()) == text


def test_a_reply_of_nothing_but_calls_has_an_empty_text() -> None:
    assert text_of(b'{"choices":[{"message":{"content":null,"tool_calls":[]}}]}') == ""


@pytest.mark.parametrize(
    "data", [b"", b"[]", b"{}", b'{"text":5}', b'{"text":"a"', b'{"error":{"code":"busy"}}', b'{"text":"\xff"}']
)
def test_what_has_no_text_is_no_reply(data: bytes) -> None:
    with pytest.raises(CutOff):
        text_of(data)


async def test_the_text_of_a_frame_of_the_daemon(wire: Wire) -> None:
    client = await wire.connect()
    client.send({"op": "chat", "id": 1, "prompt": "x", "logprobs": True})
    assert text_of(await client.reader.readline()) == "Hello!"


def test_importing_the_client_loads_nothing_heavy() -> None:
    script = (
        "import edgeqwen.client as c, sys; before = set(sys.modules); c.AsyncClient; c.text_of\n"
        "print(*sorted(name.split('.')[0] for name in before)); print(*sorted(set(sys.modules) - before))"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=20)
    first, later = result.stdout.splitlines()
    heavy = {"numpy", "onnxruntime", "aiohttp", "ijson", "msgspec", "asyncio", "uvloop", "tokenizers", "jinja2", "rich"}
    assert not heavy & set(first.split())
    assert "asyncio" in later.split()
