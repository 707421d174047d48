"""One message of a conversation, as clients of both fronts send it: a role, and text or parts that are text."""

from __future__ import annotations

from typing import Any, Final

import msgspec

from edgeqwen.errors import BadRequest

ROLES: Final = ("system", "user", "assistant", "tool")
EXTRAS: Final = ("name", "reasoning_content", "tool_calls", "tool_call_id")
"""Members that a template may read besides role and content."""


class Part(msgspec.Struct, frozen=True, kw_only=True):
    """A part of a message's content. Only text is read; other kinds are refused by their name."""

    type: str
    text: str | None = None


class Message(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A turn of a conversation. `content` may be null only for the assistant, whose turn may be nothing but calls."""

    role: str
    content: str | list[Part] | None = None
    name: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None

    def to_template(self, index: int) -> dict[str, Any]:
        """What a chat template reads. Raises `BadRequest` that names the member of `messages[index]`."""
        path = f"messages[{index}]"
        if self.role not in ROLES:
            raise BadRequest(f"{path}.role must be one of {', '.join(ROLES)}", field=f"{path}.role")
        if self.content is None and self.role != "assistant":
            raise BadRequest(f"{path}.content is missing", field=f"{path}.content")
        members: dict[str, Any] = {"role": self.role, "content": _text(self.content, f"{path}.content")}
        for name in EXTRAS:
            if (value := getattr(self, name)) is not None:
                members[name] = value
        return members


def _text(content: str | list[Part] | None, path: str) -> str:
    """The text of a content; parts are joined as they are, without anything between them."""
    if content is None or isinstance(content, str):
        return content or ""
    for index, part in enumerate(content):
        if part.type != "text" or part.text is None:
            raise BadRequest(f"{path}[{index}] is not text; only text is supported", field=f"{path}[{index}].type")
    return "".join(part.text or "" for part in content)
