"""The formats that clients have: OpenAI's chat with tools, completions, embeddings, tokens; Anthropic's messages."""

from __future__ import annotations

import base64
import json
import struct
from pathlib import Path
from typing import Any

import pytest

from edgeqwen.engine.settings import EngineLimits
from edgeqwen.errors import BadRequest
from edgeqwen.http.anthropic_request import read_messages
from edgeqwen.http.openai_request import read_chat
from edgeqwen.protocol.limits import WireLimits
from tests.http_client import Answer, connect
from tests.wire import Gate, Wire, fake_inference, serve, token_ids, until

CHAT, COMPLETIONS, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/messages"
USER = [{"role": "user", "content": "x"}]
ARGUMENTS = json.dumps({"city": 'x </tool_call> "q" 日本'}, ensure_ascii=False)
CALL = f'<tool_call>\n{{"name": "look", "arguments": {ARGUMENTS}}}\n</tool_call>'
SECOND = '<tool_call>\n{"name": "wait", "arguments": {}}\n</tool_call>'
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}} for name in ("look", "wait")
]
ANTHROPIC_TOOLS = [{"name": name, "input_schema": {"type": "object"}} for name in ("look", "wait")]


async def ask(wire: Wire, path: str, members: dict[str, Any]) -> Answer:
    return await (await connect(wire)).ask("POST", path, members)


# Calls of tools in chat completions.


async def test_calls_stand_apart_from_the_text(tmp_path: Path) -> None:
    async with serve(tmp_path, fake_inference(f"I look.\n{CALL}\n{SECOND}")) as wire:
        body = (await ask(wire, CHAT, {"messages": USER, "tools": TOOLS})).json
    (choice,) = body["choices"]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] == "I look."
    calls = choice["message"]["tool_calls"]
    assert [(call["type"], call["function"]["name"]) for call in calls] == [("function", "look"), ("function", "wait")]
    assert json.loads(calls[0]["function"]["arguments"]) == json.loads(ARGUMENTS)
    assert len({call["id"] for call in calls}) == 2


async def test_content_is_null_where_there_are_calls_alone(tmp_path: Path) -> None:
    async with serve(tmp_path, fake_inference(SECOND)) as wire:
        with_tools = (await ask(wire, CHAT, {"messages": USER, "tools": TOOLS})).json["choices"][0]
        without = (await ask(wire, CHAT, {"messages": USER})).json["choices"][0]
        none = (await ask(wire, CHAT, {"messages": USER, "tools": TOOLS, "tool_choice": "none"})).json["choices"][0]
    assert (with_tools["message"]["content"], with_tools["finish_reason"]) == (None, "tool_calls")
    for choice in (without, none):
        assert (choice["message"]["content"], choice["finish_reason"]) == (SECOND, "stop")
        assert "tool_calls" not in choice["message"]


def joined_calls(events: list[Any], index: int) -> list[dict[str, Any]]:
    """As OpenAI's clients join them: by their index, names from the first piece, arguments from all."""
    calls: list[dict[str, Any]] = []
    for event in events:
        for choice in event["choices"]:
            for piece in choice["delta"].get("tool_calls", ()) if choice["index"] == index else ():
                if piece["index"] == len(calls):
                    calls.append({"id": piece["id"], "type": piece["type"], **piece["function"]})
                else:
                    calls[piece["index"]]["arguments"] += piece["function"]["arguments"]
    return calls


async def test_streamed_calls_join_to_those_in_one_piece(tmp_path: Path) -> None:
    body = {"messages": USER, "tools": TOOLS, "n": 2}
    async with serve(tmp_path, fake_inference(f"I look. {CALL}{SECOND}")) as wire:
        whole = (await ask(wire, CHAT, body)).json["choices"]
        events = (await ask(wire, CHAT, {**body, "stream": True})).events
    for choice in whole:
        calls = joined_calls(events, choice["index"])
        expected = [call["function"] | {"type": "function"} for call in choice["message"]["tool_calls"]]
        assert [{name: call[name] for name in ("type", "name", "arguments")} for call in calls] == expected
    finishes = [event["choices"][0]["finish_reason"] for event in events]
    assert [finish for finish in finishes if finish] == ["tool_calls", "tool_calls"]
    assert not any("<tool_call>" in json.dumps(event) for event in events)


