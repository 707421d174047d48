"""What a configuration that is read while the daemon runs changes of the one that it runs with."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass

from edgeqwen.config.tables import LIVE_KEYS, Config, fields_of_tables


@dataclass(frozen=True, slots=True)
class Changes:
    """`config` is what is to run: live keys as read, all others as they run. `changed` are the live keys whose values
    differ, `restart` the other ones, as `table.key` in the order of the tables.
    """

    config: Config
    changed: tuple[str, ...]
    restart: tuple[str, ...]


def changes_between(running: Config, read: Config) -> Changes:
    """How `read` differs from what runs."""
    names = [f"{table}.{key}" for table, keys in fields_of_tables().items() for key in keys]
    differing = [name for name in names if _value(running, name) != _value(read, name)]
    changed = tuple(name for name in differing if name in LIVE_KEYS)
    restart = tuple(name for name in differing if name not in LIVE_KEYS)
    return Changes(_with_values(running, read, changed), changed, restart)


def _value(config: Config, name: str) -> object:
    table, _, key = name.partition(".")
    return getattr(getattr(config, table), key)


def _with_values(running: Config, read: Config, names: Iterable[str]) -> Config:
    """`running` with what `read` says of the keys `names`."""
    for name in names:
        table, _, key = name.partition(".")
        changed = dataclasses.replace(getattr(running, table), **{key: _value(read, name)})
        running = dataclasses.replace(running, **{table: changed})
    return running
