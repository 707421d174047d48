"""What `stats` tells whom: an admin of everybody, everybody else of the daemon and of themselves."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import jsonschema_rs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgeqwen.engine.tallies import Tallies, Tally
from edgeqwen.http.access import ApiKeys
from edgeqwen.protocol.peer import Peer
from tests.http_client import connect
from tests.test_network import LOCAL, ONE, OTHER, key, listening
from tests.test_openapi import document
from tests.test_wire_limits import OTHER as SOMEBODY_ELSE
from tests.test_wire_limits import SOMEBODY, ask_as, needs_users, open_to_all
from tests.wire import Gate, Wire, WireClient, fake_inference, serve, until

FACTS: Final = {"done", "uptime_s", "rss_bytes", "slots", "waiting", "tok_s", "threads"}
NOTHING: Final = {"requests": 0, "errors": 0, "tokens": 0}
STATS: Final = {"op": "stats"}

Become = Callable[[Peer], None]


@pytest.fixture
def become(monkeypatch: pytest.MonkeyPatch) -> Become:
    """Who makes the next connections."""

    def become(peer: Peer) -> None:
        monkeypatch.setattr("edgeqwen.server.connection.peer_of", lambda transport: peer)

    return become


def user(uid: int) -> Peer:
    return Peer(uid, str(uid), is_admin=False)


async def connect_as(wire: Wire, become: Become, peer: Peer) -> WireClient:
    become(peer)
    client = await wire.connect()
    await client.ask({"op": "health"})  # so that the connection is this peer's
    return client


def own(frame: dict[str, Any]) -> dict[str, Any]:
    """What of a frame is about the one that asks."""
    return {name: value for name, value in frame.items() if name not in FACTS}


async def test_users_are_told_of_themselves_alone_and_an_admin_of_all(tmp_path: Path, become: Become) -> None:
    async with serve(tmp_path, fake_inference(kv_bytes_per_token=10)) as wire:
        one, other = [await connect_as(wire, become, user(uid)) for uid in (1001, 1002)]
        before = await other.ask(STATS)
        chat = await one.ask({"op": "chat", "session": "@a", "prompt": "x"})
        await one.ask({"op": "chat", "prompt": "y"})
        await until(lambda: wire.inference.stats().kv["block_bytes"] > 0)
        assert own(await other.ask(STATS)) == own(before)
        mine = await one.ask(STATS)
        assert own(before) == {
            "scope": "own",
            "conns": 1,
            "running": 0,
            "queued": 0,
            "requests": [],
            "sessions": 0,
            "kv_bytes": 0,
            "totals": NOTHING,
            "kv": {"budget_bytes": before["kv"]["budget_bytes"], "cached": 0},
            "session_files": {"on_disk": False, "unsaved": 0},
        }
        assert mine["totals"] == {"requests": 2, "errors": 0, "tokens": 2 * chat["usage"]["completion"]}
        assert (mine["scope"], mine["conns"], mine["sessions"]) == ("own", 1, 1)
        assert mine["session_files"] == {"on_disk": False, "unsaved": 1}
        assert mine["kv_bytes"] > 0
        everything = await (await connect_as(wire, become, Peer(1003, "1003", is_admin=True))).ask(STATS)
        assert (everything["scope"], everything["conns"], everything["sessions"]) == ("all", 3, 1)
        assert everything["totals"] == mine["totals"]
        assert everything["kv_bytes"] >= mine["kv_bytes"], "what requests still hold counts too"
        assert {"damaged", "later_version"} < set(everything["session_files"])
        assert set(mine) <= set(everything)


async def test_who_runs_is_told_to_the_runner_and_that_somebody_waits_to_all(tmp_path: Path, become: Become) -> None:
    async with serve(tmp_path, fake_inference("z" * 2000, step_s=0.005, num_slots=1)) as wire:
        one, other = [await connect_as(wire, become, user(uid)) for uid in (1001, 1002)]
        one.send(*({"op": "chat", "id": n, "prompt": "x", "stream": True, "max_tokens": 2000} for n in range(3)))
        await until(lambda: (wire.inference.stats().running, wire.inference.stats().queued) == (1, 2))
        theirs = await other.ask(STATS)
        assert (theirs["running"], theirs["queued"], theirs["totals"]) == (0, 0, NOTHING)
        assert (theirs["slots"], theirs["waiting"]) == (1, 2)
        mine = await (await connect_as(wire, become, user(1001))).ask(STATS)
        assert (mine["running"], mine["queued"], mine["waiting"], mine["conns"]) == (1, 2, 2, 2)
        assert mine["totals"]["requests"] == 3


async def test_tokens_and_prompts_that_were_known_are_counted_for_their_owner(tmp_path: Path, become: Become) -> None:
    async with serve(tmp_path) as wire:
        one, other = [await connect_as(wire, become, user(uid)) for uid in (1001, 1002)]
        ask = {"op": "chat", "prompt": "x" * 100}
        await one.ask(ask)
        cached = (await one.ask(ask))["usage"]["cached"]
        assert cached > 0
        assert (await one.ask(STATS))["kv"]["cached"] == cached
        assert (await other.ask(STATS))["kv"]["cached"] == 0


async def test_an_error_is_its_owners(tmp_path: Path, become: Become) -> None:
    async with serve(tmp_path, fake_inference(fail_at_step=1)) as wire:
        one, other = [await connect_as(wire, become, user(uid)) for uid in (1001, 1002)]
        assert (await one.ask({"op": "chat", "prompt": "x"}))["error"]["code"] == "engine"
        assert (await one.ask(STATS))["totals"]["errors"] == 1
        assert (await other.ask(STATS))["totals"] == NOTHING


async def test_while_the_model_is_loaded_each_sees_what_it_has_waiting(tmp_path: Path, become: Become) -> None:
    gate = Gate()
    async with serve(tmp_path, fake_inference(gate=gate, load_s=0.01), is_loaded=False) as wire:
        one, other = [await connect_as(wire, become, user(uid)) for uid in (1001, 1002)]
        one.send({"op": "chat", "id": 1, "prompt": "x"})
        await until(lambda: wire.inference.stats().queued == 1)
        theirs = await other.ask(STATS)
        assert wire.inference.state == "loading"
        assert (theirs["queued"], theirs["waiting"], theirs["slots"]) == (0, 1, 0)
        gate.opened.set()
        await one.read_final()


@pytest.mark.parametrize(("method", "path"), [("GET", "/stats"), ("POST", "/eqp/stats")])
async def test_http_tells_a_user_the_same(tmp_path: Path, become: Become, method: str, path: str) -> None:
    async with serve(tmp_path) as wire:
        line = await connect_as(wire, become, user(1001))
        await line.ask({"op": "chat", "prompt": "x"})
        for uid, requests in ((1001, 1), (1002, 0)):
            become(user(uid))
            client = await connect(wire)
            told = (await client.ask(method, path, {} if method == "POST" else None)).json
            assert (told["scope"], told["totals"]["requests"]) == ("own", requests)


async def test_the_file_of_the_routes_says_what_an_admin_is_told_and_what_others_are(
    tmp_path: Path, become: Become
) -> None:
    schemas = document()["components"]["schemas"]
    validator = jsonschema_rs.Draft202012Validator(schemas["Statistics"])
    async with serve(tmp_path) as wire:
        for peer in (user(1001), Peer(1002, "1002", is_admin=True)):
            become(peer)
            validator.validate((await (await connect(wire)).ask("GET", "/stats")).json)


@pytest.mark.parametrize(("method", "path"), [("GET", "/stats"), ("POST", "/eqp/stats")])
async def test_a_key_is_told_of_what_was_done_with_it(tmp_path: Path, method: str, path: str) -> None:
    async with listening(tmp_path, keys=ApiKeys((ONE, OTHER))) as (wire, port):
        client = await port.connect()
        body: dict[str, Any] | None = {} if method == "POST" else None
        await client.ask("POST", "/eqp/chat", {"prompt": "x", "session": "@a"}, headers=key(ONE))
        for value, number in ((ONE, 1), (OTHER, 0)):
            told = (await client.ask(method, path, body, headers=key(value))).json
            assert (told["scope"], told["totals"]["requests"], told["sessions"]) == ("own", number, number)
            assert "conns" not in told, "a connection is nobody's: the next request may bring another key"
        assert wire.inference.stats().totals["requests"] == 1


async def test_without_keys_all_of_the_network_are_one(tmp_path: Path) -> None:
    async with listening(tmp_path) as (wire, port):
        await (await connect(wire)).ask("POST", "/eqp/chat", {"prompt": "x"}, headers=LOCAL)
        await (await port.connect()).ask("POST", "/eqp/chat", {"prompt": "x"}, headers=LOCAL)
        told = (await (await port.connect()).ask("GET", "/stats", headers=LOCAL)).json
        assert (told["scope"], told["totals"]["requests"]) == ("own", 1)
        assert wire.inference.stats().totals["requests"] == 2


@needs_users
async def test_the_kernel_says_whose_numbers_they_are() -> None:
    async with open_to_all() as wire:
        await ask_as(wire, SOMEBODY, {"op": "chat", "session": "@a", "prompt": "x"})
        await until(lambda: not wire.server.connections)
        mine = (await ask_as(wire, SOMEBODY, STATS))[0]
        assert (mine["scope"], mine["totals"]["requests"], mine["sessions"], mine["conns"]) == ("own", 1, 1, 1)
        theirs = (await ask_as(wire, SOMEBODY_ELSE, STATS))[0]
        assert (theirs["scope"], theirs["totals"], theirs["sessions"], theirs["kv_bytes"]) == ("own", NOTHING, 0, 0)
        root = await (await wire.connect()).ask(STATS)
        assert (root["scope"], root["totals"]["requests"], root["sessions"]) == ("all", 1, 1)


# The tallies.


@given(st.lists(st.tuples(st.sampled_from("abcdef"), st.sampled_from(["request", "token", "failure"]))))
def test_only_so_many_owners_are_remembered_and_the_total_counts_all(events: list[tuple[str, str]]) -> None:
    tallies = Tallies(most=3)
    latest: dict[str, None] = {}
    for owner, kind in events:
        getattr(tallies, f"add_{kind}")(owner)
        if kind == "request":
            latest.pop(owner, None)
            latest[owner] = None
    kinds = [kind for _, kind in events]
    assert len(tallies) == min(3, len(latest))
    assert tallies.total == Tally(kinds.count("request"), kinds.count("failure"), kinds.count("token"))
    remembered, forgotten = list(latest)[-3:], list(latest)[:-3]
    assert all(tallies.of(owner).num_requests > 0 for owner in remembered)
    assert all(tallies.of(owner) == Tally() for owner in forgotten)


def test_an_owner_that_asks_again_is_remembered_longer() -> None:
    tallies = Tallies(most=2)
    for owner in ("a", "b", "a", "c"):
        tallies.add_request(owner)
    assert [tallies.of(owner).num_requests for owner in "abc"] == [2, 0, 1]


def test_what_comes_of_a_request_after_its_owner_was_forgotten_counts_in_the_total_alone() -> None:
    tallies = Tallies(most=1)
    tallies.add_request("a")
    tallies.add_request("b")
    tallies.add_token("a")
    tallies.add_cached("a", 5)
    assert (tallies.of("a"), len(tallies)) == (Tally(), 1)
    assert tallies.total == Tally(num_requests=2, num_tokens=1, num_cached=5)