async def test_a_call_of_any_length_comes_in_chunks_of_bounded_size(tmp_path: Path) -> None:
    arguments = json.dumps({"text": "y" * 5000})
    said = f'<tool_call>{{"name": "look", "arguments": {arguments}}}</tool_call>'
    body = {"messages": USER, "tools": TOOLS, "stream": True, "max_tokens": 9000}
    async with serve(tmp_path, fake_inference(said, capacity=16384), WireLimits(frame_bytes=4096)) as wire:
        answer = await ask(wire, CHAT, body)
        (tool,) = joined_calls(answer.events, 0)
    async with serve(tmp_path, fake_inference(said, capacity=16384), WireLimits(frame_bytes=4096)) as wire:
        anthropic = {"messages": USER, "tools": ANTHROPIC_TOOLS, "stream": True, "max_tokens": 9000}
        blocks = (await ask(wire, MESSAGES, anthropic)).body
    assert json.loads(tool["arguments"]) == json.loads(arguments)
    for data in (answer.body, blocks):
        assert max(len(event) for event in data.split(b"\n\n")) <= 4096


async def test_a_call_that_the_budget_cuts_is_no_call(tmp_path: Path) -> None:
    async with serve(tmp_path, fake_inference(CALL)) as wire:
        body = {"messages": USER, "tools": TOOLS, "max_tokens": 40}
        (choice,) = (await ask(wire, CHAT, body)).json["choices"]
        (cut,) = (await ask(wire, MESSAGES, {**body, "tools": ANTHROPIC_TOOLS})).json["content"]
    assert choice["finish_reason"] == "length"
    assert "tool_calls" not in choice["message"]
    assert cut["type"] == "text"


async def test_a_conversation_goes_on_behind_its_calls(tmp_path: Path) -> None:
    async with serve(tmp_path, fake_inference(SECOND)) as wire:
        body = {"messages": USER, "tools": TOOLS, "conversation_id": "c"}
        first = (await ask(wire, CHAT, body)).json["choices"][0]["message"]
        result = {"role": "tool", "content": "4", "tool_call_id": first["tool_calls"][0]["id"]}
        again = await ask(wire, CHAT, {**body, "messages": [*USER, first, result]})
        assert again.status == 200
        frames = (await (await connect(wire)).ask("POST", "/eqp/session.get", {"session": "@c"})).lines
    assert frames[0]["turns"] == 2


async def test_an_answer_of_great_length_is_cut(tmp_path: Path) -> None:
    body = {"messages": USER, "max_tokens": 3000, "prompt": "x", "logprobs": True, "top_logprobs": 5}
    limits = WireLimits(http_reply_bytes=20_000)
    async with serve(tmp_path, fake_inference("z" * 3000), limits) as wire:
        chat = {name: value for name, value in body.items() if name != "prompt"}
        (choice,) = (await ask(wire, CHAT, chat)).json["choices"]
        older = {"prompt": "x", "max_tokens": 3000, "logprobs": 5}
        (text,) = (await ask(wire, COMPLETIONS, older)).json["choices"]
    for each, said in ((choice, choice["message"]["content"]), (text, text["text"])):
        assert each["finish_reason"] == "length"
        assert 0 < len(said) < 3000


@pytest.mark.parametrize(
    ("path", "members"),
    [(CHAT, {"messages": USER, "logprobs": True, "top_logprobs": 5}), (COMPLETIONS, {"prompt": "x", "logprobs": 5})],
)
async def test_what_piled_up_for_a_slow_reader_comes_in_events_of_a_frames_size(
    tmp_path: Path, path: str, members: dict[str, Any]
) -> None:
    body = {**members, "max_tokens": 3000, "stream": True}
    async with serve(tmp_path, fake_inference("z" * 3000), WireLimits(frame_bytes=4096)) as wire:
        client = await connect(wire)
        client.send("POST", path, body)
        await until(lambda: wire.inference.stats().totals["tokens"] == 3000)
        answer = await client.read()
    choices = [event["choices"][0] for event in answer.events]
    tokens = [
        choice["logprobs"].get("content") or choice["logprobs"]["tokens"] for choice in choices if choice["logprobs"]
    ]
    texts = [choice["delta"].get("content", "") if path == CHAT else choice["text"] for choice in choices]
    assert sum(map(len, tokens)) == 3000
    assert "".join(texts) == "z" * 3000
    assert max(len(event) for event in answer.body.split(b"\n\n")) <= 4096


# Fields of chat completions.


@pytest.mark.parametrize(
    ("members", "think"),
    [
        ({"reasoning_effort": "none"}, False),
        ({"reasoning_effort": "minimal"}, False),
        ({"reasoning_effort": "high"}, True),
        ({"reasoning_effort": "high", "enable_thinking": False}, False),
        ({"reasoning_effort": None}, None),
    ],
)
def test_effort_says_whether_to_think_unless_it_is_said_otherwise(members: dict[str, Any], think: bool | None) -> None:
    assert read_chat({"messages": USER, **members}).given.think is think


