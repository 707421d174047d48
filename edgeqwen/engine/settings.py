"""What the engine is given at start: the model's files, and the limits of the configuration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from edgeqwen.text import ChatTemplate, Tokenizer


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """What a package says of text and sampling.

    `template` is None for a model that has none. `generation_defaults` is the content of `generation_config.json`, with
    the configuration's own values laid over it by whoever has one.
    """

    name: str
    quant: str
    tokenizer: Tokenizer
    template: ChatTemplate | None
    generation_defaults: Mapping[str, Any]
    eos_token_ids: tuple[int, ...]


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
