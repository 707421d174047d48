"""HTTP on the same socket: routes, OpenAI's format, and what is refused."""

from __future__ import annotations

import asyncio
import json
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from edgeqwen.engine.settings import EngineLimits
from edgeqwen.errors import BadRequest
from edgeqwen.http.openai_request import read_chat
from edgeqwen.protocol.limits import WireLimits
from tests.http_client import connect
from tests.wire import GUARD_S, Gate, Wire, fake_inference, serve, until

CHAT = "/v1/chat/completions"
USER = [{"role": "user", "content": "x"}]
LONG = "x" * 2000
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]


# OpenAI's chat completions.


async def test_completion_in_one_piece(wire: Wire) -> None:
    answer = await (await connect(wire)).ask("POST", CHAT, {"model": "any", "messages": USER})
    body = answer.json
    assert answer.status == 200
    assert answer.headers["content-type"].startswith("application/json")
    assert (body["object"], body["model"]) == ("chat.completion", "scripted")
    assert re.fullmatch(r"chatcmpl-\w+", body["id"])
    choice = body["choices"][0]
    assert choice["message"] == {"role": "assistant", "content": "Hello!", "refusal": None}
    assert (choice["finish_reason"], choice["logprobs"]) == ("stop", None)
    usage = body["usage"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert usage["prompt_tokens_details"] == {"cached_tokens": 0}
    assert usage["completion_tokens_details"] == {"reasoning_tokens": 0}


@pytest.mark.parametrize("stream_options", [{"include_usage": True}, {"include_usage": False}, None])
@pytest.mark.parametrize(
    ("text", "max_tokens", "finish"), [("Hello!", None, "stop"), ("Hello!", 1, "length"), ("", None, "stop")]
)
async def test_streamed_completion_ends_well_formed(
    tmp_path: Path, stream_options: dict[str, bool] | None, text: str, max_tokens: int | None, finish: str
) -> None:
    body = {"messages": USER, "stream": True, "stream_options": stream_options, "max_tokens": max_tokens}
    async with serve(tmp_path, fake_inference(text)) as wire:
        answer = await (await connect(wire)).ask("POST", CHAT, body)
    events = answer.events
    wants_usage = stream_options == {"include_usage": True}
    assert answer.headers["content-type"].startswith("text/event-stream")
    if wants_usage:
        last = events.pop()
        assert last["choices"] == []
        assert last["usage"]["completion_tokens"] >= 1
        assert all(event["usage"] is None for event in events)
    assert all(("usage" in event) == wants_usage for event in events)
    reasons = [event["choices"][0]["finish_reason"] for event in events]
    assert reasons == [None] * (len(events) - 1) + [finish]
    assert events[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert events[-1]["choices"][0]["delta"] == {}
    said = "".join(event["choices"][0]["delta"].get("content", "") for event in events)
    assert said == (text if max_tokens is None else "Hello"[: len(said)])
    assert len({event["id"] for event in events}) == 1


async def test_thought_is_apart_and_can_be_left_out(tmp_path: Path) -> None:
    async with serve(tmp_path, fake_inference("<think>\nhm\n</think>\n\nfour")) as wire:
        client = await connect(wire)
        whole = (await client.ask("POST", CHAT, {"messages": USER})).json
        without = (await client.ask("POST", CHAT, {"messages": USER, "return_reasoning": False})).json
        streamed = (await client.ask("POST", CHAT, {"messages": USER, "stream": True})).events
        silent = (await client.ask("POST", CHAT, {"messages": USER, "stream": True, "return_reasoning": False})).events
    message = whole["choices"][0]["message"]
    assert (message["content"], message["reasoning_content"].strip()) == ("four", "hm")
    assert whole["usage"]["completion_tokens_details"]["reasoning_tokens"] > 0
    assert "reasoning_content" not in without["choices"][0]["message"]
    for counted in ("prompt_tokens", "completion_tokens", "completion_tokens_details"):
        assert without["usage"][counted] == whole["usage"][counted]
    deltas = [event["choices"][0]["delta"] for event in streamed]
    assert "".join(delta.get("content", "") for delta in deltas) == "four"
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == message["reasoning_content"]
    assert not any("reasoning_content" in event["choices"][0]["delta"] for event in silent)


async def test_logprobs_have_texts_and_bytes(wire: Wire) -> None:
    client = await connect(wire)
    body = {"messages": USER, "logprobs": True, "top_logprobs": 2}
    entries = (await client.ask("POST", CHAT, body)).json["choices"][0]["logprobs"]["content"]
    assert "".join(entry["token"] for entry in entries) == "Hello!"
    assert bytes(entries[0]["bytes"]) == entries[0]["token"].encode()
    assert all(len(entry["top_logprobs"]) == 2 for entry in entries)
    events = (await client.ask("POST", CHAT, {**body, "stream": True})).events
    streamed = [event["choices"][0]["logprobs"]["content"] for event in events if event["choices"][0]["logprobs"]]
    assert [entry["token"] for group in streamed for entry in group] == [entry["token"] for entry in entries]


async def test_several_choices(wire: Wire) -> None:
    client = await connect(wire)
    whole = (await client.ask("POST", CHAT, {"messages": USER, "n": 3})).json
    assert [choice["index"] for choice in whole["choices"]] == [0, 1, 2]
    events = (await client.ask("POST", CHAT, {"messages": USER, "n": 3, "stream": True})).events
    for index in range(3):
        own = [event["choices"][0] for event in events if event["choices"][0]["index"] == index]
        assert "".join(choice["delta"].get("content", "") for choice in own) == "Hello!"
        assert [choice["finish_reason"] for choice in own][-1] == "stop"


async def test_deadline_is_told_as_length(tmp_path: Path) -> None:
    async with serve(tmp_path, fake_inference(LONG, step_s=0.01)) as wire:
        answer = await (await connect(wire)).ask("POST", CHAT, {"messages": USER, "deadline_ms": 60})
    assert answer.json["choices"][0]["finish_reason"] == "length"


async def test_a_failure_in_the_middle_of_a_stream_is_told(tmp_path: Path) -> None:
    async with serve(tmp_path, fake_inference(LONG, fail_at_step=5)) as wire:
        client = await connect(wire)
        events = (await client.ask("POST", CHAT, {"messages": USER, "stream": True})).events
        assert events[-1]["error"]["type"] == "server_error"
        assert (await client.ask("GET", "/health")).status == 200


@pytest.mark.parametrize(
    ("members", "param"),
    [
        ({}, "messages"),
        ({"messages": "x"}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": USER, "temprature": 1}, "temprature"),
        ({"messages": USER, "think": True}, "think"),
        ({"messages": USER, "session": "@x"}, "session"),
        ({"messages": USER, "max_completion_tokens": 5, "max_tokens": "5"}, "max_tokens"),
        ({"messages": USER, "tools": [{"type": "function"}]}, "tools[0].function"),
        ({"messages": USER, "temperature": "hot"}, "temperature"),
        ({"messages": USER, "temperature": 101}, "temperature"),
        ({"messages": USER, "top_k": -1}, "top_k"),
        ({"messages": USER, "n": 9}, "n"),
        ({"messages": USER, "stream_options": {"include_usage": True}}, "stream_options"),
        ({"messages": USER, "response_format": {"type": "table"}}, "response_format.type"),
        ({"messages": USER, "tools": TOOLS, "tool_choice": "sometimes"}, "tool_choice"),
        ({"messages": USER, "tool_choice": "required"}, "tool_choice"),
        ({"messages": USER, "reasoning_effort": "some"}, "reasoning_effort"),
        ({"messages": USER, "conversation_id": ""}, "conversation_id"),
        ({"messages": USER, "chat_template_kwargs": {"messages": "x"}}, "chat_template_kwargs.messages"),
        ({"messages": USER, "chat_template_kwargs": {"a": [1]}}, "chat_template_kwargs.a"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            "messages[0].content[0].type",
        ),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
        ({"messages": [*USER, {"role": "robot", "content": "x"}]}, "messages[1].role"),
        ({"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
    ],
)
async def test_a_field_at_fault_is_named_in_openais_error(wire: Wire, members: dict[str, Any], param: str) -> None:
    answer = await (await connect(wire)).ask("POST", CHAT, members)
    error = answer.json["error"]
    assert answer.status == 400
    assert set(error) == {"message", "type", "param", "code"}
    assert (error["type"], error["param"], error["code"]) == ("invalid_request_error", param, "bad_request")


def test_what_clients_really_send_is_read() -> None:
    chat = read_chat({
        "model": "gpt-4o",
        "messages": [
            {"role": "developer", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
            {
                "role": "assistant",
                "content": None,
                "refusal": None,
                "audio": None,
                "parsed": {"a": 1},
                "tool_calls": [{"id": "1"}],
            },
            {"role": "tool", "content": "4", "tool_call_id": "1"},
        ],
        "max_tokens": 5,
        "max_completion_tokens": 6,
        "stop": "end",
        "temperature": None,
        "user": "u",
        "metadata": {"a": "b"},
        "store": False,
        "response_format": {"type": "text"},
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "stream": True,
        "stream_options": {"include_usage": True, "include_obfuscation": False},
        "chat_template_kwargs": {"enable_thinking": False, "style": "short"},
    })
    given = chat.given
    assert given.messages == (
        {"role": "system", "content": "ab"},
        {"role": "assistant", "content": "", "tool_calls": [{"id": "1"}]},
        {"role": "tool", "content": "4", "tool_call_id": "1"},
    )
    assert (given.max_tokens, given.stop, given.temperature, given.think) == (6, ("end",), None, False)
    assert given.template_kwargs == {"style": "short"}
    assert (chat.is_stream, chat.with_usage_chunk, chat.with_reasoning) == (True, True, True)


def test_enable_thinking_itself_wins_over_the_template_arguments() -> None:
    members = {"messages": USER, "enable_thinking": True, "chat_template_kwargs": {"enable_thinking": False}}
    assert read_chat(members).given.think is True
    with pytest.raises(BadRequest):
        read_chat({"messages": USER, "chat_template_kwargs": {"enable_thinking": "no"}})


# The socket protocol's operations as HTTP.


async def test_operation_of_the_socket_protocol_in_one_piece_and_streamed(wire: Wire) -> None:
    client = await connect(wire)
    whole = await client.ask("POST", "/eqp/chat", {"prompt": "Hi", "id": 7})
    streamed = await client.ask("POST", "/eqp/chat", {"op": "chat", "prompt": "Hi", "stream": True})
    assert whole.headers["content-type"] == "application/x-ndjson"
    assert [(line["id"], line["text"]) for line in whole.lines] == [(7, "Hello!")]
    assert streamed.headers["transfer-encoding"] == "chunked"
    assert streamed.lines[0]["event"] == "start"
    assert "".join(line.get("delta", "") for line in streamed.lines) == "Hello!"
    assert [line["done"] for line in streamed.lines] == [False] * (len(streamed.lines) - 1) + [True]


@pytest.mark.parametrize(
    ("op", "members", "status", "code"),
    [
        ("health", None, 200, None),
        ("tokenize", {"text": "a"}, 200, None),
        ("chat", {"prompt": 1}, 400, "bad_request"),
        ("chat", {"prompt": "x", "temperature": -1}, 400, "bad_request"),
        ("chat", {"prompt": "x", "stream": True, "max_tokens": 10**6}, 413, "too_long"),
        ("chat", {"op": "health"}, 400, "bad_request"),
        ("nothing", {}, 404, "unknown_op"),
        ("cancel", {"rid": "r999"}, 404, "not_found"),
        ("cancel", {"target": 1}, 400, "bad_request"),
        ("health", {"v": 2}, 400, "unsupported_version"),
    ],
)
async def test_status_is_that_of_the_first_frame(
    wire: Wire, op: str, members: dict[str, Any] | None, status: int, code: str | None
) -> None:
    answer = await (await connect(wire)).ask("POST", f"/eqp/{op}", members)
    assert answer.status == status
    assert len(answer.lines) == 1
    assert answer.lines[0].get("error", {}).get("code") == code


async def test_probes_and_models(tmp_path: Path, gate: Gate) -> None:
    async with serve(tmp_path, fake_inference(gate=gate, load_s=0.1), is_loaded=False) as wire:
        client = await connect(wire)
        assert (await client.ask("GET", "/health")).json["state"] == "loading"
        loading = await client.ask("GET", "/ready")
        assert (loading.status, loading.headers["retry-after"]) == (503, "2")
        gate.opened.set()
        await until(lambda: wire.inference.state == "ready")
        assert (await client.ask("GET", "/ready")).json["model"] == "scripted"
        assert (await client.ask("GET", "/v1/models")).json["data"][0]["id"] == "scripted"
        assert (await client.ask("GET", "/stats")).json["conns"] == 1


# The connection.


async def test_requests_one_after_another_and_pipelined(wire: Wire) -> None:
    client = await connect(wire)
    for _ in range(2):
        assert (await client.ask("GET", "/health")).status == 200
    client.send("GET", "/health")
    client.send("POST", CHAT, {"messages": USER})
    client.send("GET", "/nowhere")
    assert [(await client.read()).status for _ in range(3)] == [200, 200, 404]


async def test_request_in_single_bytes(wire: Wire) -> None:
    client = await connect(wire)
    for byte in b'POST /eqp/chat HTTP/1.1\r\nHost: x\r\nContent-Length: 14\r\n\r\n{"prompt":"x"}':
        client.writer.write(bytes([byte]))
        await asyncio.sleep(0)
    assert (await client.read()).lines[0]["text"] == "Hello!"


async def test_chunked_body_and_expectation(wire: Wire) -> None:
    client = await connect(wire)
    client.send("POST", "/eqp/tokenize", headers={"Transfer-Encoding": "chunked", "Expect": "100-continue"})
    assert (await client.read_head())[0] == 100
    client.writer.write(b'8\r\n{"text":\r\n4\r\n"a"}\r\n0\r\n\r\n')
    answer = await client.read()
    assert (answer.status, answer.lines[0]["n"]) == (200, 1)


async def test_half_close_gets_its_answer(tmp_path: Path) -> None:
    async with serve(tmp_path, fake_inference(step_s=0.03)) as wire:
        client = await connect(wire)
        client.send("POST", CHAT, {"messages": USER})
        client.writer.write_eof()
        assert (await client.read()).json["choices"][0]["message"]["content"] == "Hello!"
        assert await client.is_closed()


@pytest.mark.parametrize("path", [CHAT, "/eqp/chat"])
@pytest.mark.parametrize("is_stream", [True, False])
@pytest.mark.parametrize("is_half_closed", [True, False])
async def test_hanging_up_cancels(tmp_path: Path, path: str, is_stream: bool, is_half_closed: bool) -> None:
    body = {"messages": USER, "stream": is_stream}
    async with serve(tmp_path, fake_inference(LONG, step_s=0.01), WireLimits(probe_s=0.03)) as wire:
        client = await connect(wire)
        client.send("POST", path, body)
        await until(lambda: wire.inference.stats().running == 1)
        if is_half_closed:
            client.writer.write_eof()
            await asyncio.sleep(0.05)
        client.writer.transport.abort()
        await until(lambda: wire.inference.stats().running == 0)
        assert wire.inference.stats().totals["tokens"] < len(LONG) / 2


async def test_a_client_that_reads_nothing_is_cut_off(tmp_path: Path) -> None:
    limits = WireLimits(high_water_bytes=1024, stall_s=0.2)
    async with serve(tmp_path, fake_inference(LONG, loop=True), limits) as wire:
        client = await wire.connect(limit=1024)
        body = json.dumps({"messages": USER, "stream": True, "n": 8}).encode()
        client.write(b"POST %s HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%s" % (CHAT.encode(), len(body), body))
        await until(lambda: wire.inference.stats().running > 0)
        await until(lambda: not wire.server.connections)
        await until(lambda: wire.inference.stats().running == 0)


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Origin": "http://evil.example"}, 403),
        ({"Origin": "http://x"}, 403),
        ({"Origin": "null"}, 403),
        ({"Sec-Fetch-Site": "cross-site"}, 403),
        ({"Sec-Fetch-Site": "same-site"}, 403),
        ({"Sec-Fetch-Site": "none"}, 200),
        ({"Sec-Fetch-Mode": "cors"}, 200),
        ({"Host": "localhost:8080", "Origin": "http://localhost:8080"}, 200),
        ({"Host": "localhost:8080", "Origin": "http://localhost:8081"}, 403),
    ],
)
async def test_requests_of_other_sites_are_refused(wire: Wire, headers: dict[str, str], status: int) -> None:
    answer = await (await connect(wire)).ask("POST", "/eqp/health", b"{}", headers=headers)
    assert answer.status == status
    assert wire.inference.stats().totals["requests"] == 0


async def test_methods_and_paths(wire: Wire) -> None:
    client = await connect(wire)
    answer = await client.ask("GET", CHAT)
    assert (answer.status, answer.headers["allow"]) == (405, "POST")
    assert (await client.ask("POST", "/health", b"{}")).status == 405
    answer = await client.ask("GET", "/eqp/health")
    assert (answer.status, answer.lines[0]["error"]["code"]) == (405, "bad_request")
    assert (await client.ask("GET", "/nothing")).status == 404
    assert (await client.ask("GET", "/v1/chat/completions/")).status == 404


async def test_head_is_answered_as_get_is_without_a_body(wire: Wire) -> None:
    client = await connect(wire)
    client.send("HEAD", "/health")
    status, headers = await client.read_head()
    whole = await client.ask("GET", "/health")
    assert (status, headers["content-length"]) == (200, str(len(whole.body)))
    assert (await client.ask("POST", "/health", b"{}")).headers["allow"] == "GET, HEAD"
    client.send("HEAD", CHAT)
    assert (await client.read_head())[0] == 405


async def test_responses_name_the_daemon_and_nothing_that_it_is_made_of(wire: Wire) -> None:
    for request in (b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n", b"GET /health HTTP/1.1\r\nno colon\r\n\r\n"):
        client = await connect(wire)
        client.writer.write(request)
        _, headers = await client.read_head()
        assert headers["server"].startswith("edgeqwen/")


@pytest.mark.parametrize("body", [b"", b"[]", b"{", b'{"a":NaN}', b"\xff", b"[" * 5000])
async def test_a_body_that_is_no_object_is_refused(wire: Wire, body: bytes) -> None:
    client = await connect(wire)
    answer = await client.ask("POST", CHAT, body)
    assert answer.status == 400
    assert answer.json["error"]["code"] in {"bad_json", "bad_utf8"}
    assert (await client.ask("GET", "/health")).status == 200


async def test_errors_of_an_operation_are_frames_whatever_is_wrong(tmp_path: Path) -> None:
    async with serve(tmp_path, None, WireLimits(line_bytes=4096)) as wire:
        client = await connect(wire)
        bad = await client.ask("POST", "/eqp/chat", b"[]")
        foreign = await client.ask("POST", "/eqp/chat", {"prompt": "x"}, headers={"Origin": "null"})
        large = await client.ask("POST", "/eqp/chat", {"prompt": "x" * 5000})
        assert [answer.status for answer in (bad, foreign, large)] == [400, 403, 413]
        frames = [answer.lines for answer in (bad, foreign, large)]
        assert [[(line["done"], line["error"]["code"]) for line in lines] for lines in frames] == [
            [(True, "bad_json")],
            [(True, "forbidden")],
            [(True, "too_large")],
        ]
        assert await client.is_closed()


async def test_bodies_too_large_too_slow_or_packed_are_refused(tmp_path: Path) -> None:
    async with serve(tmp_path, None, WireLimits(line_bytes=4096, body_s=0.1)) as wire:
        declared, chunked, slow, packed = [await connect(wire) for _ in range(4)]
        declared.send("POST", CHAT, headers={"Content-Length": "1000000"})
        assert (await declared.read()).status == 413
        chunked.send("POST", CHAT, headers={"Transfer-Encoding": "chunked"})
        chunked.writer.write(b"2000\r\n" + b"x" * 0x2000 + b"\r\n")
        assert (await chunked.read()).status == 413
        slow.send("POST", CHAT, headers={"Content-Length": "100"})
        assert (await slow.read()).status == 408
        answer = await packed.ask("POST", CHAT, b"{}", headers={"Content-Encoding": "gzip"})
        assert (answer.status, answer.json["error"]["param"]) == (400, "Content-Encoding")
        for client in (declared, chunked, slow):
            assert await client.is_closed()


async def test_headers_too_long_or_too_slow_are_refused(tmp_path: Path) -> None:
    async with serve(tmp_path, None, WireLimits(header_s=0.1)) as wire:
        long, slow = await connect(wire), await connect(wire)
        slow.writer.write(b"GET /health HTTP/1.1\r\nHost:")
        long.send("GET", "/health", headers={"X-Fill": "x" * 9000})
        refused = await long.read()
        assert (refused.status, refused.json["error"]["code"]) == (431, "too_large")
        assert await long.is_closed()
        refused = await slow.read()
        assert (refused.status, refused.json["error"]["code"]) == (408, "timeout")
        assert await slow.is_closed()


async def test_headers_too_long_on_a_kept_connection_are_refused(wire: Wire) -> None:
    client = await connect(wire)
    assert (await client.ask("GET", "/health")).status == 200
    answer = await client.ask("GET", "/health", headers={"X-Fill": "x" * 9000})
    assert answer.status == 431
    assert await client.is_closed()


@pytest.mark.parametrize(
    "data",
    [
        b'POST /nowhere HTTP/1.1\r\nHost: x\r\n\r\n{"op":"shutdown"}\n',
        b'GET /health HTTP/1.1\r\nHost: x\r\n\r\n\n{"op":"shutdown"}\n{"op":"shutdown"}\n',
        b'POST\r\n{"op":"shutdown"}\n\r\n\r\n{"op":"shutdown"}\n',
        b'POST / HTTP/1.1\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n{"op":"shutdown"}\n',
    ],
)
async def test_lines_behind_http_are_not_executed(wire: Wire, data: bytes) -> None:
    client = await connect(wire)
    client.writer.write(data)
    async with asyncio.timeout(GUARD_S):
        received = await client.reader.read()
    assert received.startswith(b"HTTP/1.")
    assert b'"draining":' not in received
    assert wire.shutdowns == []


async def test_logs_hold_nothing_of_a_malformed_request(wire: Wire, caplog: pytest.LogCaptureFixture) -> None:
    client = await connect(wire)
    client.writer.write(b"POST /canary-secret HTTP/1.1\r\nbroken canary-secret\r\n\r\n")
    assert (await client.read()).status == 400
    assert "canary" not in caplog.text


async def test_busy_has_a_time_to_retry(tmp_path: Path, gate: Gate) -> None:
    inference = fake_inference(gate=gate, limits=EngineLimits(per_owner=1))
    async with serve(tmp_path, inference) as wire:
        first, second = await connect(wire), await connect(wire)
        first.send("POST", CHAT, {"messages": USER})
        await until(lambda: inference.stats().running == 1)
        answer = await second.ask("POST", CHAT, {"messages": USER})
        assert (answer.status, answer.json["error"]["type"]) == (429, "rate_limit_error")
        assert int(answer.headers["retry-after"]) >= 1
        answer = await second.ask("POST", "/eqp/chat", {"prompt": "x"})
        assert (answer.status, answer.lines[0]["error"]["code"]) == (429, "quota")
        assert int(answer.headers["retry-after"]) >= 1
        gate.opened.set()
        assert (await first.read()).status == 200


async def test_an_idle_kept_connection_does_not_hold_up_the_end(wire: Wire) -> None:
    client = await connect(wire)
    assert (await client.ask("GET", "/health")).status == 200
    wire.server.stop_accepting()
    assert await client.is_closed()


async def test_http_library_is_imported_at_the_first_http_byte_only() -> None:
    script = "import edgeqwen.server, sys; print('aiohttp' in sys.modules)"
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", script, stdout=asyncio.subprocess.PIPE)
    output, _ = await process.communicate()
    assert output == b"False\n"


@pytest.mark.parametrize("count", [2, 50])
async def test_requests_that_wait_at_the_half_close_are_answered(wire: Wire, count: int) -> None:
    client = await connect(wire)
    for _ in range(count):
        client.send("POST", "/eqp/tokenize", {"text": "a"})
    client.writer.write_eof()
    assert [(await client.read()).status for _ in range(count)] == [200] * count
    assert await client.is_closed()


@pytest.mark.parametrize("num_before", [0, 1, 3])
@pytest.mark.parametrize(
    ("headers", "part"),
    [
        ({"Content-Length": "99"}, b'{"text":"a"}'),
        ({"Content-Length": "99"}, b""),
        ({"Transfer-Encoding": "chunked"}, b'c\r\n{"text":"a"}\r\n'),
    ],
)
async def test_body_that_ends_with_the_input_is_refused_at_once(
    wire: Wire, num_before: int, headers: Mapping[str, str], part: bytes
) -> None:
    client = await connect(wire)
    for _ in range(num_before):
        client.send("POST", "/eqp/tokenize", {"text": "a"})
    client.send("POST", "/eqp/tokenize", headers=headers)
    client.writer.write(part)
    client.writer.write_eof()
    async with asyncio.timeout(5):  # far below the time that a body is given
        assert [(await client.read()).status for _ in range(num_before)] == [200] * num_before
        answer = await client.read()
    assert (answer.status, answer.json["error"]["code"]) == (400, "bad_request")
    assert await client.is_closed()


@pytest.mark.parametrize("is_stream", [True, False])
@pytest.mark.parametrize(("path", "end"), [(CHAT, b'"finish_reason":"stop"'), ("/eqp/chat", b'"finish":"stop"')])
async def test_http_1_0_gets_an_answer_that_ends_with_the_connection(
    wire: Wire, path: str, end: bytes, is_stream: bool
) -> None:
    client = await connect(wire)
    body = json.dumps({"messages": USER, "stream": is_stream}).encode()
    client.writer.write(f"POST {path} HTTP/1.0\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
    async with asyncio.timeout(GUARD_S):
        status, headers = await client.read_head()
        assert (status, "transfer-encoding" in headers) == (200, False)
        assert end in await client.reader.read()


@pytest.mark.parametrize(
    ("path", "body"),
    [(CHAT, {"messages": USER, "stream": True}), ("/eqp/chat", {"messages": USER}), ("/eqp/batch", [{"prompt": "a"}])],
)
async def test_a_body_without_a_length_ends_with_the_connection_though_http_1_0_asks_to_keep_it(
    wire: Wire, path: str, body: Any
) -> None:
    client = await connect(wire)
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.0\r\nConnection: keep-alive\r\nContent-Length: {len(data)}\r\n\r\n".encode()
    client.writer.write(2 * (head + data))
    async with asyncio.timeout(5):  # far below the time that a connection is kept
        status, headers = await client.read_head()
        assert (status, "connection" in headers, "transfer-encoding" in headers) == (200, False, False)
        assert b"HTTP/" not in await client.reader.read()


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
@pytest.mark.parametrize("value", [0, 1 << 40, 1 << 20])
async def test_the_limit_of_tokens_is_named_as_the_client_named_it(wire: Wire, name: str, value: int) -> None:
    answer = await (await connect(wire)).ask("POST", CHAT, {"messages": USER, name: value})
    assert answer.json["error"]["param"] == name
    assert answer.json["error"]["message"].startswith(f"{name} ")
