"""The socket from outside: a real server and engine on a scripted runtime, spoken to over real connections."""

from __future__ import annotations

import asyncio
import gc
import json
import random
import re
import shutil
import socket
import subprocess
import tracemalloc
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from edgeqwen.engine.settings import EngineLimits
from edgeqwen.protocol.limits import WireLimits
from edgeqwen.protocol.peer import Peer
from edgeqwen.server import operations, peers
from tests.wire import Gate, Wire, WireClient, fake_inference, serve, until

LONG = "x" * 2000


async def is_idle(wire: Wire) -> None:
    await until(lambda: wire.inference.stats().running == 0 and wire.inference.stats().queued == 0)


# Requests and replies.


async def test_chat_in_one_piece_has_text_finish_usage_and_seed(wire: Wire) -> None:
    client = await wire.connect()
    final = await client.ask({"op": "chat", "prompt": "Hi"})
    assert (final["text"], final["finish"], final["seed"]) == ("Hello!", "stop", 42)
    assert final["usage"]["completion"] == 3
    assert set(final["ms"]) == {"queue", "ttft", "total"}
    assert "id" not in final


async def test_streamed_deltas_join_to_the_text_in_one_piece(tmp_path: Path) -> None:
    text = 'ok 🫠 龘 👩🏽‍🚀 नमस्ते "done":true\n\t end'
    async with serve(tmp_path, fake_inference(text)) as wire:
        client = await wire.connect()
        whole = await client.ask({"op": "chat", "prompt": "Hi", "id": 1})
        client.send({"op": "chat", "prompt": "Hi", "id": 2, "stream": True})
        final, frames = await client.read_final()
    assert whole["text"] == text
    assert frames[0]["event"] == "start"
    assert frames[0]["prompt_tokens"] == final["usage"]["prompt"]
    assert "".join(frame["delta"] for frame in frames[1:]) == text
    assert "\ufffd" not in text
    assert (final["finish"], final["rid"]) == ("stop", frames[0]["rid"])


async def test_budget_that_ends_inside_a_character_leaves_valid_text(tmp_path: Path) -> None:
    async with serve(tmp_path, fake_inference("🫠🫠")) as wire:
        client = await wire.connect()
        for max_tokens in (1, 2, 3):
            whole = await client.ask({"op": "chat", "prompt": "x", "max_tokens": max_tokens})
            client.send({"op": "chat", "prompt": "x", "max_tokens": max_tokens, "stream": True})
            final, frames = await client.read_final()
            assert (whole["finish"], final["finish"]) == ("length", "length")
            assert "".join(frame["delta"] for frame in frames[1:]) == whole["text"]
        assert (await client.ask({"op": "health"}))["ok"] is True


async def test_thought_travels_apart_from_the_answer(tmp_path: Path) -> None:
    async with serve(tmp_path, fake_inference("<think>\nhm\n</think>\n\nfour")) as wire:
        client = await wire.connect()
        whole = await client.ask({"op": "chat", "prompt": "2+2?"})
        client.send({"op": "chat", "prompt": "2+2?", "stream": True})
        _, frames = await client.read_final()
    assert whole["text"] == "four"
    assert whole["reasoning"].strip() == "hm"
    assert whole["usage"]["reasoning"] > 0
    assert "".join(frame.get("delta", "") for frame in frames) == "four"
    assert "".join(frame.get("reasoning", "") for frame in frames) == whole["reasoning"]


async def test_generate_echo_verbose_and_logprobs(wire: Wire) -> None:
    client = await wire.connect()
    final = await client.ask({
        "op": "generate",
        "prompt": "own ",
        "echo": True,
        "verbose": True,
        "logprobs": True,
        "top_logprobs": 2,
        "seed": 5,
    })
    assert final["text"] == "own Hello!"
    assert final["params"]["seed"] == final["seed"] == 5
    assert len(final["prompt_ids"]) == final["usage"]["prompt"]
    assert all(len(entry["top"]) == 2 for entry in final["logprobs"])
    tokens = await client.ask({"op": "generate", "tokens": final["prompt_ids"]})
    assert tokens["text"] == "Hello!"


async def test_several_choices_are_numbered(wire: Wire) -> None:
    client = await wire.connect()
    whole = await client.ask({"op": "chat", "prompt": "x", "n": 2})
    client.send({"op": "chat", "prompt": "x", "n": 2, "stream": True})
    _, frames = await client.read_final()
    assert [choice["text"] for choice in whole["choices"]] == ["Hello!", "Hello!"]
    for index in (0, 1):
        assert "".join(frame["delta"] for frame in frames[1:] if frame["choice"] == index) == "Hello!"


