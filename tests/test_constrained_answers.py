"""Answers that must look like something, through the engine: beside others, with guesses ahead, behind thoughts."""

from __future__ import annotations

import asyncio
import functools
import json
import subprocess
import sys
from typing import Any

import jsonschema_rs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgeqwen.core.request import Failed, ToolCall
from edgeqwen.engine.generation import GenerationInput
from edgeqwen.errors import BadRequest
from edgeqwen.runtime.fake import FakeScript
from edgeqwen.text import ChatTemplate, Tokenizer
from edgeqwen.text.reasoning import find_thinking
from tests.engines import Listener, Rig, ids, running
from tests.random_schemas import SchemaMaker
from tests.tiny_tokenizers import byte_level_file

USER = ({"role": "user", "content": "x"},)
LETTERS = {"type": "regex", "regex": "[a-c]{3}"}


def schema_format(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}


def tool(name: str) -> dict[str, Any]:
    parameters = {
        "type": "object",
        "properties": {"n": {"enum": [1, 2]}},
        "required": ["n"],
        "additionalProperties": False,
    }
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


def call(name: str, n: int) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {{"n": {n}}}}}\n</tool_call>'


TOOLS = (tool("look"), tool("listen"))


def calls(listener: Listener) -> list[tuple[str, Any]]:
    found = [event for event in listener.events if isinstance(event, ToolCall)]
    return [(event.name, json.loads(event.arguments)) for event in found]


async def test_an_answer_keeps_to_its_form_whatever_the_model_wants() -> None:
    async with running(FakeScript(tokens=ids("Hello world"))) as rig:
        done, listener = await rig.run(response_format=LETTERS)
        assert done.finishes == ("stop",)
        assert len(listener.text()) == 3
        assert set(listener.text()) <= set("abc")
        assert done.usage.completion == 3, "no end token is needed"


async def test_it_ends_where_the_model_has_no_end_token() -> None:
    async with running(eos_token_ids=()) as rig:
        done, listener = await rig.run(response_format=schema_format({"enum": [[1], [2]]}))
        assert done.finishes == ("stop",)
        assert json.loads(listener.text()) in ([1], [2])


async def test_what_the_budget_cuts_off_says_so_and_what_just_fits_does_not() -> None:
    async with running() as rig:
        cut, _ = await rig.run(response_format=LETTERS, max_tokens=2)
        whole, _ = await rig.run(response_format=LETTERS, max_tokens=3)
    assert cut.finishes == ("length",)
    assert whole.finishes == ("stop",)


async def test_least_tokens_do_not_keep_a_complete_answer_from_ending() -> None:
    async with running() as rig:
        done, listener = await rig.run(response_format={"type": "regex", "regex": "a(b|cc?)"}, min_tokens=20)
        longer, _ = await rig.run(response_format={"type": "regex", "regex": "ab*"}, min_tokens=20)
    assert done.finishes == ("stop",)
    assert listener.text() in ("ab", "ac", "acc")
    assert longer.usage.completion >= 20


@pytest.mark.parametrize("is_greedy", [True, False])
async def test_biases_penalties_and_logprobs_go_with_a_form(is_greedy: bool) -> None:
    (a, b) = ids("ab")
    async with running() as rig:
        done, listener = await rig.run(
            response_format={"type": "regex", "regex": "[ab]{6}"},
            temperature=0.0 if is_greedy else 1.0,
            logit_bias={str(a): 100, str(b): 0},
            frequency_penalty=2,
            logprobs=True,
            top_logprobs=3,
            top_k=5,
        )
    assert done.finishes == ("stop",)
    entries = [entry for delta in listener.deltas for entry in delta.logprobs]
    assert [entry.token for entry in entries] == [a] * 6
    assert all(len(entry.top) == 3 and entry.logprob < 0 for entry in entries)


