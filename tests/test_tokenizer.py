"""Text to ids and back: exact bytes, both decoder forms, the plain encoder, and broken files."""

from __future__ import annotations

import functools
import json
import re
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as RustTokenizer

from edgeqwen.errors import BadRequest, ModelInvalid, ModelMissing
from edgeqwen.text import Tokenizer, encoders
from tests.qwen_files import NUM_TOKENS, THINK, qwen_tokenizer, qwen_tokenizer_path
from tests.tiny_tokenizers import ORDINARY, SPECIAL, byte_level, byte_level_file, sentencepiece, sentencepiece_file

MARKERS = [*SPECIAL, *ORDINARY]
words = st.sampled_from([
    *MARKERS,
    "<|im_",
    "end|>",
    "<",
    ">",
    "|",
    "Hello",
    " ",
    "\n",
    "é",
    "e\u0301",
    "🫠",
    "龘",
    "\x00",
])
texts = st.lists(words | st.text(max_size=4), max_size=12).map("".join)


def marked(tokenizer: Tokenizer, text: str) -> list[int]:
    """Ids by way of `cut` and `encode_parts`: what the prompt is made by."""
    return tokenizer.encode_parts(tokenizer.cut(text))


@functools.cache
def library_tokenizer() -> RustTokenizer:
    return RustTokenizer.from_file(str(qwen_tokenizer_path()))


def test_other_threads_run_while_a_long_text_is_encoded() -> None:
    """The interpreter takes its lock from nobody here, so another thread runs only if encoding lets go of it."""
    tokenizer, seen, is_over = byte_level(), [0], threading.Event()

    def count() -> None:
        while not is_over.is_set():
            seen[0] += 1
            time.sleep(0)

    counter = threading.Thread(target=count)
    interval_s = sys.getswitchinterval()
    sys.setswitchinterval(1000)
    try:
        counter.start()
        before = seen[0]
        ids = tokenizer.encode("x" * 2_000_000, special=False)
        during = seen[0] - before
    finally:
        sys.setswitchinterval(interval_s)
        is_over.set()
        counter.join()
    assert len(ids) == 2_000_000
    assert during > 0


def test_ids_that_others_rely_on() -> None:
    tokenizer = qwen_tokenizer()
    assert tokenizer.num_tokens == NUM_TOKENS
    assert tokenizer.encode("🫠", special=False) == [9284, 104, 254]
    assert tokenizer.encode("龘", special=False) == [82912, 246]
    assert tokenizer.encode("x != y , z", special=False) == [87, 961, 379, 1154, 1147]
    assert tokenizer.token_id("<think>") == THINK
    assert tokenizer.token_id("<nothing>") is None


def test_added_tokens_are_ids_or_text_as_asked() -> None:
    tokenizer = qwen_tokenizer()
    assert tokenizer.encode("<think>", special=True) == [THINK]
    assert tokenizer.encode("<think>", special=False) == [13708, 766, 29]
    assert tokenizer.encode("", special=True) == tokenizer.encode("", special=False) == []


def test_nothing_is_tidied_and_leading_blanks_stay() -> None:
    tokenizer = qwen_tokenizer()
    for text in ("x != y , z", "  lead", "\n", "\t y", " 's n't ,", "a\r\n\u00a0 b"):
        assert tokenizer.decode_bytes(tokenizer.encode(text, special=False)).decode() == text


def test_special_tokens_and_padding_have_no_bytes_but_ordinary_added_tokens_have() -> None:
    tokenizer = qwen_tokenizer()
    for token_id in (151643, 151644, 151645, 151669, 151935, -1, 10**12):
        assert tokenizer.token_bytes(token_id) == b""
    assert tokenizer.token_bytes(151657) == b"<tool_call>"
    assert tokenizer.decode_bytes([151644, 87, 151645]) == b"x"
    assert tokenizer.decode_bytes([151644, 87, 151645], skip_special=False) == b"<|im_start|>x<|im_end|>"


@settings(deadline=None)
@given(st.lists(st.integers(0, NUM_TOKENS - 1), max_size=60))
def test_bytes_of_any_ids_are_what_the_library_decodes(ids: list[int]) -> None:
    tokenizer = qwen_tokenizer()
    library = library_tokenizer()
    assert tokenizer.decode_bytes(ids).decode("utf-8", "replace") == library.decode(ids, skip_special_tokens=True)


