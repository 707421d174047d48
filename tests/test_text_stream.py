"""From token ids to deltas: whole characters, stop strings, thought and answer, nothing lost and nothing twice."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from edgeqwen.core.request import TokenLogprob
from edgeqwen.text import IncrementalDetokenizer, StopMatcher, TextDelta, TextStream, Tokenizer
from tests.qwen_files import END_OF_TEXT, END_THINK, IM_END, NUM_TOKENS, THINK, qwen_tokenizer
from tests.tiny_tokenizers import byte_level, byte_level_file, sentencepiece


class Run(NamedTuple):
    """What a client sees of a script of token ids."""

    content: str
    reasoning: str
    deltas: tuple[TextDelta, ...]
    num_pushed: int
    is_stopped: bool
    num_reasoning: int


def run(ids: Sequence[int], *, tokenizer: Tokenizer | None = None, has_logprobs: bool = False, **options: Any) -> Run:
    """Push until a stop string ends it, then finish."""
    stream = TextStream(tokenizer or qwen_tokenizer(), **options)
    deltas: list[TextDelta] = []
    num_pushed = num_reasoning = 0
    for token_id in ids:
        step = stream.push(token_id, TokenLogprob(token_id, "", -float(num_pushed)) if has_logprobs else None)
        deltas += step.deltas
        num_pushed += 1
        num_reasoning += step.is_reasoning
        assert step.is_stopped == stream.is_stopped
        if step.is_stopped:
            break
    deltas += stream.finish()
    assert stream.finish() == ()
    text = {"content": "", "reasoning": ""}
    for delta in deltas:
        assert delta.text or delta.logprobs
        delta.text.encode()  # whole code points only
        text[delta.channel] += delta.text
    return Run(text["content"], text["reasoning"], tuple(deltas), num_pushed, stream.is_stopped, num_reasoning)


def encode(text: str) -> list[int]:
    return qwen_tokenizer().encode(text, special=True)


def spell(text: str) -> list[int]:
    """One token a byte."""
    tokenizer = byte_level()
    ids = [tokenizer.encode(char, special=False) for char in text]
    return [i for part in ids for i in part]


def spell_bytes(data: bytes) -> list[int]:
    by_byte = {byte_level().token_bytes(i): i for i in range(256)}
    return [by_byte[bytes([byte])] for byte in data]


# Characters


def test_characters_split_over_tokens_arrive_whole() -> None:
    text = "ok 🫠 龘 👩🏽‍🚀 🏴󠁧󠁢󠁥󠁮󠁧󠁿 नमस्ते end"
    result = run(encode(text))
    assert result.content == text
    assert "\ufffd" not in "".join(delta.text for delta in result.deltas)


def test_each_delta_comes_as_soon_as_its_character_is_whole() -> None:
    stream = TextStream(qwen_tokenizer())
    texts = ["".join(delta.text for delta in stream.push(i).deltas) for i in (9284, 104, 254, 82912, 246, 87)]
    assert texts == ["", "", "🫠", "", "龘", "x"]


@settings(deadline=None)
@given(st.lists(st.integers(0, 151_935), max_size=500))
def test_deltas_of_any_ids_are_the_decode_of_all_ids(ids: list[int]) -> None:
    tokenizer = qwen_tokenizer()
    assert run(ids).content == tokenizer.decode_bytes(ids).decode("utf-8", "replace")


@settings(deadline=None)
@given(st.binary(max_size=40), st.lists(st.integers(0, 40), max_size=6))
@example(b"\xf0\x9f\xab\xf0\x9f\xab\xa0", [1, 2, 3])
@example(b"\xed\xa0\x80\xc0\x80\xf8\x88", [1])
@example(b"\xe0\x80\xf4\x90\x80\x80", [1, 3])
def test_any_cut_of_any_bytes_gives_the_same_text(data: bytes, cuts: list[int]) -> None:
    detokenizer = IncrementalDetokenizer()
    bounds = [0, *sorted(cuts), len(data)]
    text = "".join(detokenizer.push(data[a:b]) for a, b in itertools.pairwise(bounds))
    assert text + detokenizer.finish() == data.decode("utf-8", "replace")


def test_a_lone_bad_byte_is_one_mark_and_stalls_nothing() -> None:
    result = run(spell_bytes(b"a\xffb"), tokenizer=byte_level())
    assert [delta.text for delta in result.deltas] == ["a", "\ufffd", "b"]


@pytest.mark.parametrize("ids", [[9284], [9284, 104]])
def test_a_character_torn_by_the_budget_is_one_mark(ids: list[int]) -> None:
    tokenizer = qwen_tokenizer()
    expected = tokenizer.decode_bytes(ids).decode("utf-8", "replace")
    assert run(ids).content == expected
    assert expected.count("\ufffd") == 1


def test_blanks_and_punctuation_arrive_as_generated() -> None:
    parts = ["  lead", " x", "\n", "\t", " y"]
    ids = [i for part in parts for i in encode(part)]
    assert run(ids).content == "".join(parts)
    assert run([87, 961, 379, 1154, 1147]).content == "x != y , z"


def test_a_sentencepiece_continuation_keeps_its_space() -> None:
    ids = sentencepiece().encode("Hello world", special=False)
    assert run(ids, tokenizer=sentencepiece()).content == " Hello world"


# Tokens without text


@pytest.mark.parametrize("end", [IM_END, END_OF_TEXT])
def test_end_markers_are_no_text(end: int) -> None:
    assert run([*encode("yes"), end]).content == "yes"


def test_ids_without_a_token_are_no_text_and_keep_characters_and_stops_together() -> None:
    assert run([NUM_TOKENS, 151_935, 64]).content == "a"
    assert run([9284, NUM_TOKENS, 104, 151_935, 254]).content == "🫠"
    result = run([*encode("own"), NUM_TOKENS, *encode(" fox")], stop=["own fox"])
    assert (result.content, result.is_stopped) == ("", True)


# Stop strings


def test_a_stop_string_across_tokens_ends_the_text_before_it() -> None:
    result = run(encode("The quick brown fox jumps"), stop=["own fox"])
    assert [delta.text for delta in result.deltas] == ["The", " quick", " br"]
    assert result.is_stopped
    assert result.num_pushed == 4


@pytest.mark.parametrize(
    ("text", "stop", "expected"),
    [
        (" Paris", ["Pari"], " "),
        ("Hi\nUser: x", ["\nUser:"], "Hi"),
        ("abcd", ["abc", "ab"], ""),
        ("xabcd", ["abcd", "bc"], "xa"),
        ("xabc", ["abc", "bc"], "x"),
        ("a\n\nb", ["\n\n"], "a"),
        ("aaab", ["aab"], "a"),
        ("ok 🫠!", ["🫠"], "ok "),
        ("ok 🫠!", [" 🫠!"], "ok"),
        ("none of them", ["nothing", "themes"], "none of them"),
    ],
)
def test_stop_strings(text: str, stop: list[str], expected: str) -> None:
    for tokenizer, ids in ((qwen_tokenizer(), encode(text)), (byte_level(), spell(text))):
        result = run(ids, tokenizer=tokenizer, stop=stop)
        assert result.content == expected
        assert result.is_stopped == (expected != text)


def test_only_a_possible_beginning_is_held_back() -> None:
    matcher = StopMatcher(["</end>", "<b>"])
    assert [matcher.push(part) for part in ("a <", " b </", "e", "x<", "/end")] == ["a ", "< b ", "", "</ex", ""]
    assert matcher.flush() == "</end"
    assert matcher.flush() == ""


def naive_stop(text: str, stops: list[str]) -> str:
    """Letter by letter: the first stop string that is complete ends it, the longest if several are."""
    for end in range(len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            return text[: end - max(map(len, found))]
    return text


letters = st.text(alphabet="ab<\n", max_size=24)


@settings(deadline=None)
@given(letters, st.lists(st.text(alphabet="ab<\n", min_size=1, max_size=4), max_size=4), st.lists(st.integers(0, 24)))
def test_stops_do_not_depend_on_the_cut_and_agree_with_a_naive_search(
    text: str, stops: list[str], cuts: list[int]
) -> None:
    matcher = StopMatcher(stops)
    bounds = [0, *sorted(cuts), len(text)]
    seen = ""
    for a, b in itertools.pairwise(bounds):
        seen += matcher.push(text[a:b])
        assert naive_stop(text, stops).startswith(seen)
    assert seen + matcher.flush() == naive_stop(text, stops)
    assert matcher.is_stopped == (naive_stop(text, stops) != text or any(text.endswith(stop) for stop in stops))


@pytest.mark.parametrize("ids_after", [[IM_END], []])
def test_text_that_only_looked_like_a_stop_arrives_at_the_end(ids_after: list[int]) -> None:
    result = run([*encode("a < b </e"), *ids_after], stop=["</end>"])
    assert (result.content, result.is_stopped) == ("a < b </e", False)


def test_what_was_held_back_stays_in_its_channel() -> None:
    ids = [*encode("<think>\nwhy </e"), END_THINK, *encode("\n\nso </e"), IM_END]
    result = run(ids, splits_reasoning=True, stop=["</end>"])
    assert (result.reasoning, result.content) == ("why </e", "so </e")


def test_a_stop_string_ends_the_answer_and_not_the_thought() -> None:
    ids = encode("<think>\nQuestion: a\n\nb\n</think>\n\nc Question: d")
    result = run(ids, splits_reasoning=True, stop=["Question:", "\n\n"])
    assert (result.reasoning, result.content, result.is_stopped) == ("Question: a\n\nb", "c ", True)


def test_a_stop_string_counts_only_after_the_minimum() -> None:
    ids = spell("abxab")
    assert run(ids, tokenizer=byte_level(), stop=["ab"], min_tokens=2).content == ""
    assert run(ids, tokenizer=byte_level(), stop=["ab"], min_tokens=3).content == "abx"
    assert run(ids, tokenizer=byte_level(), stop=["ab"], min_tokens=9).content == "abxab"
    assert run(ids, tokenizer=byte_level(), stop=["a", "xab!", "b!"], min_tokens=5).content == "abxab"


def test_nothing_comes_after_a_stop() -> None:
    stream = TextStream(byte_level(), stop=["b"])
    for token_id in spell("ab"):
        stream.push(token_id)
    step = stream.push(spell("c")[0])
    assert (step.deltas, step.is_stopped, stream.finish()) == ((), True, ())


# Thought and answer


def test_with_thinking_off_all_is_content() -> None:
    result = run([*encode("Red, green\n"), IM_END], splits_reasoning=True)
    assert (result.content, result.reasoning, result.num_reasoning) == ("Red, green\n", "", 0)


def test_a_thought_nobody_asked_for_is_still_no_content() -> None:
    result = run(encode("<think>\nSECRET\n</think>\n\nok<|im_end|>"), splits_reasoning=True)
    assert (result.content, result.reasoning) == ("ok", "SECRET")


def test_an_empty_thought_leaves_no_trace() -> None:
    result = run([THINK, 271, END_THINK, 271, 19, IM_END], splits_reasoning=True)
    assert result.deltas == (TextDelta("content", "4"),)


def test_a_prompt_that_opened_the_thought_starts_in_it() -> None:
    result = run(encode("\nhm\n\n</think>\n\nyes"), splits_reasoning=True, starts_in_reasoning=True)
    assert (result.content, result.reasoning) == ("yes", "hm")


def test_only_newlines_directly_around_the_thought_are_dropped() -> None:
    ids = encode("<think>\n\n  a\n\nb \n\n</think>\n\n\n  c\n\nd\n")
    result = run(ids, splits_reasoning=True)
    assert (result.reasoning, result.content) == ("  a\n\nb ", "  c\n\nd\n")


def test_markers_spelt_of_ordinary_tokens_are_text() -> None:
    ids = qwen_tokenizer().encode("In XML, close with </think> and <think> go on", special=False)
    assert run(ids, splits_reasoning=True).content == "In XML, close with </think> and <think> go on"
    inside = [THINK, *qwen_tokenizer().encode("say </think> so", special=False), END_THINK, 19]
    result = run(inside, splits_reasoning=True)
    assert (result.reasoning, result.content) == ("say </think> so", "4")


def test_a_thought_that_spends_the_budget_is_reasoning_and_no_content() -> None:
    result = run([THINK, *[64] * 19], splits_reasoning=True)
    assert (result.content, result.reasoning, result.num_reasoning) == ("", "a" * 19, 20)


def test_stray_markers_are_dropped() -> None:
    result = run([64, END_THINK, 271, 65, THINK, THINK, 66, END_THINK, END_THINK, 67], splits_reasoning=True)
    assert (result.content, result.reasoning) == ("a\n\nbd", "c")


def test_where_nothing_is_split_the_markers_are_text() -> None:
    assert run([THINK, 64, END_THINK, 65]).content == "<think>a</think>b"


def test_a_torn_character_does_not_cross_the_marker() -> None:
    result = run([THINK, 9284, 104, END_THINK, 254, 64], splits_reasoning=True)
    assert (result.reasoning, result.content) == ("\ufffd", "\ufffda")


def test_a_model_without_think_tokens_has_one_channel() -> None:
    tokenizer = Tokenizer.from_bytes(byte_level_file(added=[]))
    result = run(spell("ab"), tokenizer=tokenizer, splits_reasoning=True, starts_in_reasoning=True)
    assert (result.content, result.reasoning, result.num_reasoning) == ("ab", "", 0)


ids_with_markers = st.lists(
    st.sampled_from([THINK, END_THINK, 271, 198, 9284, 104, 254, 64, IM_END, NUM_TOKENS]) | st.integers(0, 300),
    max_size=40,
)


@settings(deadline=None)
@given(ids_with_markers, st.booleans(), st.lists(st.sampled_from(["a", '!"', "aa", "\n\n", "\n\na"]), max_size=2))
def test_split_streams_agree_with_splitting_afterwards(ids: list[int], starts: bool, stop: list[str]) -> None:
    result = run(ids, splits_reasoning=True, starts_in_reasoning=starts, stop=stop)
    content, reasoning = split_afterwards(ids, starts, stop)
    assert (result.content, result.reasoning) == (content, reasoning)


def split_afterwards(ids: list[int], in_thought: bool, stop: list[str]) -> tuple[str, str]:
    """The rules applied to the whole list at once, segment by segment."""
    texts = {True: "", False: ""}
    segments: list[tuple[bool, bool, list[int]]] = [(in_thought, False, [])]
    for token_id in ids:
        if token_id in (THINK, END_THINK):
            is_thought = token_id == THINK
            if is_thought != segments[-1][0]:
                segments.append((is_thought, segments[-1][0], []))
        else:
            segments[-1][2].append(token_id)
    for is_thought, follows_thought, part in segments:
        text = qwen_tokenizer().decode_bytes(part).decode("utf-8", "replace")
        if is_thought:
            texts[True] += text.strip("\n")
            continue
        text = text.lstrip("\n") if follows_thought else text
        texts[False] += naive_stop(text, stop)
        if any(found in text for found in stop):
            break
    return texts[False], texts[True]


# Log-probabilities


@settings(deadline=None)
@given(ids_with_markers, st.lists(st.sampled_from(["a", "aa", "\n\n"]), max_size=2))
def test_every_logprob_is_delivered_once_and_in_order(ids: list[int], stop: list[str]) -> None:
    result = run(ids, splits_reasoning=True, stop=stop, has_logprobs=True)
    delivered = [logprob for delta in result.deltas for logprob in delta.logprobs]
    assert [logprob.token for logprob in delivered] == ids[: result.num_pushed]
    assert [-logprob.logprob for logprob in delivered] == list(range(result.num_pushed))
