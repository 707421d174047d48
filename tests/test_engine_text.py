"""What a client reads: end tokens, characters and stop strings over tokens, thoughts, budgets, defaults."""

from __future__ import annotations

import random
from typing import Any

import pytest

from edgeqwen.core.request import Delta, Started, TokenLogprob, ToolCall
from edgeqwen.engine.settings import EngineLimits
from edgeqwen.errors import BadRequest
from edgeqwen.runtime.fake import FakeScript
from tests.engines import Listener, Rig, eos, ids, running
from tests.tiny_tokenizers import byte_level

USER = ({"role": "user", "content": "Name three colours"},)
THINK, END_THINK = byte_level().token_id("<think>") or 0, byte_level().token_id("</think>") or 0


async def answer(text: str | tuple[int, ...], **given: Any) -> tuple[Listener, tuple[str, ...]]:
    """The answer of a model that says `text` and then ends; a prompt of messages, unless one is given."""
    tokens = ids(text) if isinstance(text, str) else text
    if not {"prompt", "tokens"} & set(given):
        given["messages"] = USER
    async with running(FakeScript(tokens=tokens, eos=eos(), capacity=1024)) as rig:
        done, listener = await rig.run(**given)
    check_text(listener)
    return listener, done.finishes


def check_text(listener: Listener) -> None:
    """Every delta is whole UTF-8 text, and none is empty for nothing."""
    for delta in listener.deltas:
        delta.text.encode("utf-8")
        assert delta.text or delta.logprobs


@pytest.mark.parametrize("end", ["<|im_end|>", "<|im_start|>"])
async def test_each_end_token_stops_is_not_shown_and_counts_once(end: str) -> None:
    both = (ids("<|im_end|>")[0], ids("<|im_start|>")[0])
    script = FakeScript(tokens=(*ids("ok"), *ids(end), *ids("more")))
    async with running(script, eos_token_ids=both) as rig:
        done, listener = await rig.run(messages=USER)
    assert listener.text() == "ok"
    assert done.finishes == ("stop",)
    assert done.usage.completion == len(ids("ok")) + 1


async def test_an_ignored_end_token_is_not_shown_and_stops_nothing() -> None:
    listener, finishes = await answer(f"a{'<|im_end|>'}b", ignore_eos=True, max_tokens=4)
    assert listener.text() == "ab"
    assert finishes == ("length",)


async def test_min_tokens_keeps_an_answer_from_ending_early() -> None:
    async with running(FakeScript(tokens=(eos(),), loop=True)) as rig:
        done, listener = await rig.run(min_tokens=5, max_tokens=20, logprobs=True)
        assert done.usage.completion == 6
        assert done.finishes == ("stop",)
        drawn = [logprob.token for delta in listener.deltas for logprob in delta.logprobs]
        assert len(drawn) == 6
        assert [token == eos() for token in drawn] == [False] * 5 + [True]


async def test_without_a_budget_an_endless_answer_ends_at_the_documented_default() -> None:
    limits = EngineLimits(default_max_tokens=30)
    async with running(FakeScript(tokens=ids("la "), loop=True), limits=limits) as rig:
        _, endless = await rig.submit(temperature=0)
        done, _ = await rig.run(max_tokens=2)
        assert done.finishes == ("length",), "others are served meanwhile"
        ended = await endless.done()
        assert (ended.finishes, ended.usage.completion) == (("length",), 30)


async def test_the_presence_penalty_changes_what_is_said() -> None:
    async with running(FakeScript(tokens=ids("a"), loop=True, margin=1.0)) as rig:
        _, plain = await rig.run(max_tokens=10)
        _, penalised = await rig.run(max_tokens=10, presence_penalty=1.5)
    assert plain.text() == "a" * 10
    assert penalised.text() != plain.text()


