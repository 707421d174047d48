"""Configuration: one frozen tree of tables, from a TOML file, overridden by the environment, overridden by flags.

The key `queue` of the table `[limits]` is `limits.queue` to a flag and `EDGEQWEN_LIMITS_QUEUE` to the environment.
What is not known, of the wrong type or out of range raises `ConfigInvalid` (exit 78) that names the key and where it
was set. The tree holds values only; nothing here reads the environment or a file unless it is handed to `load`.
"""

from __future__ import annotations

import dataclasses
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from edgeqwen.errors import ConfigInvalid

ENV_PREFIX = "EDGEQWEN_"
MAX_DEFAULT_CONTEXT = 8192

Value: TypeAlias = int | float | str | bool | tuple[str, ...]


KV_TYPES = ("auto", "fp32", "int8")


def _key(default: Any, *, least: float | None = None, most: float | None = None, options: tuple[str, ...] = ()) -> Any:
    """A dataclass field with a range, both ends included, or with the texts that it may be."""
    return field(default=default, metadata={"least": least, "most": most, "options": options})


@dataclass(frozen=True, slots=True)
class ModelTable:
    """`package` is a folder or the name of an installed package; empty means the only one installed."""

    package: str = ""


@dataclass(frozen=True, slots=True)
class SocketTable:
    """`path` empty means the default place of the user who runs. Members of `group`, if given, may connect too."""

    path: str = ""
    group: str = ""


@dataclass(frozen=True, slots=True)
class HttpTable:
    """HTTP is spoken on the socket. `listen`, such as `127.0.0.1:8080`, has it on a TCP port too; empty means none.

    Network clients need a key of `api_key_file` if it is given (one a line), and it must be if other machines reach the
    address. They may call the daemon by a loopback name, by the address it listens on, and by `allowed_hosts` (without
    a port; IPv6 in brackets). Web pages of `allowed_origins`, such as `http://localhost:3000`, may ask.
    """

    listen: str = ""
    api_key_file: str = ""
    allowed_hosts: tuple[str, ...] = ()
    allowed_origins: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class CpuTable:
    """`threads` are those of a step; `decode_threads` and `prefill_threads` if the two kinds of step differ; 0 means as
    the thread plan finds best. `cpus` is a list such as `0-3,8`; empty means all that the process may use. `pin` false
    leaves it to the kernel which of them a thread runs on.
    """

    threads: int = _key(0, least=0, most=1024)
    decode_threads: int = _key(0, least=0, most=1024)
    prefill_threads: int = _key(0, least=0, most=1024)
    cpus: str = ""
    pin: bool = True


@dataclass(frozen=True, slots=True)
class KvTable:
    """`context` is the tokens one slot holds; 0 means the model's own limit, at most 8,192. `type` is how keys and
    values are kept: `auto` takes what suits the package and the memory there is.

    `memory_mb` (MiB, as the others) bounds all keys and values in memory; 0 takes a quarter of what is free. Those of
    conversations are also kept on disk: `disk_mb` at most (0: none), and `daily_writes_mb` written in a day. `settle`
    computes in idle time how a past turn reads in the next prompt. `system_prompts` are texts that all users begin
    with: computed at the start, and shared.
    """

    slots: int = _key(8, least=1, most=256)
    context: int = _key(0, least=0, most=1_048_576)
    type: str = _key("auto", options=KV_TYPES)
    memory_mb: int = _key(0, least=0, most=1 << 24)
    disk_mb: int = _key(2048, least=0, most=1 << 24)
    daily_writes_mb: int = _key(8192, least=0, most=1 << 24)
    settle: bool = True
    system_prompts: tuple[str, ...] = ()

    def context_of(self, max_position: int) -> int:
        """The tokens of a slot for a model that has `max_position`."""
        return self.context or min(max_position, MAX_DEFAULT_CONTEXT)


@dataclass(frozen=True, slots=True)
class LimitsTable:
    """What one client and all clients together may ask for. `stop_bytes` is of one stop string, `per_uid` what of one
    user runs and waits, `queue` what of all waits.
    """

    line_bytes: int = _key(1 << 20, least=1024, most=1 << 30)
    nesting: int = _key(32, least=8, most=64)
    messages: int = _key(256, least=1, most=65_536)
    stop_strings: int = _key(8, least=1, most=256)
    stop_bytes: int = _key(64, least=1, most=4096)
    connections: int = _key(128, least=2, most=65_536)
    connections_per_uid: int = _key(64, least=1, most=65_536)
    inflight: int = _key(8, least=1, most=1024)
    batch_items: int = _key(64, least=1, most=65_536)
    queue: int = _key(128, least=1, most=65_536)
    per_uid: int = _key(64, least=1, most=65_536)
    default_max_tokens: int = _key(2048, least=1, most=1_048_576)
    max_deadline_ms: int = _key(600_000, least=1, most=86_400_000)


