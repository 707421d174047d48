"""What a daemon serves: its options, and the model that comes of them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from edgeqwen.config import Config, ConfigSources, KvTable
from edgeqwen.cpu import ThreadPlan
from edgeqwen.engine.life import RuntimeFactory
from edgeqwen.engine.settings import ModelFiles
from edgeqwen.errors import ConfigInvalid
from edgeqwen.text import ChatTemplate


@dataclass(frozen=True, slots=True)
class DaemonOptions:
    """`config` was read from `sources`. `package_path` is a package folder; for a fake runtime it needs the text files
    only. `threads` compute the steps. `state_dir`, where what is measured of this machine is kept, and `cache_dir` may
    not exist yet.
    """

    config: Config
    sources: ConfigSources
    package_path: Path
    socket_path: Path
    threads: ThreadPlan
    state_dir: Path
    cache_dir: Path


@dataclass(frozen=True, slots=True)
class Model:
    """What `Inference` needs of a model: the files that concern text, and how to make its runtime."""

    files: ModelFiles
    runtime_factory: RuntimeFactory


def check_context(kv: KvTable, most: int) -> None:
    """Raise `ConfigInvalid` for a context that is longer than `most`, the positions that a model knows."""
    if kv.context > most:
        raise ConfigInvalid(f"kv.context: {kv.context} is above what the model can do, {most}")


def chat_template(source: str | None) -> ChatTemplate | None:
    """The template of a model; None if it has none."""
    return None if source is None else ChatTemplate(source)
