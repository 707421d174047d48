"""Tools for templates that know nothing of them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from edgeqwen.text import ChatTemplate, PromptBuilder
from edgeqwen.text.tool_calls import Call, CallFinder
from edgeqwen.text.tool_preamble import knows_tools
from tests.tiny_tokenizers import byte_level

SIMPLE = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
TOOL = {"type": "function", "function": {"name": "wetter", "description": "für <think>"}}
CALL = {"id": "c", "type": "function", "function": {"name": "wetter", "arguments": '{"stadt": "Köln"}'}}


def rendered(messages: list[dict[str, Any]], tools: list[dict[str, Any]], template: str = SIMPLE) -> str:
    prompt = PromptBuilder(byte_level(), ChatTemplate(template)).build(messages, tools=tools)
    return byte_level().decode_bytes(prompt.ids, skip_special=False).decode()


@pytest.mark.parametrize(
    ("source", "knows"),
    [
        ("{% if tools %}x{% endif %}", True),
        ("{{ messages }}", False),
        ("{{ my_tools }}", False),
        ("{{tools|tojson}}", True),
    ],
)
def test_a_template_that_names_tools_knows_them(source: str, knows: bool) -> None:
    assert knows_tools(source) is knows


def test_tools_stand_behind_what_the_system_message_says() -> None:
    text = rendered([{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}], [TOOL])
    system, user = text.split("<|im_end|>\n", maxsplit=1)
    assert system.startswith("<|im_start|>system\nBe brief.\n\n# Tools\n")
    assert f"<tools>\n{json.dumps(TOOL, ensure_ascii=False)}\n</tools>" in system
    assert user == "<|im_start|>user\nHi<|im_end|>\n"


def test_there_is_a_system_message_where_there_was_none() -> None:
    assert rendered([{"role": "user", "content": "Hi"}], [TOOL]).startswith("<|im_start|>system\n# Tools\n")
    assert rendered([{"role": "user", "content": "Hi"}], []).startswith("<|im_start|>user\n")


def test_calls_and_results_are_told_as_text() -> None:
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "I look.", "tool_calls": [CALL, CALL]},
        {"role": "tool", "content": "12", "tool_call_id": "c"},
        {"role": "tool", "content": "13", "tool_call_id": "c"},
        {"role": "user", "content": "And?"},
    ]
    _, _, assistant, results, question = rendered(messages, []).split("<|im_start|>")
    finder = CallFinder()
    said, *calls = finder.push(assistant.removeprefix("assistant\n").removesuffix("<|im_end|>\n")) + finder.finish()
    assert said == "I look."
    assert calls == [Call("wetter", '{"stadt":"Köln"}')] * 2
    assert results == ("user\n<tool_response>\n12\n</tool_response>\n<tool_response>\n13\n</tool_response><|im_end|>\n")
    assert question == "user\nAnd?<|im_end|>\n"


def test_a_template_that_knows_tools_is_given_them_as_they_are() -> None:
    template = "{{ tools | tojson }}{% for m in messages %}{{ m.role }}{{ m.tool_calls | tojson }}{% endfor %}"
    text = rendered([{"role": "assistant", "content": "", "tool_calls": [CALL]}], [TOOL], template)
    assert text.startswith(json.dumps([TOOL], ensure_ascii=False))
    assert "wetter" in text.removeprefix(json.dumps([TOOL], ensure_ascii=False))
    assert "# Tools" not in text


def test_what_a_client_writes_in_a_tool_stays_text() -> None:
    ids = PromptBuilder(byte_level(), ChatTemplate(SIMPLE)).build([{"role": "user", "content": "x"}], tools=[TOOL]).ids
    assert byte_level().added_token_id("<think>") not in ids
    assert byte_level().added_token_id("<tool_call>") in ids, "the preamble's own markers are what they say"
