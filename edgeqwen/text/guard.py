"""Keeps client text from being read as control tokens, without changing it.

Flags in tokenizer.json do not help: Qwen3's `<think>` and `<tool_call>` are not "special" there. So before a
template sees client text, every added-token string in it is replaced by one private-use character, and characters
of that private range that are already there are escaped. The template then writes its own markers around text that
cannot contain any; the rendered prompt is cut at the markers, and each stretch of text is restored and encoded by
an encoder that knows no added tokens.

    client   "a <think> b"      ->  "a \\U000F0003 b"         (token 1 of the list)
    client   "\\U000F0001"        ->  "\\U000F0000\\U000F0001"   (escape, then the character)

A marker could also be put together at a border, from the end of a client's text and the template's text after it.
So where a client's text ends with a beginning of a marker, or begins with an end of one, or is a middle of one, a
private-use character that restores to nothing is set at that border. Names of members are spared this (templates
ask for them by name), but not the replacement.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from edgeqwen.errors import BadRequest
from edgeqwen.text.tokenizer import compile_alternatives

_ESCAPE = 0xF0000  # first of the supplementary private-use plane; token k is `_FIRST_MARK + k`
_BREAK = _ESCAPE + 1
_FIRST_MARK = _BREAK + 1
_MAX_NUM_TOKENS = 0xFFFD - _FIRST_MARK + _ESCAPE
_MAX_NESTING = 64


class TextGuard:
    """Replaces `tokens` (the added-token strings of a tokenizer) in client text and brings them back."""

    def __init__(self, tokens: Iterable[str]) -> None:
        self._tokens = tuple(tokens)
        assert len(self._tokens) <= _MAX_NUM_TOKENS, len(self._tokens)
        self._escape = chr(_ESCAPE)
        self._break = chr(_BREAK)
        self._marks = {token: chr(_FIRST_MARK + k) for k, token in enumerate(self._tokens)}
        self._texts = {mark: token for token, mark in self._marks.items()}
        private = f"[{self._escape}-{chr(_BREAK + len(self._tokens))}]"
        self._found = re.compile(f"{private}|{compile_alternatives(self._tokens).pattern}")
        self._guarded = re.compile(f"{self._escape}(.?)|{private}", re.DOTALL)
        self._heads = {token[:size] for token in self._tokens for size in range(1, len(token))}
        self._tails = {token[size:] for token in self._tokens for size in range(1, len(token))}
        self._longest = max(map(len, self._tokens), default=0)

    def guard(self, text: str) -> str:
        """`text` in a form that holds no added-token string, nor a piece of one at its borders."""
        text = self._replace(text)
        before = self._break if self._has_tail(text) or self._is_middle(text) else ""
        after = self._break if self._has_head(text) else ""
        return before + text + after

    def guard_value(self, value: Any, *, field: str) -> Any:
        """A copy of a JSON value with every string in it guarded; `field` is what an error names."""
        return self._guard_value(value, field=field, nesting=0)

    def restore(self, text: str) -> str:
        """The client's text again, wherever it stands in `text`."""
        return self._guarded.sub(self._restored, text)

    def _replace(self, text: str) -> str:
        return self._found.sub(lambda match: self._marks.get(match[0]) or self._escape + match[0], text)

    def _restored(self, match: re.Match[str]) -> str:
        if match[0].startswith(self._escape):
            return match[1]
        return self._texts.get(match[0], "")

    def _has_head(self, text: str) -> bool:
        """Ends with a beginning of a marker."""
        return any(text[-size:] in self._heads for size in range(1, min(len(text), self._longest) + 1))

    def _has_tail(self, text: str) -> bool:
        """Begins with an end of a marker."""
        return any(text[:size] in self._tails for size in range(1, min(len(text), self._longest) + 1))

    def _is_middle(self, text: str) -> bool:
        return 0 < len(text) < self._longest and any(text in token for token in self._tokens)

    def _guard_value(self, value: Any, *, field: str, nesting: int) -> Any:
        if nesting > _MAX_NESTING:
            raise BadRequest(f"nested deeper than {_MAX_NESTING} levels", field=field)
        if isinstance(value, str):
            return self.guard(value)
        if isinstance(value, Mapping):
            return {
                self._replace(str(key)): self._guard_value(item, field=field, nesting=nesting + 1)
                for key, item in value.items()
            }
        if isinstance(value, list | tuple):
            return [self._guard_value(item, field=field, nesting=nesting + 1) for item in value]
        if value is None or isinstance(value, bool | int | float):
            return value
        raise BadRequest(f"holds a {type(value).__name__}, which JSON has not", field=field)