@settings(deadline=None)
@given(texts)
def test_cutting_at_markers_gives_the_stock_ids(text: str) -> None:
    tokenizer = qwen_tokenizer()
    assert marked(tokenizer, text) == tokenizer.encode(text, special=True)


@settings(deadline=None)
@given(texts)
def test_plain_encoding_never_gives_an_added_token(text: str) -> None:
    for tokenizer in (qwen_tokenizer(), byte_level(), sentencepiece()):
        added = {token.id for token in tokenizer.added_tokens if token.text != "<unk>"}
        assert added.isdisjoint(tokenizer.encode(text, special=False))


@settings(deadline=None)
@given(texts)
def test_byte_level_text_survives(text: str) -> None:
    tokenizer = byte_level()
    assert tokenizer.decode_bytes(tokenizer.encode(text, special=False)).decode() == text
    assert marked(tokenizer, text) == tokenizer.encode(text, special=True)


@pytest.mark.parametrize("scheme", ["first", "always", "never"])
@settings(deadline=None)
@given(text=texts)
def test_sentencepiece_pieces_get_the_stock_ids(scheme: str, text: str) -> None:
    tokenizer = sentencepiece(scheme)
    assert marked(tokenizer, text) == tokenizer.encode(text, special=True)


@settings(deadline=None)
@given(st.text(alphabet="Helo wrd <>|é🫠\n", max_size=20).filter(lambda text: not text.startswith(" ")))
def test_sentencepiece_text_survives(text: str) -> None:
    tokenizer = sentencepiece("always")
    assert tokenizer.decode_bytes(tokenizer.encode(text, special=False)).decode() == text


@settings(deadline=None)
@given(st.lists(st.integers(0, 300), max_size=30))
def test_sentencepiece_bytes_are_what_the_library_decodes_where_they_are_text(ids: list[int]) -> None:
    tokenizer = sentencepiece()
    rust = RustTokenizer.from_str(sentencepiece_file().decode())
    try:
        text = tokenizer.decode_bytes(ids).decode()
    except UnicodeDecodeError:
        return  # there the library puts one mark a byte, the text rule one mark a fault
    assert text == rust.decode(ids, skip_special_tokens=True)


def test_sentencepiece_space_is_taken_off_at_the_start_of_a_text_only() -> None:
    tokenizer = sentencepiece()
    ids = tokenizer.encode("Hello world", special=False)
    assert tokenizer.decode_bytes(ids) == b"Hello world"
    assert b"".join(map(tokenizer.token_bytes, ids)) == b" Hello world"
    byte_id = tokenizer.token_id("<0xF0>")
    assert byte_id is not None
    assert tokenizer.token_bytes(byte_id) == b"\xf0"


def test_metaspace_decoder_is_read() -> None:
    decoder = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": False}
    tokenizer = Tokenizer.from_bytes(sentencepiece_file(decoder=decoder))
    assert tokenizer.decode_bytes(tokenizer.encode("Hello world", special=False)) == b"Hello world"


@pytest.mark.parametrize(
    "flags", [{"rstrip": True}, {"lstrip": True}, {"lstrip": True, "rstrip": True}, {"single_word": True}, {}]
)
@settings(deadline=None)
@given(text=st.lists(st.sampled_from(["<a>", "<a>b", " ", "\n", "x", "<", "_"]), max_size=10).map("".join))
def test_flags_of_added_tokens_are_heeded(flags: dict[str, bool], text: str) -> None:
    tokenizer = Tokenizer.from_bytes(byte_level_file(added=[{"content": "<a>", **flags}, {"content": "<a>b"}]))
    assert marked(tokenizer, text) == tokenizer.encode(text, special=True)


def test_a_marker_that_is_also_an_ordinary_word_stays_text() -> None:
    whole = json.loads(byte_level_file(added=[]))
    whole["model"]["ignore_merges"] = True
    token_id = whole["model"]["vocab"]["marker"] = len(whole["model"]["vocab"])
    whole["added_tokens"] = [json.loads(byte_level_file())["added_tokens"][0] | {"id": token_id, "content": "marker"}]
    tokenizer = Tokenizer.from_bytes(json.dumps(whole).encode())
    assert tokenizer.encode("marker", special=True) == [token_id]
    ids = tokenizer.encode("marker", special=False)
    assert token_id not in ids
    assert tokenizer.decode_bytes(ids) == b"marker"


