"""Calls of tools, told from the text of an answer."""

from __future__ import annotations

import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgeqwen.text.tool_calls import Call, CallFinder, Piece

CALL = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
FOUND = Call("f", '{"a":1}')


def pieces(*texts: str) -> list[Piece]:
    finder = CallFinder()
    found = [piece for text in texts for piece in finder.push(text)] + finder.finish()
    assert finder.num_calls == sum(isinstance(piece, Call) for piece in found)
    joined: list[Piece] = []
    for piece in found:
        if isinstance(piece, str) and joined and isinstance(joined[-1], str):
            joined[-1] += piece
        else:
            joined.append(piece)
    return joined


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (CALL, [FOUND]),
        (f"Let me see.\n\n{CALL}", ["Let me see.", FOUND]),
        (f"{CALL}\n{CALL}\n", [FOUND, FOUND]),
        (f"{CALL} and so on", [FOUND, " and so on"]),
        ('<tool_call>{"name":"f"}</tool_call>', [Call("f", "{}")]),
        ('<tool_call>{"name":"f","parameters":{"b":[]}}</tool_call>', [Call("f", '{"b":[]}')]),
        ('<tool_call>{"name":"f","arguments":"{\\"a\\": 1}"}</tool_call>', [Call("f", '{"a": 1}')]),
        ('<tool_call>{"name":"f","arguments":{}}', [Call("f", "{}")]),
        ("no call \n", ["no call \n"]),
        ("a < b, <tool", ["a < b, <tool"]),
        ("", []),
    ],
    ids=repr,
)
def test_calls_are_told_from_text(text: str, found: list[Piece]) -> None:
    assert pieces(text) == found
    assert pieces(*text) == found, "character by character"


@pytest.mark.parametrize(
    "inside",
    [
        "nothing",
        "[1]",
        '{"name": 1}',
        '{"name": ""}',
        '{"arguments": {}}',
        '{"name": "f", "arguments": {"a"',
        "{" * 9000,
        "",
    ],
    ids=lambda inside: inside[:20],
)
@pytest.mark.parametrize("close", ["</tool_call>", ""], ids=["closed", "cut off"])
def test_what_is_no_call_stays_text(inside: str, close: str) -> None:
    for text in (f"<tool_call>{inside}{close}", f"Look:\n\n<tool_call>{inside}{close}"):
        assert pieces(text) == [text]
        assert pieces(*text) == [text]


def test_text_comes_at_once_unless_a_call_may_begin_in_it() -> None:
    finder = CallFinder()
    assert finder.push("Good day") == ["Good day"]
    assert finder.push(" \n") == []
    assert finder.push("<tool") == []
    assert finder.push("s> are") == [" \n<tools> are"]


@given(
    st.lists(st.one_of(st.sampled_from([CALL, "<tool_call>", "</tool_call>", "<", "\n", " "]), st.text(max_size=5))),
    st.data(),
)
def test_any_cut_of_a_text_gives_the_same_pieces(parts: list[str], data: st.DataObject) -> None:
    text = "".join(parts)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    bounds = [0, *cuts, len(text)]
    assert pieces(*(text[a:b] for a, b in itertools.pairwise(bounds))) == pieces(text)


TEXTS = st.one_of(st.text(max_size=9), st.sampled_from(["</tool_call>", '"</tool_call>\\', '\\" <tool_call>']))


@given(st.dictionaries(st.text(max_size=5), st.one_of(st.integers(-9, 9), TEXTS, st.none()), max_size=4))
def test_arguments_come_through(arguments: dict[str, object]) -> None:
    text = json.dumps({"name": "f", "arguments": arguments})
    (call,) = pieces(*f"<tool_call>\n{text}\n</tool_call>")
    assert isinstance(call, Call)
    assert json.loads(call.arguments) == arguments