@dataclass(frozen=True, slots=True)
class SessionsTable:
    """`per_uid` sessions of one user at most; one is forgotten `ttl_s` seconds after its last turn, if it does not say
    itself when.
    """

    per_uid: int = _key(1024, least=1, most=65_536)
    ttl_s: int = _key(7 * 86_400, least=1, most=90 * 86_400)


@dataclass(frozen=True, slots=True)
class EngineTable:
    """`runtime` is `onnx` or `fake:SCRIPT` (scripted answers, for tests).

    `speculation` guesses tokens ahead where an answer repeats what stands before it. `deterministic` keeps to one graph
    and no guessing, for quantisations whose last bits depend on the number of rows.
    """

    runtime: str = "onnx"
    speculation: bool = True
    deterministic: bool = False


@dataclass(frozen=True, slots=True)
class ServiceTable:
    """`drain_s` is how long running answers may take to end after SIGTERM. `state_dir` keeps what was measured of this
    machine, `cache_dir` what may be lost; empty means the default place of the user who runs.
    """

    drain_s: float = _key(10.0, least=0.0, most=3600.0)
    state_dir: str = ""
    cache_dir: str = ""


@dataclass(frozen=True, slots=True)
class Config:
    """All tables; the defaults are a working configuration."""

    model: ModelTable = field(default_factory=ModelTable)
    socket: SocketTable = field(default_factory=SocketTable)
    http: HttpTable = field(default_factory=HttpTable)
    cpu: CpuTable = field(default_factory=CpuTable)
    kv: KvTable = field(default_factory=KvTable)
    limits: LimitsTable = field(default_factory=LimitsTable)
    sessions: SessionsTable = field(default_factory=SessionsTable)
    engine: EngineTable = field(default_factory=EngineTable)
    service: ServiceTable = field(default_factory=ServiceTable)


@dataclass(frozen=True, slots=True)
class _Setting:
    """One value on its way in: `origin` is how to name it in an error."""

    table: str
    key: str
    value: Any
    origin: str


def load(path: Path | None, environ: Mapping[str, str], flags: Mapping[str, Value | None]) -> Config:
    """The configuration of file, environment and flags (`{"kv.slots": 4}`; None is "not given"), later ones winning."""
    settings: list[_Setting] = []
    if path is not None:
        settings += _from_file(path)
    settings += _from_environment(environ)
    settings += _from_flags(flags)
    chosen: dict[str, dict[str, Any]] = {}
    for setting in settings:
        chosen.setdefault(setting.table, {})[setting.key] = _checked(setting)
    default = Config()
    tables = {name: dataclasses.replace(getattr(default, name), **values) for name, values in chosen.items()}
    return dataclasses.replace(default, **tables)


def _from_file(path: Path) -> Iterator[_Setting]:
    try:
        tree = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigInvalid(f"{path}: cannot read the configuration: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigInvalid(f"{path}: not valid TOML: {error}") from error
    for table, values in tree.items():
        if not isinstance(values, dict):
            raise ConfigInvalid(f"{path}: {table} stands outside of any table; tables are {_table_names()}")
        if table not in _tables():
            raise ConfigInvalid(f"{path}: unknown table [{table}]; tables are {_table_names()}")
        for key, value in values.items():
            yield _Setting(table, key, value, f"{path}: {table}.{key}")


def _from_environment(environ: Mapping[str, str]) -> Iterator[_Setting]:
    for name, text in environ.items():
        if not name.startswith(ENV_PREFIX):
            continue
        table, _, key = name.removeprefix(ENV_PREFIX).lower().partition("_")
        if name != name.upper() or key not in _tables().get(table, ()):
            raise ConfigInvalid(f"{name}: unknown environment variable; they are named {ENV_PREFIX}TABLE_KEY")
        kind = type(_tables()[table][key].default)
        yield _Setting(table, key, _parsed(text, kind, name), name)


def _from_flags(flags: Mapping[str, Value | None]) -> Iterator[_Setting]:
    for name, value in flags.items():
        if value is not None:
            table, _, key = name.partition(".")
            yield _Setting(table, key, value, f"flag for {name}")


def _tables() -> dict[str, dict[str, dataclasses.Field[Any]]]:
    """Table -> key -> its field."""
    default = Config()
    return {
        table.name: {key.name: key for key in dataclasses.fields(getattr(default, table.name))}
        for table in dataclasses.fields(Config)
    }


def _table_names() -> str:
    return " ".join(f"[{name}]" for name in _tables())


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
    keys = _tables()[setting.table]
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
