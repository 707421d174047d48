"""Items out of a JSON text that comes in pieces: the same ones however it is cut, and never more than one in memory."""

from __future__ import annotations

import itertools
import json
import tracemalloc
from collections.abc import Sequence
from typing import Any

import ijson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgeqwen.errors import EdgeqwenError
from edgeqwen.protocol.item_reader import BLOCK_BYTES, ItemReader

TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=30)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.floats(allow_nan=False, allow_infinity=False) | TEXTS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXTS, inner, max_size=4),
    max_leaves=12,
)
EXCESSES = st.integers(-3 * BLOCK_BYTES, 3 * BLOCK_BYTES)
OBJECTS = st.dictionaries(TEXTS.filter(lambda name: name != "items"), VALUES, max_size=4)


def read(data: bytes, cuts: Sequence[int] = (), **settings: Any) -> tuple[list[Any], ItemReader]:
    """The items of `data`, cut at these places."""
    reader = ItemReader(**settings)
    items: list[Any] = []
    places = [0, *sorted({cut % (len(data) + 1) for cut in cuts}), len(data)]
    for start, end in itertools.pairwise(places):
        items += reader.feed(data[start:end])
    items += reader.finish()
    return items, reader


def error_of(data: bytes, **settings: Any) -> tuple[list[Any], EdgeqwenError]:
    """The items before the error, and the error; the same wherever the text is cut."""
    items, reader = read(data, **settings)
    assert reader.error is not None, items
    assert read(data, range(len(data)), **settings)[0] == items
    return items, reader.error


@given(st.lists(VALUES, max_size=6), st.lists(st.integers(0, 2000), max_size=12), st.booleans(), st.booleans())
def test_an_array_gives_its_items_wherever_it_is_cut(
    values: list[Any], cuts: list[int], is_ascii: bool, is_spread: bool
) -> None:
    text = json.dumps(values, ensure_ascii=is_ascii, indent=2 if is_spread else None)
    items, reader = read(text.encode(), cuts)
    assert (reader.error, items, reader.num_items) == (None, values, len(values))
    assert json.dumps(items) == json.dumps(values)


@given(st.lists(OBJECTS, min_size=1, max_size=5), st.lists(st.integers(0, 2000), max_size=12), st.booleans())
def test_lines_give_their_objects_wherever_they_are_cut(lines: list[Any], cuts: list[int], is_said: bool) -> None:
    text = "".join(json.dumps(line) + "\n" for line in lines)
    items, reader = read(text.encode(), cuts, is_lines=is_said)
    assert (reader.error, items, reader.head) == (None, lines, {})


@given(OBJECTS, st.lists(VALUES, max_size=5), st.lists(st.integers(0, 2000), max_size=12))
def test_an_object_gives_what_stands_before_its_items(head: dict[str, Any], values: list[Any], cuts: list[int]) -> None:
    items, reader = read(json.dumps({**head, "items": values}).encode(), cuts)
    assert (reader.error, items, reader.head) == (None, values, head)


@given(st.binary(max_size=60), st.lists(st.integers(0, 60), max_size=6))
def test_any_bytes_give_items_or_an_error_wherever_they_are_cut(data: bytes, cuts: list[int]) -> None:
    for text in (data, b'[{"a":"' + data, b'{"a":1}\n' + data):
        whole, reader = read(text)
        pieces, again = read(text, cuts)
        assert pieces == whole
        assert (reader.error is None) == (again.error is None)


@given(st.text('\\"u0dD89abABcCfF7n', max_size=24), st.lists(st.integers(0, 60), max_size=6))
def test_escapes_are_read_as_the_lines_of_the_socket_are(text: str, cuts: list[int]) -> None:
    data = f'["{text}"]'.encode()
    try:
        expected = json.loads(data)
        json.dumps(expected, ensure_ascii=False).encode()
    except ValueError:  # UnicodeEncodeError, of a lone surrogate, is one
        expected = None
    items, reader = read(data, cuts)
    if expected is None:
        assert reader.error is not None
    else:
        assert (reader.error, items) == (None, expected)


def test_items_come_out_as_soon_as_they_are_complete() -> None:
    reader = ItemReader()
    assert reader.feed(b'{"each":"chat",') == []
    assert not reader.has_begun
    assert reader.feed(b'"items":[{"prompt":"a"}') == [{"prompt": "a"}]
    assert (reader.has_begun, reader.head) == (True, {"each": "chat"})
    assert reader.feed(b',{"prompt":') == []
    assert reader.feed(b'"b"}]}') == [{"prompt": "b"}]
    assert reader.finish() == []
    assert reader.error is None