async def test_tokenize_and_detokenize_are_inverse_and_bytes_come_as_base64(wire: Wire) -> None:
    client = await wire.connect()
    tokens = (await client.ask({"op": "tokenize", "text": "Hello 🫠"}))["tokens"]
    assert (await client.ask({"op": "detokenize", "tokens": tokens}))["text"] == "Hello 🫠"
    broken = await client.ask({"op": "detokenize", "tokens": tokens[:-1]})
    assert "text" not in broken
    assert "b64" in broken
    special = await client.ask({"op": "tokenize", "text": "<|im_end|>", "special": True})
    plain = await client.ask({"op": "tokenize", "text": "<|im_end|>"})
    assert (special["n"], plain["n"] > 1) == (1, True)


async def test_hello_shows_versions_and_limits(wire: Wire) -> None:
    client = await wire.connect()
    hello = await client.ask({"op": "hello", "id": "h"})
    assert hello["proto"] == [1]
    assert hello["limits"]["line"] == 1 << 20
    assert hello["limits"]["inflight"] == 8
    assert hello["server"].startswith("edgeqwen/")


async def test_stats_count(wire: Wire) -> None:
    client = await wire.connect()
    await client.ask({"op": "chat", "prompt": "x"})
    stats = await client.ask({"op": "stats"})
    assert (stats["conns"], stats["running"], stats["totals"]["requests"]) == (1, 0, 1)
    assert stats["rss_bytes"] > 1 << 20
    assert set(stats["tok_s"]) == {"prefill", "decode"}


@pytest.mark.parametrize(
    ("request_members", "code", "field"),
    [
        ({"op": "chat", "prompt": "x", "temprature": 1}, "bad_request", "temprature"),
        ({"op": "chat", "prompt": "x", "temperature": 101}, "bad_request", "temperature"),
        ({"op": "chat", "prompt": "x", "n": 99}, "bad_request", "n"),
        ({"op": "chat", "messages": []}, "bad_request", "messages"),
        ({"op": "nothing"}, "unknown_op", "op"),
        ({"op": "health", "v": 2}, "unsupported_version", "v"),
        ({"op": "cancel"}, "bad_request", "target"),
        ({"op": "cancel", "rid": "r999"}, "not_found", "rid"),
        ({"op": "detokenize", "tokens": [10**9]}, "bad_request", "tokens"),
    ],
)
async def test_an_error_is_answered_and_the_connection_goes_on(
    wire: Wire, request_members: dict[str, Any], code: str, field: str
) -> None:
    client = await wire.connect()
    final = await client.ask({"id": 3, **request_members})
    assert (final["id"], final["error"]["code"], final["error"]["field"]) == (3, code, field)
    assert (await client.ask({"op": "health", "x_note": "ignored"}))["ok"] is True


async def test_an_id_that_is_no_id_is_not_echoed(wire: Wire) -> None:
    client = await wire.connect()
    final = await client.ask({"op": "health", "id": None})
    assert "id" not in final
    assert final["error"]["field"] == "id"


async def test_a_failing_step_ends_its_request_and_nothing_else(tmp_path: Path) -> None:
    async with serve(tmp_path, fake_inference(fail_at_step=2)) as wire:
        client = await wire.connect()
        assert (await client.ask({"op": "chat", "prompt": "x", "id": 1}))["error"]["code"] == "engine"
        assert (await client.ask({"op": "chat", "prompt": "x", "id": 1}))["text"] == "Hello!"


# Framing.


async def test_crlf_blank_lines_and_single_bytes(wire: Wire) -> None:
    client = await wire.connect()
    for byte in b'\r\n\n {"op":"health","id":1}\r\n\n\n{"op":"health","id":2}\n':
        client.write(bytes([byte]))
        await asyncio.sleep(0)
    assert [(await client.read() or {})["id"] for _ in range(2)] == [1, 2]


async def test_a_hundred_requests_in_one_write(wire: Wire) -> None:
    client = await wire.connect()
    client.send(*({"op": "chat", "prompt": "x", "id": index} for index in range(100)))
    finals = [(await client.read_final())[0] for _ in range(100)]
    assert sorted(final["id"] for final in finals) == list(range(100))
    assert all(final["text"] == "Hello!" for final in finals)


async def test_a_thousand_control_operations_in_one_write(wire: Wire) -> None:
    client = await wire.connect()
    client.send(*({"op": "health", "id": index} for index in range(1000)))
    assert [(await client.read() or {})["id"] for _ in range(1000)] == list(range(1000))


async def test_last_line_without_lf_is_answered_at_the_end_of_input(wire: Wire) -> None:
    client = await wire.connect()
    client.write(b'{"op":"chat","prompt":"x"}')
    client.shut()
    frames = await client.read_all()
    assert [frame["text"] for frame in frames] == ["Hello!"]


