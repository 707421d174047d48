"""Tools for templates that know nothing of them: told in the system message, in the form that Qwen3's own template has.

    system     what the client says, then which tools there are and how one is called
    assistant  its calls, behind what it says, as `text.tool_calls` finds them
    tool       a turn of the user: <tool_response>, the result, </tool_response>; several in a row are one turn

A model that was never trained on tools may still write such a call, all the more where `tool_choice` demands one.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

from edgeqwen.text.tool_calls import CALL_CLOSE, CALL_OPEN

_KNOWS_TOOLS: Final = re.compile(r"\btools\b")

_BEFORE: Final = (
    "# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
    "You are provided with function signatures within <tools></tools> XML tags:\n<tools>"
)
_AFTER: Final = (
    "\n</tools>\n\nFor each function call, return a json object with function name and arguments within "
    f"{CALL_OPEN}{CALL_CLOSE} XML tags:\n"
    f'{CALL_OPEN}\n{{"name": <function-name>, "arguments": <args-json-object>}}\n{CALL_CLOSE}'
)


def knows_tools(template_source: str) -> bool:
    """Whether a template renders tools by itself, as far as its text tells."""
    return _KNOWS_TOOLS.search(template_source) is not None


def tell_tools(messages: Sequence[dict[str, Any]], tools: Sequence[Any]) -> list[dict[str, Any]]:
    """The messages with all of tools in their contents; `tools` as a template gets them, none if there are none."""
    told: list[dict[str, Any]] = []
    for role, group in itertools.groupby(messages, key=lambda message: message["role"]):
        if role == "tool":
            responses = [f"<tool_response>\n{message['content']}\n</tool_response>" for message in group]
            told.append({"role": "user", "content": "\n".join(responses)})
        else:
            told += [_with_calls(message) for message in group]
    if not tools:
        return told
    preamble = _BEFORE + "".join("\n" + _json(tool) for tool in tools) + _AFTER
    if told and told[0]["role"] == "system":
        content = told[0]["content"]
        return [{**told[0], "content": f"{content}\n\n{preamble}" if content else preamble}, *told[1:]]
    return [{"role": "system", "content": preamble}, *told]


def _with_calls(message: dict[str, Any]) -> dict[str, Any]:
    calls = message.get("tool_calls")
    if not calls:
        return message
    texts = [message["content"]] if message["content"] else []
    texts += [f"{CALL_OPEN}\n{_call(each['function'])}\n{CALL_CLOSE}" for each in calls]
    kept = {name: value for name, value in message.items() if name != "tool_calls"}
    return {**kept, "content": "\n".join(texts)}


def _call(function: Mapping[str, Any]) -> str:
    return _json({"name": function["name"], "arguments": function["arguments"]})


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