@settings(max_examples=15, deadline=None)
@given(seeds=st.lists(st.integers(0, 1 << 20), min_size=1, max_size=4))
def test_answers_at_once_are_values_of_their_schemas_with_and_without_guesses(seeds: list[int]) -> None:
    schemas = [SchemaMaker(seed, depth=2).make() for seed in seeds]

    async def answers(*, speculates: bool) -> list[tuple[Any, list[str]]]:
        async with running(FakeScript(margin=2.0), speculates=speculates) as rig:
            listeners = []
            for seed, schema in zip(seeds, schemas, strict=True):
                given: dict[str, Any] = {"temperature": 1.0, "seed": seed, "n": 1 + seed % 2, "max_tokens": 200}
                _, listener = await rig.submit(response_format=schema_format(schema), **given)
                listeners.append(listener)
            found = []
            for listener in listeners:
                done = await listener.done()
                found.append((done.finishes, [listener.text(choice=i) for i in range(len(done.finishes))]))
            return found

    found = asyncio.run(answers(speculates=True))
    assert found == asyncio.run(answers(speculates=False))
    for schema, (finishes, texts) in zip(schemas, found, strict=True):
        validator = jsonschema_rs.Draft202012Validator(schema, validate_formats=True)
        for finish, text in zip(finishes, texts, strict=True):
            assert finish == "length" or validator.is_valid(json.loads(text)), text


async def test_a_form_that_becomes_too_much_ends_its_own_request_only() -> None:
    schema = {"properties": {f"p{i}": {"type": "string"} for i in range(1500)}}  # may be anything, or a huge object
    async with running(FakeScript(tokens=ids('{"p1":'))) as rig:
        _, wrong = await rig.submit(response_format=schema_format(schema))
        _, right = await rig.submit(response_format=LETTERS)
        failed = await wrong.end()
        assert isinstance(failed, Failed)
        assert (failed.error.code, failed.error.field) == ("bad_request", "response_format.json_schema.schema")
        assert (await right.done()).finishes == ("stop",)


async def test_a_client_that_gives_up_while_its_form_is_compiled_leaves_nothing() -> None:
    async with running() as rig:
        task = asyncio.create_task(
            rig.inference.submit(GenerationInput(prompt="x", response_format=LETTERS), owner="1", sink=Listener())
        )
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert (await rig.run(response_format=LETTERS))[0].finishes == ("stop",)
        assert rig.inference.stats().queued == 0


# Tools.


@functools.cache
def template_with_tools() -> ChatTemplate:
    return ChatTemplate(
        "{% for t in tools or [] %}{{ t.function.name }} {% endfor %}{% for m in messages %}{{ m.content }}{% endfor %}"
    )


async def test_a_demanded_call_comes_as_a_call() -> None:
    async with running(FakeScript(tokens=ids("Hello")), template=template_with_tools()) as rig:
        done, listener = await rig.run(messages=USER, tools=TOOLS, tool_choice="required", parallel_tool_calls=False)
        assert done.finishes == ("tool_calls",)
        ((name, arguments),) = calls(listener)
        assert name in ("look", "listen")
        assert arguments["n"] in (1, 2)
        assert listener.text() == ""
        named = {"type": "function", "function": {"name": "listen"}}
        _, listener = await rig.run(messages=USER, tools=TOOLS, tool_choice=named, n=2, think=False, temperature=1.0)
        assert [name for name, _ in calls(listener)] == ["listen", "listen"], "one of each choice"


async def test_several_calls_may_come_unless_one_is_asked_for() -> None:
    script = FakeScript(tokens=(*ids(f"{call('look', 1)}\n{call('listen', 2)}"), ids("<|im_end|>")[0]))
    both = [("look", {"n": 1}), ("listen", {"n": 2})]
    async with running(script, template=template_with_tools()) as rig:
        for choice in (None, "auto", "required"):
            for is_parallel in (None, True, False):
                done, listener = await rig.run(
                    messages=USER, tools=TOOLS, tool_choice=choice, parallel_tool_calls=is_parallel
                )
                assert done.finishes == ("tool_calls",)
                assert calls(listener) == (both[:1] if is_parallel is False else both), (choice, is_parallel)


