"""The configuration read and checked: what is not known, of the wrong type or out of range raises `ConfigInvalid`
(exit 78) that names the key and where it was set.
"""

from __future__ import annotations

import dataclasses
import stat
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edgeqwen.config.tables import Config, Value, fields_of_tables
from edgeqwen.errors import ConfigInvalid

ENV_PREFIX = "EDGEQWEN_"


@dataclass(frozen=True, slots=True)
class _Setting:
    """One value on its way in: `origin` is how to name it in an error, `source` where it was set."""

    table: str
    key: str
    value: Any
    origin: str
    source: str


@dataclass(frozen=True, slots=True)
class ConfigSources:
    """Where a configuration comes from: a file, the environment as it was at the start, flags (`{"kv.slots": 4}`; None
    is "not given"). Later ones win.
    """

    path: Path | None
    environ: Mapping[str, str]
    flags: Mapping[str, Value | None]

    def read(self) -> Config:
        return load(self.path, self.environ, self.flags)

    def sources(self) -> dict[str, str]:
        """Where the value of each key that is set comes from, by `table.key`: the path of the file, the name of the
        variable, or `flag`. Raises `ConfigInvalid`.
        """
        settings = _settings(self.path, self.environ, self.flags)
        return {f"{setting.table}.{setting.key}": setting.source for setting in map(_sound, settings)}

    def faults(self) -> list[ConfigInvalid]:
        """All that is wrong, and not just the first."""
        found: list[ConfigInvalid] = []
        for setting in _settings(self.path, self.environ, self.flags):
            try:
                _checked(_sound(setting))
            except ConfigInvalid as error:
                found.append(error)
        return found

    def read_again(self) -> Config:
        """As the file is now. Raises `ConfigInvalid` for one that can be read only once too, such as a pipe: it would
        seem to be empty now, and everything in it to be gone.
        """
        if self.path is not None and _is_special(self.path):
            raise ConfigInvalid(f"{self.path}: is not a regular file, so it cannot be read again")
        return self.read()


def load(path: Path | None, environ: Mapping[str, str], flags: Mapping[str, Value | None]) -> Config:
    """The configuration of `ConfigSources`, from its parts."""
    chosen: dict[str, dict[str, Any]] = {}
    for setting in map(_sound, _settings(path, environ, flags)):
        chosen.setdefault(setting.table, {})[setting.key] = _checked(setting)
    default = Config()
    tables = {name: dataclasses.replace(getattr(default, name), **values) for name, values in chosen.items()}
    return dataclasses.replace(default, **tables)


def _settings(
    path: Path | None, environ: Mapping[str, str], flags: Mapping[str, Value | None]
) -> Iterator[_Setting | ConfigInvalid]:
    """All that are set, those that count more later; in the place of one that makes no sense, what is wrong with it."""
    if path is not None:
        yield from _from_file(path)
    yield from _from_environment(environ)
    yield from _from_flags(flags)


def _sound(setting: _Setting | ConfigInvalid) -> _Setting:
    if isinstance(setting, ConfigInvalid):
        raise setting
    return setting


def _is_special(path: Path) -> bool:
    """Whether there is something else than a file; where nothing can be found out, reading says what is wrong."""
    try:
        return not stat.S_ISREG(path.stat().st_mode)
    except OSError:
        return False


def _from_file(path: Path) -> Iterator[_Setting | ConfigInvalid]:
    try:
        tree = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        yield ConfigInvalid(f"{path}: cannot read the configuration: {error.strerror}")
        return
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        yield ConfigInvalid(f"{path}: not valid TOML: {error}")
        return
    for table, values in tree.items():
        if not isinstance(values, dict):
            yield ConfigInvalid(f"{path}: {table} stands outside of any table; tables are {_table_names()}")
        elif table not in fields_of_tables():
            yield ConfigInvalid(f"{path}: unknown table [{table}]; tables are {_table_names()}")
        else:
            for key, value in values.items():
                yield _Setting(table, key, value, f"{path}: {table}.{key}", str(path))


def _from_environment(environ: Mapping[str, str]) -> Iterator[_Setting | ConfigInvalid]:
    for name, text in environ.items():
        if not name.startswith(ENV_PREFIX):
            continue
        table, _, key = name.removeprefix(ENV_PREFIX).lower().partition("_")
        if name != name.upper() or key not in fields_of_tables().get(table, ()):
            yield ConfigInvalid(f"{name}: unknown environment variable; they are named {ENV_PREFIX}TABLE_KEY")
            continue
        try:
            value = _parsed(text, type(fields_of_tables()[table][key].default), name)
        except ConfigInvalid as error:
            yield error
        else:
            yield _Setting(table, key, value, name, name)


def _from_flags(flags: Mapping[str, Value | None]) -> Iterator[_Setting]:
    for name, value in flags.items():
        if value is not None:
            table, _, key = name.partition(".")
            yield _Setting(table, key, value, f"flag for {name}", "flag")


def _table_names() -> str:
    return " ".join(f"[{name}]" for name in fields_of_tables())


def _parsed(text: str, kind: type, name: str) -> Value:
    """The value of an environment variable for a key of type `kind`."""
    try:
        if kind is bool:
            return _BOOLS[text.lower()]
        if kind is int:
            return int(text)
        if kind is float:
            return float(text)
        if kind is tuple:  # as it would stand in the file
            values = tomllib.loads(f"value = {text}")["value"]
            return tuple(values) if isinstance(values, list) else (text,)
    except (KeyError, ValueError):  # also of what is no TOML
        raise ConfigInvalid(f"{name}: {text!r} is not {_KIND_NAMES[kind]}") from None
    return text


_KIND_NAMES = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "text",
    tuple: 'a list of texts, such as ["one", "two"]',
}
_BOOLS = {"true": True, "1": True, "false": False, "0": False}


def _checked(setting: _Setting) -> Any:
    """The value, if key, type and range are right."""
    keys = fields_of_tables()[setting.table]
    if setting.key not in keys:
        raise ConfigInvalid(f"{setting.origin}: unknown key; [{setting.table}] has {', '.join(keys)}")
    known = keys[setting.key]
    kind: type = type(known.default)
    value = setting.value
    if kind is float and type(value) is int:
        value = float(value)
    if isinstance(value, list) and kind is tuple and all(isinstance(each, str) for each in value):
        value = tuple(value)
    if type(value) is not kind:
        raise ConfigInvalid(f"{setting.origin}: must be {_KIND_NAMES[kind]}")
    options = known.metadata.get("options")
    if options and value not in options:
        raise ConfigInvalid(f"{setting.origin}: must be one of {', '.join(options)}")
    least, most = known.metadata.get("least"), known.metadata.get("most")
    # Written so that NaN, which compares false with everything, is refused too.
    if least is not None and not value >= least:
        raise ConfigInvalid(f"{setting.origin}: {value} is below the least value, {least}")
    if most is not None and not value <= most:
        raise ConfigInvalid(f"{setting.origin}: {value} is above the greatest value, {most}")
    return value
