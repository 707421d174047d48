"""Who may do what, told by the kernel, and limits as the configuration sets them, through real sockets and daemons."""

from __future__ import annotations

import array
import asyncio
import contextlib
import json
import os
import shutil
import socket
import subprocess
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from edgeqwen.protocol.limits import WireLimits
from edgeqwen.protocol.peer import Peer
from edgeqwen.server import peers
from tests.daemons import DaemonProcess, running_daemon
from tests.fronts import CHAT_PATH, call, post
from tests.wire import Gate, Wire, fake_inference, serve, until

SOMEBODY: Final = 12_345
OTHER: Final = 12_346
ADMINS: Final = 4321

needs_users = pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("socat") is None, reason="needs root, to be somebody else, and socat"
)


@contextlib.asynccontextmanager
async def open_to_all(**options: Any) -> AsyncIterator[Wire]:
    """A server whose socket every user may connect to."""
    with tempfile.TemporaryDirectory(prefix="eq-open-") as name:
        async with serve(Path(name), **options) as wire:
            os.chmod(name, 0o711)
            os.chmod(wire.path, 0o666)
            yield wire


async def ask_as(wire: Wire, uid: int, *requests: dict[str, Any], groups: tuple[int, ...] = ()) -> list[dict[str, Any]]:
    """The final frames that a process of another user gets."""
    command = ("socat", "-t", "20", "-", f"UNIX-CONNECT:{wire.path}")
    lines = b"".join(json.dumps(each).encode() + b"\n" for each in requests)
    out = await asyncio.to_thread(
        subprocess.check_output, command, input=lines, timeout=30, user=uid, group=uid, extra_groups=groups
    )
    frames = [json.loads(line) for line in out.splitlines() if line]
    return [frame for frame in frames if frame["done"]]


def codes(frames: list[dict[str, Any]]) -> list[str]:
    return [frame["error"]["code"] if "error" in frame else "well" for frame in frames]


@needs_users
async def test_members_of_the_admin_group_are_admins_and_others_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "admin_gid", lambda: ADMINS)
    async with open_to_all() as wire:
        stop = {"op": "shutdown", "drain_s": 1}
        assert codes(await ask_as(wire, SOMEBODY, stop)) == ["forbidden"]
        assert codes(await ask_as(wire, SOMEBODY, stop, groups=(ADMINS + 1, 7))) == ["forbidden"]
        assert wire.shutdowns == []
        assert codes(await ask_as(wire, SOMEBODY, stop, groups=(7, ADMINS))) == ["well"]
        assert codes(await ask_as(wire, ADMINS, stop)) == ["well"], "it may be the primary group, too"
        assert wire.shutdowns == [1, 1]


@needs_users
async def test_without_the_admin_group_there_are_no_admins_by_group(monkeypatch: pytest.MonkeyPatch) -> None:
    peers.admin_gid.cache_clear()
    monkeypatch.setattr(peers, "ADMIN_GROUP", "a-group-that-there-is-not")
    async with open_to_all() as wire:
        assert codes(await ask_as(wire, SOMEBODY, {"op": "shutdown"}, groups=(0, 7))) == ["forbidden"]
        assert wire.shutdowns == []
    peers.admin_gid.cache_clear()


@needs_users
async def test_a_user_that_is_nobody_in_particular_is_refused() -> None:
    async with open_to_all() as wire:
        assert codes(await ask_as(wire, 65_534)) == ["forbidden"], "before it has said anything"
        assert codes(await ask_as(wire, SOMEBODY, {"op": "health"})) == ["well"]


@needs_users
async def test_users_see_nothing_of_each_other() -> None:
    async with open_to_all(inference=fake_inference("z" * 2000, step_s=0.005)) as wire:
        mine = await wire.connect()
        mine.send({"op": "chat", "id": 1, "prompt": "x", "stream": True, "max_tokens": 2000})
        rid = (await mine.read() or {})["rid"]
        name = {"session": "@talk"}
        own = await ask_as(wire, SOMEBODY, {"op": "session.create", "name": "talk"}, {"op": "session.list"})
        assert codes(own) == ["well", "well"]
        named = {"session": own[0]["session"]}
        kinds = ("session.get", "session.reset", "session.delete", "session.fork")
        wished = [{"op": op, **which} for op in kinds for which in (name, named)]
        assert set(codes(await ask_as(wire, OTHER, *wished))) == {"not_found"}
        cancel, turn = {"op": "cancel", "rid": rid}, {"op": "chat", **named, "prompt": "x", "max_tokens": 2}
        assert codes(await ask_as(wire, OTHER, cancel, turn)) == ["not_found", "not_found"]
        assert (await ask_as(wire, OTHER, {"op": "session.list"}))[0]["sessions"] == []
        assert wire.inference.stats().running == 1
        assert (await ask_as(wire, SOMEBODY, {"op": "session.list"}))[0]["sessions"][0]["session"] == own[0]["session"]


