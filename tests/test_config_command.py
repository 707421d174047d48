"""`edgeqwen config`: what would be served from, where it was set, and all that is wrong with it."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest

from edgeqwen.config import LIVE_KEYS, fields_of_tables
from tests.daemons import run_command, running_daemon, script_of, write_text_model


def run(*flags: str, environ: dict[str, str] | None = None) -> subprocess.CompletedProcess[bytes]:
    return run_command("config", *flags, environ=environ)


def shown(*flags: str, environ: dict[str, str] | None = None) -> dict[str, Any]:
    done = run("show", "--json", *flags, environ=environ)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_each_value_is_shown_with_where_it_was_set(tmp_path: Path) -> None:
    path = tmp_path / "c.toml"
    path.write_text('[kv]\nslots = 3\ncontext = 100\n[service]\nlog_level = "warning"\n')
    found = shown("--config", str(path), "--context", "200", environ={"EDGEQWEN_KV_SLOTS": "4"})
    assert list(found) == [f"{table}.{key}" for table, keys in fields_of_tables().items() for key in keys]
    assert found["kv.slots"] == {"value": 4, "source": "EDGEQWEN_KV_SLOTS", "live": False}
    assert found["kv.context"] == {"value": 200, "source": "flag", "live": False}
    assert found["service.log_level"] == {"value": "warning", "source": str(path), "live": True}
    assert found["limits.queue"] == {"value": 128, "source": "default", "live": True}
    assert {name for name, each in found.items() if each["live"]} == LIVE_KEYS
    changed = shown("--changed", "--config", str(path))
    assert set(changed) == {"kv.slots", "kv.context", "service.log_level"}


def test_what_is_shown_is_a_file_that_says_the_same(tmp_path: Path) -> None:
    path = tmp_path / "c.toml"
    path.write_text('[kv]\nsystem_prompts = ["Be \\"brief\\".", "Ä"]\nslots = 3\n')
    text = run("show", "--config", str(path)).stdout.decode()
    assert tomllib.loads(text)["kv"]["system_prompts"] == ['Be "brief".', "Ä"]
    again = tmp_path / "again.toml"
    again.write_text(text)
    before, after = shown("--config", str(path)), shown("--config", str(again))
    assert {name: each["value"] for name, each in before.items()} == {k: each["value"] for k, each in after.items()}
    assert run("show", "--changed").stdout.decode().startswith("# nothing differs")


def test_a_file_that_cannot_be_read_is_an_error_of_the_configuration(tmp_path: Path) -> None:
    done = run("show", "--config", str(tmp_path / "nowhere"))
    assert done.returncode == 78
    assert b"cannot read the configuration" in done.stderr


def test_all_that_is_wrong_is_told_at_once(tmp_path: Path) -> None:
    path = tmp_path / "c.toml"
    path.write_text("[kv]\nslots = 0\nslot = 1\n[limit]\nx = 1\n[service]\ndrain_s = 'long'\n")
    done = run("check", "--config", str(path), environ={"EDGEQWEN_LIMITS_QUEUE": "many"})
    lines = done.stdout.decode().splitlines()
    assert done.returncode == 78
    assert [line for line in lines if not line.startswith("problem: ")] == []
    for part in ("kv.slots: 0 is below", "kv.slot: unknown key", "[limit]", "service.drain_s", "EDGEQWEN_LIMITS_QUEUE"):
        assert any(part in line for line in lines), part


def test_what_the_values_name_is_looked_at(tmp_path: Path) -> None:
    path = tmp_path / "c.toml"
    path.write_text(
        '[socket]\npath = "/nowhere/at/all/s"\ngroup = "no-such-group"\n[model]\npackage = "/nowhere"\n'
        f'[http]\nlisten = "0.0.0.0:80"\napi_key_file = ""\n[cpu]\ncpus = "900-901"\n[service]\nstate_dir = "{path}"\n'
    )
    done = run("check", "--json", "--config", str(path))
    report = json.loads(done.stdout)
    assert (done.returncode, report["ok"]) == (78, False)
    for part in ("no-such-group", "/nowhere/at/all: no such folder", "/nowhere: neither", "900"):
        assert any(part in text for text in report["problems"]), (part, report)
    assert any("service.state_dir" in text for text in report["warnings"])


def test_a_sound_configuration_is_said_to_be_sound_also_while_a_daemon_runs_there(tmp_path: Path) -> None:
    model = write_text_model(tmp_path / "m")
    with running_daemon(script_of("x")) as daemon:
        flags = ("--model", str(model), "--runtime", "fake:", "--socket", str(daemon.socket_path))
        done = run("check", *flags)
    assert (done.returncode, done.stdout.strip()) == (0, b"the configuration is sound"), done


def test_keys_that_others_may_read_and_limits_that_do_not_fit_are_doubtful(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("0123456789abcdef0123456789abcdef\n")
    keys.chmod(0o644)
    config = tmp_path / "c.toml"
    config.write_text(f'[http]\napi_key_file = "{keys}"\n[limits]\nqueue = 4\n[service]\nidle_exit_s = 60\n')
    flags = ("--model", str(write_text_model(tmp_path / "m")), "--runtime", "fake:", "--socket", str(tmp_path / "s"))
    report = json.loads(run("check", "--json", "--config", str(config), *flags).stdout)
    for part in ("chmod 600", "limits.per_uid", "idle_unload_s"):
        assert any(part in text for text in report["warnings"]), (part, report)


# The mode of the socket.


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077])
@pytest.mark.parametrize("mode", ["auto", "0600", "0666"])
def test_the_socket_has_the_mode_that_is_set_whatever_the_umask(mode: str, umask: int) -> None:
    before = os.umask(umask)
    try:
        with running_daemon("fake:", environ={"EDGEQWEN_SOCKET_MODE": mode}) as daemon:
            found = stat.S_IMODE(daemon.socket_path.stat().st_mode)
            assert found == (0o600 if mode == "auto" else int(mode, 8))
            daemon.wait_until_ready()
            assert ("every user of this machine" in daemon.log) == (mode == "0666")
    finally:
        os.umask(before)


def test_a_mode_for_a_group_needs_one() -> None:
    done = run("check", environ={"EDGEQWEN_SOCKET_MODE": "0660"})
    assert done.returncode == 78
    assert b"socket.mode: 0660 lets a group connect; name it in socket.group" in done.stdout
