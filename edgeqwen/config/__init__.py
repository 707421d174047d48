"""Configuration: one frozen tree of tables, from a TOML file, overridden by the environment, overridden by flags.

The key `queue` of the table `[limits]` is `limits.queue` to a flag and `EDGEQWEN_LIMITS_QUEUE` to the environment. The
tree (`tables`) holds values only; nothing here reads the environment or a file unless it is handed in (`reading`).
`changes` compares what is read later with what runs.
"""

from edgeqwen.config.changes import Changes, changes_between
from edgeqwen.config.reading import ConfigSources, load
from edgeqwen.config.tables import (
    KV_TYPES,
    LIVE_KEYS,
    MAX_DEFAULT_CONTEXT,
    TORCH_MODES,
    TORCH_WEIGHTS,
    Config,
    HttpTable,
    KvTable,
    TorchTable,
    Value,
    fields_of_tables,
)

__all__ = [
    "KV_TYPES",
    "LIVE_KEYS",
    "MAX_DEFAULT_CONTEXT",
    "TORCH_MODES",
    "TORCH_WEIGHTS",
    "Changes",
    "Config",
    "ConfigSources",
    "HttpTable",
    "KvTable",
    "TorchTable",
    "Value",
    "changes_between",
    "fields_of_tables",
    "load",
]