async def test_tools_that_may_not_be_called_are_not_told_of() -> None:
    async with running(FakeScript(tokens=ids(call("look", 1))), template=template_with_tools()) as rig:
        told = await rig.inference.prompt(GenerationInput(messages=USER, tools=TOOLS))
        untold = await rig.inference.prompt(GenerationInput(messages=USER, tools=TOOLS, tool_choice="none"))
        assert rig.tokenizer.decode_bytes(told.ids) == b"look listen x"
        assert rig.tokenizer.decode_bytes(untold.ids) == b"x"
        _, listener = await rig.run(messages=USER, tools=TOOLS, tool_choice="none", max_tokens=20)
        assert calls(listener) == []


async def test_with_a_format_and_tools_the_model_chooses() -> None:
    given = {"messages": USER, "tools": TOOLS, "response_format": schema_format({"const": {"a": 1}})}
    async with running(FakeScript(tokens=ids(call("look", 2))), template=template_with_tools()) as rig:
        _, listener = await rig.run(**given, parallel_tool_calls=False)
        assert calls(listener) == [("look", {"n": 2})]
    async with running(FakeScript(tokens=ids('{"a": 1}')), template=template_with_tools()) as rig:
        done, listener = await rig.run(**given)
        assert done.finishes == ("stop",)
        assert json.loads(listener.text()) == {"a": 1}


# Thoughts.


@pytest.mark.parametrize("budget", [0, 1, 4])
async def test_a_thought_is_as_long_as_its_budget_and_an_answer_follows(budget: int) -> None:
    async with running(FakeScript(tokens=ids("Hello " * 9), loop=True)) as rig:
        done, listener = await rig.run(messages=USER, think=True, think_budget=budget, max_tokens=30)
        closing = 2  # the newline and the marker
        assert done.usage.reasoning == budget + closing
        assert done.finishes == ("length",)
        assert listener.text() != ""
        assert len(rig.tokenizer.encode(listener.text("reasoning"), special=False)) <= budget


async def test_a_form_begins_behind_the_thought() -> None:
    script = FakeScript(tokens=ids("Hello</think>world"), loop=True)
    async with running(script) as rig:
        for given in ({"think": True}, {"think": True, "think_budget": 50}, {"think": True, "speculate": False}):
            done, listener = await rig.run(messages=USER, response_format=LETTERS, max_tokens=60, **given)
            assert done.finishes == ("stop",)
            assert listener.text("reasoning") == "Hello"
            assert len(listener.text()) == 3
        done, listener = await rig.run(
            messages=USER, response_format=LETTERS, max_tokens=60, think=True, think_budget=0
        )
        assert listener.text("reasoning") == ""
        assert len(listener.text()) == 3


async def test_a_model_may_open_the_thought_itself_unless_it_is_not_to_think() -> None:
    async with running(FakeScript(tokens=ids("<think>Hello</think>"), loop=True)) as rig:
        _, listener = await rig.run(messages=USER, response_format=LETTERS)
        assert listener.text("reasoning") == "Hello"
        assert len(listener.text()) == 3
        done, listener = await rig.run(messages=USER, response_format=LETTERS, think=False)
        assert listener.text("reasoning") == ""
        assert done.usage.completion == 3


def num_closing(rig: Rig) -> int:
    """Tokens that a thought is closed with."""
    thinking = find_thinking(rig.tokenizer)
    assert thinking is not None
    return len(thinking.closing)


@pytest.mark.parametrize("opened_by", ["template", "model"])
@pytest.mark.parametrize("budget", [100, 99, 90, 1000, (1 << 31) - 1])
async def test_a_budget_that_leaves_no_room_is_cut_until_an_answer_fits(budget: int, opened_by: str) -> None:
    opening, think = ("<think>", None) if opened_by == "model" else ("", True)
    async with running(FakeScript(tokens=ids(opening + "x" * 300))) as rig:
        ask: dict[str, Any] = {"messages": USER, "max_tokens": 100, "think_budget": budget, "think": think}
        done, listener = await rig.run(**ask, response_format=LETTERS)
        assert (done.finishes, len(listener.text())) == (("stop",), 3)
        generation, listener = await rig.submit(**ask)
        assert (await listener.done()).finishes == ("length",)
        assert listener.text() == "x" * 16
        num_thought = 100 - 16 - num_closing(rig) - len(ids(opening))
        assert listener.text("reasoning") == "x" * num_thought
        assert generation.params["think_budget"] == num_thought