@needs_users
async def test_one_connection_is_left_for_root_when_somebody_takes_all() -> None:
    limits = WireLimits(connections=3, connections_per_uid=3)
    async with open_to_all(limits=limits) as wire:
        command = ("socat", "-t", "20", "-", f"UNIX-CONNECT:{wire.path}")
        held = [
            await asyncio.to_thread(subprocess.Popen, command, stdin=subprocess.PIPE, user=SOMEBODY, group=SOMEBODY)
            for _ in range(2)
        ]
        try:
            await until(lambda: len(wire.server.connections) == 2)
            assert codes(await ask_as(wire, OTHER)) == ["busy"]
            assert (await (await wire.connect()).ask({"op": "health"}))["ok"]
        finally:
            for process in held:
                process.kill()
                process.communicate()


async def test_sixteen_connections_of_one_user_are_no_more_than_one_of_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    who = iter([Peer(1001, "1001", is_admin=False)] * 16 + [Peer(1002, "1002", is_admin=False)])
    monkeypatch.setattr("edgeqwen.server.connection.peer_of", lambda transport: next(who))
    async with serve(tmp_path, fake_inference("z" * 30, num_slots=1, step_s=0.002)) as wire:
        many = [await wire.connect() for _ in range(16)]
        for client in many:
            client.send({"op": "chat", "prompt": "x", "max_tokens": 20})
        await until(lambda: wire.inference.stats().queued == 15)
        one = await wire.connect()
        assert (await one.ask({"op": "chat", "prompt": "y", "max_tokens": 20}))["usage"]["completion"] == 20
        assert wire.inference.stats().queued >= 12, "it has waited for one or two of them, not for all"
        for client in many:
            assert "error" not in (await client.read_final())[0]


async def test_descriptors_that_are_sent_along_are_not_taken(tmp_path: Path) -> None:
    async with serve(tmp_path) as wire:
        client = await wire.connect()
        await client.ask({"op": "health"})
        before = len(os.listdir("/proc/self/fd"))
        with socket.socket(socket.AF_UNIX) as sock, socket.socket(socket.AF_UNIX) as other:
            sock.connect(str(wire.path))
            rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [other.fileno()] * 64))]
            for _ in range(50):
                sock.sendmsg([b'{"op":"health"}\n'], rights)
            await until(lambda: len(wire.server.connections) == 2)
            sock.setblocking(False)
            answered = b""
            while answered.count(b"\n") < 50:
                answered += await asyncio.wait_for(asyncio.get_running_loop().sock_recv(sock, 65_536), 10)
            assert len(os.listdir("/proc/self/fd")) == before + 3, (
                "the socket, its other end, and the one that was sent"
            )


# Limits.

SMALL: Final = {
    "LINE_BYTES": 2048, "NESTING": 8, "MESSAGES": 3, "STOP_STRINGS": 2, "STOP_BYTES": 4, "INFLIGHT": 2,
    "BATCH_ITEMS": 2, "QUEUE": 5, "PER_UID": 4, "CONNECTIONS": 9, "CONNECTIONS_PER_UID": 7, "MAX_DEADLINE_MS": 5000,
}  # fmt: skip


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonProcess]:
    environ = {f"EDGEQWEN_LIMITS_{name}": str(value) for name, value in SMALL.items()}
    environ["STATE_DIRECTORY"] = str(tmp_path_factory.mktemp("state"))
    environ |= {"EDGEQWEN_SESSIONS_PER_UID": "2", "EDGEQWEN_SESSIONS_TTL_S": "60"}
    with running_daemon("fake:", environ=environ) as daemon:
        yield daemon


