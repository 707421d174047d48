"""The configuration read again: what changes, what does not, who may ask, what is under way meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from edgeqwen.client import Client
from edgeqwen.config import LIVE_KEYS, ConfigSources, load
from edgeqwen.engine.settings import EngineLimits
from edgeqwen.errors import ConfigInvalid, EdgeqwenError
from edgeqwen.http.access import ApiKeys, HttpAccess
from edgeqwen.part_settings import PartSettings, part_settings
from edgeqwen.protocol.limits import WireLimits
from edgeqwen.reload import Reloader
from edgeqwen.service import Notifier
from edgeqwen.sessions.sessions import SessionLimits
from tests.daemons import DaemonProcess, run_command, running_daemon, script_of
from tests.http_client import HttpClient, connect
from tests.test_config import other_value
from tests.test_network import CHAT, LONG, USER, key, listening
from tests.test_wire_limits import SOMEBODY, ask_as, codes, needs_users, open_to_all
from tests.wire import GUARD_S, Gate, Wire, fake_inference, serve, until

KEYS: Final = ("the-key-of-someone", "the-key-of-another")


def write_keys(path: Path, *keys: str) -> Path:
    path.write_text("".join(f"{each}\n" for each in keys))
    path.chmod(0o600)
    return path


# What the parts are told.


@pytest.mark.parametrize("name", sorted(LIVE_KEYS))
def test_of_every_key_that_counts_at_once_some_part_is_told(name: str, tmp_path: Path) -> None:
    value = str(write_keys(tmp_path / "keys", *KEYS)) if name == "http.api_key_file" else other_value(name)
    before, after = (part_settings(load(None, {}, flags), tmp_path) for flags in ({}, {name: value}))
    assert before != after


class Rig:
    """A reloader over a file, and what it tells the parts."""

    def __init__(self, folder: Path, text: str = "", *, flags: dict[str, Any] | None = None) -> None:
        self.path = folder / "edgeqwen.toml"
        self.path.write_text(text)
        self.told: list[PartSettings] = []
        self.error: EdgeqwenError | None = None
        sources = ConfigSources(self.path, {}, flags or {})
        config = sources.read()
        self.reloader = Reloader(
            sources,
            config,
            part_settings(config, folder),
            cache_dir=folder,
            check=self._check,
            apply=self.told.append,
            notifier=Notifier({}),
        )

    def _check(self) -> None:
        if self.error is not None:
            raise self.error

    def reload(self, text: str | None = None) -> tuple[list[str], list[str]]:
        """What has changed, and what needs a restart, when the file is read again."""
        if text is not None:
            self.path.write_text(text)
        members = self.reloader.reload("test")
        assert members.keys() == {"changed", "restart"}
        return members["changed"], members["restart"]


def test_what_changes_is_told_once_and_what_needs_a_restart_until_it_comes(tmp_path: Path) -> None:
    rig = Rig(tmp_path, "[limits]\nqueue = 5\n")
    assert rig.reload() == ([], [])
    changed = "[limits]\nqueue = 6\nper_uid = 7\n[kv]\nslots = 3\n[service]\ndrain_s = 2\n"
    assert rig.reload(changed) == (["limits.queue", "limits.per_uid", "service.drain_s"], ["kv.slots"])
    told = rig.told[-1]
    assert (told.engine.queue, told.engine.per_owner, told.drain_s) == (6, 7, 2.0)
    assert rig.reload() == ([], ["kv.slots"])
    assert rig.reload("") == (["limits.queue", "limits.per_uid", "service.drain_s"], [])
    assert rig.told[-1].engine == EngineLimits()


def test_a_key_that_a_flag_sets_does_not_change(tmp_path: Path) -> None:
    rig = Rig(tmp_path, "[limits]\nqueue = 5\n", flags={"limits.queue": 9, "kv.slots": 2})
    assert rig.reload("[limits]\nqueue = 6\n[kv]\nslots = 4\n") == ([], [])
    assert rig.told[-1].engine.queue == 9


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("[limits]\nqueue = 6\nper_uid = 0\n", "limits.per_uid"),
        ("[limits]\nqueue = 6\nquue = 6\n", "limits.quue"),
        ("[limits]\nqueue = 6\n[kv]\nslots = 0\n", "kv.slots"),
        ("[limits]\nqueue = 6\n[socket]\ngroup = 'there-is-no-such-group'\n", "socket.group"),
        ("[limits]\nqueue = 6\n[http]\nlisten = 'nowhere'\n", "http.listen"),
        ("[limits]\nqueue = 6\n[http]\nlisten = '0.0.0.0:80'\n", "http.api_key_file"),
        ("[limits]\nqueue = 6\n[http]\napi_key_file = '/nowhere/at/all'\n", "http.api_key_file"),
        ("[limits\n", "not valid TOML"),
    ],
)
def test_a_mistake_is_named_and_changes_nothing(tmp_path: Path, text: str, named: str) -> None:
    rig = Rig(tmp_path, "[limits]\nqueue = 5\n")
    with pytest.raises(ConfigInvalid, match=named.replace(".", r"\.")) as caught:
        rig.reload(text)
    assert caught.value.code == "bad_config"
    assert rig.told == []
    assert rig.reload("[limits]\nqueue = 6\n") == (["limits.queue"], [])


def test_a_file_that_is_gone_changes_nothing(tmp_path: Path) -> None:
    rig = Rig(tmp_path, "[limits]\nqueue = 5\n")
    rig.path.unlink()
    with pytest.raises(ConfigInvalid, match=r"edgeqwen\.toml"):
        rig.reload()
    assert rig.told == []


def test_an_address_that_others_reach_keeps_its_need_of_keys(tmp_path: Path) -> None:
    keys = write_keys(tmp_path / "keys", *KEYS)
    http = f"[http]\nlisten = '0.0.0.0:0'\napi_key_file = '{keys}'\n"
    rig = Rig(tmp_path, http)
    with pytest.raises(ConfigInvalid, match=r"http\.api_key_file"):
        rig.reload("")
    with pytest.raises(ConfigInvalid, match=r"http\.api_key_file"):
        rig.reload("[http]\nlisten = '127.0.0.1:0'\n")
    assert rig.told == []


def test_a_name_that_is_listened_on_stays_allowed_until_the_restart(tmp_path: Path) -> None:
    rig = Rig(tmp_path, "[http]\nlisten = '127.0.0.2:0'\n")
    assert rig.reload("[http]\nallowed_hosts = ['box']\n") == (["http.allowed_hosts"], ["http.listen"])
    assert rig.told[-1].access.allowed_hosts == {"127.0.0.2", "box"}


def test_other_keys_in_the_same_file_are_a_change_and_the_same_ones_are_none(tmp_path: Path) -> None:
    keys = write_keys(tmp_path / "keys", *KEYS)
    rig = Rig(tmp_path, f"[http]\napi_key_file = '{keys}'\n")
    write_keys(keys, *reversed(KEYS), "# only the order is another")
    assert rig.reload() == ([], [])
    write_keys(keys, KEYS[0])
    assert rig.reload() == (["http.api_key_file"], [])
    assert rig.told[-1].access.keys is not None
    assert rig.told[-1].access.keys.owner_of(KEYS[1]) is None


def reloader_without_a_file(folder: Path, **flags: str) -> Reloader:
    sources = ConfigSources(None, {}, {name.replace("__", "."): value for name, value in flags.items()})
    config = sources.read()
    settings = part_settings(config, folder)
    return Reloader(
        sources,
        config,
        settings,
        cache_dir=folder,
        check=lambda: None,
        apply=lambda _: None,
        notifier=Notifier({}),
    )


def test_without_a_configuration_file_there_are_only_keys_to_read_again(tmp_path: Path) -> None:
    with pytest.raises(ConfigInvalid, match="no configuration to read again"):
        reloader_without_a_file(tmp_path).reload("test")
    keys = write_keys(tmp_path / "keys", *KEYS)
    reloader = reloader_without_a_file(tmp_path, http__api_key_file=str(keys))
    assert reloader.reload("test")["changed"] == []
    write_keys(keys, KEYS[0])
    assert reloader.reload("test")["changed"] == ["http.api_key_file"]


def test_at_the_end_it_is_too_late(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    rig.error = EdgeqwenError("the daemon is shutting down", code="draining")
    with pytest.raises(EdgeqwenError, match="shutting down"):
        rig.reload("[limits]\nqueue = 5\n")
    assert rig.told == []


# Parts at work.


async def test_lowered_limits_are_for_what_comes_and_hello_shows_them(tmp_path: Path, gate: Gate) -> None:
    async with serve(tmp_path, fake_inference(gate=gate)) as wire:
        first, second = await wire.connect(), await wire.connect()
        for number in range(8):
            first.send({"op": "chat", "prompt": "x", "id": number})
        await until(lambda: wire.inference.stats().running + wire.inference.stats().queued == 8)
        wire.inference.set_limits(EngineLimits(queue=1, per_owner=8, messages=1))
        wire.server.set_limits(WireLimits(inflight=2, batch_items=1))
        limits = (await second.ask({"op": "hello"}))["limits"]
        assert (limits["per_uid"], limits["inflight"], limits["messages"]) == (8, 2, 1)
        assert (await second.ask({"op": "chat", "prompt": "x"}))["error"]["code"] == "quota"
        two = [{"role": "user", "content": "x"}] * 2
        assert (await second.ask({"op": "chat", "messages": two}))["error"]["field"] == "messages"
        assert (await second.ask({"op": "batch", "items": [{"prompt": "x"}] * 2}))["error"]["field"] == "items"
        gate.opened.set()
        finals = [(await first.read_final())[0] for _ in range(8)]
        assert sorted(each["id"] for each in finals) == list(range(8))
        assert {each["finish"] for each in finals} == {"stop"}


async def test_what_waits_for_the_model_keeps_its_place_under_lower_limits(tmp_path: Path, gate: Gate) -> None:
    async with serve(tmp_path, fake_inference(gate=gate, load_s=0.001), is_loaded=False) as wire:
        client, other = await wire.connect(), await wire.connect()
        for number in range(4):
            client.send({"op": "chat", "prompt": "x", "id": number})
        await until(lambda: wire.inference.stats().queued == 4)
        wire.inference.set_limits(EngineLimits(queue=1, per_owner=1))
        assert (await other.ask({"op": "chat", "prompt": "x"}))["error"]["code"] == "quota"
        gate.opened.set()
        finals = [(await client.read_final())[0] for _ in range(4)]
        assert {each.get("finish") for each in finals} == {"stop"}


async def test_a_line_that_has_begun_may_be_as_long_as_it_might_have_been(wire: Wire) -> None:
    client = await wire.connect()
    line = json.dumps({"op": "health", "x_": "y" * 3000}).encode()
    assert (await client.ask({"op": "health"}))["ok"]
    client.write(line[:2000])
    (connection,) = wire.server.connections
    await until(lambda: connection._lines is not None and connection._lines.is_partial)
    wire.server.set_limits(WireLimits(line_bytes=1024))
    client.write(line[2000:] + b"\n")
    assert (await client.read_final())[0]["ok"]
    client.write(line + b"\n")
    assert (await client.read_final())[0]["error"]["code"] == "too_large"


async def test_a_raised_limit_counts_for_the_line_that_is_coming(wire: Wire) -> None:
    wire.server.set_limits(WireLimits(line_bytes=1024))
    client = await wire.connect()
    line = json.dumps({"op": "health", "x_": "y" * 3000}).encode()
    client.write(line[:1000])
    await until(lambda: any(each._lines is not None for each in wire.server.connections))
    wire.server.set_limits(WireLimits(line_bytes=4096))
    client.write(line[1000:] + b"\n")
    assert (await client.read_final())[0]["ok"]


async def test_connections_beyond_a_lowered_limit_stay(wire: Wire) -> None:
    clients = [await wire.connect() for _ in range(4)]
    for client in clients:
        assert (await client.ask({"op": "health"}))["ok"]
    wire.server.set_limits(WireLimits(connections_per_uid=1))
    refused = await (await wire.connect()).read()
    assert refused is not None
    assert refused["error"]["code"] == "quota"
    for client in clients:
        assert (await client.ask({"op": "health"}))["ok"]


async def test_http_connections_that_there_are_heed_new_limits(wire: Wire) -> None:
    client = await connect(wire)
    body = {"text": "y" * 3000}
    assert (await client.ask("POST", "/eqp/tokenize", body)).status == 200
    wire.server.set_limits(WireLimits(line_bytes=1024))
    assert (await client.ask("POST", "/eqp/tokenize", body)).status == 413
    wire.server.set_limits(WireLimits())
    assert (await (await connect(wire)).ask("POST", "/eqp/tokenize", body)).status == 200


async def test_sessions_that_there_are_stay_under_lower_limits(wire: Wire) -> None:
    client = await wire.connect()
    for name in ("one", "two"):
        assert "error" not in await client.ask({"op": "session.create", "name": name})
    wire.server.sessions.set_limits(SessionLimits(per_owner=1, ttl_s=60), default_max_tokens=5)
    assert (await client.ask({"op": "session.create"}))["error"]["code"] == "quota"
    listed = await client.ask({"op": "session.list"})
    assert (len(listed["sessions"]), listed["quota"]["sessions"]) == (2, 1)
    assert (await client.ask({"op": "session.get", "session": "@one"}))["ttl_s"] == 7 * 86_400
    await client.ask({"op": "session.delete", "session": "@one"})
    await client.ask({"op": "session.delete", "session": "@two"})
    await client.ask({"op": "session.create", "name": "three"})
    assert (await client.ask({"op": "session.get", "session": "@three"}))["ttl_s"] == 60


LAST_CHUNK: Final = b"0\r\n\r\n"


async def rest_of(client: HttpClient) -> bytes:
    """What still comes before the connection is cut off."""
    parts: list[bytes] = []
    async with asyncio.timeout(GUARD_S):
        with contextlib.suppress(ConnectionError):
            while part := await client.reader.read(1 << 16):
                parts.append(part)
    return b"".join(parts)


async def test_a_revoked_key_is_refused_and_what_runs_for_it_is_cut_off(tmp_path: Path) -> None:
    inference = fake_inference(LONG, step_s=0.005, speculates=False)
    async with listening(tmp_path, inference, keys=ApiKeys(KEYS)) as (wire, port):
        theirs, ours, idle = [await port.connect() for _ in range(3)]
        assert (await idle.ask("GET", "/v1/models", headers=key(KEYS[1]))).status == 200
        theirs.send("POST", CHAT, {"messages": USER, "stream": True}, headers=key(KEYS[1]))
        ours.send("POST", CHAT, {"messages": USER, "max_tokens": 300}, headers=key(KEYS[0]))
        await until(lambda: wire.inference.stats().running == 2)
        wire.server.set_access(HttpAccess(keys=ApiKeys((KEYS[0], "the-key-of-a-third"))))
        await until(lambda: wire.inference.stats().running == 1)
        assert not (await rest_of(theirs)).endswith(LAST_CHUNK)
        assert (await idle.ask("GET", "/v1/models", headers=key(KEYS[1]))).status == 401
        assert (await idle.ask("GET", "/v1/models", headers=key("the-key-of-a-third"))).status == 200
        assert (await ours.read()).json["choices"][0]["finish_reason"] == "length"


async def test_with_the_first_keys_those_without_one_are_shut_out(tmp_path: Path) -> None:
    async with listening(tmp_path, fake_inference(LONG, step_s=0.005, speculates=False)) as (wire, port):
        local, remote = await connect(wire), await port.connect()
        for client in (local, remote):
            client.send("POST", CHAT, {"messages": USER, "max_tokens": 200}, headers={"Host": "localhost"})
        await until(lambda: wire.inference.stats().running == 2)
        wire.server.set_access(HttpAccess(keys=ApiKeys(KEYS)))
        await until(lambda: wire.inference.stats().running < 2)
        assert (await local.read()).status == 200
        assert await rest_of(remote) == b""


async def test_pages_and_names_may_be_others(tmp_path: Path) -> None:
    async with listening(tmp_path) as (wire, port):
        client = await port.connect()
        page = {"Host": "box", "Origin": "http://page"}
        assert (await client.ask("GET", "/health", headers=page)).status == 403
        access = HttpAccess(allowed_hosts=frozenset({"box"}), allowed_origins=frozenset({"http://page"}))
        wire.server.set_access(access)
        assert (await client.ask("GET", "/health", headers=page)).status == 200
        wire.server.set_access(HttpAccess())
        assert (await client.ask("GET", "/health", headers=page)).status == 403


# Who may ask, and how.


async def test_an_admin_asks_by_socket_or_http(wire: Wire) -> None:
    client, http = await wire.connect(), await connect(wire)
    members = {"done": True, "changed": ["limits.queue"], "restart": []}
    assert await client.ask({"op": "reload", "id": 14}) == {"id": 14, **members}
    answer = await http.ask("POST", "/eqp/reload", {})
    assert (answer.status, answer.lines) == (200, [members])
    assert wire.reloads == [f"uid {os.geteuid()}"] * 2
    assert (await client.ask({"op": "reload", "path": "x"}))["error"]["field"] == "path"


@needs_users
async def test_others_may_not_have_the_configuration_read() -> None:
    async with open_to_all() as wire:
        assert codes(await ask_as(wire, SOMEBODY, {"op": "reload"})) == ["forbidden"]
        assert wire.reloads == []


# Daemons.


@contextlib.contextmanager
def configured_daemon(
    folder: Path, text: str, *flags: str, runtime: str = "fake:", environ: dict[str, str] | None = None
) -> Iterator[tuple[DaemonProcess, Path]]:
    path = folder / "edgeqwen.toml"
    path.write_text(text)
    with running_daemon(runtime, "--config", str(path), *flags, environ=environ) as daemon:
        yield daemon, path


def wait_for_log(daemon: DaemonProcess, text: str) -> None:
    give_up_at = time.monotonic() + GUARD_S
    while text not in daemon.log:
        assert daemon.process.poll() is None, daemon.log
        assert time.monotonic() < give_up_at, daemon.log
        time.sleep(0.01)


def limits_of(client: Client) -> dict[str, Any]:
    limits: dict[str, Any] = client.request("hello")["limits"]
    return limits


def test_sighup_has_the_file_read_again_and_disturbs_nobody(tmp_path: Path) -> None:
    script = script_of("word " * 40, step_s=0.02)
    with (
        configured_daemon(tmp_path, "[limits]\nmessages = 9\n", "--slots", "2", runtime=script) as (daemon, path),
        daemon.client() as client,
        daemon.client() as other,
    ):
        frames = client.stream("chat", prompt="hi", stream=True, speculate=False)
        assert next(frames)["event"] == "start"
        path.write_text("[limits]\nmessages = 1\nline_bytes = 2048\n[kv]\nslots = 4\ncontext = 512\n")
        daemon.process.send_signal(signal.SIGHUP)
        wait_for_log(daemon, "INFO reloaded by=SIGHUP changed=limits.line_bytes,limits.messages restart=kv.context\n")
        with pytest.raises(EdgeqwenError) as caught:
            other.request("chat", messages=[{"role": "user", "content": "x"}] * 2)
        assert caught.value.field == "messages"
        assert (limits_of(other)["messages"], limits_of(other)["line"]) == (1, 2048)
        assert [*frames][-1]["finish"] == "stop"


def test_a_wrong_file_leaves_the_old_values_in_force(tmp_path: Path) -> None:
    with (
        configured_daemon(tmp_path, "[limits]\nmessages = 9\n") as (daemon, path),
        daemon.client() as client,
    ):
        path.write_text("[limits]\nmessages = 1\nqueue = 0\n")
        daemon.process.send_signal(signal.SIGHUP)
        wait_for_log(
            daemon, f'WARNING reload_failed by=SIGHUP error="{path}: limits.queue: 0 is below the least value, 1"'
        )
        with pytest.raises(EdgeqwenError, match=r"limits\.queue") as caught:
            client.reload()
        assert (caught.value.code, caught.value.exit_code) == ("bad_config", 78)
        assert limits_of(client)["messages"] == 9
        path.write_text("[limits]\nmessages = 1\n")
        assert client.reload()["changed"] == ["limits.messages"]
        assert limits_of(client)["messages"] == 1


def test_the_environment_of_the_start_comes_before_the_file(tmp_path: Path) -> None:
    environ = {"EDGEQWEN_LIMITS_QUEUE": "7"}
    with configured_daemon(tmp_path, "", environ=environ) as (daemon, path), daemon.client() as client:
        path.write_text("[limits]\nqueue = 3\n")
        assert client.reload() == {"id": 1, "done": True, "changed": [], "restart": []}
        assert limits_of(client)["queue"] == 7


def test_the_log_may_say_less(tmp_path: Path) -> None:
    with configured_daemon(tmp_path, "") as (daemon, path), daemon.client() as client:
        wait_for_log(daemon, "INFO ready")
        path.write_text("[service]\nlog_level = 'warning'\n")
        assert client.reload()["changed"] == ["service.log_level"]
        path.write_text("[service]\nlog_level = 'loud'\n")
        with pytest.raises(EdgeqwenError, match=r"service\.log_level"):
            client.reload()
        wait_for_log(daemon, "WARNING reload_failed")
        path.write_text("[service]\nlog_level = 'error'\n")
        assert client.reload()["changed"] == ["service.log_level"]
        assert " reloaded " not in daemon.log
        path.write_text("")
        assert client.reload()["changed"] == ["service.log_level"]
        wait_for_log(daemon, "INFO reloaded by=")


def test_drain_time_may_be_another(tmp_path: Path) -> None:
    script = script_of("word " * 40, step_s=0.02, loop=True)
    with configured_daemon(tmp_path, "[service]\ndrain_s = 600\n", runtime=script) as (daemon, path):
        with daemon.client() as client, daemon.client() as other:
            frames = client.stream("chat", prompt="hi", stream=True, speculate=False)
            next(frames)
            path.write_text("[service]\ndrain_s = 0.1\n")
            assert other.reload()["changed"] == ["service.drain_s"]
            daemon.process.send_signal(signal.SIGTERM)
            assert [*frames][-1]["finish"] == "cancelled"
        assert daemon.wait() == 0


def test_a_service_manager_is_told_of_a_reload_between_ready_and_stopping(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(tmp_path / "notify"))
        manager.settimeout(GUARD_S)
        environ = {"NOTIFY_SOCKET": str(tmp_path / "notify")}
        with configured_daemon(tmp_path, "", environ=environ) as (daemon, path):
            assert manager.recv(200) == b"STATUS=loading the model"
            assert manager.recv(200) == b"READY=1\nSTATUS=serving fake"
            for text in ("[limits]\nqueue = 3\n", "no configuration"):
                path.write_text(text)
                began_us = time.monotonic_ns() // 1000
                daemon.process.send_signal(signal.SIGHUP)
                state, _, since = manager.recv(200).decode().partition("\nMONOTONIC_USEC=")
                assert state == "RELOADING=1"
                assert began_us <= int(since) <= time.monotonic_ns() // 1000
                assert manager.recv(200) == b"READY=1\nSTATUS=serving fake"
            daemon.process.send_signal(signal.SIGTERM)
            assert manager.recv(200) == b"STOPPING=1"
            assert daemon.wait() == 0
            assert daemon.log.count(" reloaded by=SIGHUP ") == 1


# The command.


def test_the_command_says_what_changed(tmp_path: Path) -> None:
    with configured_daemon(tmp_path, "") as (daemon, path):
        command = ("reload", "--socket", str(daemon.socket_path))
        result = run_command(*command)
        assert (result.returncode, result.stdout) == (0, b"nothing has changed\n")
        path.write_text("[limits]\nqueue = 3\nmessages = 4\n[kv]\nslots = 3\n")
        result = run_command(*command)
        assert (result.returncode, result.stderr) == (0, b"")
        assert result.stdout.decode().splitlines() == [
            "changed  limits.messages",
            "changed  limits.queue",
            "restart  kv.slots",
        ]
        result = run_command(*command, "--json")
        assert json.loads(result.stdout) == {"changed": [], "restart": ["kv.slots"]}
        path.write_text("[limits]\nqueue = -1\n")
        result = run_command(*command)
        assert (result.returncode, result.stdout) == (78, b"")
        assert b"limits.queue" in result.stderr


def test_the_command_without_a_daemon_or_a_file(tmp_path: Path) -> None:
    assert run_command("reload", "--socket", str(tmp_path / "s")).returncode == 69
    with running_daemon() as daemon:
        result = run_command("reload", "--socket", str(daemon.socket_path))
        assert (result.returncode, result.stdout) == (78, b"")
        assert b"no configuration" in result.stderr