async def test_line_of_exactly_one_mebibyte_is_served(tmp_path: Path) -> None:
    async with serve(tmp_path) as wire:
        client = await wire.connect()
        head, tail = b'{"op":"health","x_fill":"', b'"}'
        client.write(head + b"a" * ((1 << 20) - len(head) - len(tail)) + tail + b"\n")
        assert (await client.read() or {})["ok"] is True
        client.write(head + b"a" * ((1 << 20) + 1 - len(head) - len(tail)) + tail + b"\n" + b'{"op":"health"}\n' * 3)
        frames = await client.read_all()
    assert [frame["error"]["code"] for frame in frames] == ["too_large"]


@pytest.mark.parametrize(
    "data",
    [
        b"\0\n",
        b"\xef\xbb\xbf{}\n",
        b'{"op":"\xff"}\n',
        b'{"op":"\\ud800"}\n',
        b'{"op":NaN}\n',
        b'{"op":' + b"[" * 200_000 + b"\n",
        b"[]\n",
        b"[1,2]\n",
        b"7\n",
        b"{}{}\n",
        b'{"op":"health"\n',
    ],
)
async def test_what_is_no_object_gets_one_error_and_the_end(wire: Wire, data: bytes) -> None:
    client = await wire.connect()
    client.write(data + b'{"op":"health"}\n' * 2)
    frames = await client.read_all()
    assert [frame["error"]["code"] in {"bad_json", "bad_utf8"} for frame in frames] == [True]
    assert (await (await wire.connect()).ask({"op": "health"}))["ok"] is True


async def test_http_after_json_is_not_executed(wire: Wire) -> None:
    client = await wire.connect()
    client.write(b'{"op":"health"}\nPOST /eqp/shutdown HTTP/1.1\r\nHost: x\r\n\r\n{"op":"shutdown"}\n')
    frames = await client.read_all()
    assert [frame["done"] for frame in frames] == [True, True]
    assert frames[1]["error"]["code"] == "bad_json"
    assert wire.shutdowns == []


async def test_a_bad_line_cancels_what_is_in_flight(tmp_path: Path) -> None:
    async with serve(tmp_path, fake_inference(LONG, step_s=0.005)) as wire:
        client = await wire.connect()
        client.send({"op": "chat", "prompt": "x", "stream": True, "id": 1})
        await client.read()
        client.write(b"garbage\n")
        frames = await client.read_all()
        assert frames[-1]["error"]["code"] == "bad_json"
        assert [frame for frame in frames[:-1] if frame["done"]] == []
        await is_idle(wire)


async def test_streamed_frames_stay_below_the_limit_and_a_long_answer_ends_with_length(tmp_path: Path) -> None:
    limits = WireLimits(frame_bytes=4096, reply_bytes=8192)
    async with serve(tmp_path, fake_inference("龘" * 3000), limits) as wire:
        client = await wire.connect()
        final = await client.ask({"op": "generate", "prompt": "龘" * 900, "echo": True, "id": 1})
        assert final["finish"] == "length"
        client.send({"op": "generate", "prompt": "龘" * 900, "echo": True, "stream": True, "max_tokens": 3, "id": 2})
        _, frames = await client.read_final()
    assert len(json.dumps(final, ensure_ascii=False).encode()) <= 8192
    assert all(len(json.dumps(frame, ensure_ascii=False).encode()) <= 4096 for frame in frames)
    assert "".join(frame["delta"] for frame in frames[1:]) == "龘" * 901


async def test_an_echo_that_alone_fills_the_reply_ends_the_generation(tmp_path: Path) -> None:
    async with serve(tmp_path, fake_inference(LONG, step_s=0.005), WireLimits(reply_bytes=4096)) as wire:
        client = await wire.connect()
        final = await client.ask({"op": "generate", "prompt": "龘" * 1200, "echo": True})
        await is_idle(wire)
    assert final["finish"] == "length"
    assert set(final["text"]) == {"龘"}
    assert final["usage"]["completion"] <= 2


# Order and concurrency.


async def test_two_streams_interleave_and_each_is_in_order(tmp_path: Path) -> None:
    text = "".join(f"{index} " for index in range(60))
    async with serve(tmp_path, fake_inference(text)) as wire:
        client = await wire.connect()
        client.send(*({"op": "chat", "prompt": "x", "stream": True, "id": name} for name in "ab"))
        frames: list[dict[str, Any]] = []
        while sum(frame["done"] for frame in frames) < 2:
            frames.append(await client.read() or {})
    for name in "ab":
        assert "".join(frame.get("delta", "") for frame in frames if frame["id"] == name) == text
    order = [frame["id"] for frame in frames if "delta" in frame]
    assert order != sorted(order)


async def test_requests_without_id_are_answered_in_order_errors_and_control_too(wire: Wire) -> None:
    client = await wire.connect()
    client.send(
        {"op": "chat", "prompt": "x", "stream": True},
        {"op": "hello"},
        {"op": "nothing"},
        {"op": "tokenize", "text": "x"},
        {"op": "chat", "prompt": "x"},
        {"op": "health"},
    )
    finals = [(await client.read_final())[0] for _ in range(6)]
    kinds = ["finish", "proto", "error", "tokens", "text", "state"]
    assert [kind in final for kind, final in zip(kinds, finals, strict=True)] == [True] * 6


