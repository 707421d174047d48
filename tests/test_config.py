"""Configuration: file < environment < flags, and every mistake named."""

from __future__ import annotations

import os
import re
import tomllib
from pathlib import Path

import pytest

from edgeqwen.cli.serve import command as serve_command
from edgeqwen.cli.serving_flags import SETTINGS
from edgeqwen.config import LIVE_KEYS, Config, ConfigSources, Value, changes_between, fields_of_tables, load
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


KEYS = [f"{table}.{key}" for table, keys in fields_of_tables().items() for key in keys]


def other_value(name: str) -> Value:
    """Another value for a key than its default."""
    table, _, key = name.partition(".")
    known = fields_of_tables()[table][key]
    match known.default:
        case bool():
            return not known.default
        case int():
            return known.default + 1
        case float():
            return known.default + 0.5
        case str():
            return known.metadata["options"][-1] if known.metadata["options"] else "other"
    return ("other",)


@pytest.mark.parametrize("name", KEYS)
def test_a_key_counts_at_once_or_at_the_next_start(name: str) -> None:
    read = load(None, {}, {name: other_value(name)})
    changes = changes_between(Config(), read)
    if name in LIVE_KEYS:
        assert (changes.changed, changes.restart, changes.config) == ((name,), (), read)
    else:
        assert (changes.changed, changes.restart, changes.config) == ((), (name,), Config())


def test_what_counts_at_once_is_all_that_is_taken_over() -> None:
    read = load(None, {}, {name: other_value(name) for name in KEYS})
    changes = changes_between(Config(), read)
    assert sorted(changes.changed + changes.restart) == sorted(KEYS)
    assert changes_between(changes.config, read).changed == ()
    assert changes_between(changes.config, read).restart == changes.restart


def test_flags_and_environment_win_when_the_file_is_read_again(tmp_path: Path) -> None:
    path = write(tmp_path, "[limits]\nqueue = 3\nper_uid = 3\ninflight = 3\n")
    sources = ConfigSources(path, {"EDGEQWEN_LIMITS_PER_UID": "7"}, {"limits.queue": 6})
    running = sources.read()
    write(tmp_path, "[limits]\nqueue = 4\nper_uid = 4\ninflight = 4\n")
    assert changes_between(running, sources.read_again()).changed == ("limits.inflight",)


def test_what_can_be_read_once_only_is_not_read_again(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ConfigInvalid, match="regular file"):
        ConfigSources(tmp_path / "pipe", {}, {}).read_again()
    with pytest.raises(ConfigInvalid, match=r"nowhere\.toml"):
        ConfigSources(tmp_path / "nowhere.toml", {}, {}).read_again()


DOCS = Path(__file__).parent.parent / "docs"
DOCUMENT = (DOCS / "configuration.md").read_text(encoding="utf-8")
KINDS = {bool: "true, false", int: "whole number", float: "number", str: "text", tuple: "list of texts"}
FLAGS = {
    SETTINGS[parameter.name]: f"`{parameter.opts[0]}`"
    for parameter in serve_command.params
    if parameter.name in SETTINGS
}


def documented_row(name: str) -> list[str]:
    """What the row of a key should say: key, type and range, default, flag, variable, live."""
    table, _, key = name.partition(".")
    known = fields_of_tables()[table][key]
    match known.default:
        case bool():
            default = str(known.default).lower()
        case ():
            default = "[]"
        case str():
            default = f'"{known.default}"' if known.default else ""
        case _:
            default = str(known.default)
    options, least, most = (known.metadata[each] for each in ("options", "least", "most"))
    bounds = "" if least is None else f", {least:g} to {most if isinstance(most, int) else format(most, 'g')}"
    span = ", ".join(f"`{option}`" for option in options) if options else KINDS[type(known.default)] + bounds
    shown = f"`{default}`" if default else "empty"
    variable = f"`EDGEQWEN_{table.upper()}_{key.upper()}`"
    return [f"`{key}`", span, shown, FLAGS.get(name, ""), variable, "live" if name in LIVE_KEYS else ""]


def test_the_document_has_every_key_as_it_is() -> None:
    sections = re.findall(r"^### \[(\w+)\]\n(.*?)(?=^#|\Z)", DOCUMENT, re.DOTALL | re.MULTILINE)
    rows = {
        table: [
            [cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("| `")
        ]
        for table, text in sections
    }
    assert {table: [row[:6] for row in rows[table]] for table in rows} == {
        table: [documented_row(f"{table}.{key}") for key in keys] for table, keys in fields_of_tables().items()
    }
    assert all(row[6] for each in rows.values() for row in each)


def test_every_flag_of_serve_is_of_a_setting() -> None:
    names = {parameter.name for parameter in serve_command.params}
    assert names - {"config_path"} == set(SETTINGS)
    assert set(SETTINGS.values()) <= set(KEYS)


def test_the_example_has_every_key_and_sets_none(tmp_path: Path) -> None:
    text = (DOCS / "edgeqwen.toml").read_text(encoding="utf-8")
    assert load(write(tmp_path, text), {}, {}) == Config()
    in_force = re.sub(r"^#(?=\w+ = )", "", text, flags=re.MULTILINE)
    assert {table: list(keys) for table, keys in tomllib.loads(in_force).items()} == {
        table: list(keys) for table, keys in fields_of_tables().items()
    }
    assert load(write(tmp_path, in_force), {}, {}) == Config()


def test_the_configuration_that_the_document_shows_is_one(tmp_path: Path) -> None:
    (text,) = re.findall(r"^```toml\n(.*?)^```$", DOCUMENT, re.DOTALL | re.MULTILINE)
    assert load(write(tmp_path, text), {}, {}).limits.per_uid == 16
