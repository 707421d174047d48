"""Requests as typed messages, errors that name the member, and frames that a small parser can read."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgeqwen.core.request import Delta, Done, Event, Started, Timings, TokenLogprob, ToolCall, Usage
from edgeqwen.errors import EdgeqwenError
from edgeqwen.protocol.answers import Answer, AnswerForm, Backlog
from edgeqwen.protocol.messages import Chat, Generate, read_envelope, read_id, read_operation
from edgeqwen.protocol.operation import Operation
from edgeqwen.protocol.replies import cut_text, delta_frames, encode_frame, encoded_len, split_text


def read(**members: Any) -> Operation:
    envelope = read_envelope(members)
    return read_operation(envelope.op, members)


def fault(**members: Any) -> EdgeqwenError:
    with pytest.raises(EdgeqwenError) as caught:
        read(**members)
    return caught.value


@pytest.mark.parametrize("value", ["a", "x" * 64, "~ !", 0, 7, (1 << 53) - 1])
def test_id_may_be_short_printable_text_or_a_whole_number(value: object) -> None:
    assert read_id({"id": value}) == value


@pytest.mark.parametrize("value", [None, "", "x" * 65, "é", "a\n", -1, 1 << 53, 1.5, True, [], {}])
def test_other_ids_are_refused(value: object) -> None:
    with pytest.raises(EdgeqwenError) as caught:
        read_id({"id": value})
    assert (caught.value.code, caught.value.field) == ("bad_request", "id")


def test_a_request_need_not_have_an_id() -> None:
    assert read_id({"op": "health"}) is None


@pytest.mark.parametrize(
    ("members", "code", "field"),
    [
        ({}, "bad_request", "op"),
        ({"op": 7}, "bad_request", "op"),
        ({"op": None}, "bad_request", "op"),
        ({"op": "nothing"}, "unknown_op", "op"),
        ({"op": "session.rename"}, "unknown_op", "op"),
        ({"op": "session.create", "ttl_s": "1"}, "bad_request", "ttl_s"),
        ({"op": "session.create", "owner": "x"}, "bad_request", "owner"),
        ({"op": "session.get"}, "bad_request", "session"),
        ({"op": "session.fork", "session": "s", "at": 1.5}, "bad_request", "at"),
        ({"op": "health", "v": 2}, "unsupported_version", "v"),
        ({"op": "health", "v": "1"}, "bad_request", "v"),
        ({"op": "health", "v": None}, "bad_request", "v"),
        ({"op": "health", "close": 1}, "bad_request", "close"),
        ({"op": "health", "temprature": 1}, "bad_request", "temprature"),
        ({"op": "chat", "prompt": "x", "temprature": 1}, "bad_request", "temprature"),
        ({"op": "chat", "prompt": "x", "temprature": None}, "bad_request", "temprature"),
        ({"op": "chat", "prompt": 1}, "bad_request", "prompt"),
        ({"op": "chat", "prompt": "x", "max_tokens": "9"}, "bad_request", "max_tokens"),
        ({"op": "chat", "prompt": "x", "max_tokens": 1.5}, "bad_request", "max_tokens"),
        ({"op": "chat", "prompt": "x", "stream": 1}, "bad_request", "stream"),
        ({"op": "chat", "prompt": "x", "stop": ["a", 1]}, "bad_request", "stop[1]"),
        ({"op": "chat", "prompt": "x", "tokens": [1]}, "bad_request", "tokens"),
        ({"op": "chat", "prompt": "x", "echo": True}, "bad_request", "echo"),
        ({"op": "chat", "messages": [{"role": "user", "content": 1}]}, "bad_request", "messages[0].content"),
        ({"op": "chat", "messages": [{"content": "x"}]}, "bad_request", "messages[0].role"),
        ({"op": "chat", "messages": [{"role": "user", "content": "x", "y": 1}]}, "bad_request", "messages[0].y"),
        ({"op": "generate", "prompt": "x", "messages": []}, "bad_request", "messages"),
        ({"op": "generate", "prompt": "x", "think": True}, "bad_request", "think"),
        ({"op": "generate", "prompt": "x", "think_budget": 1}, "bad_request", "think_budget"),
        ({"op": "generate", "prompt": "x", "tool_choice": "none"}, "bad_request", "tool_choice"),
        ({"op": "generate", "tokens": [1, "2"]}, "bad_request", "tokens[1]"),
        ({"op": "tokenize"}, "bad_request", "text"),
        ({"op": "tokenize", "text": None}, "bad_request", "text"),
        ({"op": "detokenize", "tokens": "1"}, "bad_request", "tokens"),
        ({"op": "shutdown", "drain_s": "10"}, "bad_request", "drain_s"),
        ({"op": "chat", "prompt": "x", "session": 7}, "bad_request", "session"),
        ({"op": "chat", "prompt": "x", "session": "s", "if_rev": "1"}, "bad_request", "if_rev"),
        ({"op": "generate", "prompt": "x", "session": "s"}, "bad_request", "session"),
        ({"op": "chat", "prompt": "x", "tool_choice": 1}, "bad_request", "tool_choice"),
        ({"op": "chat", "prompt": "x", "response_format": "json_object"}, "bad_request", "response_format"),
        ({"op": "chat", "prompt": "x", "think_budget": "1"}, "bad_request", "think_budget"),
        ({"op": "chat", "prompt": "x", "priority": 1}, "bad_request", "priority"),
    ],
)
def test_error_names_the_member(members: dict[str, Any], code: str, field: str) -> None:
    error = fault(**members)
    assert (error.code, error.field) == (code, field)


def test_error_repeats_no_value() -> None:
    error = fault(op="chat", messages=[{"role": "user", "content": ["secret"]}])
    assert "secret" not in error.message
    assert error.message == "messages[0].content[0] must be an object"


def test_a_long_unknown_name_is_cut() -> None:
    error = fault(op="health", **{"n" * 5000: 1})
    assert len(error.message) < 100


def test_null_is_not_given() -> None:
    message = read(op="chat", prompt="x", messages=None, temperature=None, session=None, tool_choice=None)
    assert isinstance(message, Chat)
    assert message.temperature is None
    assert message.turns() == ({"role": "user", "content": "x"},)


def test_zero_is_a_value() -> None:
    message = read(op="chat", prompt="x", temperature=0, top_k=0, seed=0)
    assert isinstance(message, Chat)
    assert (message.temperature, message.top_k, message.seed) == (0.0, 0, 0)


def test_names_that_start_with_x_are_ignored() -> None:
    assert read(op="health", x_trace="7") == read(op="health")


def test_fields_that_change_no_answer_are_accepted() -> None:
    assert isinstance(read(op="generate", prompt="x", cache=False, speculate=True, priority="normal"), Generate)


@pytest.mark.parametrize("members", [{}, {"prompt": "x", "messages": [{"role": "user", "content": "y"}]}])
def test_chat_needs_either_messages_or_prompt(members: dict[str, Any]) -> None:
    message = read(op="chat", **members)
    assert isinstance(message, Chat)
    with pytest.raises(EdgeqwenError, match="either messages or prompt"):
        message.turns()


def test_assistant_without_content_counts_as_empty_and_keeps_its_calls() -> None:
    calls = [{"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}]
    message = read(op="chat", messages=[{"role": "assistant", "content": None, "tool_calls": calls}])
    assert isinstance(message, Chat)
    assert message.turns() == ({"role": "assistant", "content": "", "tool_calls": calls},)


def test_parts_of_a_content_are_joined_with_nothing_between() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": " b"}]
    message = read(op="chat", messages=[{"role": "user", "content": parts}, {"role": "assistant", "content": []}])
    assert isinstance(message, Chat)
    assert message.turns() == ({"role": "user", "content": "a b"}, {"role": "assistant", "content": ""})


@pytest.mark.parametrize("part", [{"type": "image_url", "image_url": {"url": "x"}}, {"type": "text"}])
def test_a_part_that_is_no_text_is_refused_by_its_place(part: dict[str, Any]) -> None:
    message = read(op="chat", messages=[{"role": "user", "content": [{"type": "text", "text": "a"}, part]}])
    assert isinstance(message, Chat)
    with pytest.raises(EdgeqwenError) as caught:
        message.turns()
    assert (caught.value.code, caught.value.field) == ("bad_request", "messages[0].content[1].type")


@pytest.mark.parametrize("turn", [{"role": "robot", "content": "x"}, {"role": "user"}])
def test_turns_with_wrong_role_or_without_content_are_refused(turn: dict[str, Any]) -> None:
    message = read(op="chat", messages=[turn])
    assert isinstance(message, Chat)
    with pytest.raises(EdgeqwenError) as caught:
        message.turns()
    assert caught.value.field in {"messages[0].role", "messages[0].content"}


def test_frame_starts_with_id_and_done_and_has_no_spaces() -> None:
    assert (
        encode_frame({"ok": True, "a": [1, 2]}, done=True, request_id="q")
        == b'{"id":"q","done":true,"ok":true,"a":[1,2]}\n'
    )
    assert encode_frame({}, done=False, request_id=0) == b'{"id":0,"done":false}\n'
    assert encode_frame({}, done=True) == b'{"done":true}\n'


def test_text_cannot_look_like_the_end_mark() -> None:
    frame = encode_frame({"delta": 'say "done":true\nor not'}, done=False, request_id=1)
    assert b'"done":true' not in frame
    assert frame.count(b"\n") == 1


texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=300)


@given(texts, st.integers(6, 200))
def test_pieces_of_a_text_fit_and_join_to_it(text: str, max_bytes: int) -> None:
    pieces = list(split_text(text, max_bytes))
    assert "".join(pieces) == text
    assert all(0 < encoded_len(piece) <= max_bytes for piece in pieces)


@given(texts, st.integers(0, 200))
def test_cut_text_is_the_longest_beginning_that_fits(text: str, max_bytes: int) -> None:
    cut = cut_text(text, max_bytes)
    assert text.startswith(cut)
    assert encoded_len(cut) <= max_bytes
    if cut != text:
        assert encoded_len(text[: len(cut) + 1]) > max_bytes


@pytest.mark.parametrize("char", ["a", '"', "\0", "é", "龘", "🫠"])
def test_streamed_frames_of_a_long_text_stay_below_the_limit(char: str) -> None:
    delta = Delta(7, "reasoning", char * 50_000)
    frames = list(delta_frames(delta, frame_bytes=32 << 10, with_choice=True))
    assert all(len(encode_frame(frame, done=False, request_id="x" * 64)) <= 32 << 10 for frame in frames)
    assert "".join(frame["reasoning"] for frame in frames) == char * 50_000


def test_streamed_frames_of_many_logprobs_stay_below_the_limit() -> None:
    top = tuple((token, -1.5) for token in range(20))
    logprobs = tuple(TokenLogprob(token, "text", -0.25, top) for token in range(500))
    frames = list(delta_frames(Delta(0, "content", "x" * 20_000, logprobs), frame_bytes=32 << 10, with_choice=False))
    assert all(len(encode_frame(frame, done=False, request_id="x" * 64)) <= 32 << 10 for frame in frames)
    assert [entry["token"] for frame in frames for entry in frame.get("logprobs", ())] == list(range(500))
    assert "".join(frame["delta"] for frame in frames) == "x" * 20_000


def test_backlog_joins_neighbours_of_one_choice_and_channel_only() -> None:
    backlog = Backlog()
    parts = [
        (0, "reasoning", "a"),
        (0, "reasoning", "b"),
        (0, "content", "c"),
        (1, "content", "d"),
        (1, "content", "e"),
    ]
    for choice, channel, text in parts:
        backlog.push(Delta(choice, "content" if channel == "content" else "reasoning", text))
    found = []
    while backlog:
        event = backlog.pop()
        assert isinstance(event, Delta)
        found.append((event.choice, event.channel, event.text))
    assert found == [(0, "reasoning", "ab"), (0, "content", "c"), (1, "content", "de")]


def test_backlog_joins_choices_that_alternate() -> None:
    backlog = Backlog()
    for index in range(100):
        backlog.push(Delta(index % 2, "content", str(index % 10)))
    found = [backlog.pop() for _ in range(2)]
    assert not backlog
    assert found == [Delta(0, "content", "02468" * 10), Delta(1, "content", "13579" * 10)]


class Sheet:
    """An answer and the frames it emitted; `is_writable` is set by the test."""

    def __init__(self, **form: Any) -> None:
        self.frames: list[dict[str, Any]] = []
        self.finals: list[dict[str, Any]] = []
        self.is_writable = True
        self.num_stops = 0
        self.answer = Answer(AnswerForm(**form), emit=self._emit, is_writable=lambda: self.is_writable, stop=self._stop)

    def _emit(self, members: dict[str, Any], done: bool) -> None:
        json.dumps(members)
        (self.finals if done else self.frames).append(members)

    def _stop(self) -> None:
        self.num_stops += 1

    def push(self, *events: Event) -> None:
        for event in events:
            self.answer.push(event)


def done(*finishes: Any) -> Done:
    return Done("r1", finishes or ("stop",), Usage(3, 1, 2), Timings(1, 2, 3))


def test_whole_answer_is_one_final_frame() -> None:
    sheet = Sheet()
    sheet.answer.set_resolved({"seed": 7}, (1, 2, 3))
    sheet.push(
        Started("r1", 0, 3), Delta(0, "reasoning", "hm"), Delta(0, "content", "a"), Delta(0, "content", "b"), done()
    )
    assert sheet.frames == []
    assert sheet.finals == [
        {
            "text": "ab",
            "reasoning": "hm",
            "finish": "stop",
            "rid": "r1",
            "usage": {"prompt": 3, "cached": 1, "completion": 2},
            "ms": {"queue": 1, "ttft": 2, "total": 3},
            "seed": 7,
        }
    ]


def test_streamed_answer_waits_while_it_cannot_be_written_and_joins_deltas() -> None:
    sheet = Sheet(is_stream=True)
    sheet.push(Started("r1", 2, 3), Delta(0, "content", "a"))
    sheet.is_writable = False
    sheet.push(Delta(0, "content", "b"), Delta(0, "content", "c"), done())
    assert len(sheet.frames) == 2
    sheet.is_writable = True
    sheet.answer.pump()
    assert sheet.frames[0] == {"event": "start", "rid": "r1", "queue": 2, "prompt_tokens": 3}
    assert sheet.frames[1:] == [{"delta": "a"}, {"delta": "bc"}]
    assert len(sheet.finals) == 1
    assert "text" not in sheet.finals[0]


def test_answer_longer_than_a_reply_may_be_is_cut_and_ends_with_length() -> None:
    sheet = Sheet(reply_bytes=4096)
    sheet.push(Started("r1", 0, 3), *(Delta(0, "content", "é" * 100) for _ in range(40)), done("cancelled"))
    assert sheet.num_stops >= 1
    final = sheet.finals[0]
    assert final["finish"] == "length"
    assert set(final["text"]) == {"é"}
    assert len(encode_frame(final, done=True, request_id="x" * 64)) <= 4096


def test_what_verbose_adds_counts_towards_the_length_of_a_reply() -> None:
    sheet = Sheet(reply_bytes=32 << 10, is_verbose=True)
    bias = {str(100_000 + token): -99.123456789 for token in range(1024)}
    sheet.answer.set_resolved({"seed": 1, "logit_bias": bias}, tuple(range(100_000, 100_100)))
    sheet.push(Started("r1", 0, 3), Delta(0, "content", "a" * 8000), done("cancelled"))
    assert sheet.finals[0]["finish"] == "length"
    assert 0 < len(sheet.finals[0]["text"]) < 8000
    assert len(encode_frame(sheet.finals[0], done=True, request_id="x" * 64)) <= 32 << 10


def test_a_cancelled_answer_keeps_its_text_and_says_so() -> None:
    sheet = Sheet()
    sheet.push(Started("r1", 0, 3), Delta(0, "content", "part"), done("cancelled"))
    assert (sheet.finals[0]["text"], sheet.finals[0]["finish"]) == ("part", "cancelled")


def test_several_choices_are_told_apart() -> None:
    sheet = Sheet(num_choices=2)
    sheet.push(Started("r1", 0, 3), Delta(1, "content", "b"), Delta(0, "content", "a"), done("stop", "length"))
    assert sheet.finals[0]["choices"] == [
        {"choice": 0, "text": "a", "finish": "stop"},
        {"choice": 1, "text": "b", "finish": "length"},
    ]
    streamed = Sheet(num_choices=2, is_stream=True)
    streamed.push(Delta(1, "content", "b"), done("stop", "length"))
    assert streamed.frames == [{"choice": 1, "delta": "b"}]


def call(number: int, arguments: str = "{}", choice: int = 0) -> ToolCall:
    return ToolCall(choice, number, f"c{number}", "f", arguments)


@pytest.mark.parametrize("is_stream", [False, True], ids=["whole", "streamed"])
def test_calls_of_tools_are_told_in_the_last_frame(is_stream: bool) -> None:
    sheet = Sheet(is_stream=is_stream)
    sheet.push(Started("r1", 0, 3), call(0, '{"a":1}'), call(1), done("tool_calls"))
    assert sheet.finals[0]["finish"] == "tool_calls"
    assert sheet.finals[0]["tool_calls"] == [
        {"id": "c0", "name": "f", "arguments": '{"a":1}'},
        {"id": "c1", "name": "f", "arguments": "{}"},
    ]
    assert len(sheet.frames) == is_stream


def test_calls_of_several_choices_are_told_apart() -> None:
    sheet = Sheet(num_choices=2)
    sheet.push(call(0, choice=1), Delta(0, "content", "a"), done("stop", "tool_calls"))
    assert sheet.finals[0]["choices"] == [
        {"choice": 0, "text": "a", "finish": "stop"},
        {"choice": 1, "text": "", "tool_calls": [{"id": "c0", "name": "f", "arguments": "{}"}], "finish": "tool_calls"},
    ]


def test_a_call_longer_than_a_frame_comes_in_pieces_before_the_last_one() -> None:
    arguments = json.dumps({"text": 'é"' * 20_000}, ensure_ascii=False)
    sheet = Sheet(is_stream=True)
    sheet.push(call(0), call(1, arguments), call(2), done("tool_calls"))
    found: dict[str, str] = {}
    for frame in (*sheet.frames, *sheet.finals):
        assert len(encode_frame(frame, done=True, request_id="x" * 64)) <= 32 << 10
        for entry in frame["tool_calls"]:
            found[entry["id"]] = found.get(entry["id"], "") + entry["arguments"]
    assert found == {"c0": "{}", "c1": arguments, "c2": "{}"}


def test_a_call_that_a_reply_has_no_room_for_cuts_it() -> None:
    sheet = Sheet(reply_bytes=4096)
    sheet.push(call(0), call(1, "1" * 5000), done("cancelled"))
    assert sheet.num_stops == 1
    assert sheet.finals[0]["finish"] == "length"
    assert [entry["id"] for entry in sheet.finals[0]["tool_calls"]] == ["c0"]


def test_text_after_a_call_is_not_joined_with_text_before_it() -> None:
    backlog = Backlog()
    events: list[Event] = [Delta(0, "content", "a"), call(0), Delta(0, "content", "b")]
    for event in events:
        backlog.push(event)
    assert [backlog.pop() for _ in events] == events


def test_verbose_final_frame_of_a_stream_stays_below_the_limit() -> None:
    sheet = Sheet(is_stream=True, is_verbose=True)
    ids = tuple(range(100_000, 105_000))
    sheet.answer.set_resolved({"seed": 1, "logit_bias": {str(token): -100.0 for token in range(1024)}}, ids)
    sheet.push(done())
    parts = [*sheet.frames, *sheet.finals]
    assert [token for part in parts for token in part["prompt_ids"]] == list(ids)
    assert all(len(encode_frame(part, done=False)) <= 32 << 10 for part in parts)
    assert sheet.finals[0]["params"]["seed"] == 1