async def test_omitted_sampling_fields_take_the_models_and_zero_is_greedy() -> None:
    defaults = {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95}
    async with running(defaults=defaults) as rig:

        async def params(**given: Any) -> tuple[float, int, float]:
            generation, listener = await rig.submit(max_tokens=1, **given)
            await listener.done()
            return generation.params["temperature"], generation.params["top_k"], generation.params["top_p"]

        assert await params() == (0.6, 20, 0.95)
        assert await params(temperature=None) == (0.6, 20, 0.95)
        assert await params(temperature=0) == (0, 20, 0.95)
        assert await params(top_p=1, top_k=0) == (0.6, 0, 1)
        with pytest.raises(BadRequest, match="top_k"):
            await params(top_k=-1)
        seeds = {(await rig.submit(max_tokens=1))[0].params["seed"] for _ in range(3)}
        assert len(seeds) == 3


async def test_ids_without_a_text_are_never_said() -> None:
    size = byte_level().num_tokens
    script = FakeScript(tokens=(size, size + 266, *ids("a"), eos()), vocab_size=size + 300)
    async with running(script) as rig:
        done, listener = await rig.run(logprobs=True, top_logprobs=3)
        assert done.usage.completion == 4
        said = _logprobs(listener)
        assert len(said) == 4
        assert all(token < size for logprob in said for token, _ in [*logprob.top, (logprob.token, 0)])
        assert listener.text().endswith("a")
        for given in ({"tokens": (size,)}, {"logit_bias": {str(size): 1.0}}):
            with pytest.raises(BadRequest):
                await rig.submit(**given)
        hot, listener = await rig.run(temperature=100, top_k=0, top_p=1, max_tokens=200, ignore_eos=True, logprobs=True)
        assert hot.usage.completion == 200
        assert all(logprob.token < size for logprob in _logprobs(listener))


def _logprobs(listener: Listener) -> list[TokenLogprob]:
    return [logprob for delta in listener.deltas for logprob in delta.logprobs]


async def test_a_budget_spent_inside_the_thought_leaves_the_content_empty() -> None:
    async with running(FakeScript(tokens=(THINK, *ids("a") * 50))) as rig:
        done, listener = await rig.run(messages=USER, max_tokens=20)
    assert done.finishes == ("length",)
    assert (listener.text("reasoning"), listener.text()) == ("a" * 19, "")
    assert (done.usage.completion, done.usage.reasoning) == (20, 20)


async def test_an_end_token_right_behind_the_thought_is_none_of_it() -> None:
    listener, _ = await answer("<think>x</think>", logprobs=True)
    done = await listener.done()
    assert (done.usage.completion, done.usage.reasoning) == (4, 3)
    assert [delta.channel for delta in listener.deltas if delta.logprobs] == ["reasoning"] * 3 + ["content"]


async def test_thought_and_answer_are_told_apart_by_the_marker_tokens() -> None:
    listener, _ = await answer("<think>\nSECRET\n</think>\n\nok", logprobs=True)
    assert "SECRET" in listener.text("reasoning")
    assert listener.text() == "ok"
    assert len(_logprobs(listener)) == len(ids("<think>\nSECRET\n</think>\n\nok")) + 1
    prompted, _ = await answer("hm</think>\n\nok", think=True)
    assert (prompted.text("reasoning"), prompted.text()) == ("hm", "ok")
    spelled = tuple(token for part in ("</", "think", ">") for token in byte_level().encode(part, special=False))
    literal, _ = await answer((*ids("In XML, close with "), *spelled, *ids(" and go on")))
    assert literal.text() == "In XML, close with </think> and go on"
    raw, _ = await answer((THINK, *ids("x")), prompt="raw")
    assert (raw.text("reasoning"), raw.text()) == ("", "<think>x"), "generate splits nothing"


@pytest.mark.parametrize("text", ["ok 🫠 龘 👩🏽‍🚀 नमस्ते end", "  lead x\n\t y", "x != y , z"])
async def test_characters_over_tokens_arrive_whole_and_text_byte_for_byte(text: str) -> None:
    listener, _ = await answer(text)
    assert listener.text() == text