def test_what_an_answer_must_look_like_is_passed_on() -> None:
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": {}}}
    choice = {"type": "function", "function": {"name": "look"}}
    members = {"response_format": form, "tools": TOOLS, "tool_choice": choice, "parallel_tool_calls": False}
    given = read_chat({"messages": USER, **members, "thinking_budget": 7}).given
    assert (given.response_format, given.tools, given.tool_choice) == (form, tuple(TOOLS), choice)
    assert (given.parallel_tool_calls, given.think_budget) == (False, 7)


def test_tool_choice_without_tools_means_nothing_unless_it_asks_for_one() -> None:
    for choice in ("auto", "none"):
        given = read_chat({"messages": USER, "tool_choice": choice, "parallel_tool_calls": True}).given
        assert (given.tool_choice, given.parallel_tool_calls) == (None, None)
    assert read_chat({"messages": USER, "tool_choice": "required"}).given.tool_choice == "required"


@pytest.mark.parametrize(
    "members",
    [
        {"functions": TOOLS},
        {"function_call": {"name": "look"}},
        {"modalities": ["audio"]},
        {"audio": {"voice": "alloy"}},
        {"web_search_options": {}},
        {"verbosity": "low"},
        {"moderation": {"model": "m"}},
    ],
)
def test_what_would_change_the_answer_and_is_not_supported_is_refused_by_name(members: dict[str, Any]) -> None:
    with pytest.raises(BadRequest) as caught:
        read_chat({"messages": USER, **members})
    assert caught.value.field == next(iter(members))


async def test_an_engines_field_is_named_as_the_client_named_it(wire: Wire) -> None:
    answer = await ask(wire, CHAT, {"messages": USER, "thinking_budget": -1})
    assert (answer.status, answer.json["error"]["param"]) == (400, "thinking_budget")
    assert answer.json["error"]["message"].startswith("thinking_budget ")


# Completions.


async def test_completion_of_a_text_and_of_its_tokens(wire: Wire) -> None:
    body = (await ask(wire, COMPLETIONS, {"model": "any", "prompt": "Once", "max_tokens": 20})).json
    assert (body["object"], body["model"]) == ("text_completion", "scripted")
    assert body["choices"] == [{"text": "Hello!", "index": 0, "logprobs": None, "finish_reason": "stop"}]
    ids = list(token_ids("Once")[:-1])
    of_ids = (await ask(wire, COMPLETIONS, {"prompt": ids, "max_tokens": 20})).json
    assert (of_ids["choices"], of_ids["usage"]["prompt_tokens"]) == (body["choices"], len(ids))


@pytest.mark.parametrize("is_stream", [True, False])
async def test_several_prompts_are_answered_side_by_side(tmp_path: Path, is_stream: bool) -> None:
    """More than are with the engine at once; `echo` tells which answer belongs to which prompt."""
    prompts = [f"prompt {number} " for number in range(20)]
    body = {"prompt": prompts, "n": 2, "echo": True, "max_tokens": 20, "stream": is_stream}
    async with serve(tmp_path) as wire:
        answer = await ask(wire, COMPLETIONS, body | ({"stream_options": {"include_usage": True}} if is_stream else {}))
        totals = wire.inference.stats().totals
    events = answer.events if is_stream else [answer.json]
    texts = ["" for _ in range(40)]
    for choice in (choice for event in events for choice in event["choices"]):
        texts[choice["index"]] += choice["text"]
    assert texts == [f"{prompt}Hello!" for prompt in prompts for _ in range(2)]
    finishes = [choice["finish_reason"] for event in events for choice in event["choices"] if choice["finish_reason"]]
    assert finishes == ["stop"] * 40
    usage = events[-1]["usage"]
    assert usage["prompt_tokens"] == sum(len(token_ids(prompt)) - 1 for prompt in prompts)
    assert usage["completion_tokens"] == totals["tokens"]
    assert {event["id"] for event in events} == {events[0]["id"]}


async def test_prompts_of_ids_and_the_default_budget(tmp_path: Path) -> None:
    async with serve(tmp_path, fake_inference("0123456789" * 9)) as wire:
        ids = [list(token_ids(text)[:-1]) for text in ("one", "two")]
        choices = (await ask(wire, COMPLETIONS, {"prompt": ids})).json["choices"]
    assert [(choice["index"], choice["finish_reason"]) for choice in choices] == [(0, "length"), (1, "length")]
    assert all(len(choice["text"]) == 16 for choice in choices)


