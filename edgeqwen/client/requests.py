"""Members of requests, as both clients send them, and where batches are cut."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, TypeAlias

from edgeqwen.protocol.address import check_length, default_socket

Messages: TypeAlias = str | Sequence[Mapping[str, Any]]
"""One message of the user, or a conversation of objects with `role` and `content`."""

Prompt: TypeAlias = str | Sequence[int]
"""Text, or token ids."""

BATCH_ITEMS: Final = 64
BATCH_BYTES: Final = 512 << 10
"""Of the items in one line, encoded: half of what a line may have, so that one that is too long is told alone."""


def socket_path(path: str | os.PathLike[str] | None) -> str:
    """Where to connect to. Raises `ConfigInvalid` if no socket can be there."""
    shown = os.fspath(default_socket(os.environ, is_root=os.geteuid() == 0) if path is None else path)
    check_length(shown)
    return shown


def chat_members(messages: Messages, options: Mapping[str, Any]) -> dict[str, Any]:
    return {"prompt" if isinstance(messages, str) else "messages": messages, **options}


def generate_members(prompt: Prompt, options: Mapping[str, Any]) -> dict[str, Any]:
    return {"prompt" if isinstance(prompt, str) else "tokens": prompt, **options}


def embed_members(texts: Sequence[str] | Sequence[Sequence[int]], pooling: str | None) -> dict[str, Any]:
    name = "tokens" if texts and not isinstance(texts[0], str) else "texts"
    return {name: texts, "pooling": pooling}


def lines_of(items: Iterable[Mapping[str, Any]]) -> Iterator[list[Mapping[str, Any]]]:
    """Items in groups that one line can carry."""
    group: list[Mapping[str, Any]] = []
    num_bytes = 0
    for item in items:
        size = len(json.dumps(item, ensure_ascii=False))
        if group and (len(group) == BATCH_ITEMS or num_bytes + size > BATCH_BYTES):
            yield group
            group, num_bytes = [], 0
        group.append(item)
        num_bytes += size
    if group:
        yield group