@given(st.integers(1, 60), st.integers(0, 80))
@settings(max_examples=40, deadline=None)
def test_few_tokens_keep_a_quarter_for_the_answer_and_budgets_with_room_stay(max_tokens: int, budget: int) -> None:
    async def check() -> None:
        async with running(FakeScript(tokens=ids("x" * 300))) as rig:
            done, listener = await rig.run(messages=USER, think=True, think_budget=budget, max_tokens=max_tokens)
            assert (done.finishes, done.usage.completion) == (("length",), max_tokens)
            room = max(0, max_tokens - num_closing(rig))
            assert len(listener.text()) == min(room, max(room - budget, min(16, max_tokens // 4)))

    asyncio.run(check())


async def test_a_budget_has_no_effect_on_an_answer_without_a_thought() -> None:
    async with running(FakeScript(tokens=(*ids("Hello"), ids("<|im_end|>")[0]))) as rig:
        done, listener = await rig.run(messages=USER, think_budget=0)
        assert (done.finishes, listener.text()) == (("stop",), "Hello")


# What is refused, and what a client is shown.


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({"messages": USER, "think_budget": -1}, "think_budget"),
        ({"prompt": "x", "think_budget": 1}, "think_budget"),
        ({"prompt": "x", "tool_choice": "none"}, "tool_choice"),
        ({"prompt": "x", "parallel_tool_calls": True}, "parallel_tool_calls"),
        ({"prompt": "x", "response_format": LETTERS, "ignore_eos": True}, "ignore_eos"),
        ({"prompt": "x", "response_format": {"type": "xml"}}, "response_format.type"),
        ({"messages": USER, "tool_choice": "required"}, "tool_choice"),
        ({"messages": USER, "parallel_tool_calls": 1}, "parallel_tool_calls"),
    ],
)
async def test_what_cannot_be_is_refused_by_name(given: dict[str, Any], field: str) -> None:
    async with running() as rig:
        with pytest.raises(BadRequest) as caught:
            await rig.submit(**given)
        assert caught.value.field == field


async def test_a_budget_is_refused_where_a_model_has_no_markers() -> None:
    tokenizer = Tokenizer.from_bytes(byte_level_file(added=_added("<|im_start|>", "<|im_end|>")))
    async with running(tokenizer=tokenizer, eos_token_ids=()) as rig:
        with pytest.raises(BadRequest) as caught:
            await rig.submit(messages=USER, think_budget=1)
        assert caught.value.field == "think_budget"
        done, _ = await rig.run(messages=USER, response_format=LETTERS)
        assert done.finishes == ("stop",)


def _added(*texts: str) -> list[dict[str, Any]]:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return [{"content": text, "special": True, **flags} for text in texts]


async def test_the_effective_values_show_the_form_in_short() -> None:
    async with running(template=template_with_tools()) as rig:
        generation, listener = await rig.submit(
            messages=USER,
            response_format=schema_format({"const": 1}),
            tools=TOOLS,
            tool_choice={"type": "function", "function": {"name": "look", "x": "y"}},
            think_budget=3,
        )
        await listener.done()
    shown = generation.params
    assert shown["response_format"] == {"type": "json_schema"}
    assert shown["tool_choice"] == {"type": "function", "function": {"name": "look"}}
    assert shown["parallel_tool_calls"] is True
    assert shown["think_budget"] == 3


def test_no_library_is_loaded_before_there_is_a_form() -> None:
    program = "import sys, edgeqwen.daemon; sys.exit('llguidance' in sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True)
