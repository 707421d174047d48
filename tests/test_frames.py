"""Bytes to lines: how a stream is cut, what ends a connection, and which protocol a first byte belongs to."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgeqwen.errors import CODES, EdgeqwenError
from edgeqwen.protocol.frames import FrameDecoder, decode_object, is_nested_deeper, sniff

MIB = 1 << 20


def lines_of(*pieces: bytes, max_line: int = MIB, eof: bool = True) -> list[bytes]:
    decoder = FrameDecoder(max_line=max_line)
    found: list[bytes] = []
    for piece in pieces:
        decoder.feed(piece)
        found += decoder
    if eof:
        decoder.feed_eof()
        found += decoder
    return found


def fault_of(line: bytes) -> EdgeqwenError:
    with pytest.raises(EdgeqwenError) as caught:
        decode_object(line, number=3)
    return caught.value


def test_lines_end_with_lf_and_one_cr_before_it_is_ignored() -> None:
    assert lines_of(b'{"a":1}\r\n{"b":2}\n') == [b'{"a":1}', b'{"b":2}']


def test_blank_lines_are_ignored() -> None:
    assert lines_of(b'\n\r\n  \t\n{"a":1}\n\n\n') == [b'{"a":1}']


def test_end_of_input_completes_an_unterminated_line() -> None:
    assert lines_of(b'{"a":1}', eof=False) == []
    assert lines_of(b'{"a":1}') == [b'{"a":1}']


def test_end_of_input_after_a_whole_line_adds_nothing() -> None:
    assert lines_of(b'{"a":1}\n', b"", b"  ") == [b'{"a":1}']


@pytest.mark.parametrize("end", [b"\n", b"\r\n", b""])
def test_line_of_exactly_the_limit_is_taken(end: bytes) -> None:
    line = b'{"x":"' + b"a" * (MIB - 8) + b'"}'
    assert len(line) == MIB
    assert lines_of(line + end) == [line]


@pytest.mark.parametrize("end", [b"\n", b"\r\n", b""])
def test_line_of_one_byte_more_than_the_limit_is_too_large(end: bytes) -> None:
    line = b'{"x":"' + b"a" * (MIB - 7) + b'"}'
    with pytest.raises(EdgeqwenError) as caught:
        lines_of(line + end)
    assert caught.value.code == "too_large"
    assert caught.value.message == f"line 1 is longer than {MIB} bytes"


def test_too_large_is_raised_before_the_line_has_ended() -> None:
    with pytest.raises(EdgeqwenError) as caught:
        lines_of(b"\n", b"x" * 10, b"x" * 10, max_line=16, eof=False)
    assert caught.value.message == "line 2 is longer than 16 bytes"


def test_decoder_goes_on_where_iteration_stopped() -> None:
    decoder = FrameDecoder()
    decoder.feed(b"{}\n{}\n{")
    assert next(decoder) == b"{}"
    decoder.feed(b"}\n")
    assert list(decoder) == [b"{}", b"{}"]
    assert decoder.num_lines == 3


def test_partial_means_that_something_not_blank_waits() -> None:
    decoder = FrameDecoder()
    found = []
    for piece in (b" \r\n ", b"{", b"}\n"):
        decoder.feed(piece)
        found.append((list(decoder), decoder.is_partial))
    assert found == [([], False), ([], True), ([b"{}"], False)]


objects = st.dictionaries(st.text(max_size=6), st.text(max_size=20) | st.integers() | st.none(), max_size=4)


@given(st.lists(objects, max_size=6), st.sampled_from([b"\n", b"\r\n", b"\n\n"]), st.data())
def test_any_split_of_the_bytes_gives_the_same_lines(
    values: list[dict[str, object]], end: bytes, data: st.DataObject
) -> None:
    lines = [json.dumps(value, ensure_ascii=False).encode() for value in values]
    stream = end.join(lines)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=12)))
    pieces = [stream[start:stop] for start, stop in zip([0, *cuts], [*cuts, len(stream)], strict=True)]
    assert lines_of(*pieces) == lines
    assert lines_of(*(bytes([byte]) for byte in stream)) == lines


@given(st.binary(max_size=200))
def test_arbitrary_bytes_give_an_object_or_one_fatal_error(data: bytes) -> None:
    codes: list[str] = []
    try:
        for line in lines_of(data, max_line=64):
            assert isinstance(decode_object(line), dict)
    except EdgeqwenError as exc:
        codes.append(exc.code)
    assert all(CODES[code].is_fatal for code in codes)


@pytest.mark.parametrize(
    ("line", "code"),
    [
        (b"\0", "bad_json"),
        (b'{"a":"\0"}', "bad_json"),
        (b"\xef\xbb\xbf{}", "bad_json"),
        (b'{"a":"\xff"}', "bad_utf8"),
        (b'{"a":"\xed\xa0\x80"}', "bad_utf8"),
        (b'{"a":"\\ud800"}', "bad_json"),
        (b'{"\\udc00":1}', "bad_json"),
        (b'{"a":NaN}', "bad_json"),
        (b'{"a":Infinity}', "bad_json"),
        (b'{"a":1e400}', "bad_json"),
        (b"[" * 200_000, "bad_json"),
        (b'{"a":' * 200_000, "bad_json"),
        (b"[]", "bad_json"),
        (b'[{"op":"health"}]', "bad_json"),
        (b"7", "bad_json"),
        (b'"x"', "bad_json"),
        (b"null", "bad_json"),
        (b"{} {}", "bad_json"),
        (b"{'a':1}", "bad_json"),
        (b'{"a":' + b"9" * 100_000 + b"}", "bad_json"),
        (b"POST / HTTP/1.1", "bad_json"),
    ],
)
def test_what_is_no_json_object_is_fatal(line: bytes, code: str) -> None:
    error = fault_of(line)
    assert error.code == code
    assert CODES[error.code].is_fatal
    assert error.message.startswith("line 3 is n")


def test_error_does_not_repeat_what_was_sent() -> None:
    assert fault_of(b"my secret").message == "line 3 is not a JSON object"


def test_duplicate_names_the_last_one_counts() -> None:
    assert decode_object(b'{"a":1,"a":2}') == {"a": 2}


def test_nesting_is_counted_outside_strings_only() -> None:
    assert not is_nested_deeper(b'{"a":"' + b"[" * 100 + b'"}', 32)
    assert not is_nested_deeper(b'{"a":"\\"' + b"[" * 100 + b'"}', 32)
    assert not is_nested_deeper(b"[" * 32 + b"]" * 32, 32)
    assert is_nested_deeper(b"[" * 33 + b"]" * 33, 32)
    assert not is_nested_deeper(b"[]," * 1000, 32)
    assert is_nested_deeper(b'{"\\\\":' + b"[" * 32, 32)


@pytest.mark.parametrize(
    ("data", "wire"),
    [
        (b"", None),
        (b" \r\n\t", None),
        (b"{", "json"),
        (b'\n\n {"op"', "json"),
        (b"GET / HTTP/1.1", "http"),
        (b"P", "http"),
        (b"get", "unknown"),
        (b"[", "unknown"),
        (b"\0", "unknown"),
        (b"\xef\xbb\xbf{", "unknown"),
        (b"\x16\x03\x01", "unknown"),
    ],
)
def test_first_byte_tells_the_protocol(data: bytes, wire: str | None) -> None:
    assert sniff(data) == wire
