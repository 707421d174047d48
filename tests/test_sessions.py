"""Sessions through the socket: a real server and engine on a scripted runtime."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import errno
import json
import logging
import os
import re
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from edgeqwen.core.request import Done, Event
from edgeqwen.engine.generation import GenerationInput
from edgeqwen.engine.inference import Inference
from edgeqwen.protocol.limits import WireLimits
from edgeqwen.protocol.peer import Peer
from edgeqwen.protocol.session_messages import SessionGet
from edgeqwen.sessions.files import SessionFolder, decode
from edgeqwen.sessions.sessions import SessionLimits, Sessions
from edgeqwen.sessions.store import SessionStore
from edgeqwen.sessions.turns import TurnRequest
from tests.wire import GUARD_S, Gate, Wire, WireClient, fake_inference, serve, until

SYSTEM = {"role": "system", "content": "Be brief."}
BLOCK = 64
NO_SCRIPT: dict[str, Any] = {"tokens": ()}
"""The runtime says what the whole prompt leads to."""


@dataclasses.dataclass
class Clock:
    """Seconds since 1970, as the test wants them."""

    now: float = 1_000_000.0

    def __call__(self) -> float:
        return self.now


class Rig:
    """A server whose sessions are kept in `folder`."""

    def __init__(self, folder: Path, inference: Inference, **settings: Any) -> None:
        self.clock = Clock()
        self.numbers = iter(range(1, 1 << 20))
        self.store = SessionStore(SessionFolder.open(folder / "sessions"))
        self.inference = inference
        self.sessions = Sessions(
            inference,
            self.store,
            random_bits=lambda num_bits: next(self.numbers),
            clock=self.clock,
            **settings,
        )
        self.folder = folder
        self.wire: Wire

    def on_disk(self) -> list[tuple[str, int]]:
        """Id and revision of every session file."""
        found: list[tuple[str, int]] = []
        for path in self.folder.glob("sessions/*/*.session"):
            with contextlib.suppress(FileNotFoundError):  # the disk thread has just removed it
                session = decode(path.read_bytes())
                found.append((session.id, session.rev))
        return sorted(found)

    def file_of(self, session_id: str) -> Path:
        (path,) = self.folder.glob(f"sessions/*/{session_id}.session")
        return path

    async def client(self) -> WireClient:
        return await self.wire.connect()


@contextlib.asynccontextmanager
async def running(folder: Path, inference: Inference | None = None, **settings: Any) -> AsyncIterator[Rig]:
    rig = Rig(folder, inference or fake_inference(), **settings)
    async with serve(folder, rig.inference, sessions=rig.sessions) as rig.wire:
        yield rig


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[Rig]:
    """Says `Hello!` to everybody."""
    async with running(tmp_path) as each:
        yield each


def code(frame: dict[str, Any]) -> tuple[str, str | None]:
    return frame["error"]["code"], frame["error"].get("field")


async def said(client: WireClient, session: str) -> list[str]:
    frame = await client.ask({"op": "session.get", "session": session, "messages": True})
    return [message["content"] for message in frame["messages"]]


# Turns.


async def test_conversation_in_a_session_is_that_of_whole_transcripts_token_for_token(tmp_path: Path) -> None:
    async with running(tmp_path, fake_inference(**NO_SCRIPT)) as rig:
        client = await rig.client()
        created = await client.ask({"op": "session.create", "system": "Be brief."})
        transcript: list[dict[str, Any]] = [SYSTEM]
        for number, question in enumerate(["one", "two", "three"]):
            options = {"max_tokens": 12, "temperature": 0, "verbose": True, "speculate": False}
            request = {"op": "chat", "session": created["session"], "prompt": question, "if_rev": number, **options}
            turn = await client.ask(request)
            transcript.append({"role": "user", "content": question})
            whole = await client.ask({"op": "chat", "messages": transcript, **options})
            assert (turn["text"], turn["prompt_ids"]) == (whole["text"], whole["prompt_ids"])
            assert turn["usage"]["prompt"] == len(whole["prompt_ids"])
            assert (turn["session"], turn["rev"]) == (created["session"], number + 1)
            assert "saved" not in turn
            transcript.append({"role": "assistant", "content": turn["text"]})
        assert await said(client, created["session"]) == [each["content"] for each in transcript[1:]]


async def test_turn_computes_what_is_new_and_little_more(rig: Rig) -> None:
    client = await rig.client()
    await client.ask({"op": "chat", "session": "@a", "prompt": "x" * 1500})
    for question in ("y", "z" * 100):
        final = await client.ask({"op": "chat", "session": "@a", "prompt": question})
        usage = final["usage"]
        assert usage["prompt"] > 1500
        assert usage["prompt"] - usage["cached"] <= len(question) + 40 + BLOCK


async def test_streamed_turn_names_session_and_revision_in_its_last_frame_only(rig: Rig) -> None:
    client = await rig.client()
    client.send({"op": "chat", "id": 1, "session": "@a", "prompt": "x", "stream": True})
    final, frames = await client.read_final()
    assert "".join(frame.get("delta", "") for frame in frames) == "Hello!"
    assert final["rev"] == 1
    assert not any("session" in frame for frame in frames)


async def test_name_is_created_at_first_use_with_the_requests_system_message(rig: Rig) -> None:
    client = await rig.client()
    first = await client.ask({"op": "chat", "session": "@home", "messages": [SYSTEM, {"role": "user", "content": "a"}]})
    again = await client.ask({"op": "chat", "session": "@home", "messages": [SYSTEM, {"role": "user", "content": "b"}]})
    by_id = await client.ask({"op": "chat", "session": first["session"], "prompt": "c"})
    assert (first["rev"], again["rev"], by_id["rev"]) == (1, 2, 3)
    frame = await client.ask({"op": "session.get", "session": "@home"})
    assert (frame["name"], frame["system"], frame["turns"], frame["rev"]) == ("home", "Be brief.", 3, 3)
    assert await said(client, "@home") == ["a", "Hello!", "b", "Hello!", "c", "Hello!"]
    other = {"role": "system", "content": "Be long."}
    refused = await client.ask({
        "op": "chat",
        "session": "@home",
        "messages": [other, {"role": "user", "content": "d"}],
    })
    assert code(refused) == ("bad_request", "messages[0]")


@pytest.mark.parametrize(
    ("members", "expected"),
    [
        ({"session": "s_aaaaaaaaaaaaaaaa"}, ("not_found", "session")),
        ({"session": "home"}, ("not_found", "session")),
        ({"session": ""}, ("not_found", "session")),
        ({"session": "../../etc/passwd"}, ("not_found", "session")),
        ({"session": "s" * 10_000}, ("not_found", "session")),
        ({"session": "@"}, ("bad_request", "session")),
        ({"session": "@a\nb"}, ("bad_request", "session")),
        ({"session": "@" + "n" * 65}, ("bad_request", "session")),
        ({"session": "@a", "n": 2}, ("bad_request", "n")),
        ({"session": "@a", "temperature": -1}, ("bad_request", "temperature")),
        ({"session": "@a", "if_rev": 3}, ("conflict", "if_rev")),
        ({"if_rev": 0}, ("bad_request", "if_rev")),
    ],
)
async def test_refused_turn_leaves_no_session(
    rig: Rig, members: dict[str, Any], expected: tuple[str, str | None]
) -> None:
    client = await rig.client()
    refused = await client.ask({"op": "chat", "prompt": "x", **members})
    assert code(refused) == expected
    assert len(refused["error"]["message"]) < 200
    assert (await client.ask({"op": "session.list"}))["sessions"] == []
    assert rig.sessions.num_sessions == 0


async def test_message_at_fault_is_counted_from_the_start_of_the_request(rig: Rig) -> None:
    client = await rig.client()
    await client.ask({"op": "chat", "session": "@a", "prompt": "x"})
    calls = {"role": "assistant", "tool_calls": [{"function": {"name": 7}}]}
    refused = await client.ask({"op": "chat", "session": "@a", "messages": [calls, {"role": "user", "content": "y"}]})
    assert code(refused) == ("bad_request", "messages[0].tool_calls[0].function.name")
    assert "messages[0]" in refused["error"]["message"]


async def test_history_may_have_more_messages_than_one_request(rig: Rig) -> None:
    client = await rig.client()
    batch = [{"role": "user", "content": "x"}] * 100
    for rev in (1, 2, 3, 4):
        final = await client.ask({"op": "chat", "session": "@a", "messages": batch, "max_tokens": 1})
        assert final["rev"] == rev
    assert len(await said(client, "@a")) == 404
    refused = await client.ask({"op": "chat", "session": "@a", "messages": batch * 3})
    assert code(refused) == ("bad_request", "messages")


async def test_thought_is_kept_beside_the_answer_and_a_torn_one_is_not(tmp_path: Path) -> None:
    async with running(tmp_path, fake_inference("<think>\nhm hm hm\n</think>\n\nfour")) as rig:
        client = await rig.client()
        torn = await client.ask({"op": "chat", "session": "@torn", "prompt": "2+2?", "max_tokens": 3})
        assert (torn["finish"], torn["text"], torn["rev"], bool(torn["reasoning"])) == ("length", "", 1, True)
        frame = await client.ask({"op": "session.get", "session": "@torn", "messages": True})
        assert frame["messages"][1] == {"role": "assistant", "content": ""}
        whole = await client.ask({"op": "chat", "session": "@torn", "prompt": "2+2?", "verbose": True})
        frame = await client.ask({"op": "session.get", "session": "@torn", "messages": True})
        assert frame["messages"][3] == {
            "role": "assistant",
            "content": "four",
            "reasoning_content": whole["reasoning"],
        }
        prompt = await client.ask({"op": "detokenize", "tokens": whole["prompt_ids"]})
        assert "hm" not in prompt["text"]


# Turns that are not kept.


@contextlib.asynccontextmanager
async def slow_rig(folder: Path, gate: Gate, **settings: Any) -> AsyncIterator[Rig]:
    """Its answers have many steps, and none runs before the gate is open."""
    async with running(folder, fake_inference("x" * 2000, gate=gate, step_s=0.001), **settings) as rig:
        yield rig


async def begin_turn(rig: Rig, **members: Any) -> WireClient:
    """A client whose turn of `@a` is under way."""
    client = await rig.client()
    client.send({"op": "chat", "id": 1, "session": "@a", "prompt": "x", "stream": True, **members})
    frame = await client.read()
    assert frame is not None
    assert frame["event"] == "start"
    return client


async def test_cancelled_turn_is_not_kept_and_says_the_revision_it_left(tmp_path: Path, gate: Gate) -> None:
    async with slow_rig(tmp_path, gate) as rig:
        client = await rig.client()
        created = await client.ask({"op": "session.create", "name": "a"})
        turn = await begin_turn(rig)
        gate.opened.set()
        turn.send({"op": "cancel", "id": 2, "target": 1})
        finals = [(await turn.read_final())[0] for _ in range(2)]
        final = next(frame for frame in finals if frame["id"] == 1)
        assert (final["finish"], final["session"], final["rev"]) == ("cancelled", created["session"], 0)
        frame = await client.ask({"op": "session.get", "session": "@a"})
        assert (frame["rev"], frame["turns"], frame["busy"]) == (0, 0, False)


async def test_disconnect_deadline_and_failure_keep_nothing(tmp_path: Path) -> None:
    async with running(tmp_path, fake_inference("x" * 2000, step_s=0.001, fail_at_step=40)) as rig:
        client = await rig.client()
        await client.ask({"op": "session.create", "name": "a"})
        late = await client.ask({"op": "chat", "session": "@a", "prompt": "x", "deadline_ms": 1})
        assert (late["finish"], late["rev"]) == ("deadline", 0)
        failed = await client.ask({"op": "chat", "session": "@a", "prompt": "x"})
        assert code(failed) == ("engine", None)
        turn = await begin_turn(rig)
        turn.close()
        while (await client.ask({"op": "session.get", "session": "@a"}))["busy"]:
            pass
        kept = await client.ask({"op": "chat", "session": "@a", "prompt": "last", "max_tokens": 1})
        assert kept["rev"] == 1
        assert await said(client, "@a") == ["last", "x"]


async def test_first_turn_that_is_not_kept_leaves_no_session_of_that_name(tmp_path: Path, gate: Gate) -> None:
    async with slow_rig(tmp_path, gate) as rig:
        turn = await begin_turn(rig)
        client = await rig.client()
        listed = await client.ask({"op": "session.list"})
        assert [(row["name"], row["rev"], row["busy"]) for row in listed["sessions"]] == [("a", 0, True)]
        gate.opened.set()
        turn.send({"op": "cancel", "target": 1})
        final = next(frame for frame in [(await turn.read_final())[0] for _ in range(2)] if "finish" in frame)
        assert (final["finish"], "session" in final) == ("cancelled", False)
        assert (await client.ask({"op": "session.list"}))["sessions"] == []
        assert rig.on_disk() == []


async def test_receiver_that_breaks_does_not_hold_its_session(tmp_path: Path) -> None:
    async with running(tmp_path) as rig:

        def broken(event: Event) -> None:
            raise ValueError("a fault in a front")

        given = GenerationInput(messages=({"role": "user", "content": "x"},))
        await rig.sessions.turn(TurnRequest(owner="1000", ref="@a", given=given)).submit(broken)
        await until(lambda: rig.inference.stats().running == 0)
        heard: list[Event] = []
        await rig.sessions.turn(TurnRequest(owner="1000", ref="@a", given=given)).submit(heard.append)
        await until(lambda: any(isinstance(event, Done) for event in heard))


async def test_answer_cut_at_its_greatest_length_is_not_kept(tmp_path: Path) -> None:
    rig = Rig(tmp_path, fake_inference("x" * 6000, capacity=8192))
    limits = WireLimits(reply_bytes=4096)
    async with serve(tmp_path, rig.inference, limits, sessions=rig.sessions) as rig.wire:
        client = await rig.client()
        await client.ask({"op": "session.create", "name": "a"})
        final = await client.ask({"op": "chat", "session": "@a", "prompt": "x", "max_tokens": 7000})
        assert (final["finish"], final["rev"]) == ("length", 0)
        client.send({"op": "chat", "session": "@a", "prompt": "x", "max_tokens": 7000, "stream": True})
        final, _ = await client.read_final()
        assert (final["finish"], final["rev"]) == ("stop", 1)
        assert await said(client, "@a") == ["x", "x" * 6000]


# One turn at a time.


async def test_turn_reset_and_delete_of_a_busy_session_are_refused_and_others_see_what_is_finished(
    tmp_path: Path, gate: Gate
) -> None:
    async with slow_rig(tmp_path, gate) as rig:
        client = await rig.client()
        await client.ask({"op": "session.create", "name": "a", "system": "S"})
        turn = await begin_turn(rig, max_tokens=2)
        for request in (
            {"op": "chat", "session": "@a", "prompt": "y"},
            {"op": "session.reset", "session": "@a"},
            {"op": "session.delete", "session": "@a"},
        ):
            assert code(await client.ask(request)) == ("session_busy", "session")
        frame = await client.ask({"op": "session.get", "session": "@a", "messages": True})
        assert (frame["busy"], frame["messages"]) == (True, [])
        fork = await client.ask({"op": "session.fork", "session": "@a", "name": "b"})
        gate.opened.set()
        assert (await turn.read_final())[0]["rev"] == 1
        assert (await client.ask({"op": "session.get", "session": fork["session"]}))["turns"] == 0
        assert (await client.ask({"op": "session.delete", "session": "@a"}))["deleted"] == 1
        assert code(await client.ask({"op": "chat", "session": fork["from"], "prompt": "z"})) == (
            "not_found",
            "session",
        )


async def test_of_two_turns_at_once_one_runs_and_the_other_is_told(rig: Rig) -> None:
    clients = [await rig.client() for _ in range(2)]
    for client in clients:
        client.send({"op": "chat", "session": "@a", "prompt": "x"})
    finals = [(await client.read_final())[0] for client in clients]
    won = [final for final in finals if "error" not in final]
    assert [final["rev"] for final in won] == list(range(1, len(won) + 1))
    assert all(code(final) == ("session_busy", "session") for final in finals if "error" in final)
    assert await said(clients[0], "@a") == ["x", "Hello!"] * len(won)


async def test_retry_with_the_revision_of_before_says_that_the_turn_was_kept(rig: Rig) -> None:
    client = await rig.client()
    request = {"op": "chat", "session": "@a", "prompt": "x", "if_rev": 0}
    assert (await client.ask(request))["rev"] == 1
    again = await client.ask(request)
    assert code(again) == ("conflict", "if_rev")
    assert "revision 1, not at 0" in again["error"]["message"]
    assert await said(client, "@a") == ["x", "Hello!"]
    assert (await client.ask({**request, "if_rev": 1}))["rev"] == 2


async def test_requests_without_an_id_are_answered_in_order(rig: Rig) -> None:
    client = await rig.client()
    client.send(
        {"op": "session.create", "name": "a"},
        {"op": "chat", "session": "@a", "prompt": "x"},
        {"op": "session.fork", "session": "@a"},
        {"op": "health"},
        {"op": "session.delete", "session": "@a"},
        {"op": "session.list"},
    )
    frames = [(await client.read_final())[0] for _ in range(6)]
    assert [frame.get("rev") for frame in frames[:3]] == [0, 1, 1]
    assert (frames[3]["ok"], frames[4]["deleted"], len(frames[5]["sessions"])) == (True, 1, 1)


# Operations.


async def test_fork_goes_its_own_way(rig: Rig) -> None:
    client = await rig.client()
    for prompt in ("one", "two"):
        await client.ask({"op": "chat", "session": "@a", "prompt": prompt})
    fork = await client.ask({"op": "session.fork", "session": "@a", "at": 1, "name": "b"})
    assert (fork["rev"], fork["name"]) == (1, "b")
    await client.ask({"op": "chat", "session": "@b", "prompt": "other"})
    assert await said(client, "@a") == ["one", "Hello!", "two", "Hello!"]
    assert await said(client, "@b") == ["one", "Hello!", "other", "Hello!"]
    assert code(await client.ask({"op": "session.fork", "session": "@a", "at": 3})) == ("bad_request", "at")
    assert code(await client.ask({"op": "session.fork", "session": "@a", "name": "b"})) == ("conflict", "name")


async def test_reset_keeps_the_system_message_unless_told_otherwise(rig: Rig) -> None:
    client = await rig.client()
    await client.ask({"op": "session.create", "name": "a", "system": "S"})
    await client.ask({"op": "chat", "session": "@a", "prompt": "x"})
    assert (await client.ask({"op": "session.reset", "session": "@a"}))["rev"] == 2
    assert (await client.ask({"op": "session.get", "session": "@a"}))["system"] == "S"
    assert await said(client, "@a") == []
    assert (await client.ask({"op": "session.reset", "session": "@a", "keep_system": False}))["rev"] == 3
    assert "system" not in await client.ask({"op": "session.get", "session": "@a"})


async def test_list_shows_what_there_is_the_last_used_first(rig: Rig) -> None:
    client = await rig.client()
    await client.ask({"op": "session.create", "name": "a", "ttl_s": 100})
    rig.clock.now += 3.5
    await client.ask({"op": "chat", "session": "@b", "prompt": "x"})
    listed = await client.ask({"op": "session.list"})
    later, early = listed["sessions"]
    assert listed["quota"] == {"sessions": 1024, "kv_bytes": rig.inference.stats().kv["budget_bytes"]}
    assert (early["name"], early["idle_s"], early["expires"], early["tokens"]) == ("a", 3, 1_000_100, 0)
    assert (later["name"], later["rev"], later["turns"], later["busy"]) == ("b", 1, 1, False)
    assert later["tokens"] > 5
    assert later["kv_bytes"] >= 0
    assert later["expires"] == 1_000_004 + 7 * 86_400


async def test_long_list_counts_the_tokens_of_the_last_used_only(rig: Rig) -> None:
    client = await rig.client()
    await client.ask({"op": "chat", "session": "@a", "prompt": "x"})
    for number in range(40):
        rig.clock.now += 1
        await client.ask({"op": "session.fork", "session": "@a", "name": f"f{number}"})
    listed = (await client.ask({"op": "session.list"}))["sessions"]
    tokens = {row["name"]: row["tokens"] for row in listed}
    counted = (await client.ask({"op": "session.get", "session": "@f0"}))["tokens"]
    assert tokens["f39"] == counted
    assert tokens["f0"] > 0
    assert [row["name"] for row in listed][:2] == ["f39", "f38"]


@pytest.mark.parametrize(
    ("members", "expected"),
    [
        ({"ttl_s": 0}, ("bad_request", "ttl_s")),
        ({"ttl_s": 90 * 86_400 + 1}, ("bad_request", "ttl_s")),
        ({"overflow": "drop"}, ("bad_request", "overflow")),
        ({"name": ""}, ("bad_request", "name")),
        ({"name": "a\x1b[31m"}, ("bad_request", "name")),
        ({"name": "taken"}, ("conflict", "name")),
    ],
)
async def test_session_that_cannot_be_is_refused_by_field(
    rig: Rig, members: dict[str, Any], expected: tuple[str, str]
) -> None:
    client = await rig.client()
    await client.ask({"op": "session.create", "name": "taken"})
    assert code(await client.ask({"op": "session.create", **members})) == expected


async def test_session_expires_and_is_gone_from_the_disk_too(rig: Rig) -> None:
    client = await rig.client()
    created = await client.ask({"op": "session.create", "ttl_s": 10})
    kept = await client.ask({"op": "session.create"})
    rig.clock.now += 9
    assert (await client.ask({"op": "chat", "session": created["session"], "prompt": "x"}))["rev"] == 1
    rig.clock.now += 9
    assert (await client.ask({"op": "session.get", "session": created["session"]}))["idle_s"] == 9
    rig.clock.now += 1
    assert code(await client.ask({"op": "session.get", "session": created["session"]})) == ("not_found", "session")
    await until(lambda: rig.on_disk() == [(kept["session"], 0)])


async def test_quota_is_said_and_nothing_is_dropped_for_it(tmp_path: Path) -> None:
    async with running(tmp_path, limits=SessionLimits(per_owner=2)) as rig:
        client = await rig.client()
        for name in ("a", "b"):
            await client.ask({"op": "session.create", "name": name})
        for request in (
            {"op": "session.create"},
            {"op": "session.fork", "session": "@a"},
            {"op": "chat", "session": "@c", "prompt": "x"},
        ):
            assert code(await client.ask(request)) == ("quota", None)
        assert (await client.ask({"op": "chat", "session": "@a", "prompt": "x"}))["rev"] == 1
        hello = await client.ask({"op": "hello"})
        assert (hello["limits"]["sessions"], "session" in hello["features"]) == (2, True)


async def test_other_users_sessions_are_not_there(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    client = await rig.client()
    mine = await client.ask({"op": "session.create", "name": "a", "system": "S"})
    monkeypatch.setattr("edgeqwen.server.connection.peer_of", lambda transport: Peer(4000, "4000", is_admin=True))
    stranger = await rig.client()
    for ref in (mine["session"], "@a"):
        for op in ("get", "reset", "fork", "delete"):
            answer = await stranger.ask({"op": f"session.{op}", "session": ref})
            assert code(answer) == ("not_found", "session")
    assert code(await stranger.ask({"op": "chat", "session": mine["session"], "prompt": "x"})) == (
        "not_found",
        "session",
    )
    assert (await stranger.ask({"op": "session.list"}))["sessions"] == []
    own = await stranger.ask({"op": "chat", "session": "@a", "prompt": "x"})
    assert own["session"] != mine["session"]
    assert (await client.ask({"op": "session.get", "session": "@a"}))["rev"] == 0
    assert (await client.ask({"op": "stats"}))["sessions"] == 2


# The end of the context.


@pytest.fixture
async def small(tmp_path: Path) -> AsyncIterator[Rig]:
    """A context of 128 tokens, of which each turn takes about 27."""
    async with running(tmp_path, fake_inference("ok", capacity=128)) as each:
        yield each


async def test_full_session_is_refused_with_numbers_and_stays_as_it_is(small: Rig) -> None:
    client = await small.client()
    rev, final = 0, await client.ask({"op": "chat", "session": "@a", "prompt": "xxxx"})
    while "error" not in final:
        rev = final["rev"]
        assert rev < 20
        final = await client.ask({"op": "chat", "session": "@a", "prompt": "xxxx"})
    assert code(final) == ("too_long", None)
    assert "128" in final["error"]["message"]
    frame = await client.ask({"op": "session.get", "session": "@a"})
    assert (frame["rev"], frame["turns"], frame["busy"]) == (rev, rev, False)


async def test_truncating_session_drops_its_oldest_turns_and_never_the_system_message(small: Rig) -> None:
    client = await small.client()
    await client.ask({"op": "session.create", "name": "a", "system": "S", "overflow": "truncate"})
    num_dropped = 0
    for number in range(1, 16):
        final = await client.ask({"op": "chat", "session": "@a", "prompt": f"q{number:02}", "verbose": True})
        assert (final["rev"], final["finish"]) == (number, "stop")
        num_dropped += final.get("dropped", 0)
        assert len(final["prompt_ids"]) + 128 // 4 <= 128
        kept = range(num_dropped + 1, number + 1)
        assert await said(client, "@a") == [text for n in kept for text in (f"q{n:02}", "ok")]
        prompt = (await client.ask({"op": "detokenize", "tokens": final["prompt_ids"]}))["text"]
        assert prompt.startswith("<|im_start|>system\nS<|im_end|>")
    assert num_dropped > 5
    assert (await client.ask({"op": "session.get", "session": "@a"}))["system"] == "S"
    fork = await client.ask({"op": "session.fork", "session": "@a", "at": 1})
    assert code(fork) == ("bad_request", "at")


async def test_truncating_session_makes_the_room_that_is_asked_for(small: Rig) -> None:
    client = await small.client()
    await client.ask({"op": "session.create", "name": "a", "overflow": "truncate"})
    for _ in range(3):
        final = await client.ask({"op": "chat", "session": "@a", "prompt": "q", "max_tokens": 2})
    assert "dropped" not in final
    final = await client.ask({"op": "chat", "session": "@a", "prompt": "q", "max_tokens": 100})
    assert (final["dropped"], final["finish"]) == (3, "stop")
    refused = await client.ask({"op": "chat", "session": "@a", "prompt": "q" * 200})
    assert code(refused) == ("too_long", None)
    assert await said(client, "@a") == ["q", "ok"]


# The disk.


async def test_sessions_are_there_after_a_restart(tmp_path: Path) -> None:
    async with running(tmp_path, fake_inference(**NO_SCRIPT)) as rig:
        client = await rig.client()
        await client.ask({"op": "session.create", "name": "a", "system": "S", "ttl_s": 500})
        for prompt in ("one", "two"):
            await client.ask({"op": "chat", "session": "@a", "prompt": prompt, "max_tokens": 5})
        gone = await client.ask({"op": "session.create", "ttl_s": 5})
        before = await client.ask({"op": "session.get", "session": "@a", "messages": True})
        options = {"prompt": "three", "max_tokens": 5, "verbose": True}
        await client.ask({"op": "session.fork", "session": "@a", "name": "b"})
        expected = await client.ask({"op": "chat", "session": "@b", **options})
    async with running(tmp_path, fake_inference(**NO_SCRIPT)) as rig:
        rig.clock.now += 100  # the daemon was off
        client = await rig.client()
        after = await client.ask({"op": "session.get", "session": "@a", "messages": True})
        for volatile in ("idle_s", "kv_bytes"):
            before.pop(volatile), after.pop(volatile)
        assert after == before
        assert code(await client.ask({"op": "session.get", "session": gone["session"]})) == ("not_found", "session")
        turn = await client.ask({"op": "chat", "session": "@a", "if_rev": 2, **options})
        assert (turn["text"], turn["prompt_ids"], turn["rev"]) == (expected["text"], expected["prompt_ids"], 3)


class Disk:
    """A disk that can be made to fail, or to wait. `num_waiting` syncs are under way."""

    def __init__(self) -> None:
        self.error: int | None = None
        self.is_free = threading.Event()
        self.is_free.set()
        self.num_waiting = 0

    def fsync(self, fd: int) -> None:
        self.num_waiting += 1
        self.is_free.wait(60)
        self.num_waiting -= 1
        if self.error is not None:
            raise OSError(self.error, os.strerror(self.error))


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[Disk]:
    disk = Disk()
    monkeypatch.setattr(os, "fsync", disk.fsync)
    yield disk
    disk.is_free.set()


async def test_last_frame_goes_out_once_the_turn_is_on_disk(rig: Rig, disk: Disk) -> None:
    client = await rig.client()
    disk.is_free.clear()
    client.send({"op": "chat", "session": "@a", "prompt": "x", "stream": True})
    text = ""
    while not text.endswith("!"):
        frame = await client.read()
        assert frame is not None
        text += frame.get("delta", "")
    await until(lambda: disk.num_waiting == 1 and rig.inference.stats().running == 0)
    other = await rig.client()
    row = (await other.ask({"op": "session.list"}))["sessions"][0]
    assert (row["rev"], row["busy"]) == (0, True)
    assert rig.on_disk() == []
    disk.is_free.set()
    final, frames = await client.read_final()
    assert (final["rev"], frames) == (1, [])
    assert rig.on_disk() == [(final["session"], 1)]
    assert (await client.ask({"op": "chat", "session": "@a", "prompt": "y"}))["rev"] == 2


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EIO])
async def test_answer_comes_though_the_disk_is_full(
    rig: Rig, disk: Disk, caplog: pytest.LogCaptureFixture, number: int
) -> None:
    client = await rig.client()
    disk.error = number
    with caplog.at_level(logging.WARNING):
        created = await client.ask({"op": "session.create", "name": "a"})
        first = await client.ask({"op": "chat", "session": "@a", "prompt": "x"})
        num_records = len(caplog.records)
        second = await client.ask({"op": "chat", "session": "@a", "prompt": "y"})
    assert [frame["saved"] for frame in (created, first, second)] == [False] * 3
    assert (first["text"], second["rev"]) == ("Hello!", 2)
    assert (len(caplog.records), os.strerror(number) in caplog.text) == (num_records, True)
    assert (await client.ask({"op": "stats"}))["session_files"]["unsaved"] == 1
    disk.error = None
    third = await client.ask({"op": "chat", "session": "@a", "prompt": "z"})
    assert (third["rev"], "saved" in third) == (3, False)
    assert (await client.ask({"op": "stats"}))["session_files"]["unsaved"] == 0
    assert rig.on_disk() == [(created["session"], 3)]


async def test_turn_whose_file_is_being_written_at_the_end_of_the_daemon_has_its_last_frame(
    tmp_path: Path, disk: Disk
) -> None:
    async with running(tmp_path) as rig:
        client = await rig.client()
        disk.is_free.clear()
        client.send({"op": "chat", "session": "@a", "prompt": "x"})
        await until(lambda: disk.num_waiting == 1)
        await rig.inference.drain(1.0)
        await rig.inference.close()
        closing = asyncio.create_task(rig.sessions.close())
        await asyncio.sleep(0)
        disk.is_free.set()
        await closing
        final, _ = await client.read_final()
        assert (final["text"], final["rev"], "saved" in final) == ("Hello!", 1, False)
        assert await client.ask({"op": "health"})
        late = await client.ask({"op": "session.list"})
        assert late["sessions"][0]["rev"] == 1


async def test_what_is_damaged_is_counted_and_the_rest_is_served(tmp_path: Path) -> None:
    async with running(tmp_path) as rig:
        client = await rig.client()
        for name in ("a", "b"):
            await client.ask({"op": "chat", "session": f"@{name}", "prompt": "x"})
        gone = (await client.ask({"op": "session.get", "session": "@a"}))["session"]
        path = rig.file_of(gone)
    path.write_bytes(path.read_bytes()[:-1])
    async with running(tmp_path) as rig:
        client = await rig.client()
        stats = await client.ask({"op": "stats"})
        assert stats["sessions"] == 1
        assert stats["session_files"] == {"on_disk": True, "unsaved": 0, "damaged": 1, "later_version": 0}
        assert (await client.ask({"op": "chat", "session": "@b", "prompt": "y"}))["rev"] == 2


async def test_sessions_of_the_disk_are_waited_for(tmp_path: Path) -> None:
    async with running(tmp_path) as rig:
        client = await rig.client()
        await client.ask({"op": "chat", "session": "@a", "prompt": "x"})
    rig = Rig(tmp_path, fake_inference())
    await rig.inference.start()
    early = asyncio.create_task(rig.sessions.answer(SessionGet(session="@a"), owner=str(os.geteuid())))
    await asyncio.sleep(0)
    assert not early.done()
    await rig.sessions.load()
    assert (await early)["rev"] == 1
    await rig.inference.close()
    await rig.sessions.close()


# Settling.


class Wishes:
    """What the engine was asked to settle, by session."""

    def __init__(self, inference: Inference, monkeypatch: pytest.MonkeyPatch) -> None:
        self.ids: dict[str, tuple[int, ...]] = {}
        monkeypatch.setattr(inference, "settle", self._settle)
        monkeypatch.setattr(inference, "unsettle", lambda key: self.ids.pop(key, None))

    def _settle(self, key: str, owner: str, ids: tuple[int, ...]) -> None:
        assert owner == str(os.geteuid())
        self.ids[key] = ids


async def test_finished_turn_is_settled_until_the_session_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inference = fake_inference()
    wishes = Wishes(inference, monkeypatch)
    async with running(tmp_path, inference) as rig:
        client = await rig.client()
        session = (await client.ask({"op": "chat", "session": "@a", "prompt": "x"}))["session"]
        await until(lambda: session in wishes.ids)
        wished = wishes.ids[session]
        final = await client.ask({"op": "chat", "session": "@a", "prompt": "y", "verbose": True})
        assert tuple(final["prompt_ids"][: len(wished)]) == wished
        assert len(wished) > final["usage"]["prompt"] // 2
        await until(lambda: session in wishes.ids)
        await client.ask({"op": "session.reset", "session": "@a"})
        assert not wishes.ids
        await client.ask({"op": "chat", "session": "@a", "prompt": "x"})
        await until(lambda: session in wishes.ids)
        await client.ask({"op": "session.delete", "session": "@a"})
        assert not wishes.ids


async def test_new_turn_takes_the_wish_back_while_it_runs(
    tmp_path: Path, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    inference = fake_inference(gate=gate)
    wishes = Wishes(inference, monkeypatch)
    async with running(tmp_path, inference) as rig:
        gate.opened.set()
        client = await rig.client()
        await client.ask({"op": "chat", "session": "@a", "prompt": "x"})
        await until(lambda: bool(wishes.ids))
        gate.opened.clear()
        turn = await begin_turn(rig)
        assert not wishes.ids
        gate.opened.set()
        await turn.read_final()


async def test_turn_that_wants_no_cache_is_not_settled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inference = fake_inference()
    wishes = Wishes(inference, monkeypatch)
    async with running(tmp_path, inference) as rig:
        client = await rig.client()
        for _ in range(3):
            assert "error" not in await client.ask({"op": "chat", "session": "@a", "prompt": "x", "cache": False})
        assert not wishes.ids


# HTTP.


async def post(rig: Rig, **body: Any) -> tuple[int, Any]:
    reader, writer = await asyncio.open_unix_connection(str(rig.wire.path))
    data = json.dumps(body).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\nConnection: close\r\n\r\n"
    writer.write(head.encode() + data)
    async with asyncio.timeout(GUARD_S):
        answer = await reader.read()
    writer.close()
    head_bytes, _, content = answer.partition(b"\r\n\r\n")
    return int(head_bytes.split()[1]), json.loads(content)


async def test_conversation_over_http_is_a_session_and_takes_history_or_news(rig: Rig) -> None:
    first = {"role": "user", "content": "a"}
    status, body = await post(rig, conversation_id="home", messages=[SYSTEM, first])
    answer = body["choices"][0]["message"]
    assert (status, answer["content"]) == (200, "Hello!")
    whole = [SYSTEM, first, answer, {"role": "user", "content": [{"type": "text", "text": "b"}]}]
    assert (await post(rig, conversation_id="home", messages=whole))[0] == 200
    assert (await post(rig, conversation_id="home", messages=[{"role": "user", "content": "c"}]))[0] == 200
    client = await rig.client()
    assert await said(client, "@home") == ["a", "Hello!", "b", "Hello!", "c", "Hello!"]


@pytest.mark.parametrize(
    ("members", "status", "param"),
    [
        ({"conversation_id": ""}, 400, "conversation_id"),
        ({"conversation_id": "a\x00"}, 400, "conversation_id"),
        ({"conversation_id": 7}, 400, "conversation_id"),
        ({"conversation_id": "a", "n": 2}, 400, "n"),
        ({"conversation_id": "a", "messages": [SYSTEM]}, 400, "messages"),
        ({"conversation_id": "busy"}, 409, "conversation_id"),
    ],
)
async def test_http_errors_speak_of_the_conversation(
    tmp_path: Path, gate: Gate, members: dict[str, Any], status: int, param: str
) -> None:
    async with slow_rig(tmp_path, gate) as rig:
        await begin_turn(rig, session="@busy")
        body = {"messages": [{"role": "user", "content": "x"}], **members}
        got, answer = await post(rig, **body)
        gate.opened.set()
        assert (got, answer["error"]["param"]) == (status, param)


async def test_operations_over_http_serve_sessions(rig: Rig) -> None:
    reader, writer = await asyncio.open_unix_connection(str(rig.wire.path))
    data = b'{"name":"a","id":1}'
    head = f"POST /eqp/session.create HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\nConnection: close\r\n\r\n"
    writer.write(head.encode() + data)
    async with asyncio.timeout(GUARD_S):
        answer = await reader.read()
    writer.close()
    frame = json.loads(answer.partition(b"\r\n\r\n")[2])
    assert (frame["id"], frame["rev"], frame["name"]) == (1, 0, "a")


DOCUMENT = (Path(__file__).parent.parent / "docs" / "protocol.md").read_text(encoding="utf-8")
SEQUENCES = re.findall(r"^```jsonl in order\n(.*?)^```", DOCUMENT, re.DOTALL | re.MULTILINE)


async def test_examples_of_the_document_are_answered_in_their_order(rig: Rig) -> None:
    client = await rig.client()
    (lines,) = SEQUENCES
    for line in lines.splitlines():
        client.write(line.encode() + b"\n")
        final, _ = await client.read_final()
        assert "error" not in final, line


@pytest.mark.parametrize("end", ["session.delete", "session.reset"])
async def test_nothing_is_remembered_of_a_session_that_ends_as_soon_as_its_turn_does(
    rig: Rig, end: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What its next prompt would begin with is being read then."""
    read, opened, num_reads = rig.inference.history_ids, asyncio.Event(), 0

    async def slow_at_first(given: GenerationInput) -> tuple[int, ...]:
        nonlocal num_reads
        num_reads += 1
        ids = await read(given)
        if num_reads == 1:
            await opened.wait()
        return ids

    monkeypatch.setattr(rig.inference, "history_ids", slow_at_first)
    client = await rig.client()
    await client.ask({"op": "chat", "session": "@a", "prompt": "x"})
    assert "error" not in await client.ask({"op": end, "session": "@a"})
    opened.set()
    await client.ask({"op": "tokenize", "text": "x"})
    assert num_reads == 2
    assert not rig.sessions._tokens._known
    assert rig.sessions._tokens._num_remembered == 0