async def test_random_ids_stream_as_they_decode() -> None:
    rng = random.Random(3)
    size = byte_level().num_tokens - 5
    tokens = tuple(rng.randrange(size) for _ in range(150))
    listener, _ = await answer(tokens, prompt="x")
    assert listener.text() == byte_level().decode_bytes(tokens).decode("utf-8", "replace")


async def test_a_lone_bad_byte_is_one_mark_and_does_not_stall_the_stream() -> None:
    half = ids("é")[:1]
    listener, _ = await answer((*half, *ids("abc")))
    assert listener.text() == "\ufffdabc"


@pytest.mark.parametrize(("max_tokens", "expected"), [(1, "\ufffd"), (2, "\ufffd"), (4, "🫠")])
async def test_a_budget_that_ends_inside_a_character_ends_in_one_mark(max_tokens: int, expected: str) -> None:
    assert len(ids("🫠")) == 4
    listener, finishes = await answer("🫠 and more", max_tokens=max_tokens)
    assert listener.text() == expected
    assert finishes == ("length",)


async def test_a_stop_string_right_after_half_a_character_stops() -> None:
    listener, finishes = await answer((*ids("a"), *ids("🫠")[:2], *ids("END more")), stop=("END",))
    assert listener.text() == "a\ufffd"
    assert finishes == ("stop",)


async def test_cancelling_inside_a_character_leaves_text_whole() -> None:
    async with running(FakeScript(tokens=(*ids("ab🫠"), eos()))) as rig:
        listener = Listener()
        listener.on_event = lambda event: _cancel(rig, listener) if isinstance(event, Delta) else None
        await rig.submit(listener=listener, messages=USER)
        assert (await listener.done()).finishes == ("cancelled",)
        check_text(listener)


def _cancel(rig: Rig, listener: Listener) -> None:
    started = listener.events[0]
    assert isinstance(started, Started)
    rig.inference.cancel(started.rid, owner=None)


@pytest.mark.parametrize(
    ("text", "stop", "expected"),
    [
        ("The quick brown fox jumps", ("own fox",), "The quick br"),
        (" Paris", ("Pari",), " "),
        ("hello\nUser: x", ("\nUser:",), "hello"),
        ("a END. b", ("END", "END."), "a "),
        ("a END. b", ("END.", "END"), "a "),
        ("melting 🫠 face", ("🫠",), "melting "),
        ("nothing of it", ("xyz",), "nothing of it"),
    ],
)
async def test_a_stop_string_over_tokens_is_found_and_never_shown(
    text: str, stop: tuple[str, ...], expected: str
) -> None:
    listener, finishes = await answer(text, stop=stop)
    assert listener.text() == expected
    assert finishes == ("stop",)


async def test_only_a_possible_beginning_of_a_stop_string_is_held_back() -> None:
    listener, _ = await answer("abcdefghij", stop=("z" * 60,))
    assert [delta.text for delta in listener.deltas] == list("abcdefghij")


@pytest.mark.parametrize("max_tokens", [None, len(ids("a < b </e"))], ids=["end token", "budget"])
async def test_text_that_looked_like_a_stop_string_arrives_before_the_end(max_tokens: int | None) -> None:
    listener, finishes = await answer("a < b </e", stop=("</end>",), max_tokens=max_tokens)
    assert listener.text() == "a < b </e"
    assert finishes == ("length" if max_tokens else "stop",)


async def test_a_held_back_tail_inside_the_thought_stays_there() -> None:
    listener, _ = await answer("<think>a < b </e", stop=("</end>",))
    assert (listener.text("reasoning"), listener.text()) == ("a < b </e", "")


async def test_a_stop_string_completed_by_the_last_of_the_budget_is_a_stop() -> None:
    listener, finishes = await answer("abc", stop=("c",), max_tokens=3)
    assert (listener.text(), finishes) == ("ab", ("stop",))