async def test_older_logprobs_stand_side_by_side(tmp_path: Path) -> None:
    async with serve(tmp_path, fake_inference("Hé🫠!")) as wire:
        body = {"prompt": "x", "logprobs": 2, "max_tokens": 20}
        (choice,) = (await ask(wire, COMPLETIONS, body)).json["choices"]
        (chosen,) = (await ask(wire, COMPLETIONS, {**body, "logprobs": 0})).json["choices"]
        events = (await ask(wire, COMPLETIONS, {**body, "stream": True})).events
    lists = choice["logprobs"]
    assert choice["text"] == "Hé🫠!"
    assert lists["tokens"][0] == "H"
    assert lists["tokens"][1] == "bytes:\\xc3"
    assert len({len(values) for values in lists.values()}) == 1
    for token, value, top in zip(lists["tokens"], lists["token_logprobs"], lists["top_logprobs"], strict=True):
        assert top[token] == value
        assert len(top) >= 2
    offsets = lists["text_offset"]
    assert [choice["text"][offset : offset + 1] for offset in (offsets[0], offsets[1], offsets[-1])] == ["H", "é", "!"]
    assert offsets == sorted(offsets)
    assert [len(top) for top in chosen["logprobs"]["top_logprobs"]] == [1] * len(lists["tokens"])
    streamed = [event["choices"][0]["logprobs"] for event in events if event["choices"][0]["logprobs"]]
    for name, values in lists.items():
        assert [value for each in streamed for value in each[name]] == values


