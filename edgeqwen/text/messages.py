"""Client messages brought into the one form that templates read. The rules:

* Roles are system, user, assistant and tool; `developer` is system under another name.
* `content` is text. A list of `{"type": "text"}` parts is their texts one after another, with nothing between. An
  assistant's content may be missing or null, which is the same as "".
* A thought travels in `reasoning_content`. Clients that know no such member send it back inside the content, so a
  `<think>...</think>` block at the very start of an assistant's content is taken for one if `reasoning_content` is
  absent. A marker anywhere else is text, and stays.
* The arguments of a tool call may be an object or its JSON text; text that is a JSON object becomes that object,
  empty text becomes `{}`, and other text stays text.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from edgeqwen.errors import BadRequest

_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
_OPENING_THOUGHT = re.compile(r"\s*<think>(.*?)</think>", re.DOTALL)
_MAX_NESTING = 32


def read_messages(messages: Sequence[Mapping[str, Any]], *, splits_thoughts: bool) -> list[dict[str, Any]]:
    """Checked copies of `messages` in the form above; raises `BadRequest` that names the member.

    `splits_thoughts` says whether a think block at the start of content is taken for a thought.
    """
    if not messages:
        raise BadRequest("messages must hold at least one message", field="messages")
    read = [_read_message(message, field=f"messages[{i}]") for i, message in enumerate(messages)]
    return [_split_thought(message) for message in read] if splits_thoughts else read


def parse_arguments(arguments: Any) -> Any:
    """A tool call's arguments as the template gets them (rule above)."""
    if not isinstance(arguments, str):
        return arguments
    if not arguments.strip():
        return {}
    # Text that nests deeper than any request may is no arguments object; parsing it could exhaust the stack.
    if _nesting(arguments) > _MAX_NESTING:
        return arguments
    try:
        value = msgspec.json.decode(arguments)
    except (msgspec.DecodeError, UnicodeEncodeError):
        return arguments
    return value if isinstance(value, dict) else arguments


def _read_message(message: Mapping[str, Any], *, field: str) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise BadRequest(f"{field} must be an object with role and content", field=field)
    given = message.get("role")
    role = _ROLES.get(given) if isinstance(given, str) else None
    if role is None:
        raise BadRequest(f"{field}.role must be one of {', '.join(_ROLES)}", field=f"{field}.role")
    read: dict[str, Any] = {"role": role, "content": _read_content(message.get("content"), role=role, field=field)}
    for name in ("name", "tool_call_id"):
        if message.get(name) is not None:
            read[name] = _text(message[name], field=f"{field}.{name}")
    if role == "assistant":
        _read_assistant(message, read, field=field)
    return read


def _read_content(content: Any, *, role: str, field: str) -> str:
    field = f"{field}.content"
    if content is None and role == "assistant":
        return ""
    if isinstance(content, list | tuple):
        return "".join(_read_part(part, field=field) for part in content)
    return _text(content, field=field)


def _read_part(part: Any, *, field: str) -> str:
    if not isinstance(part, Mapping) or part.get("type") != "text":
        message = f"{field} must be text or a list of text parts; parts of other types are not supported"
        raise BadRequest(message, field=field)
    return _text(part.get("text"), field=field)


def _read_assistant(message: Mapping[str, Any], read: dict[str, Any], *, field: str) -> None:
    name = next((n for n in ("reasoning_content", "reasoning") if message.get(n) is not None), None)
    if name:
        read["reasoning_content"] = _text(message[name], field=f"{field}.{name}")
    calls = message.get("tool_calls")
    if calls is None:
        return
    if not isinstance(calls, list | tuple):
        raise BadRequest(f"{field}.tool_calls must be a list", field=f"{field}.tool_calls")
    if calls:
        read["tool_calls"] = [_read_call(call, field=f"{field}.tool_calls[{i}]") for i, call in enumerate(calls)]


def _read_call(call: Any, *, field: str) -> dict[str, Any]:
    function = call.get("function", call) if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        raise BadRequest(f"{field} must be an object with function.name and function.arguments", field=field)
    read: dict[str, Any] = {"type": "function"}
    if call.get("id") is not None:
        read["id"] = _text(call["id"], field=f"{field}.id")
    read["function"] = {
        "name": _text(function.get("name"), field=f"{field}.function.name"),
        "arguments": parse_arguments({} if function.get("arguments") is None else function["arguments"]),
    }
    return read


def _split_thought(message: dict[str, Any]) -> dict[str, Any]:
    if message["role"] != "assistant" or "reasoning_content" in message:
        return message
    match = _OPENING_THOUGHT.match(message["content"])
    if not match:
        return message
    rest = message["content"][match.end() :]
    return {**message, "content": rest.lstrip("\n"), "reasoning_content": match[1].strip("\n")}


def _text(value: Any, *, field: str) -> str:
    if not isinstance(value, str):
        raise BadRequest(f"{field} must be text", field=field)
    return value


def _nesting(text: str) -> int:
    """Upper bound of the nesting of a JSON text (brackets inside strings count too)."""
    depth = deepest = 0
    for char in text:
        if char in "[{":
            depth += 1
            deepest = max(deepest, depth)
        elif char in "]}":
            depth -= 1
    return deepest
