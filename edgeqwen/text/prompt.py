"""From messages to prompt ids: read, guard, render, cut, restore, encode (`messages`, `guard`, `template`,
`tokenizer`).

For harmless text the ids are those of the stock way (render, then encode with added tokens). Ids of added tokens
come from the template only, whatever a client writes in a message, a tool or a template argument.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from edgeqwen.errors import BadRequest
from edgeqwen.text.guard import TextGuard
from edgeqwen.text.messages import read_messages
from edgeqwen.text.reasoning import THINK_CLOSE, ThinkTokens, find_think_tokens
from edgeqwen.text.template import ChatTemplate
from edgeqwen.text.tokenizer import Part, Tokenizer
from edgeqwen.text.tool_preamble import knows_tools, tell_tools

RESERVED_KWARGS: Final = ("messages", "tools", "documents", "add_generation_prompt")


@dataclass(frozen=True, slots=True)
class Prompt:
    """A tokenised prompt, and where its answer starts.

    `splits_reasoning`: the model has think tokens, so the thought is told from the content by them.
    `starts_in_reasoning`: the prompt ends with an open think block.
    """

    ids: tuple[int, ...]
    splits_reasoning: bool = False
    starts_in_reasoning: bool = False


class PromptBuilder:
    """Builds the prompts of one model. Safe to use from several threads. A model whose template does not know tools is
    told of them in its system message (`tool_preamble`).
    """

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate) -> None:
        self._tokenizer = tokenizer
        self._template = template
        self._guard = TextGuard(token.text for token in tokenizer.added_tokens)
        self._think = find_think_tokens(tokenizer)
        # A template that knows nothing of thoughts would lose one that is no longer in the content.
        knows_thoughts = "reasoning_content" in template.source or THINK_CLOSE in template.source
        self._knows_tools = knows_tools(template.source)
        self._splits_thoughts = self._think is not None and knows_thoughts

    def build(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        think: bool | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> Prompt:
        """The prompt of a conversation, ready for the assistant's turn.

        `think` is the template's `enable_thinking`; None leaves it to the template. `template_kwargs` are further
        scalars for the template. Raises `BadRequest` that names the member at fault.
        """
        guard = self._guard
        names = self._read_kwargs(template_kwargs or {}, think=think)
        read = read_messages(messages, splits_thoughts=self._splits_thoughts)
        safe = [self._guard_message(message, field=f"messages[{i}]") for i, message in enumerate(read)]
        safe_tools = [guard.guard_value(_object(tool, i), field=f"tools[{i}]") for i, tool in enumerate(tools)]
        if not self._knows_tools:
            safe, safe_tools = tell_tools(safe, safe_tools), []
        text = self._template.render(safe, tools=safe_tools, **names)
        parts = self._tokenizer.cut(text)
        restored = [part if isinstance(part, int) else guard.restore(part) for part in parts]
        ids = self._tokenizer.encode_parts(restored)
        if not ids:
            raise BadRequest("the model's chat template renders these messages to nothing", field="messages")
        starts = self._think is not None and _ends_with_open_thought(restored, self._think)
        return Prompt(tuple(ids), splits_reasoning=self._think is not None, starts_in_reasoning=starts)

    def _guard_message(self, message: dict[str, Any], *, field: str) -> dict[str, Any]:
        guarded: dict[str, Any] = {"role": message["role"]}
        for name, value in message.items():
            if name == "tool_calls":
                guarded[name] = [self._guard_call(call, field=f"{field}.tool_calls") for call in value]
            elif name != "role":
                guarded[name] = self._guard.guard(value)
        return guarded

    def _guard_call(self, call: dict[str, Any], *, field: str) -> dict[str, Any]:
        guarded = self._guard.guard_value({**call, "type": None}, field=field)
        return {**guarded, "type": call["type"]}

    def _read_kwargs(self, kwargs: Mapping[str, Any], *, think: bool | None) -> dict[str, Any]:
        field = "template_kwargs"
        for name, value in kwargs.items():
            if name in RESERVED_KWARGS:
                raise BadRequest(f"{name} is set by the request's own members", field=field)
            if not (value is None or isinstance(value, str | int | float | bool)):
                raise BadRequest("values must be text, numbers, true, false or null", field=field)
        names = {name: self._guard.guard_value(value, field=field) for name, value in kwargs.items()}
        return names if think is None else {**names, "enable_thinking": think}


def _object(tool: Any, index: int) -> Mapping[str, Any]:
    if not isinstance(tool, Mapping):
        raise BadRequest("must be an object", field=f"tools[{index}]")
    return tool


def _ends_with_open_thought(parts: Sequence[Part], think: ThinkTokens) -> bool:
    for part in reversed(parts):
        if isinstance(part, int):
            return part == think.open
        if part.strip():
            return False
    return False
