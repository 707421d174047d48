"""What the requests of several of OpenAI's routes have in common."""

from __future__ import annotations

from typing import Any, TypeAlias

import msgspec

from edgeqwen.errors import BadRequest

Texts: TypeAlias = tuple[str, ...] | tuple[tuple[int, ...], ...]
"""Texts, or the token ids of each; never empty."""


class StreamOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Whether the usage comes in a last chunk of its own."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None


def wants_usage_chunk(options: StreamOptions | None, *, is_stream: bool) -> bool:
    """Raises `BadRequest` for options of a stream that is none."""
    if options is None:
        return False
    if not is_stream:
        raise BadRequest("stream_options is for stream: true only", field="stream_options")
    return bool(options.include_usage)


def read_texts(given: Any, field: str) -> Texts:
    """A text, texts, token ids, or lists of token ids. Raises `BadRequest` (field `field`)."""
    if isinstance(given, str):
        return (given,)
    if isinstance(given, list) and given:
        if all(isinstance(each, str) for each in given):
            return tuple(given)
        if _are_ids(given):
            return (tuple(given),)
        if all(isinstance(each, list) and _are_ids(each) for each in given):
            return tuple(map(tuple, given))
    raise BadRequest(f"{field} must be a string, a list of strings, token ids, or lists of token ids", field=field)


def _are_ids(given: list[Any]) -> bool:
    return all(type(each) is int for each in given)
