"""Calls of tools through every front of a daemon, with Qwen3's tokenizer, whose markers are tokens of their own."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from edgeqwen.text import Tokenizer
from tests.daemons import DaemonProcess, running_daemon
from tests.fronts import WITHOUT_ASK, Answer, Front, chat, write_qwen_model
from tests.qwen_files import qwen_tokenizer_path

USER = [{"role": "user", "content": "x"}]
FIRST = {"text": 'x </tool_call> "q" 日本'}
TOOLS = [{"type": "function", "function": {"name": name, "parameters": {"type": "object"}}} for name in ("one", "two")]
BOTH = (
    f'<tool_call>\n{{"name": "one", "arguments": {json.dumps(FIRST, ensure_ascii=False)}}}\n</tool_call>\n'
    '<tool_call>\n{"name": "two", "arguments": {}}\n</tool_call>'
)
BROKEN = '<tool_call>\n{"name": "one", "arguments": {"a": }}\n</tool_call>'
EOS = 151645


@pytest.fixture(scope="module", params=[BOTH, BROKEN], ids=["both", "broken"])
def played(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[str, DaemonProcess]]:
    """What the model says, and a daemon whose model says it."""
    ids = [*Tokenizer.from_file(qwen_tokenizer_path()).encode(request.param, special=True), EOS]
    model = write_qwen_model(tmp_path_factory.mktemp("qwen") / "model")
    with running_daemon("fake:" + json.dumps({"tokens": ids, "eos": EOS}), model=model) as daemon:
        yield request.param, daemon


def calls_of(answer: Answer, front: Front) -> list[tuple[str, Any]]:
    """Names and arguments, put together as a client of the front does it."""
    if front in ("socket", "socket stream"):
        calls = [call for frame in answer.raw for call in frame.get("tool_calls", ())]
    elif front == "http":
        calls = [call["function"] for call in answer.raw["choices"][0]["message"].get("tool_calls", ())]
    else:
        calls = []
        for piece in (piece for choice in answer.raw for piece in choice["delta"].get("tool_calls", ())):
            if "id" in piece:
                calls.append(dict(piece["function"]))
            else:
                calls[piece["index"]]["arguments"] += piece["function"]["arguments"]
    return [(call["name"], json.loads(call["arguments"])) for call in calls]


@pytest.mark.parametrize("front", WITHOUT_ASK)
def test_calls_are_the_same_on_every_front_and_nothing_of_them_is_text(
    played: tuple[str, DaemonProcess], front: Front
) -> None:
    said, daemon = played
    answer = chat(daemon, front, messages=USER, tools=TOOLS, think=False)
    assert answer.refused is None
    if said == BOTH:
        assert (calls_of(answer, front), answer.finish) == ([("one", FIRST), ("two", {})], "tool_calls")
        assert not answer.content
    else:
        assert (calls_of(answer, front), answer.finish, answer.content) == ([], "stop", BROKEN)


@pytest.mark.parametrize("front", WITHOUT_ASK)
@pytest.mark.parametrize("max_tokens", [1, 5, 12])
def test_a_call_that_the_budget_cuts_is_not_offered_as_one(
    played: tuple[str, DaemonProcess], front: Front, max_tokens: int
) -> None:
    said, daemon = played
    answer = chat(daemon, front, messages=USER, tools=TOOLS, think=False, max_tokens=max_tokens)
    assert (calls_of(answer, front), answer.finish) == ([], "length")
    assert said.startswith(answer.content.rstrip("\ufffd"))
