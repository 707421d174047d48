"""OpenAI's chat completion request, as its clients send it, to what the engine reads.

A field that would change the answer and is not supported is refused by name, and so is a field nobody knows; a field
that changes nothing is accepted. `null` is "not given". The model's name is not checked: there is one model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from edgeqwen.engine.generation import GenerationInput
from edgeqwen.errors import BadRequest
from edgeqwen.http.openai_input import StreamOptions, wants_usage_chunk
from edgeqwen.protocol.message import EXTRAS, ROLES, Message, Part
from edgeqwen.protocol.messages import GenerationOptions, convert, given_members

NO_EFFECT: Final = frozenset({
    "cache_prompt", "keep_alive", "metadata", "prediction", "prompt_cache_key", "prompt_cache_options",
    "prompt_cache_retention", "safety_identifier", "service_tier", "store", "user",
})  # fmt: skip
"""Accepted whatever they hold."""

NEUTRAL: Final[Mapping[str, tuple[Any, ...]]] = {
    "modalities": (["text"],),
    "function_call": ("auto", "none"),
    "functions": ([],),
    "verbosity": ("medium",),
}
"""Accepted with one of these values, which say what happens anyway."""

UNSUPPORTED: Final = frozenset({"audio", "moderation", "web_search_options", *NEUTRAL})

OPENAI_ROLES: Final = (*ROLES, "developer")
"""`developer` is this format's newer name of `system`."""

EFFORTS: Final[Mapping[str, bool]] = {
    "none": False, "minimal": False, "low": True, "medium": True, "high": True, "xhigh": True, "max": True,
}  # fmt: skip
"""`reasoning_effort` says whether to think; how much is `thinking_budget`'s to say."""

NAMES: Final[Mapping[str, str]] = {
    "think": "enable_thinking", "think_budget": "thinking_budget", "template_kwargs": "chat_template_kwargs",
}  # fmt: skip
"""The engine's name of a field: its name here."""

TEMPLATE_OWN: Final = frozenset({"messages", "tools", "add_generation_prompt"})


class Turn(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A message. Answers are often sent back as they came, hence the members that hold nothing, and `parsed`, which
    OpenAI's package adds to what it has read as a schema's value.
    """

    role: str
    content: str | list[Part] | None = None
    name: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None
    refusal: None = None
    audio: None = None
    function_call: None = None
    annotations: list[Any] | None = None
    parsed: Any = None


class ChatBody(GenerationOptions, frozen=True, kw_only=True):
    """The supported fields."""

    messages: list[Turn]
    model: str | None = None
    max_completion_tokens: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    response_format: dict[str, Any] | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    enable_thinking: bool | None = None
    thinking_budget: int | None = None
    reasoning_effort: str | None = None
    return_reasoning: bool = True
    chat_template_kwargs: dict[str, Any] | None = None
    conversation_id: str | None = None


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """A checked request: what the engine gets, how the answer is wanted, and which of the caller's conversations it
    goes on with.
    """

    given: GenerationInput
    is_stream: bool
    with_usage_chunk: bool
    with_reasoning: bool
    num_choices: int
    conversation: str | None = None


def read_chat(members: Mapping[str, Any]) -> ChatRequest:
    """Raises `BadRequest` with the field at fault."""
    given = given_members(members, but=NO_EFFECT)
    for name in sorted(UNSUPPORTED & given.keys()):
        if given[name] not in NEUTRAL.get(name, ()):
            raise BadRequest(f"{name} is not supported", field=name)
        del given[name]
    body: ChatBody = convert(given, ChatBody)
    return ChatRequest(
        given=_generation_input(body),
        is_stream=body.stream,
        with_usage_chunk=wants_usage_chunk(body.stream_options, is_stream=body.stream),
        with_reasoning=body.return_reasoning,
        num_choices=1 if body.n is None else body.n,
        conversation=body.conversation_id,
    )


def _generation_input(body: ChatBody) -> GenerationInput:
    think, template_kwargs = read_template_kwargs(body.chat_template_kwargs, body.enable_thinking)
    members = body.to_input()
    if body.max_completion_tokens is not None:
        members["max_tokens"] = body.max_completion_tokens
    return GenerationInput(
        messages=read_turns(body.messages),
        tools=tuple(body.tools or ()),
        tool_choice=body.tool_choice if body.tools or body.tool_choice not in ("none", "auto") else None,
        parallel_tool_calls=body.parallel_tool_calls if body.tools else None,
        response_format=body.response_format,
        template_kwargs=template_kwargs,
        think=_effort(body) if think is None else think,
        think_budget=body.thinking_budget,
        **members,
    )


def _effort(body: ChatBody) -> bool | None:
    if body.reasoning_effort is None:
        return None
    if body.reasoning_effort not in EFFORTS:
        raise BadRequest(f"reasoning_effort must be one of {', '.join(EFFORTS)}", field="reasoning_effort")
    return EFFORTS[body.reasoning_effort]


def read_turns(turns: Sequence[Turn]) -> tuple[Mapping[str, Any], ...]:
    """The messages as the engine takes them. Raises `BadRequest`."""
    return tuple(_message(turn, index).to_template(index) for index, turn in enumerate(turns))


def _message(turn: Turn, index: int) -> Message:
    if turn.role not in OPENAI_ROLES:
        field = f"messages[{index}].role"
        raise BadRequest(f"{field} must be one of {', '.join(OPENAI_ROLES)}", field=field)
    members = {name: getattr(turn, name) for name in EXTRAS}
    if turn.reasoning_content is None:
        members["reasoning_content"] = turn.reasoning
    return Message(
        role="system" if turn.role == "developer" else turn.role,
        content=turn.content,
        **members,
    )


def read_template_kwargs(
    kwargs: Mapping[str, Any] | None, enable_thinking: bool | None
) -> tuple[bool | None, dict[str, Any]]:
    """Whether to think, and the other values for the template: scalars, and none that would replace the prompt."""
    values = dict(kwargs or {})
    for name, value in values.items():
        field = f"chat_template_kwargs.{name}"[:80]
        if name in TEMPLATE_OWN:
            raise BadRequest(f"{field} is not for the client to set", field=field)
        if not isinstance(value, bool | int | float | str):
            raise BadRequest(f"{field} must be a string, a number, true or false", field=field)
    think = values.pop("enable_thinking", None)
    if think is not None and not isinstance(think, bool):
        field = "chat_template_kwargs.enable_thinking"
        raise BadRequest(f"{field} must be true or false", field=field)
    return (think if enable_thinking is None else enable_thinking), values
