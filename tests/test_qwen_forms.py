"""Forms and thoughts with Qwen3's own vocabulary of 151,669 tokens, whose markers are tokens of their own."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from edgeqwen.constrain.compiler import Compiler
from edgeqwen.constrain.form import read_form
from edgeqwen.core.constraint import Constraint
from edgeqwen.runtime.fake import FakeScript
from edgeqwen.text.reasoning import find_thinking
from tests.engines import running
from tests.qwen_files import END_OF_TEXT, END_THINK, IM_END, THINK, qwen_builder, qwen_template, qwen_tokenizer

NOTHING: dict[str, Any] = {"response_format": None, "tools": (), "tool_choice": None, "parallel_tool_calls": None}
TOOL = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
}


def compiled(**members: Any) -> Constraint:
    async def run() -> Constraint:
        form = read_form(**NOTHING | members)
        assert form is not None
        return await Compiler(qwen_tokenizer(), (IM_END, END_OF_TEXT)).compile(form)

    return asyncio.run(run())


def allowed(constraint: Constraint, ids: list[int]) -> tuple[set[int], bool]:
    """What may come behind these ids, each of which may come; and whether nothing may."""
    state = constraint.begin()
    row = np.zeros(qwen_tokenizer().num_tokens, np.float32)
    state.mask(row)
    for token in ids:
        assert row[token] == 0, qwen_tokenizer().token_bytes(token)
        state.take(token)
        row = np.zeros(row.size, np.float32)
        state.mask(row)
    return set(np.flatnonzero(row == 0).tolist()), state.is_over


def test_a_thought_is_closed_as_the_template_closes_one() -> None:
    thinking = find_thinking(qwen_tokenizer())
    assert thinking is not None
    assert (thinking.opening, thinking.closing_marker) == (THINK, END_THINK)
    without = qwen_builder().build([{"role": "user", "content": "x"}], think=False).ids
    assert without[-2:] == thinking.closing[-2:], "behind the marker there is what the template writes there"
    assert qwen_tokenizer().decode_bytes(thinking.closing) == b"\n</think>\n\n"


@pytest.mark.parametrize(
    ("budget", "max_tokens", "num_thought", "num_answer"),
    [
        (100, 100, 80, 16),  # <think>, the thought, a newline, </think> and an empty line, the answer
        (99, 100, 80, 16),
        (80, 100, 80, 16),
        (79, 100, 79, 17),
        (20, 20, 11, 5),
        (4, 4, 0, 0),
        (1, 1, 0, 0),
    ],
)
async def test_a_budget_of_all_tokens_leaves_the_answer_some(
    budget: int, max_tokens: int, num_thought: int, num_answer: int
) -> None:
    said = [THINK, *qwen_tokenizer().encode(" so" * 200, special=False)]
    files: dict[str, Any] = {"tokenizer": qwen_tokenizer(), "template": qwen_template()}
    async with running(FakeScript(tokens=tuple(said)), eos_token_ids=(IM_END, END_OF_TEXT), **files) as rig:
        user = ({"role": "user", "content": "x"},)
        done, listener = await rig.run(messages=user, think_budget=budget, max_tokens=max_tokens)
        assert listener.text("reasoning").count(" so") == num_thought
        assert listener.text().count(" so") == num_answer
        assert (done.finishes, done.usage.completion) == (("length",), max_tokens)


def test_a_call_is_written_with_the_markers_own_tokens_as_the_template_writes_it() -> None:
    constraint = compiled(tools=[TOOL], tool_choice="required", parallel_tool_calls=False)
    text = '<tool_call>\n{"name": "weather", "arguments": {"city": "Київ"}}\n</tool_call>'
    opening = qwen_tokenizer().added_token_id("<tool_call>")
    assert allowed(constraint, [])[0] == {opening}
    ends, is_over = allowed(constraint, qwen_tokenizer().encode(text, special=True))
    assert is_over
    assert ends <= {IM_END, END_OF_TEXT}


def test_json_is_written_as_the_tokenizer_cuts_it() -> None:
    constraint = compiled(response_format={"type": "json_object"})
    for text in ('{"name": "Ada", "born": 1815, "tags": ["a", "b"]}', '{\n  "a": {\n    "b": null\n  }\n}', "{}"):
        assert allowed(constraint, qwen_tokenizer().encode(text, special=False))[1]


def test_an_answer_that_may_end_or_go_on_may_do_both() -> None:
    constraint = compiled(response_format={"type": "regex", "regex": "ab*"})
    ids = qwen_tokenizer().encode("abb", special=False)
    tokens, is_over = allowed(constraint, ids)
    assert not is_over
    assert {IM_END, END_OF_TEXT} < tokens