async def test_a_second_request_with_an_id_in_flight_is_refused(tmp_path: Path, gate: Gate) -> None:
    async with serve(tmp_path, fake_inference(gate=gate)) as wire:
        client = await wire.connect()
        client.send({"op": "chat", "prompt": "x", "id": 1}, {"op": "chat", "prompt": "x", "id": 1})
        assert ((await client.read() or {}).get("error") or {})["code"] == "duplicate_id"
        client.send({"op": "chat", "prompt": "x", "id": "1"})
        gate.opened.set()
        finals = [(await client.read_final())[0] for _ in range(2)]
    assert [final["text"] for final in finals] == ["Hello!"] * 2
    assert {final["id"] for final in finals} == {1, "1"}


async def test_control_operations_do_not_wait_for_generations(tmp_path: Path, gate: Gate) -> None:
    async with serve(tmp_path, fake_inference(gate=gate)) as wire:
        client = await wire.connect()
        client.send(
            {"op": "chat", "prompt": "x", "id": 1}, {"op": "health", "id": 2}, {"op": "tokenize", "text": "x", "id": 3}
        )
        assert {(await client.read() or {})["id"] for _ in range(2)} == {2, 3}
        gate.opened.set()
        assert (await client.read() or {})["id"] == 1


async def test_at_the_cap_one_request_is_held_and_the_rest_is_not_read(tmp_path: Path, gate: Gate) -> None:
    limits = WireLimits(inflight=2, probe_s=0.02)
    async with serve(tmp_path, fake_inference(gate=gate), limits) as wire:
        client = await wire.connect()
        client.send(*({"op": "chat", "prompt": "x", "id": index} for index in range(2)), {"op": "health", "id": "h"})
        assert (await client.read() or {})["id"] == "h"
        client.send({"op": "chat", "prompt": "x", "id": 2}, {"op": "health", "id": "late"})
        with pytest.raises(TimeoutError):
            await client.read(timeout_s=0.1)
        assert wire.inference.stats().running + wire.inference.stats().queued == 2
        gate.opened.set()
        finals = [(await client.read_final())[0] for _ in range(4)]
    assert {final["id"] for final in finals} == {0, 1, 2, "late"}


async def test_a_client_that_dies_while_it_is_not_read_is_cancelled(tmp_path: Path) -> None:
    limits = WireLimits(inflight=1, probe_s=0.02)
    async with serve(tmp_path, fake_inference(LONG, step_s=0.005), limits) as wire:
        client = await wire.connect()
        client.send(*({"op": "chat", "prompt": "x", "id": index, "speculate": False} for index in range(3)))
        await until(lambda: wire.inference.stats().running == 1)
        await asyncio.sleep(0.02)
        client.close()
        await is_idle(wire)
        assert wire.inference.stats().totals["tokens"] < 500


async def test_queue_full_is_busy_with_a_time_to_retry(tmp_path: Path, gate: Gate) -> None:
    inference = fake_inference(gate=gate, limits=EngineLimits(queue=1), num_slots=1)
    async with serve(tmp_path, inference) as wire:
        client = await wire.connect()
        client.send({"op": "chat", "prompt": "x", "id": 0})
        await until(lambda: inference.stats().running == 1)
        client.send(*({"op": "chat", "prompt": "x", "id": index} for index in range(1, 4)))
        errors = [(await client.read() or {}).get("error") for _ in range(2)]
        assert [(error or {}).get("code") for error in errors] == ["busy", "busy"]
        assert all((error or {})["retry_ms"] > 0 for error in errors)
        gate.opened.set()


KINDS: list[dict[str, Any]] = [
    {"op": "chat", "prompt": "x"},
    {"op": "chat", "prompt": "x", "stream": True, "max_tokens": 1},
    {"op": "generate", "tokens": [1, 2], "stream": True},
    {"op": "chat", "prompt": "x", "temperature": -1},
    {"op": "chat", "messages": [{"role": "user"}]},
    {"op": "tokenize", "text": "own fox"},
    {"op": "detokenize", "tokens": [10**7]},
    {"op": "health"},
    {"op": "nothing"},
    {"op": "cancel", "rid": "r1"},
    {"op": "hello", "v": 3},
]


async def test_every_request_gets_exactly_one_final_frame(wire: Wire) -> None:
    dice = random.Random(7)

    async def talk(client: WireClient, num_requests: int) -> None:
        asked: Counter[int] = Counter()
        for _ in range(num_requests):
            members = {**dice.choice(KINDS), "id": dice.randrange(12)}
            asked[members["id"]] += 1
            if dice.random() < 0.2:
                client.send({"op": "cancel", "target": members["id"], "id": 99})
                asked[99] += 1
            client.send(members)
        client.shut()
        frames = await client.read_all()
        assert Counter(frame["id"] for frame in frames if frame["done"]) == asked

    await asyncio.gather(*[talk(await wire.connect(), 250) for _ in range(4)])
    await is_idle(wire)