@pytest.mark.parametrize(
    ("members", "param"),
    [
        ({}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": ["x", 1]}, "prompt"),
        ({"prompt": [1.5]}, "prompt"),
        ({"prompt": [[1], ["x"]]}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": [1 << 40]}, "prompt"),
        ({"prompt": ["x"] * 65}, "prompt"),
        ({"prompt": "x", "suffix": "y"}, "suffix"),
        ({"prompt": "x", "best_of": 2}, "best_of"),
        ({"prompt": "x", "echo": True, "logprobs": 1}, "logprobs"),
        ({"prompt": "x", "logprobs": 21}, "logprobs"),
        ({"prompt": "x", "logprobs": True}, "logprobs"),
        ({"prompt": "x", "n": 0}, "n"),
        ({"prompt": "x", "n": 9}, "n"),
        ({"prompt": "x", "max_tokens": 0}, "max_tokens"),
        ({"prompt": "x", "messages": USER}, "messages"),
        ({"prompt": "x", "stream_options": {"include_usage": True}}, "stream_options"),
    ],
)
async def test_a_completion_that_will_not_do_is_refused_by_name(
    wire: Wire, members: dict[str, Any], param: str
) -> None:
    answer = await ask(wire, COMPLETIONS, members)
    assert answer.status == 400
    assert answer.json["error"]["param"] == param
    assert wire.inference.stats().totals["requests"] == 0


@pytest.mark.parametrize("is_stream", [True, False])
async def test_one_prompt_that_fails_ends_the_others(tmp_path: Path, gate: Gate, is_stream: bool) -> None:
    """The last prompt does not fit, which shows only when its turn comes."""
    gate.opened.set()
    body = {"prompt": ["x"] * 9 + ["y" * 5000], "max_tokens": 10, "stream": is_stream}
    async with serve(tmp_path) as wire:
        answer = await ask(wire, COMPLETIONS, body)
        error = answer.events[-1]["error"] if is_stream else answer.json["error"]
        assert (answer.status, error["code"]) == (200 if is_stream else 413, "too_long")
        await until(lambda: wire.inference.stats().running == 0)
        assert (await ask(wire, COMPLETIONS, {"prompt": "x"})).status == 200


# Embeddings.


async def test_embeddings_of_texts_and_tokens_as_numbers_and_as_bytes(tmp_path: Path) -> None:
    async with serve(tmp_path, fake_inference()) as wire:
        path = "/v1/embeddings"
        body = (await ask(wire, path, {"model": "any", "input": ["one", "two"]})).json
        single = (await ask(wire, path, {"input": "two", "dimensions": 8, "user": "u"})).json
        packed = (await ask(wire, path, {"input": "two", "encoding_format": "base64"})).json
        of_ids = (await ask(wire, path, {"input": [list(token_ids("two")[:-1])]})).json
    assert (body["object"], body["model"]) == ("list", "scripted")
    assert [(each["object"], each["index"]) for each in body["data"]] == [("embedding", 0), ("embedding", 1)]
    vector = body["data"][1]["embedding"]
    assert sum(value * value for value in vector) == pytest.approx(1, abs=1e-5)
    assert single["data"][0]["embedding"] == pytest.approx(vector, abs=1e-6)
    data = base64.b64decode(packed["data"][0]["embedding"])
    assert list(struct.unpack("<8f", data)) == pytest.approx(vector, abs=1e-6)
    assert len(of_ids["data"]) == 1
    assert body["usage"]["prompt_tokens"] == body["usage"]["total_tokens"] > 0


async def test_more_texts_than_the_engine_takes_at_once_go_in_groups(tmp_path: Path) -> None:
    texts = [f"text {number}" for number in range(7)]
    async with serve(tmp_path, fake_inference(limits=EngineLimits(texts=3))) as wire:
        together = (await ask(wire, "/v1/embeddings", {"input": texts, "deadline_ms": 20_000})).json
        alone = [(await ask(wire, "/v1/embeddings", {"input": text})).json for text in texts]
        wrong = (await ask(wire, "/v1/embeddings", {"input": [*texts, "", "x"]})).json["error"]
    assert [each["index"] for each in together["data"]] == list(range(7))
    for each, single in zip(together["data"], alone, strict=True):
        assert each["embedding"] == pytest.approx(single["data"][0]["embedding"], abs=1e-6)
    assert together["usage"]["prompt_tokens"] == sum(single["usage"]["prompt_tokens"] for single in alone)
    assert (wrong["param"], wrong["message"]) == ("input[7]", "input[7] is empty")


async def test_vectors_that_make_too_long_a_reply_are_refused_before_they_are_computed(tmp_path: Path) -> None:
    limits = WireLimits(http_reply_bytes=1000)  # 8 numbers take 152 bytes, or 106
    async with serve(tmp_path, fake_inference(), limits=limits) as wire:
        for encoding, most in (("float", 6), ("base64", 9)):
            body: dict[str, Any] = {"input": ["a"] * most, "encoding_format": encoding}
            fitting = await ask(wire, "/v1/embeddings", body)
            assert (fitting.status, len(fitting.json["data"])) == (200, most)
            assert len(fitting.body) <= 1000 + 200
            num_requests = wire.inference.stats().totals["requests"]
            refused = await ask(wire, "/v1/embeddings", {**body, "input": ["a"] * (most + 1)})
            assert (refused.status, refused.json["error"]["param"]) == (400, "input")
            assert f"at most {most} at once" in refused.json["error"]["message"]
            assert wire.inference.stats().totals["requests"] == num_requests


@pytest.mark.parametrize(
    ("members", "param"),
    [
        ({}, "input"),
        ({"input": ["a"] * 2049}, "input"),
        ({"input": []}, "input"),
        ({"input": ""}, "input[0]"),
        ({"input": ["a", ""]}, "input[1]"),
        ({"input": [[1], []]}, "input[1]"),
        ({"input": [-1]}, "input[0]"),
        ({"input": [1, "a"]}, "input"),
        ({"input": "a", "dimensions": 4}, "dimensions"),
        ({"input": "a", "encoding_format": "int8"}, "encoding_format"),
        ({"input": "a", "pooling": "max"}, "pooling"),
        ({"input": "a", "truncate": True}, "truncate"),
    ],
)
async def test_embeddings_that_will_not_do_are_refused_by_name(
    tmp_path: Path, members: dict[str, Any], param: str
) -> None:
    async with serve(tmp_path, fake_inference()) as wire:
        answer = await ask(wire, "/v1/embeddings", members)
    assert (answer.status, answer.json["error"]["param"]) == (400, param)


async def test_a_model_that_makes_no_embeddings_says_so(tmp_path: Path) -> None:
    async with serve(tmp_path, fake_inference(hidden_size=0)) as wire:
        answer = await ask(wire, "/v1/embeddings", {"input": "a"})
    assert (answer.status, answer.json["error"]["param"]) == (400, "model")


# Tokens and models.


async def test_tokens_of_a_text_and_of_messages_and_back(wire: Wire) -> None:
    body = (await ask(wire, "/v1/tokenize", {"model": "any", "prompt": "Hello!"})).json
    assert body == {"tokens": list(token_ids("Hello!")[:-1]), "count": len(token_ids("Hello!")) - 1} | {
        "max_model_len": wire.inference.context
    }
    assert (await ask(wire, "/v1/detokenize", {"tokens": body["tokens"]})).json == {"prompt": "Hello!"}
    markers = [
        (await ask(wire, "/v1/tokenize", {"prompt": "<|im_end|>", "special": special})).json["count"]
        for special in (True, False)
    ]
    assert markers[0] == 1 < markers[1]
    prompt = (await ask(wire, "/v1/tokenize", {"messages": USER})).json
    chat = (await ask(wire, CHAT, {"messages": USER})).json
    assert prompt["count"] == chat["usage"]["prompt_tokens"]
    assert wire.inference.stats().totals["requests"] == 1


async def test_bytes_that_are_no_text_come_in_base64(wire: Wire) -> None:
    ids = (await ask(wire, "/v1/tokenize", {"prompt": "é"})).json["tokens"]
    assert (await ask(wire, "/v1/detokenize", {"tokens": ids[:1]})).json == {"b64": "ww=="}


@pytest.mark.parametrize(
    ("path", "members", "param"),
    [
        ("/v1/tokenize", {}, "prompt"),
        ("/v1/tokenize", {"prompt": "x", "messages": USER}, "prompt"),
        ("/v1/tokenize", {"prompt": 1}, "prompt"),
        ("/v1/tokenize", {"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
        ("/v1/tokenize", {"messages": USER, "chat_template_kwargs": {"tools": "x"}}, "chat_template_kwargs.tools"),
        ("/v1/detokenize", {}, "tokens"),
        ("/v1/detokenize", {"tokens": ["x"]}, "tokens[0]"),
        ("/v1/detokenize", {"tokens": [1 << 40]}, "tokens"),
    ],
)
async def test_tokens_that_will_not_do_are_refused_by_name(
    wire: Wire, path: str, members: dict[str, Any], param: str
) -> None:
    answer = await ask(wire, path, members)
    assert (answer.status, answer.json["error"]["param"]) == (400, param)


async def test_the_model_is_listed_and_found_by_its_name(wire: Wire) -> None:
    client = await connect(wire)
    listed = (await client.ask("GET", "/v1/models")).json
    assert listed["object"] == "list"
    assert (await client.ask("GET", "/v1/models/scripted")).json == listed["data"][0]
    assert listed["data"][0]["max_model_len"] == wire.inference.context
    missing = await client.ask("GET", "/v1/models/other/name")
    assert (missing.status, missing.json["error"]["code"]) == (404, "not_found")
    assert (await client.ask("GET", "/v1/models/")).status == 404


# Anthropic's messages.


def blocks_of(answer: Answer) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The blocks that the events of a stream make, and its message as they leave it; the order is checked."""
    events = [event.split(b"\n") for event in answer.body.removesuffix(b"\n\n").split(b"\n\n")]
    assert all(len(lines) == 2 for lines in events)
    members = [json.loads(lines[1].removeprefix(b"data: ")) for lines in events]
    names = [lines[0].removeprefix(b"event: ").decode() for lines in events]
    assert names == [each["type"] for each in members]
    assert names[:2] == ["message_start", "ping"]
    assert names[-2:] == ["message_delta", "message_stop"]
    blocks: list[dict[str, Any]] = []
    is_open = False
    for each in members[2:-2]:
        if each["type"] == "content_block_start":
            assert (is_open, each["index"]) == (False, len(blocks))
            blocks.append({**each["content_block"], "input_json": ""})
            is_open = True
            continue
        assert (is_open, each["index"]) == (True, len(blocks) - 1)
        if each["type"] == "content_block_stop":
            is_open = False
            continue
        delta = dict(each["delta"])
        kind = delta.pop("type")
        ((name, text),) = delta.items()
        assert kind == {"text": "text_delta", "thinking": "thinking_delta", "partial_json": "input_json_delta"}[name]
        blocks[-1]["input_json" if name == "partial_json" else name] += text
    assert not is_open
    for block in blocks:
        text = block.pop("input_json")
        if block["type"] == "tool_use":
            block["input"] = json.loads(text)
    message = members[0]["message"] | members[-2]["delta"] | {"usage": members[-2]["usage"]}
    return blocks, message


@pytest.mark.parametrize(
    ("said", "kinds", "stop_reason"),
    [
        ("Hello!", ["text"], "end_turn"),
        ("<think>\nhm\n</think>\n\nfour", ["thinking", "text"], "end_turn"),
        (f"I look. {CALL}{SECOND}", ["text", "tool_use", "tool_use"], "tool_use"),
        ("", [], "end_turn"),
    ],
)
async def test_a_message_says_the_same_streamed_and_in_one_piece(
    tmp_path: Path, said: str, kinds: list[str], stop_reason: str
) -> None:
    body = {"model": "any", "max_tokens": 500, "messages": USER, "tools": ANTHROPIC_TOOLS}
    async with serve(tmp_path, fake_inference(said)) as wire:
        whole = (await ask(wire, MESSAGES, body)).json
        blocks, message = blocks_of(await ask(wire, MESSAGES, {**body, "stream": True}))
    assert [block["type"] for block in whole["content"]] == kinds
    assert (whole["type"], whole["role"], whole["model"]) == ("message", "assistant", "scripted")
    assert (whole["stop_reason"], whole["stop_sequence"]) == (stop_reason, None)
    for block in (*blocks, *whole["content"]):
        block.pop("id", None)
    assert blocks == whole["content"]
    assert message["stop_reason"] == stop_reason
    for name in ("output_tokens",):
        assert message["usage"][name] == whole["usage"][name] > 0
    if "tool_use" in kinds:
        assert whole["content"][1]["input"] == json.loads(ARGUMENTS)


async def test_thoughts_can_be_left_out_of_a_message(tmp_path: Path) -> None:
    thinking = {"type": "adaptive", "display": "omitted"}
    body = {"max_tokens": 50, "messages": USER, "thinking": thinking}
    async with serve(tmp_path, fake_inference("<think>hm</think>four")) as wire:
        whole = (await ask(wire, MESSAGES, body)).json
        blocks, _ = blocks_of(await ask(wire, MESSAGES, {**body, "stream": True}))
    assert blocks == whole["content"] == [{"type": "text", "text": "four"}]


async def test_the_budget_and_the_cache_are_told_in_anthropics_words(tmp_path: Path) -> None:
    async with serve(tmp_path, fake_inference("0123456789" * 9)) as wire:
        body = {"max_tokens": 5, "messages": [{"role": "user", "content": "x" * 300}]}
        first = (await ask(wire, MESSAGES, body)).json
        second = (await ask(wire, MESSAGES, body)).json
        counted = (await ask(wire, f"{MESSAGES}/count_tokens", {"messages": body["messages"]})).json
    assert (first["stop_reason"], first["usage"]["output_tokens"]) == ("max_tokens", 5)
    assert second["usage"]["cache_read_input_tokens"] > 0
    for usage in (first["usage"], second["usage"]):
        assert usage["input_tokens"] + usage["cache_read_input_tokens"] == counted["input_tokens"]


@pytest.mark.parametrize("is_stream", [True, False])
async def test_the_stop_sequence_that_was_said_is_told(tmp_path: Path, is_stream: bool) -> None:
    body = {"max_tokens": 50, "messages": USER, "stop_sequences": ["never", "wor"], "stream": is_stream}
    async with serve(tmp_path, fake_inference("Hello world!")) as wire:
        answer = await ask(wire, MESSAGES, body)
    message = blocks_of(answer)[1] if is_stream else answer.json
    assert (message["stop_reason"], message["stop_sequence"]) == ("stop_sequence", "wor")


def test_blocks_become_the_templates_messages() -> None:
    wanted = read_messages({
        "max_tokens": 5,
        "system": [
            {"type": "text", "text": "Be ", "cache_control": {"type": "ephemeral"}}, {"type": "text", "text": "brief."},
        ],
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "hm", "signature": ""},
                    {"type": "text", "text": "I look."},
                    {"type": "tool_use", "id": "1", "name": "look", "input": {"city": "Kyiv"}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "1", "content": [{"type": "text", "text": "4"}]},
                    {"type": "text", "text": "so?"},
                ],
            },
        ],
        "tools": ANTHROPIC_TOOLS,
        "tool_choice": {"type": "any", "disable_parallel_tool_use": True},
        "thinking": {"type": "enabled", "budget_tokens": 2},
        "stop_sequences": ["end"],
        "metadata": {"user_id": "u"},
    })  # fmt: skip
    call = {"id": "1", "type": "function", "function": {"name": "look", "arguments": {"city": "Kyiv"}}}
    given = wanted.given
    assert given.messages == (
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "ab"},
        {"role": "assistant", "content": "I look.", "reasoning_content": "hm", "tool_calls": [call]},
        {"role": "tool", "content": "4", "tool_call_id": "1"},
        {"role": "user", "content": "so?"},
    )
    assert wanted.origins == (None, 0, 1, 2, 2)
    assert given.tools == tuple(TOOLS)
    assert (given.tool_choice, given.parallel_tool_calls) == ("required", False)
    assert (given.think, given.think_budget, given.stop, given.max_tokens) == (True, 2, ("end",), 5)


def test_thinking_is_off_unless_it_is_asked_for() -> None:
    assert read_messages({"max_tokens": 5, "messages": USER}).given.think is False


@pytest.mark.parametrize(
    ("members", "named"),
    [
        ({"messages": USER}, "max_tokens"),
        ({"max_tokens": 5}, "messages"),
        ({"max_tokens": 5, "messages": []}, "messages"),
        ({"max_tokens": 0, "messages": USER}, "max_tokens"),
        ({"max_tokens": 5, "messages": USER, "temperature": 101}, "temperature"),
        ({"max_tokens": 5, "messages": USER, "stop_sequences": [""]}, "stop_sequences"),
        ({"max_tokens": 5, "messages": USER, "temprature": 1}, "temprature"),
        ({"max_tokens": 5, "messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
        ({"max_tokens": 5, "messages": [*USER, {"role": "assistant", "content": "x"}]}, "messages[1]"),
        ({"max_tokens": 5, "messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages[0].content[0]"),
        ({"max_tokens": 5, "messages": USER, "system": [{"type": "image"}]}, "system[0]"),
        ({"max_tokens": 5, "messages": USER, "tools": [{"type": "web_search_1", "name": "w"}]}, "tools[0].type"),
        ({"max_tokens": 5, "messages": USER, "tools": [{"name": "w"}]}, "tools[0].input_schema"),
        ({"max_tokens": 5, "messages": USER, "tool_choice": {"type": "some"}}, "tool_choice.type"),
        ({"max_tokens": 5, "messages": USER, "tool_choice": {"type": "tool"}}, "tool_choice.name"),
        ({"max_tokens": 5, "messages": USER, "thinking": {"type": "enabled"}}, "thinking.budget_tokens"),
        ({"max_tokens": 5, "messages": USER, "thinking": {"type": "deep"}}, "thinking.type"),
        (
            {"max_tokens": 5, "messages": USER, "thinking": {"type": "enabled", "budget_tokens": -1}},
            "thinking.budget_tokens",
        ),
        ({"max_tokens": 5, "messages": USER, "mcp_servers": [{}]}, "mcp_servers"),
        ({"max_tokens": 5, "messages": USER, "output_config": {"format": {"type": "xml"}}}, "output_config.format"),
    ],
)
async def test_a_message_that_will_not_do_is_refused_in_anthropics_form(
    wire: Wire, members: dict[str, Any], named: str
) -> None:
    answer = await ask(wire, MESSAGES, members)
    assert answer.status == 400
    assert (answer.json["type"], answer.json["error"]["type"]) == ("error", "invalid_request_error")
    assert named in answer.json["error"]["message"]
    assert wire.inference.stats().totals["requests"] == 0


async def test_anthropics_errors_have_their_types(tmp_path: Path) -> None:
    async with serve(tmp_path, fake_inference("x" * 2000, fail_at_step=5)) as wire:
        body = {"max_tokens": 1000, "messages": USER}
        too_long = await ask(wire, MESSAGES, {**body, "max_tokens": 1_000_000})
        assert (too_long.status, too_long.json["error"]["type"]) == (413, "request_too_large")
        broken = await ask(wire, MESSAGES, {**body, "stream": True})
        assert broken.status == 200
        last = broken.body.removesuffix(b"\n\n").split(b"\n\n")[-1]
        assert last.startswith(b"event: error\n")
        assert json.loads(last.split(b"data: ")[1])["error"]["type"] == "api_error"
        method = await (await connect(wire)).ask("GET", MESSAGES)
        assert (method.status, method.headers["allow"], method.json["type"]) == (405, "POST", "error")


@pytest.mark.parametrize("path", [COMPLETIONS, MESSAGES])
@pytest.mark.parametrize("is_stream", [True, False])
async def test_hanging_up_cancels_whatever_the_format(tmp_path: Path, path: str, is_stream: bool) -> None:
    body: dict[str, Any] = {"max_tokens": 2000, "stream": is_stream}
    body |= {"prompt": ["x"] * 12} if path == COMPLETIONS else {"messages": USER}
    async with serve(tmp_path, fake_inference("x" * 2000, step_s=0.01), WireLimits(probe_s=0.03)) as wire:
        client = await connect(wire)
        client.send("POST", path, body)
        await until(lambda: wire.inference.stats().running > 0)
        client.writer.transport.abort()
        await until(lambda: wire.inference.stats().running + wire.inference.stats().queued == 0)
        assert wire.inference.stats().totals["requests"] <= 8
