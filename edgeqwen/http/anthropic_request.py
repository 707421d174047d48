"""Anthropic's request for messages, as its clients send it, to what the engine reads.

Content comes in blocks. Texts of one message that stand side by side are one, with nothing between; a `tool_result` is
a message of its own to the model's template. Thinking is off unless it is asked for, as this format has it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec

from edgeqwen.engine.generation import GenerationInput
from edgeqwen.errors import BadRequest
from edgeqwen.protocol.messages import convert, given_members

NO_EFFECT: Final = frozenset({
    "cache_control", "diagnostics", "inference_geo", "metadata", "service_tier", "speed", "user_profile_id",
    "workspace_id",
})  # fmt: skip
"""Accepted whatever they hold."""

UNSUPPORTED: Final = frozenset({"container", "context_management", "mcp_servers"})

NAMES: Final[Mapping[str, str]] = {
    "stop": "stop_sequences", "think": "thinking", "think_budget": "thinking.budget_tokens",
    "response_format": "output_config.format",
}  # fmt: skip
"""The engine's name of a field: its name here."""

TOOL_CHOICES: Final[Mapping[str, str]] = {"auto": "auto", "any": "required", "none": "none"}


class Block(msgspec.Struct, frozen=True, kw_only=True):
    """A part of a message, of any kind; which members count depends on `type`."""

    type: str
    text: str | None = None
    thinking: str | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None
    content: str | list[Block] | None = None


