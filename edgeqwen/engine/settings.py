"""What the engine is given at start: the model's files, and the limits of the configuration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edgeqwen.core.model import Pooling
from edgeqwen.text import ChatTemplate, Tokenizer


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """What a package says of text and sampling.

    `template` is None for a model that has none. `generation_defaults` is the content of `generation_config.json`, with
    the configuration's own values laid over it by whoever has one. `pooling` is how the model's embeddings are
    made, None if it does not say.
    """

    name: str
    quant: str
    tokenizer: Tokenizer
    template: ChatTemplate | None
    generation_defaults: Mapping[str, Any]
    eos_token_ids: tuple[int, ...]
    pooling: Pooling | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class KvSettings:
    """What is kept of keys and values. `memory_bytes` bounds all of them, those of running requests included (0: a
    part of what is free when the model has been loaded). `folder` is where blocks of conversations are written to, at
    most `disk_bytes`, and `daily_write_bytes` a day; None: nowhere.

    With `settles` the engine computes in idle time what is asked for by `Inference.settle`. `system_prompts` are
    computed at the start, kept for good, and shared by all users.
    """

    memory_bytes: int = 0
    folder: Path | None = None
    disk_bytes: int = 2 << 30
    daily_write_bytes: int = 8 << 30
    write_delay_s: float = 5.0
    settles: bool = True
    system_prompts: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLimits:
    """Bounds on what is accepted; the defaults are those of the protocol's table of limits."""

    queue: int = 128
    per_owner: int = 64
    max_deadline_ms: int = 600_000
    default_max_tokens: int = 2048
    messages: int = 256
    stop_strings: int = 8
    stop_bytes: int = 64
    choices: int = 8
    logit_bias: int = 1024
    top_logprobs: int = 20
    texts: int = 64