def test_settings_of_a_training_run_do_not_cut_or_fill_the_prompt() -> None:
    truncation = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}
    tokenizer = Tokenizer.from_bytes(byte_level_file(truncation=truncation))
    assert len(tokenizer.encode("abcdef", special=True)) == 6


def test_half_a_surrogate_pair_is_a_bad_request() -> None:
    with pytest.raises(BadRequest, match="surrogate"):
        byte_level().encode("\ud800", special=True)


CTC = {"type": "CTC", "pad_token": "<pad>", "word_delimiter_token": "|", "cleanup": True}


def changed(change: Callable[[dict[str, Any]], Any]) -> bytes:
    whole = json.loads(sentencepiece_file())
    change(whole)
    return json.dumps(whole).encode()


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"{", "is not a tokenizer.json"),
        (b"\xff", "is not a tokenizer.json"),
        (changed(lambda t: t["model"].update(continuing_subword_prefix="é")), "is not a tokenizer.json"),  # a panic
        (byte_level_file(decoder=None), "no decoder"),
        (byte_level_file(decoder={"type": "WordPiece", "prefix": "##", "cleanup": True}), "WordPiece"),
        (changed(lambda t: t["decoder"]["decoders"].append(CTC)), "CTC"),
        (changed(lambda t: t["decoder"]["decoders"][0].update(pattern={"Regex": "x"})), "Replace"),
        (b'{"model":{"type":"WordLevel","vocab":{"a":0},"unk_token":"a"},"added_tokens":[]}', "WordLevel"),
    ],
)
def test_files_that_cannot_be_used_are_named(data: bytes, words: str) -> None:
    with pytest.raises(ModelInvalid) as caught:
        Tokenizer.from_bytes(data, file="some/tokenizer.json")
    assert "some/tokenizer.json" in caught.value.message
    assert words in caught.value.message
    assert "\n" not in caught.value.message


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelMissing, match=r"tokenizer\.json"):
        Tokenizer.from_file(tmp_path / "tokenizer.json")
    with pytest.raises(ModelInvalid, match="cannot be read"):
        Tokenizer.from_file(tmp_path)


def test_what_was_let_go_is_read_again_with_the_next_text(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_bytes(sentencepiece_file())
    tokenizer = Tokenizer.from_file(path)
    text = "one two <|im_end|>three"
    before = [tokenizer.encode(text, special=special) for special in (True, False)]
    parts = tokenizer.cut(text)
    for _ in range(2):
        tokenizer.let_go()
        tokenizer.let_go()
        assert [tokenizer.encode(text, special=special) for special in (True, False)] == before
        tokenizer.let_go()
        assert tokenizer.encode_parts(parts) == sentencepiece().encode_parts(parts)
        tokenizer.let_go()
        assert tokenizer.decode_bytes(before[1]).decode() == text


@pytest.mark.parametrize("change", ["gone", "another"])
def test_a_file_that_is_not_there_any_more_when_it_is_read_again_is_named(change: str, tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_bytes(byte_level_file())
    tokenizer = Tokenizer.from_file(path)
    path.unlink()
    if change == "another":
        path.write_bytes(sentencepiece_file())
    assert tokenizer.encode("hi", special=False), "it is still in memory"
    tokenizer.let_go()
    with pytest.raises((ModelMissing, ModelInvalid), match=re.escape(str(path))):
        tokenizer.encode("hi", special=False)


def test_a_tokenizer_that_came_without_a_file_stays() -> None:
    tokenizer = byte_level()
    tokenizer.let_go()
    assert tokenizer.encode("hi", special=False)


def test_threads_that_come_together_read_it_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_bytes(byte_level_file())
    tokenizer = Tokenizer.from_file(path)
    tokenizer.let_go()
    reads: list[Path] = []

    def read(path: Path) -> bytes:
        reads.append(path)
        return path.read_bytes()

    monkeypatch.setattr(encoders, "read_file", read)
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda _: tokenizer.encode("hi", special=False), range(32)))
    assert found == [byte_level().encode("hi", special=False)] * 32
    assert len(reads) == 1