class Turn(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A message."""

    role: str
    content: str | list[Block]


class Tool(msgspec.Struct, frozen=True, kw_only=True):
    """A tool of the client's; those that run on Anthropic's servers have a `type` of their own."""

    name: str
    type: str = "custom"
    description: str | None = None
    input_schema: dict[str, Any] | None = None


class ToolChoice(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which tool the answer calls."""

    type: str
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Whether to think, and for how many tokens at most."""

    type: str
    budget_tokens: int | None = None
    display: str | None = None


class OutputConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the answer must look like. `effort` is accepted; how much to think is `thinking.budget_tokens`' to say."""

    effort: str | None = None
    format: dict[str, Any] | None = None


class PromptBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What makes the prompt, and the fields that say how the answer begins."""

    model: str | None = None
    messages: list[Turn]
    system: str | list[Block] | None = None
    tools: list[Tool] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None


class MessagesBody(PromptBody, frozen=True, kw_only=True):
    """The supported fields."""

    max_tokens: int
    stream: bool = False
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    stop_sequences: list[str] | None = None


@dataclass(frozen=True, slots=True)
class MessagesRequest:
    """A checked request: what the engine gets, and how the answer is wanted. `origins` says of each of its messages
    which of the client's it comes from (None: the system's).
    """

    given: GenerationInput
    origins: tuple[int | None, ...]
    is_stream: bool = False
    with_thinking: bool = True


def read_messages(members: Mapping[str, Any]) -> MessagesRequest:
    """Raises `BadRequest` with the field at fault."""
    body: MessagesBody = convert(_given(members), MessagesBody)
    turns = _read_turns(body)
    options: dict[str, Any] = {name: getattr(body, name) for name in ("max_tokens", "temperature", "top_p", "top_k")}
    if body.stop_sequences is not None:
        options["stop"] = tuple(body.stop_sequences)
    if body.output_config is not None and body.output_config.format is not None:
        options["response_format"] = _response_format(body.output_config.format)
    options |= _tool_members(body) | _thought_members(body)
    return MessagesRequest(
        given=GenerationInput(messages=tuple(turns.messages), **options),
        origins=tuple(turns.origins),
        is_stream=body.stream,
        with_thinking=body.thinking is None or body.thinking.display != "omitted",
    )


def read_prompt(members: Mapping[str, Any]) -> MessagesRequest:
    """What is counted: as `read_messages`, without the fields that say how to generate. Raises `BadRequest`."""
    body: PromptBody = convert(_given(members), PromptBody)
    turns = _read_turns(body)
    given = GenerationInput(messages=tuple(turns.messages), **_tool_members(body), **_thought_members(body))
    return MessagesRequest(given=given, origins=tuple(turns.origins))


def _given(members: Mapping[str, Any]) -> dict[str, Any]:
    given = given_members(members, but=NO_EFFECT)
    for name in sorted(UNSUPPORTED & given.keys()):
        if given[name]:
            raise BadRequest(f"{name} is not supported", field=name)
        del given[name]
    return given


@dataclass(slots=True)
class _Turns:
    """Messages for the template, and where they come from."""

    messages: list[dict[str, Any]] = field(default_factory=list)
    origins: list[int | None] = field(default_factory=list)

    def add(self, origin: int | None, role: str, content: str, **members: Any) -> None:
        given = {name: value for name, value in members.items() if value}
        self.messages.append({"role": role, "content": content, **given})
        self.origins.append(origin)


def _read_turns(body: PromptBody) -> _Turns:
    turns = _Turns()
    if body.system:
        turns.add(None, "system", _texts(body.system, "system"))
    for index, turn in enumerate(body.messages):
        path = f"messages[{index}]"
        if turn.role == "user":
            _add_user(turns, index, turn.content, path)
        elif turn.role == "assistant":
            _add_assistant(turns, index, turn.content, path)
        elif turn.role == "system":
            turns.add(index, "system", _texts(turn.content, path))
        else:
            raise BadRequest(f"{path}.role must be user, assistant or system", field=f"{path}.role")
    if body.messages and body.messages[-1].role == "assistant":
        last = f"messages[{len(body.messages) - 1}]"
        raise BadRequest(f"{last} is the assistant's: an answer that has begun is not gone on with", field=last)
    return turns


def _texts(content: str | Sequence[Block] | None, path: str) -> str:
    """A text, or blocks that are nothing but text."""
    if content is None or isinstance(content, str):
        return content or ""
    for index, block in enumerate(content):
        if block.type != "text" or block.text is None:
            raise _other_kind(f"{path}.content[{index}]" if path != "system" else f"system[{index}]", "text")
    return "".join(block.text or "" for block in content)


def _other_kind(path: str, *kinds: str) -> BadRequest:
    return BadRequest(f"{path}.type must be {' or '.join(kinds)}, and its members those of the kind", field=path)


def _add_user(turns: _Turns, index: int, content: str | list[Block], path: str) -> None:
    """Results of tools, each a message, and texts, those between two results in one."""
    if isinstance(content, str):
        turns.add(index, "user", content)
        return
    texts: list[str] = []
    for number, block in enumerate(content):
        where = f"{path}.content[{number}]"
        if block.type == "text" and block.text is not None:
            texts.append(block.text)
        elif block.type == "tool_result" and block.tool_use_id is not None:
            if texts:
                turns.add(index, "user", "".join(texts))
                texts = []
            turns.add(index, "tool", _texts(block.content, where), tool_call_id=block.tool_use_id)
        else:
            raise _other_kind(where, "text", "tool_result")
    if texts or not content:
        turns.add(index, "user", "".join(texts))


def _add_assistant(turns: _Turns, index: int, content: str | list[Block], path: str) -> None:
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[dict[str, Any]] = []
    for number, block in enumerate([Block(type="text", text=content)] if isinstance(content, str) else content):
        if block.type == "text" and block.text is not None:
            texts.append(block.text)
        elif block.type == "thinking" and block.thinking is not None:
            thoughts.append(block.thinking)
        elif block.type == "tool_use" and None not in (block.id, block.name, block.input):
            function = {"name": block.name, "arguments": block.input}
            calls.append({"id": block.id, "type": "function", "function": function})
        else:
            raise _other_kind(f"{path}.content[{number}]", "text", "thinking", "tool_use")
    turns.add(index, "assistant", "".join(texts), reasoning_content="".join(thoughts), tool_calls=calls)


def _tool_members(body: PromptBody) -> dict[str, Any]:
    tools = tuple(_function(tool, f"tools[{index}]") for index, tool in enumerate(body.tools or ()))
    choice = body.tool_choice
    if choice is None:
        return {"tools": tools}
    is_single = choice.disable_parallel_tool_use
    members = {"tools": tools, "parallel_tool_calls": None if is_single is None else not is_single}
    if choice.type == "tool":
        if choice.name is None:
            raise BadRequest("tool_choice.name is missing", field="tool_choice.name")
        return {**members, "tool_choice": {"type": "function", "function": {"name": choice.name}}}
    if choice.type not in TOOL_CHOICES:
        kinds = ", ".join((*TOOL_CHOICES, "tool"))
        raise BadRequest(f"tool_choice.type must be one of {kinds}", field="tool_choice.type")
    if not tools and choice.type != "any":
        return {"tools": ()}
    return {**members, "tool_choice": TOOL_CHOICES[choice.type]}


def _function(tool: Tool, path: str) -> dict[str, Any]:
    if tool.type != "custom":
        raise BadRequest(f"{path}.type must be custom: tools of the server are not supported", field=f"{path}.type")
    if tool.input_schema is None:
        raise BadRequest(f"{path}.input_schema is missing", field=f"{path}.input_schema")
    description = {} if tool.description is None else {"description": tool.description}
    return {"type": "function", "function": {"name": tool.name, **description, "parameters": tool.input_schema}}


def _thought_members(body: PromptBody) -> dict[str, Any]:
    thinking = body.thinking
    if thinking is None or thinking.type == "disabled":
        return {"think": False}
    if thinking.type == "adaptive":
        return {"think": True}
    if thinking.type != "enabled":
        raise BadRequest("thinking.type must be enabled, adaptive or disabled", field="thinking.type")
    if thinking.budget_tokens is None:
        raise BadRequest("thinking.budget_tokens is missing", field="thinking.budget_tokens")
    return {"think": True, "think_budget": thinking.budget_tokens}


def _response_format(given: Mapping[str, Any]) -> dict[str, Any]:
    if given.get("type") != "json_schema" or not isinstance(given.get("schema"), dict):
        field = "output_config.format"
        raise BadRequest(f"{field} must have the type json_schema and a schema", field=field)
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": given["schema"]}}