@pytest.mark.parametrize(
    ("data", "num_items"),
    [
        (b'[{"a":1},{"b":2},{"c":}]', 2),
        (b'[{"a":1},', 1),
        (b'[{"a":1}', 1),
        (b'[{"a":1}]]', 1),
        (b'[{"a":1}][{"a":1}]', 1),
        (b'[{"a":1}]{"a":1}', 1),
        (b'{"items":[1],"common":{}}', 1),
        (b'{"items":[1]}{"a":1}', 1),
        (b'{"a":1}\n{"b":', 1),
        (b'{"a":1}\nnonsense', 1),
        (b'{"a":1', 0),
        (b"5", 0),
        (b'"text"', 0),
        (b"", 0),
        (b"  \n", 0),
        (b"\xef\xbb\xbf[]", 0),
        (b"[NaN]", 0),
        (b"[1e999]", 0),
        (b'["a\nb"]', 0),
        (b'[1,"\\ud800"]', 1),
        (b'[1,"\\udc00\\ud800"]', 1),
        (b'[1,"\\ud800', 1),
    ],
)
def test_what_is_wrong_ends_the_items_and_is_said(data: bytes, num_items: int) -> None:
    items, error = error_of(data)
    assert (len(items), error.code) == (num_items, "bad_json")
    assert "\n" not in error.message


def test_an_error_repeats_nothing_that_was_sent() -> None:
    assert "secret" not in error_of(b'[{"a": secret}]')[1].message


def test_what_is_not_utf8_is_told_apart() -> None:
    assert error_of(b'[1,"\xff\xfe"]')[1].code == "bad_utf8"


def test_no_lines_are_no_items_if_lines_were_said_to_come() -> None:
    for data in (b"", b"\n"):
        items, reader = read(data, is_lines=True)
        assert (items, reader.error) == ([], None)


@pytest.mark.parametrize("start", [b"[", b'[{"a":', b'{"items":[', b'{"common":', b'{"a":1}\n{"b":'])
def test_brackets_without_end_are_refused_at_the_limit(start: bytes) -> None:
    _, reader = read(start + b"[" * 300_000)
    assert reader.error is not None
    assert "deeper than 32" in reader.error.message


@pytest.mark.parametrize("depth", [3, 32])
def test_an_item_may_be_as_deep_as_the_limit(depth: int) -> None:
    item = b"[" * depth + b"]" * depth
    items, reader = read(b"[" + item + b"]", nesting=depth)
    assert (reader.error, len(items)) == (None, 1)
    items, reader = read(b"[[" + item + b"]]", nesting=depth)
    assert reader.error is not None


@given(EXCESSES, st.integers(0, 2 * BLOCK_BYTES), st.lists(st.integers(0, 200_000)))
def test_an_item_is_refused_beyond_its_limit_and_two_blocks(excess: int, before: int, cuts: list[int]) -> None:
    limit = 4 * BLOCK_BYTES
    prompt = "x" * (limit + excess - len('{"a":""}'))
    data = json.dumps(["y" * before, {"a": prompt}, 5]).encode()
    items, reader = read(data, cuts, item_bytes=limit)
    if excess <= 0:
        assert (reader.error, len(items)) == (None, 3)
    elif excess > 2 * BLOCK_BYTES:
        assert reader.error is not None
        assert (reader.error.code, len(items)) == ("too_large", 1)
    assert read(data, item_bytes=limit)[0] == items


@pytest.mark.parametrize("start", [b'["', b'{"items":["', b'{"a":"', b'{"common":{"a":"', b"[     "])
def test_a_text_without_end_is_refused_without_being_held(start: bytes) -> None:
    reader = ItemReader(item_bytes=1 << 20)
    reader.feed(start)
    piece = (b" " if start.endswith(b" ") else b"x") * (64 << 10)
    tracemalloc.start()
    try:
        for number in range(16 << 10):  # a gigabyte
            reader.feed(piece)
            num_pieces = number + 1
            if reader.error is not None:
                break
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert reader.error is not None
    assert reader.error.code == "too_large"
    assert num_pieces <= 19
    assert peak < 4 << 20


def test_the_parser_in_c_is_used_where_there_is_one() -> None:
    """Tests of speed and memory are about that one."""
    assert ijson.backend in {"yajl2_c", "python"}
