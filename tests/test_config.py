"""Configuration: file < environment < flags, and every mistake named."""

from __future__ import annotations

from pathlib import Path

import pytest

from edgeqwen.config import Config, load
from edgeqwen.errors import EXIT_CONFIG, ConfigInvalid


def write(folder: Path, text: str) -> Path:
    path = folder / "edgeqwen.toml"
    path.write_text(text)
    return path


def test_nothing_given_is_the_defaults() -> None:
    assert load(None, {"HOME": "/root"}, {}) == Config()


def test_flags_win_over_environment_over_file(tmp_path: Path) -> None:
    path = write(tmp_path, "[kv]\nslots = 2\ncontext = 100\n[limits]\nqueue = 3\n")
    environ = {"EDGEQWEN_KV_SLOTS": "4", "EDGEQWEN_KV_CONTEXT": "200"}
    config = load(path, environ, {"kv.slots": 6, "limits.queue": None})
    assert (config.kv.slots, config.kv.context, config.limits.queue) == (6, 200, 3)
    assert config.socket == Config().socket


def test_environment_key_may_hold_underscores() -> None:
    assert load(None, {"EDGEQWEN_LIMITS_CONNECTIONS_PER_UID": "7"}, {}).limits.connections_per_uid == 7


@pytest.mark.parametrize(("text", "value"), [("true", True), ("1", True), ("False", False), ("0", False)])
def test_environment_says_true_and_false_in_words_and_digits(text: str, value: bool) -> None:
    assert load(None, {"EDGEQWEN_ENGINE_DETERMINISTIC": text}, {}).engine.deterministic is value
    with pytest.raises(ConfigInvalid, match="EDGEQWEN_ENGINE_SPECULATION: 'maybe' is not true or false"):
        load(None, {"EDGEQWEN_ENGINE_SPECULATION": "maybe"}, {})


def test_whole_number_does_for_a_float(tmp_path: Path) -> None:
    config = load(write(tmp_path, "[service]\ndrain_s = 3\n"), {}, {})
    assert config.service.drain_s == 3.0
    assert type(config.service.drain_s) is float


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("[kv]\nslot = 1\n", "kv.slot"),
        ("[cache]\nsize = 1\n", "[cache]"),
        ("slots = 1\n", "slots"),
        ("[kv]\nslots = 0\n", "kv.slots"),
        ("[kv]\nslots = 1000\n", "256"),
        ("[kv]\nslots = true\n", "kv.slots"),
        ("[kv]\nslots = 1.5\n", "kv.slots"),
        ('[kv]\nslots = "2"\n', "kv.slots"),
        ("[socket]\npath = 3\n", "socket.path"),
        ("[service]\ndrain_s = nan\n", "service.drain_s"),
        ("[engine]\nspeculation = 1\n", "engine.speculation"),
        ("[kv\n", "edgeqwen.toml"),
        ("x = " + "[" * 100_000, "edgeqwen.toml"),
    ],
)
def test_mistake_in_the_file_is_named(tmp_path: Path, text: str, named: str) -> None:
    with pytest.raises(ConfigInvalid) as caught:
        load(write(tmp_path, text), {}, {})
    assert named in caught.value.message
    assert caught.value.exit_code == EXIT_CONFIG


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("EDGEQWEN_KV_SLOT", "1"),
        ("EDGEQWEN_NOTHING", "1"),
        ("EDGEQWEN_KV", "1"),
        ("EDGEQWEN_kv_slots", "1"),
        ("EDGEQWEN_KV_SLOTS", "many"),
        ("EDGEQWEN_KV_SLOTS", "-1"),
        ("EDGEQWEN_SERVICE_DRAIN_S", "nan"),
    ],
)
def test_mistake_in_the_environment_is_named(name: str, value: str) -> None:
    with pytest.raises(ConfigInvalid) as caught:
        load(None, {name: value}, {})
    assert name in caught.value.message


def test_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigInvalid, match=r"nowhere\.toml"):
        load(tmp_path / "nowhere.toml", {}, {})
