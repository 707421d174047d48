"""The TCP port: HTTP only, keys, names, origins, and what nobody may do there."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from edgeqwen.engine.inference import Inference
from edgeqwen.errors import ConfigInvalid
from edgeqwen.http.access import ApiKeys, HttpAccess
from edgeqwen.protocol.limits import WireLimits
from edgeqwen.server.network import bind_network, bound_address, parse_address
from tests.daemons import run_command, running_daemon, script_of, write_text_model
from tests.http_client import HttpClient, connect
from tests.wire import GUARD_S, Wire, WireClient, fake_inference, serve, until

CHAT = "/v1/chat/completions"
USER = [{"role": "user", "content": "x"}]
LONG = "x" * 2000
ONE, OTHER = "the-key-of-someone", "the-key-of-another"
LOCAL = {"Host": "localhost"}


@dataclass
class Port:
    """The port that a server listens on; its connections are closed with the server."""

    wire: Wire
    number: int

    async def connect(self) -> HttpClient:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.number)
        self.wire.clients.append(WireClient(reader, writer))
        return HttpClient(reader, writer)


@contextlib.asynccontextmanager
async def listening(
    folder: Path, inference: Inference | None = None, limits: WireLimits | None = None, **access: Any
) -> AsyncIterator[tuple[Wire, Port]]:
    """A server on a Unix socket and a port of its own."""
    async with serve(folder, inference, limits, access=HttpAccess(**access)) as wire:
        sock = bind_network(parse_address("127.0.0.1:0"), has_keys=False)
        port = Port(wire, bound_address(sock).port)
        await wire.server.start_network(sock)
        yield wire, port


def key(value: str) -> dict[str, str]:
    return {**LOCAL, "Authorization": f"Bearer {value}"}


async def test_both_listeners_serve_the_same_routes(tmp_path: Path) -> None:
    async with listening(tmp_path) as (wire, port):
        for client in (await connect(wire), await port.connect()):
            answer = await client.ask("POST", CHAT, {"messages": USER}, headers=LOCAL)
            assert answer.json["choices"][0]["message"]["content"] == "Hello!"
            frames = (await client.ask("POST", "/eqp/chat", {"prompt": "x"}, headers=LOCAL)).lines
            assert frames[0]["text"] == "Hello!"


@pytest.mark.parametrize("data", [b'{"op":"chat","prompt":"x"}\n', b'  {"op":"health"}', b"\x16\x03\x01\x02"])
async def test_lines_are_refused_on_the_port_with_a_word(tmp_path: Path, data: bytes) -> None:
    async with listening(tmp_path) as (wire, port):
        client = await port.connect()
        client.writer.write(data)
        async with asyncio.timeout(GUARD_S):
            received = await client.reader.read()
        error = json.loads(received)["error"]
        assert (error["code"], "HTTP only" in error["message"]) == ("forbidden", True)
        assert wire.inference.stats().totals["requests"] == 0


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Host": "localhost"}, 200),
        ({"Host": "LOCALHOST:80"}, 200),
        ({"Host": "127.0.0.1:8080"}, 200),
        ({"Host": "[::1]:8080"}, 200),
        ({"Host": "box.example:1"}, 200),
        ({"Host": "evil.example"}, 403),
        ({"Host": "localhost.evil.example"}, 403),
        ({"Host": "localhost@evil.example"}, 403),
        ({"Host": "x", "Origin": "http://x"}, 403),
        ({"Host": "localhost", "Origin": "http://evil.example"}, 403),
        ({"Host": "evil.example", "Origin": "http://evil.example"}, 403),
        ({"Host": "localhost:1", "Origin": "http://localhost:1"}, 200),
        ({"Host": "box.example", "Origin": "http://box.example"}, 200),
        ({"Host": "localhost", "Origin": "https://page.example", "Sec-Fetch-Site": "cross-site"}, 200),
        ({"Host": "localhost", "Origin": "https://page.example.evil.example"}, 403),
        ({"Host": "localhost", "Sec-Fetch-Site": "cross-site"}, 403),
    ],
)
async def test_names_and_origins_that_are_not_known_are_refused(
    tmp_path: Path, headers: Mapping[str, str], status: int
) -> None:
    hosts, origins = frozenset({"box.example"}), frozenset({"https://page.example"})
    async with listening(tmp_path, allowed_hosts=hosts, allowed_origins=origins) as (wire, port):
        answer = await (await port.connect()).ask("POST", CHAT, {"messages": USER}, headers=headers)
        assert answer.status == status
        assert wire.inference.stats().totals["requests"] == (status == 200)
        allowed = answer.headers.get("access-control-allow-origin")
        assert allowed == ("https://page.example" if headers.get("Origin") == "https://page.example" else None)


@pytest.mark.parametrize(
    "head", [b"GET /health HTTP/1.0\r\n\r\n", b"GET /health HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n"]
)
async def test_a_request_must_say_one_name(tmp_path: Path, head: bytes) -> None:
    async with listening(tmp_path) as (_, port):
        client = await port.connect()
        client.writer.write(head)
        assert (await client.read()).status in {400, 403}


async def test_a_page_of_a_configured_origin_may_ask_what_it_may_send(tmp_path: Path) -> None:
    keys = ApiKeys((ONE,))
    async with listening(tmp_path, allowed_origins=frozenset({"https://page.example"}), keys=keys) as (_, port):
        client = await port.connect()
        asked = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}
        page = {**LOCAL, "Origin": "https://page.example"}
        answer = await client.ask("OPTIONS", CHAT, headers={**page, **asked})
        assert answer.status == 204
        assert answer.headers["access-control-allow-origin"] == "https://page.example"
        assert answer.headers["access-control-allow-headers"] == "authorization"
        foreign = await client.ask("OPTIONS", CHAT, headers={**LOCAL, **asked, "Origin": "https://other.example"})
        assert (foreign.status, "access-control-allow-origin" in foreign.headers) == (403, False)
        without = await client.ask("POST", CHAT, {"messages": USER}, headers=page)
        assert (without.status, "access-control-allow-origin" in without.headers) == (401, True)
        body = {"messages": USER, "stream": True}
        streamed = await client.ask("POST", CHAT, body, headers=page | key(ONE))
        assert (streamed.status, streamed.headers["access-control-allow-origin"]) == (200, "https://page.example")
        lines = await client.ask("POST", "/eqp/chat", {"prompt": "x", "stream": True}, headers=page | key(ONE))
        assert lines.headers["access-control-allow-origin"] == "https://page.example"


async def test_a_key_is_needed_where_there_are_keys(tmp_path: Path) -> None:
    async with listening(tmp_path, keys=ApiKeys((ONE, OTHER))) as (wire, port):
        client = await port.connect()
        for headers in (LOCAL, key("wrong-key-of-nobody"), key(""), {**LOCAL, "Authorization": f"Basic {ONE}"}):
            answer = await client.ask("POST", CHAT, {"messages": USER}, headers=headers)
            assert (answer.status, answer.headers["www-authenticate"]) == (401, "Bearer")
            assert answer.json["error"]["code"] == "forbidden"
        refused = await client.ask("POST", "/v1/messages", {}, headers=LOCAL)
        assert (refused.status, refused.json["error"]["type"]) == (401, "authentication_error")
        for headers in (key(ONE), key(OTHER), {**LOCAL, "x-api-key": ONE}):
            assert (await client.ask("POST", CHAT, {"messages": USER}, headers=headers)).status == 200
        assert (await client.ask("GET", "/health", headers=LOCAL)).status == 200
        assert (await client.ask("GET", "/stats", headers=LOCAL)).status == 401
        assert (await (await connect(wire)).ask("POST", CHAT, {"messages": USER})).status == 200


async def sessions_of(client: HttpClient, headers: Mapping[str, str]) -> list[str]:
    answer = await client.ask("POST", "/eqp/session.list", {}, headers=headers)
    return [session["name"] for session in answer.lines[0]["sessions"]]


async def test_what_is_done_with_a_key_belongs_to_the_key(tmp_path: Path) -> None:
    async with listening(tmp_path, keys=ApiKeys((ONE, OTHER))) as (wire, port):
        client, local = await port.connect(), await connect(wire)
        for headers, name in ((key(ONE), "one"), (key(OTHER), "other")):
            body = {"messages": USER, "conversation_id": name}
            assert (await client.ask("POST", CHAT, body, headers=headers)).status == 200
        assert await sessions_of(client, key(ONE)) == ["one"]
        assert await sessions_of(client, key(OTHER)) == ["other"]
        assert await sessions_of(local, LOCAL) == []


async def test_without_keys_all_network_clients_are_one(tmp_path: Path) -> None:
    async with listening(tmp_path) as (wire, port):
        body = {"messages": USER, "conversation_id": "shared"}
        assert (await (await port.connect()).ask("POST", CHAT, body, headers=LOCAL)).status == 200
        assert await sessions_of(await port.connect(), LOCAL) == ["shared"]
        assert await sessions_of(await connect(wire), LOCAL) == []


@pytest.mark.parametrize(("op", "members"), [("shutdown", {}), ("reload", {}), ("cancel", {"rid": "r1"})])
async def test_a_network_client_is_never_an_admin(tmp_path: Path, op: str, members: dict[str, Any]) -> None:
    async with listening(tmp_path) as (wire, port):
        answer = await (await port.connect()).ask("POST", f"/eqp/{op}", members, headers=LOCAL)
        assert (answer.status, answer.lines[0]["error"]["code"]) == (403, "forbidden")
        assert not wire.shutdowns
        assert not wire.reloads


@pytest.mark.parametrize("is_stream", [True, False])
@pytest.mark.parametrize("is_half_closed", [True, False])
async def test_hanging_up_cancels_over_the_network_too(tmp_path: Path, is_stream: bool, is_half_closed: bool) -> None:
    async with listening(tmp_path, fake_inference(LONG, step_s=0.05)) as (wire, port):
        client = await port.connect()
        client.send("POST", CHAT, {"messages": USER, "stream": is_stream}, headers=LOCAL)
        await until(lambda: wire.inference.stats().running == 1)
        if is_half_closed:
            client.writer.write_eof()
        else:
            client.writer.close()
        await until(lambda: wire.inference.stats().running == 0)
        assert wire.inference.stats().totals["tokens"] < len(LONG) / 2


async def test_what_takes_no_time_is_answered_after_the_end_of_input(tmp_path: Path) -> None:
    async with listening(tmp_path) as (_, port):
        client = await port.connect()
        client.send("GET", "/health", headers=LOCAL)
        client.writer.write_eof()
        assert (await client.read()).status == 200
        assert await client.is_closed()


async def test_connections_of_the_network_leave_room_for_the_socket(tmp_path: Path) -> None:
    async with listening(tmp_path, None, WireLimits(connections=8, connections_per_uid=2)) as (wire, port):
        held = [await port.connect() for _ in range(2)]
        await until(lambda: len(wire.server.connections) == 2)
        refused = await (await port.connect()).read()
        assert (refused.status, refused.headers["retry-after"]) == (429, "1")
        assert refused.json["error"]["code"] == "quota"
        assert (await (await connect(wire)).ask("GET", "/health")).status == 200
        assert (await held[0].ask("GET", "/health", headers=LOCAL)).status == 200


# Addresses, files, the daemon.


@pytest.mark.parametrize(
    ("text", "shown"),
    [("127.0.0.1:8080", "127.0.0.1:8080"), ("localhost:1", "127.0.0.1:1"), ("[::1]:65535", "[::1]:65535")],
)
def test_addresses_are_read(text: str, shown: str) -> None:
    assert str(parse_address(text)) == shown


@pytest.mark.parametrize(
    "text", ["", "8080", ":8080", "127.0.0.1", "::1:8080", "[127.0.0.1]:1", "example.org:80", "127.0.0.1:65536", "1:x"]
)
def test_other_addresses_are_refused_by_name(text: str) -> None:
    with pytest.raises(ConfigInvalid, match=r"http\.listen"):
        parse_address(text)


@pytest.mark.parametrize("text", ["0.0.0.0:0", "[::]:0", "192.0.2.1:0"])
def test_an_address_that_others_reach_needs_keys(text: str) -> None:
    with pytest.raises(ConfigInvalid, match=r"http\.api_key_file"):
        bind_network(parse_address(text), has_keys=False)


def test_an_address_in_use_is_said() -> None:
    first = bind_network(parse_address("127.0.0.1:0"), has_keys=False)
    with first, pytest.raises(ConfigInvalid, match="cannot listen"):
        bind_network(bound_address(first), has_keys=False)


def write_keys(folder: Path, text: str, mode: int = 0o600) -> Path:
    path = folder / "keys"
    path.write_text(text)
    path.chmod(mode)
    return path


def test_keys_are_read_and_told_apart(tmp_path: Path) -> None:
    keys = ApiKeys.read(write_keys(tmp_path, f"# of the house\n{ONE}\n\n{OTHER}\n"))
    owners = [keys.owner_of(value) for value in (ONE, OTHER, ONE[:-1], "", "# of the house", "\udcff")]
    assert owners[2:] == [None] * 4
    assert None not in owners[:2]
    assert owners[0] != owners[1]
    assert not any(ONE in str(owner) for owner in owners)
    assert ApiKeys((ONE,)).owner_of(ONE) == owners[0]


@pytest.mark.parametrize(
    ("text", "mode", "named"),
    [
        (ONE, 0o644, "open to others"),
        (ONE, 0o660, "open to others"),
        ("short\n", 0o600, "key 1"),
        (f"{ONE}\nwith a space in it\n", 0o600, "key 2"),
        ("# none\n", 0o600, "no key"),
    ],
)
def test_a_file_of_keys_that_will_not_do_is_refused(tmp_path: Path, text: str, mode: int, named: str) -> None:
    path = write_keys(tmp_path, text, mode)
    with pytest.raises(ConfigInvalid, match=named) as caught:
        ApiKeys.read(path)
    assert "http.api_key_file" in caught.value.message
    assert ONE not in caught.value.message


def test_a_file_of_keys_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigInvalid, match="cannot read"):
        ApiKeys.read(tmp_path / "nowhere")


def test_the_daemon_listens_where_the_flag_says(tmp_path: Path) -> None:
    keys = write_keys(tmp_path, ONE)
    environ = {"EDGEQWEN_HTTP_API_KEY_FILE": str(keys)}
    with running_daemon(script_of("Hello!"), "--http", "127.0.0.1:0", environ=environ) as daemon:
        status, body = asyncio.run(ask_port(daemon.http_port, key(ONE)))
        assert "keys=yes" in daemon.log
        assert (status, body["data"][0]["object"]) == (200, "model")
        assert asyncio.run(ask_port(daemon.http_port, LOCAL))[0] == 401


async def ask_port(port: int, headers: Mapping[str, str]) -> tuple[int, Any]:
    client = HttpClient(*await asyncio.open_connection("127.0.0.1", port))
    answer = await client.ask("GET", "/v1/models", headers=headers)
    client.writer.close()
    return answer.status, answer.json


def test_the_daemon_does_not_start_where_others_reach_it_without_keys(tmp_path: Path) -> None:
    model = write_text_model(tmp_path / "model")
    (tmp_path / "s").mkdir(mode=0o700)
    place = ("--socket", str(tmp_path / "s" / "s"), "--model", str(model), "--runtime", "fake:")
    ended = run_command("serve", *place, "--http", "0.0.0.0:0")
    assert ended.returncode == 78
    assert b"http.api_key_file" in ended.stderr