# Cancelling and the ends of a connection.


async def test_cancel_by_id_ends_the_target_with_its_partial_text(tmp_path: Path) -> None:
    async with serve(tmp_path, fake_inference(LONG, step_s=0.005)) as wire:
        client = await wire.connect()
        client.send({"op": "chat", "prompt": "x", "id": 1, "stream": True})
        while "delta" not in (await client.read() or {}):
            pass
        client.send({"op": "cancel", "id": 2, "target": 1})
        finals: dict[int, dict[str, Any]] = {}
        while len(finals) < 2:
            final, _ = await client.read_final()
            finals[final["id"]] = final
        assert finals[2]["cancelled"] == 1
        assert finals[1]["finish"] == "cancelled"
        await is_idle(wire)
        assert (await client.ask({"op": "cancel", "id": 3, "target": 1}))["cancelled"] == 0


async def test_cancel_before_the_model_is_loaded(tmp_path: Path, gate: Gate) -> None:
    async with serve(tmp_path, fake_inference(gate=gate, load_s=0.1), is_loaded=False) as wire:
        client = await wire.connect()
        client.send({"op": "chat", "prompt": "x", "id": 1}, {"op": "cancel", "id": 2, "target": 1})
        finals = {final["id"]: final for final in [(await client.read_final())[0] for _ in range(2)]}
        assert wire.inference.state == "loading"
        gate.opened.set()
    assert finals[2]["cancelled"] == 1
    assert (finals[1]["finish"], finals[1]["text"]) == ("cancelled", "")


async def test_cancel_by_rid_reaches_what_runs_however_many_came_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(operations, "NUM_REMEMBERED", 1)
    async with serve(tmp_path, fake_inference(LONG, step_s=0.01)) as wire:
        client = await wire.connect()
        client.send({"op": "chat", "prompt": "x", "id": 1, "stream": True})
        rid = (await client.read() or {})["rid"]
        other = await wire.connect()
        await other.ask({"op": "chat", "prompt": "x", "max_tokens": 1})
        assert (await other.ask({"op": "cancel", "rid": rid}))["cancelled"] == 1
        assert (await client.read_final())[0]["finish"] == "cancelled"


async def test_cancel_by_rid_from_another_connection(tmp_path: Path) -> None:
    async with serve(tmp_path, fake_inference(LONG, step_s=0.005)) as wire:
        first, second = await wire.connect(), await wire.connect()
        first.send({"op": "chat", "prompt": "x", "id": 1, "stream": True})
        rid = (await first.read() or {})["rid"]
        assert (await second.ask({"op": "cancel", "rid": rid}))["cancelled"] == 1
        assert (await first.read_final())[0]["finish"] == "cancelled"
        assert (await second.ask({"op": "cancel", "rid": rid}))["cancelled"] == 0
        assert (await second.ask({"op": "cancel", "rid": "r0"}))["error"]["code"] == "not_found"


