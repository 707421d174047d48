"""OpenAI's chat completion request, as its clients send it, to what the engine reads.

A field that would change the answer and is not supported is refused by name, and so is a field nobody knows; a field
that changes nothing is accepted. `null` is "not given". The model's name is not checked: there is one model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from edgeqwen.engine.generation import GenerationInput
from edgeqwen.errors import BadRequest
from edgeqwen.protocol.messages import TURN_EXTRAS, GenerationOptions, Message, convert

NO_EFFECT: Final = frozenset({
    "metadata", "parallel_tool_calls", "prompt_cache_key", "prompt_cache_retention", "safety_identifier",
    "service_tier", "store", "user",
})  # fmt: skip
"""Accepted whatever they hold."""

NEUTRAL: Final[Mapping[str, tuple[Any, ...]]] = {
    "response_format": ({"type": "text"},),
    "tool_choice": ("auto",),
    "modalities": (["text"],),
    "function_call": ("auto",),
    "functions": ([],),
}
"""Accepted with one of these values, which say what happens anyway."""

UNSUPPORTED: Final = frozenset({
    "audio", "prediction", "reasoning_effort", "thinking_budget", "verbosity", "web_search_options",
    *NEUTRAL,
})  # fmt: skip

TEMPLATE_OWN: Final = frozenset({"messages", "tools", "add_generation_prompt"})


class Part(msgspec.Struct, frozen=True, kw_only=True):
    """A part of a message's content. Only text is read; other kinds are refused by their name."""

    type: str
    text: str | None = None


class Turn(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A message. Answers are often sent back as they came, hence the members that hold nothing."""

    role: str
    content: str | list[Part] | None = None
    name: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None
    refusal: None = None
    audio: None = None
    function_call: None = None
    annotations: list[Any] | None = None


class StreamOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Whether the usage comes in a last chunk of its own."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class ChatBody(GenerationOptions, frozen=True, kw_only=True):
    """The supported fields."""

    messages: list[Turn]
    model: str | None = None
    max_completion_tokens: int | None = None
    tools: list[dict[str, Any]] | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    enable_thinking: bool | None = None
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
    given = {name: value for name, value in members.items() if value is not None and name not in NO_EFFECT}
    if given.get("tool_choice") == "none" and not given.get("tools"):
        del given["tool_choice"]
    for name in sorted(UNSUPPORTED & given.keys()):
        if given[name] not in NEUTRAL.get(name, ()):
            raise BadRequest(f"{name} is not supported", field=name)
        del given[name]
    body: ChatBody = convert(given, ChatBody)
    if body.stream_options is not None and not body.stream:
        raise BadRequest("stream_options is for stream: true only", field="stream_options")
    return ChatRequest(
        given=_generation_input(body),
        is_stream=body.stream,
        with_usage_chunk=body.stream_options is not None and bool(body.stream_options.include_usage),
        with_reasoning=body.return_reasoning,
        num_choices=1 if body.n is None else body.n,
        conversation=body.conversation_id,
    )


def _generation_input(body: ChatBody) -> GenerationInput:
    think, template_kwargs = _template_kwargs(body)
    members = body.to_input()
    if body.max_completion_tokens is not None:
        members["max_tokens"] = body.max_completion_tokens
    return GenerationInput(
        messages=tuple(_message(turn, index).to_template(index) for index, turn in enumerate(body.messages)),
        tools=tuple(body.tools or ()),
        template_kwargs=template_kwargs,
        think=think,
        **members,
    )


def _message(turn: Turn, index: int) -> Message:
    return Message(
        role="system" if turn.role == "developer" else turn.role,
        content=_text(turn.content, f"messages[{index}].content"),
        **{name: getattr(turn, name) for name in TURN_EXTRAS},
    )


def _text(content: str | list[Part] | None, path: str) -> str | None:
    """The text of a content; parts are joined as they are, without anything between them."""
    if content is None or isinstance(content, str):
        return content
    for index, part in enumerate(content):
        if part.type != "text" or part.text is None:
            raise BadRequest(f"{path}[{index}] is not text; only text is supported", field=f"{path}[{index}].type")
    return "".join(part.text or "" for part in content)


def _template_kwargs(body: ChatBody) -> tuple[bool | None, dict[str, Any]]:
    """Whether to think, and the other values for the template: scalars, and none that would replace the prompt."""
    values = dict(body.chat_template_kwargs or {})
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
    return (think if body.enable_thinking is None else body.enable_thinking), values