async def test_a_stop_string_ends_one_choice_and_not_the_others() -> None:
    async with running(FakeScript(scripts=(ids("ab!cd"), ids("abcdefgh")), eos=eos())) as rig:
        done, listener = await rig.run(n=2, stop=("!",), messages=USER)
        assert [listener.text(choice=i) for i in range(2)] == ["ab", "abcdefgh"]
        assert done.finishes == ("stop", "stop")
        assert done.usage.completion == 3 + 9
        await rig.settle()


async def test_logprobs_come_with_the_text_of_their_token() -> None:
    listener, _ = await answer("Hello world", logprobs=True, top_logprobs=2)
    said = _logprobs(listener)
    assert [logprob.text for logprob in said] == ["Hello", " ", "world", ""]
    assert all(logprob.logprob == pytest.approx(0.0, abs=1e-6) for logprob in said)
    assert all(len(logprob.top) == 2 and logprob.top[0][0] == logprob.token for logprob in said)


async def test_echo_gives_the_prompts_text_first() -> None:
    listener, _ = await answer("b", prompt="a", echo=True)
    assert [delta.text for delta in listener.deltas] == ["a", "b"]
    tokens, _ = await answer("b", tokens=ids("x<|im_end|>é"), echo=True)
    assert tokens.text() == "x<|im_end|>éb"


async def test_a_raw_prompt_may_hold_the_models_own_markers() -> None:
    async with running(FakeScript(tokens=(eos(),))) as rig:
        generation, _ = await rig.submit(prompt="<|im_start|>user")
        assert generation.prompt_ids[0] == ids("<|im_start|>")[0]
        chat, _ = await rig.submit(messages=({"role": "user", "content": "<|im_start|>"},))
        assert chat.prompt_ids.count(ids("<|im_start|>")[0]) == 2, "those of the template, and not the client's"


async def test_text_is_tokenised_and_back() -> None:
    async with running() as rig:
        tokens = await rig.inference.tokenize("Hello<|im_end|>", special=True)
        assert tokens == [*ids("Hello"), eos()]
        assert eos() not in await rig.inference.tokenize("Hello<|im_end|>", special=False)
        assert await rig.inference.detokenize(tokens) == b"Hello<|im_end|>"
        assert await rig.inference.detokenize(ids("é")[:1]) == b"\xc3"
        with pytest.raises(BadRequest, match="tokens"):
            await rig.inference.detokenize([10**6])


TOOLS = ({"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}},)
CALL = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'


def calls(listener: Listener) -> list[tuple[int, int, str, str]]:
    found = [event for event in listener.events if isinstance(event, ToolCall)]
    assert len({call.call_id for call in found}) == len(found)
    return [(call.choice, call.index, call.name, call.arguments) for call in found]


async def test_calls_of_tools_are_events_and_the_reason_of_the_end() -> None:
    listener, finishes = await answer(f"Let me see.\n{CALL}\n{CALL}", tools=TOOLS)
    assert listener.text() == "Let me see."
    assert calls(listener) == [(0, 0, "f", '{"a":1}'), (0, 1, "f", '{"a":1}')]
    assert finishes == ("tool_calls",)


async def test_without_tools_a_call_is_text() -> None:
    listener, finishes = await answer(CALL)
    assert listener.text() == CALL
    assert not calls(listener)
    assert finishes == ("stop",)


async def test_a_call_that_the_budget_cuts_off_is_text_and_says_length() -> None:
    listener, finishes = await answer(CALL, tools=TOOLS, max_tokens=len(ids(CALL)) // 2)
    assert CALL.startswith(listener.text())
    assert not calls(listener)
    assert finishes == ("length",)


async def test_each_choice_has_its_own_calls() -> None:
    listener, finishes = await answer(CALL, tools=TOOLS, n=2)
    assert calls(listener) == [(0, 0, "f", '{"a":1}'), (1, 0, "f", '{"a":1}')]
    assert finishes == ("tool_calls", "tool_calls")


async def test_log_probabilities_of_a_calls_tokens_are_given() -> None:
    listener, _ = await answer(CALL, tools=TOOLS, logprobs=True)
    assert sum(len(delta.logprobs) for delta in listener.deltas) == len(ids(CALL)) + 1
