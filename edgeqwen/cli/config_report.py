"""What `edgeqwen config` says: settings with where they come from, and all that is wrong with them at once."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edgeqwen.cli.places import cache_folder, models_folder, socket_to_listen_on, state_folder
from edgeqwen.cli.threads import checked_processor, planned_threads
from edgeqwen.config import LIVE_KEYS, Config, ConfigSources, Value, fields_of_tables
from edgeqwen.errors import EdgeqwenError


@dataclass(frozen=True, slots=True)
class Setting:
    """One key. `source` is a path, the name of a variable, `flag` or `default`."""

    name: str
    value: Value
    source: str
    is_changed: bool

    @property
    def is_live(self) -> bool:
        return self.name in LIVE_KEYS

    def to_dict(self) -> dict[str, Any]:
        return {"value": self.value, "source": self.source, "live": self.is_live}


def settings_of(sources: ConfigSources) -> list[Setting]:
    """All settings, in the order of the tables. Raises `ConfigInvalid`."""
    config, default, where = sources.read(), Config(), sources.sources()
    names = [(table, key) for table, keys in fields_of_tables().items() for key in keys]

    def setting_of(table: str, key: str) -> Setting:
        value: Value = getattr(getattr(config, table), key)
        name = f"{table}.{key}"
        is_changed = value != getattr(getattr(default, table), key)
        return Setting(name, value, where.get(name, "default"), is_changed)

    return [setting_of(table, key) for table, key in names]


def to_toml(settings: Iterable[Setting]) -> str:
    """A file that says the same, with where each value comes from in comments."""
    lines: list[str] = []
    last = ""
    for setting in settings:
        table, _, key = setting.name.partition(".")
        if table != last:
            lines += ["", f"[{table}]"] if lines else [f"[{table}]"]
            last = table
        shown = f"{key} = {_toml_value(setting.value)}"
        note = setting.source + (", live" if setting.is_live else "")
        lines.append(f"{shown:<40} # {note}")
    return "\n".join(lines) or "# nothing differs from the defaults"


def _toml_value(value: Value) -> str:
    # What JSON writes of these types is TOML too.
    return json.dumps(list(value) if isinstance(value, tuple) else value, ensure_ascii=False)


@dataclass(frozen=True, slots=True)
class Report:
    """`problems` keep the daemon from starting; `warnings` do not."""

    problems: tuple[str, ...]
    warnings: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        return {"ok": not self.problems, "problems": list(self.problems), "warnings": list(self.warnings)}

    def to_text(self) -> str:
        lines = [f"problem: {text}" for text in self.problems] + [f"warning: {text}" for text in self.warnings]
        return "\n".join(lines) or "the configuration is sound"


def check_all(sources: ConfigSources) -> Report:
    """Look at everything that `serve` would look at before it serves, without changing anything."""
    faults = [error.message for error in sources.faults()]
    if faults:
        return Report(tuple(faults), ())
    config = sources.read()
    problems = [text for check in (_places, _keys, _socket, _processor, _model) for text in _told(check, config)]
    return Report(tuple(dict.fromkeys(problems)), tuple(_warnings(config)))


def _told(check: Callable[[Config], None], config: Config) -> Iterator[str]:
    try:
        check(config)
    except EdgeqwenError as error:
        yield error.message


def _places(config: Config) -> None:
    from edgeqwen.part_settings import check_places

    check_places(config)


def _keys(config: Config) -> None:
    from edgeqwen.part_settings import http_access

    http_access(config)


def _socket(config: Config) -> None:
    from edgeqwen.server.binding import check_socket_place

    check_socket_place(socket_to_listen_on(config.socket.path))


def _processor(config: Config) -> None:
    checked_processor()
    planned_threads(**dataclasses.asdict(config.cpu))


def _model(config: Config) -> None:
    from edgeqwen.core.package import open_package, read_text_files, resolve_model, verify_digests
    from edgeqwen.errors import ConfigInvalid
    from edgeqwen.loading import check_context, unknown_runtime
    from edgeqwen.loading.checkpoint_model import check_checkpoint
    from edgeqwen.loading.choice import serves_checkpoint

    path, runtime = resolve_model(config.model.package, models_folder()), config.engine.runtime
    if runtime.startswith("fake:"):
        read_text_files(path)
        return
    if serves_checkpoint(runtime, path):
        check_checkpoint(path, config, "torch" if runtime == "auto" else runtime)
        return
    if runtime not in {"onnx", "auto"}:
        raise unknown_runtime(runtime)
    package = open_package(path)
    verify_digests(package, with_weights=False)
    kv, manifest = config.kv, package.manifest
    check_context(kv, manifest.spec.max_position)
    if kv.type not in {"auto", *manifest.kv_types}:
        raise ConfigInvalid(f"kv.type: {path} has no {kv.type} cache; it has {', '.join(manifest.kv_types)}")


def _warnings(config: Config) -> Iterator[str]:
    from edgeqwen.core.state import could_write
    from edgeqwen.cpu import read_memory

    state = state_folder(config.service.state_dir, os.environ, is_root=os.geteuid() == 0)
    for name, folder in (
        ("service.state_dir", state),
        ("service.cache_dir", cache_folder(config.service.cache_dir, os.environ, state)),
    ):
        if not could_write(folder):
            yield f"{name}: {folder} cannot be written: sessions and what is measured of this machine are not kept"
    memory, wanted = read_memory(), config.kv.memory_mb << 20
    if memory.most and wanted > memory.most:
        yield f"kv.memory_mb: {config.kv.memory_mb} MiB are more than this machine has, {memory.most >> 20}"
    if config.limits.per_uid > config.limits.queue:
        yield "limits.per_uid is above limits.queue: one user can fill the queue"
    if config.service.idle_exit_s and 0 < config.service.idle_unload_s > config.service.idle_exit_s:
        yield "service.idle_unload_s is above service.idle_exit_s: the daemon ends before its model sleeps"
    with contextlib.suppress(OSError):
        path = config.http.api_key_file
        if path and Path(path).stat().st_mode & 0o077:
            yield f"http.api_key_file: others may read {path}; chmod 600 it"