def test_hello_shows_the_limits_as_they_are_configured(small: DaemonProcess) -> None:
    hello = call(small, "hello")
    names = {
        "line": "LINE_BYTES", "nesting": "NESTING", "messages": "MESSAGES", "stop": "STOP_STRINGS",
        "stop_bytes": "STOP_BYTES", "inflight": "INFLIGHT", "batch": "BATCH_ITEMS", "queue": "QUEUE",
        "per_uid": "PER_UID", "connections": "CONNECTIONS", "connections_per_uid": "CONNECTIONS_PER_UID",
        "deadline_ms": "MAX_DEADLINE_MS",
    }  # fmt: skip
    assert {name: hello["limits"][name] for name in names} == {name: SMALL[key] for name, key in names.items()}
    assert (hello["limits"]["sessions"], hello["limits"]["session_ttl_s"]) == (2, 60)
    assert {"batch", "embed", "http", "response_format", "session", "tools"} <= set(hello["features"])


def user(number: int) -> list[dict[str, str]]:
    return [{"role": "user", "content": "x"}] * number


@pytest.mark.parametrize(
    ("members", "field"),
    [
        ({"messages": user(4)}, "messages"),
        ({"messages": user(1), "stop": ["a", "b", "c"]}, "stop"),
        ({"messages": user(1), "stop": ["abcde"]}, "stop"),
        ({"messages": user(1), "deadline_ms": 5001}, "deadline_ms"),
    ],
)
def test_configured_limits_of_a_request_hold_on_both_fronts(
    small: DaemonProcess, members: dict[str, Any], field: str
) -> None:
    frame = call(small, "chat", **members)
    assert (frame["error"], frame["field"]) == ("bad_request", field)
    status, body = post(small, CHAT_PATH, members)
    assert (status, json.loads(body)["error"]["param"]) == (400, field)


def test_requests_at_the_configured_limits_are_served(small: DaemonProcess) -> None:
    given: dict[str, Any] = {"messages": user(3), "stop": ["abcd", "e"], "deadline_ms": 5000, "max_tokens": 2}
    assert "error" not in call(small, "chat", **given)
    status, _ = post(small, CHAT_PATH, given)
    assert status == 200


def test_configured_limits_of_lines_and_bodies_hold_on_both_fronts(small: DaemonProcess) -> None:
    nested: Any = "x"
    for _ in range(9):
        nested = [nested]
    assert call(small, "health", x_note=nested)["error"] == "bad_json"
    assert post(small, "/eqp/health", {"x_note": nested})[0] == 400
    assert call(small, "health", x_note="x" * 2048)["error"] == "too_large"
    assert post(small, "/eqp/health", {"x_note": "x" * 2048})[0] == 413
    assert call(small, "batch", items=[{"prompt": "x"}] * 3)["error"] == "bad_request"


def test_configured_number_of_sessions_is_the_quota(small: DaemonProcess) -> None:
    made = [call(small, "session.create") for _ in range(3)]
    assert [each.get("error") for each in made] == [None, None, "quota"]
    assert call(small, "session.get", session=made[0]["session"])["ttl_s"] == 60
    for each in made[:2]:
        call(small, "session.delete", session=each["session"])


# Frames of answers that were never checked by a request of their own.


async def test_wait_false_is_an_error_at_once_while_the_model_loads(tmp_path: Path) -> None:
    gate = Gate()
    async with serve(tmp_path, fake_inference(gate=gate, load_s=0.1), is_loaded=False) as wire:
        client = await wire.connect()
        client.send({"op": "chat", "id": 1, "prompt": "x"})
        refused = await client.ask({"op": "chat", "id": 2, "prompt": "x", "wait": False})
        assert refused["error"]["code"] == "loading"
        assert refused["error"]["retry_ms"] > 0
        gate.opened.set()
        final, _ = await client.read_final()
        assert (final["id"], final["text"]) == (1, "Hello!")


async def test_verbose_shows_what_was_resolved_and_the_prompt(wire: Wire) -> None:
    client = await wire.connect()
    final = await client.ask({"op": "generate", "prompt": "ab", "verbose": True, "top_k": 7, "max_tokens": 3})
    assert (final["params"]["top_k"], final["params"]["max_tokens"]) == (7, 3)
    tokens = (await client.ask({"op": "tokenize", "text": "ab"}))["tokens"]
    assert final["prompt_ids"] == tokens
    assert "params" not in await client.ask({"op": "generate", "prompt": "ab", "max_tokens": 3})
