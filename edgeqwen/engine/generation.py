"""What a front hands to the engine, before templates, tokens and defaults: `GenerationInput`.

Every field is optional and None means "not given"; ranges are checked in one place (`engine.resolve`), whichever front
the input came through, and an error names the field as the socket protocol spells it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from edgeqwen.core.request import Event

Sink: TypeAlias = Callable[[Event], None]
"""Receives a request's events on the event loop, in order; must not block or raise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationInput:
    """Exactly one of `messages` (chat), `prompt` and `tokens` (generate, no template) is given.

    `messages` are mappings with `role` and `content` (str) and, for assistants, `reasoning_content` and `tool_calls`.
    `template_kwargs` are further scalars for the template. `response_format` and `tool_choice` are as OpenAI's, and
    `response_format` also `{"type": "regex", "regex": ...}` and `{"type": "grammar", "grammar": ...}`. `has_history`:
    the messages begin with a session's, which a limit on the messages of a request is not about.
    """

    messages: tuple[Mapping[str, Any], ...] | None = None
    prompt: str | None = None
    tokens: tuple[int, ...] | None = None
    tools: tuple[Mapping[str, Any], ...] = ()
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    tool_choice: str | Mapping[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    response_format: Mapping[str, Any] | None = None
    think: bool | None = None
    think_budget: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: Mapping[str, float] | None = None
    seed: int | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    stop: tuple[str, ...] | None = None
    n: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    ignore_eos: bool | None = None
    echo: bool | None = None
    deadline_ms: int | None = None
    wait: bool | None = None
    speculate: bool | None = None
    cache: bool | None = None
    priority: str | None = None
    has_history: bool = False