async def test_strangers_may_neither_cancel_nor_shut_down(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    who = iter([Peer(1001, "1001", is_admin=False), Peer(1002, "1002", is_admin=False)])
    monkeypatch.setattr("edgeqwen.server.connection.peer_of", lambda transport: next(who))
    async with serve(tmp_path, fake_inference(LONG, step_s=0.005)) as wire:
        first, second = await wire.connect(), await wire.connect()
        first.send({"op": "chat", "prompt": "x", "id": 1, "stream": True})
        rid = (await first.read() or {})["rid"]
        assert (await second.ask({"op": "cancel", "rid": rid}))["error"]["code"] == "not_found"
        assert (await second.ask({"op": "shutdown"}))["error"]["code"] == "forbidden"
        assert wire.inference.stats().running == 1
        assert (await first.ask({"op": "cancel", "id": 2, "rid": rid}))["id"] in {1, 2}
        await is_idle(wire)
        assert wire.shutdowns == []


async def test_nobody_in_particular_is_not_served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("edgeqwen.server.connection.peer_of", lambda transport: None)
    async with serve(tmp_path) as wire:
        frames = await (await wire.connect()).read_all()
    assert [frame["error"]["code"] for frame in frames] == ["forbidden"]


async def test_the_peer_is_who_connected(wire: Wire, monkeypatch: pytest.MonkeyPatch) -> None:
    client = await wire.connect()
    peer = peers.peer_of(client.writer.transport)
    assert peer is not None
    assert peer.is_admin
    assert peer.owner == str(peer.uid)
    monkeypatch.setattr(peers, "NOBODY", frozenset({peer.uid}))
    assert peers.peer_of(client.writer.transport) is None


async def test_full_close_cancels_within_a_step(tmp_path: Path, gate: Gate) -> None:
    gate.opened.set()
    async with serve(tmp_path, fake_inference(LONG, gate=gate, step_s=0.001)) as wire:
        client = await wire.connect()
        client.send({"op": "chat", "prompt": "x", "stream": True})
        while "delta" not in (await client.read() or {}):
            pass
        gate.opened.clear()  # no step ends any more
        client.close()
        await is_idle(wire)
        num_tokens = wire.inference.stats().totals["tokens"]
        gate.opened.set()
        assert (await (await wire.connect()).ask({"op": "chat", "prompt": "x", "max_tokens": 1}))["text"] == "x"
        assert wire.inference.stats().totals["tokens"] == num_tokens + 1


async def test_half_close_does_not_cancel_and_blank_lines_keep_the_client_waiting(tmp_path: Path, gate: Gate) -> None:
    async with serve(tmp_path, fake_inference(gate=gate), WireLimits(probe_s=0.03)) as wire:
        client = await wire.connect()
        client.send({"op": "chat", "prompt": "x"})
        client.shut()
        reading = asyncio.create_task(client.read_all())
        await until(lambda: client.num_blank >= 3)
        gate.opened.set()
        assert [frame["text"] for frame in await reading] == ["Hello!"]


async def test_no_blank_lines_before_the_end_of_input(tmp_path: Path) -> None:
    limits = WireLimits(probe_s=0.02)
    async with serve(tmp_path, fake_inference(step_s=0.1), limits) as wire:
        client = await wire.connect()
        await client.ask({"op": "chat", "prompt": "x"})
    assert client.num_blank == 0


async def test_half_close_then_close_cancels(tmp_path: Path) -> None:
    limits = WireLimits(probe_s=0.03)
    async with serve(tmp_path, fake_inference(LONG, step_s=0.01), limits) as wire:
        client = await wire.connect()
        client.send({"op": "chat", "prompt": "x", "speculate": False})
        client.shut()
        await until(lambda: wire.inference.stats().running == 1)
        client.close()
        await is_idle(wire)
        assert wire.inference.stats().totals["tokens"] < len(LONG) / 2


async def test_close_member_ends_the_connection_after_the_answer(wire: Wire) -> None:
    client = await wire.connect()
    client.send({"op": "chat", "prompt": "x", "id": 1, "close": True}, {"op": "health", "id": 2})
    assert [frame["id"] for frame in await client.read_all()] == [1]
    other = await wire.connect()
    other.send({"op": "nothing", "close": True})
    assert len(await other.read_all()) == 1


# Timers and pressure.


async def test_silence_ends_a_connection(tmp_path: Path) -> None:
    async with serve(tmp_path, None, WireLimits(first_byte_s=0.05)) as wire:
        assert await (await wire.connect()).read_all() == []


async def test_idleness_ends_a_connection(tmp_path: Path) -> None:
    async with serve(tmp_path, None, WireLimits(idle_s=0.05)) as wire:
        client = await wire.connect()
        assert (await client.ask({"op": "health"}))["ok"] is True
        assert await client.read_all() == []


async def test_a_line_that_does_not_end_ends_a_connection(tmp_path: Path) -> None:
    async with serve(tmp_path, None, WireLimits(partial_line_s=0.05)) as wire:
        client = await wire.connect()
        client.write(b'{"op":')
        assert [frame["error"]["code"] for frame in await client.read_all()] == ["timeout"]


async def test_a_dripping_line_does_not_extend_its_time(tmp_path: Path) -> None:
    async with serve(tmp_path, None, WireLimits(partial_line_s=0.15)) as wire:
        client = await wire.connect()
        client.write(b'{"op":"health","x_":"')
        reading = asyncio.create_task(client.read())
        for _ in range(100):
            if reading.done():
                break
            client.write(b"x")
            await asyncio.sleep(0.02)
        assert ((await reading or {}).get("error") or {})["code"] == "timeout"


async def test_a_connection_at_work_is_not_idle(tmp_path: Path) -> None:
    async with serve(tmp_path, fake_inference(step_s=0.1), WireLimits(idle_s=0.05)) as wire:
        client = await wire.connect()
        assert (await client.ask({"op": "chat", "prompt": "x"}))["text"] == "Hello!"


async def test_partial_lines_of_one_user_leave_room_for_an_administrator(tmp_path: Path) -> None:
    limits = WireLimits(connections_per_uid=4, connections=16)
    async with serve(tmp_path, None, limits) as wire:
        for _ in range(4):
            (await wire.connect()).write(b'{"op":')
        assert (await (await wire.connect()).ask({"op": "health"}))["ok"] is True
        refused = await (await wire.connect()).read_all()
        assert [frame["error"]["code"] for frame in refused] == ["quota"]
        wire.clients[0].close()
        await until(lambda: len(wire.server.connections) < 5)
        assert (await (await wire.connect()).ask({"op": "health"}))["ok"] is True


async def test_line_that_was_refused_is_not_kept_until_garbage_is_collected(tmp_path: Path) -> None:
    async with serve(tmp_path, None, WireLimits(linger_s=0.05)) as wire:
        gc.collect()
        gc.disable()
        tracemalloc.start()
        try:
            for _ in range(8):
                client = await wire.connect()
                client.write(b'{"x":"' + b"a" * (2 << 20) + b'"}\n')
                (final,) = await client.read_all()
                assert final["error"]["code"] == "too_large"
            await until(lambda: not wire.server.connections)
            held = [trace for trace in tracemalloc.take_snapshot().traces if trace.size > 100_000]
        finally:
            tracemalloc.stop()
            gc.enable()
    ours = [str(trace.traceback) for trace in held if "/edgeqwen/" in str(trace.traceback)]
    assert not ours


async def test_connections_beyond_the_total_are_busy(tmp_path: Path) -> None:
    async with serve(tmp_path, None, WireLimits(connections=2)) as wire:
        kept = [await wire.connect() for _ in range(2)]
        refused = await (await wire.connect()).read_all()
        assert [frame["error"]["code"] for frame in refused] == ["busy"]
        assert (await kept[0].ask({"op": "health"}))["ok"] is True


class Small:
    """A client with small socket buffers, so that a server notices soon that it does not read."""

    def __init__(self, path: Path) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        self.sock.connect(str(path))
        self.sock.setblocking(False)

    async def client(self) -> WireClient:
        reader, writer = await asyncio.open_unix_connection(sock=self.sock, limit=4 << 20)
        return WireClient(reader, writer)


async def test_a_slow_reader_loses_nothing(tmp_path: Path) -> None:
    limits = WireLimits(high_water_bytes=2048)
    text = "".join(f"{index:04d} " for index in range(600))
    async with serve(tmp_path, fake_inference(text), limits) as wire:
        small = Small(wire.path)
        await asyncio.get_running_loop().sock_sendall(
            small.sock, b'{"op":"chat","prompt":"x","stream":true,"id":"%s","max_tokens":3500}\n' % (b"i" * 64)
        )
        await until(lambda: wire.inference.stats().totals["requests"] == 1)
        await is_idle(wire)
        client = await small.client()
        final, frames = await client.read_final()
        client.close()
    assert final["finish"] == "stop"
    assert "".join(frame["delta"] for frame in frames[1:]) == text
    assert len(frames) < 3000, "deltas were joined while the client did not read"


async def test_a_client_that_reads_nothing_is_cut_off_and_others_go_on(tmp_path: Path) -> None:
    limits = WireLimits(high_water_bytes=1024, stall_s=0.2)
    async with serve(tmp_path, fake_inference("ab" * 1500, loop=True), limits) as wire:
        small = Small(wire.path)
        loop = asyncio.get_running_loop()
        requests = b"".join(b'{"op":"chat","prompt":"x","stream":true,"id":"%064d"}\n' % index for index in range(4))
        await loop.sock_sendall(small.sock, requests)
        other = await wire.connect()
        assert (await other.ask({"op": "health"}))["ok"] is True
        await until(lambda: len(wire.server.connections) == 1)
        await is_idle(wire)
        small.sock.close()
        assert (await other.ask({"op": "health"}))["ok"] is True


async def test_requests_are_not_read_from_a_client_that_does_not_read_replies(tmp_path: Path) -> None:
    async with serve(tmp_path, None, WireLimits(high_water_bytes=1024)) as wire:
        client = await wire.connect(limit=4096)
        client.writer.transport.set_write_buffer_limits(high=1024)
        client.write(b'{"op":"hello","id":1}\n' * 20_000)
        sending = asyncio.create_task(client.writer.drain())
        await asyncio.sleep(0.2)
        assert not sending.done()
        for _ in range(20_000):
            assert (await client.read() or {})["id"] == 1
        await sending


# States of the engine.


async def test_ready_and_health_while_loading(tmp_path: Path, gate: Gate) -> None:
    async with serve(tmp_path, fake_inference(gate=gate, load_s=0.1), is_loaded=False) as wire:
        client = await wire.connect()
        health = await client.ask({"op": "health"})
        assert (health["ok"], health["state"]) == (True, "loading")
        assert 0 <= health["progress"] < 1
        error = (await client.ask({"op": "ready"}))["error"]
        assert error["code"] == "loading"
        assert error["retry_ms"] > 0
        refused = await client.ask({"op": "chat", "prompt": "x", "wait": False})
        assert refused["error"]["code"] == "loading"
        gate.opened.set()
        assert (await client.ask({"op": "chat", "prompt": "x"}))["text"] == "Hello!"
        assert await client.ask({"op": "ready"}) == {"done": True, "ok": True, "model": "scripted", "quant": "fp32"}


async def test_health_is_answered_while_a_step_runs(tmp_path: Path, gate: Gate) -> None:
    async with serve(tmp_path, fake_inference(gate=gate)) as wire:
        busy, other = await wire.connect(), await wire.connect()
        busy.send({"op": "chat", "prompt": "x"})
        await until(lambda: wire.inference.stats().running == 1)
        assert (await other.ask({"op": "health"}))["ok"] is True
        gate.opened.set()
        await busy.read_final()


@pytest.mark.parametrize("start", [b"get", b"[", b"\x16\x03\x01", b"\xef\xbb\xbf{"])
async def test_a_first_byte_of_no_protocol_is_answered_before_the_line_ends(tmp_path: Path, start: bytes) -> None:
    async with serve(tmp_path, None, WireLimits(partial_line_s=600.0)) as wire:
        client = await wire.connect()
        client.write(start)
        assert [frame["error"]["code"] for frame in await client.read_all()] == ["bad_json"]


async def test_deadline_ends_an_answer(tmp_path: Path) -> None:
    async with serve(tmp_path, fake_inference(LONG, step_s=0.01)) as wire:
        client = await wire.connect()
        final = await client.ask({"op": "chat", "prompt": "x", "deadline_ms": 80})
    assert final["finish"] == "deadline"
    assert set(final["text"]) <= {"x"}


async def test_shutdown_calls_back_and_draining_refuses_new_work(tmp_path: Path, gate: Gate) -> None:
    async with serve(tmp_path, fake_inference("x" * 40, gate=gate)) as wire:
        client = await wire.connect()
        client.send({"op": "chat", "prompt": "x", "id": 1, "stream": True})
        await client.read()
        client.send({"op": "shutdown", "id": 2, "drain_s": 7})
        while (frame := await client.read() or {}).get("id") != 2:
            pass
        assert frame["draining"] == 1
        assert (await client.ask({"op": "shutdown", "id": 4}))["id"] == 4
        assert wire.shutdowns == [7.0, None]
        draining = asyncio.create_task(wire.inference.drain(5))
        await asyncio.sleep(0)
        refused = await client.ask({"op": "chat", "prompt": "x", "id": 3})
        assert (refused["id"], refused["error"]["code"]) == (3, "draining")
        gate.opened.set()
        final, _ = await client.read_final()
        await draining
    assert (final["id"], final["finish"]) == (1, "stop")


async def test_closing_the_server_closes_idle_connections_and_removes_the_path(tmp_path: Path) -> None:
    async with serve(tmp_path) as wire:
        client = await wire.connect()
        await client.ask({"op": "health"})
        wire.server.stop_accepting()
        assert await client.read_all() == []
        assert not wire.path.exists()
        with pytest.raises((FileNotFoundError, ConnectionRefusedError)):
            await wire.connect()


# Tools that people use.


def run_tool(wire: Wire, *command: str, stdin: bytes) -> bytes:
    result = subprocess.run(command, input=stdin, capture_output=True, timeout=20, check=False)
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.mark.parametrize("end", [b"\n", b""])
async def test_socat_prints_a_reply_that_takes_longer_than_its_patience(tmp_path: Path, end: bytes) -> None:
    if shutil.which("socat") is None:
        pytest.skip("socat is not installed")
    async with serve(tmp_path, fake_inference("!", step_s=0.7)) as wire:
        command = ("socat", "-", f"UNIX-CONNECT:{wire.path}")
        stdin = b'{"op":"chat","prompt":"x"}' + end
        output = await asyncio.to_thread(run_tool, wire, *command, stdin=stdin)
    assert json.loads(output)["text"] == "!"


@pytest.mark.parametrize(("options", "close"), [(("-N",), b""), ((), b',"close":true')])
async def test_netcat_with_n_or_close(wire: Wire, options: tuple[str, ...], close: bytes) -> None:
    if shutil.which("nc") is None:
        pytest.skip("nc is not installed")
    command = ("nc", *options, "-U", str(wire.path))
    output = await asyncio.to_thread(run_tool, wire, *command, stdin=b'{"op":"chat","prompt":"x"' + close + b"}\n")
    assert json.loads(output)["text"] == "Hello!"


DOCUMENT = Path(__file__).parent.parent / "docs" / "protocol.md"
EXAMPLES = re.findall(r"^```jsonl\n(.*?)^```", DOCUMENT.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("example", [line for block in EXAMPLES for line in block.splitlines()])
async def test_examples_of_the_document_are_answered_without_error(wire: Wire, example: str) -> None:
    client = await wire.connect()
    client.write(example.encode() + b"\n")
    final, _ = await client.read_final()
    assert "error" not in final
