"""Embeddings of any number of texts, by as many requests as lines and replies have room for."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from edgeqwen.client.requests import BATCH_BYTES, embed_members
from edgeqwen.client.results import Embeddings, embeddings_of
from edgeqwen.errors import EdgeqwenError

FIRST_TEXTS: Final = 4
"""Sent before the length of a vector is known: that many fit for models far greater than those served."""

NUMBER_BYTES: Final = 11
REST_BYTES: Final = 2048


class EmbedJob:
    """Texts (or lists of token ids) that are embedded group by group: send `next_members`, `add` the reply; `limits`
    are the daemon's as `hello` names them, wanted once there is more than one group (`needs_limits`).
    """

    def __init__(self, texts: Sequence[str] | Sequence[Sequence[int]], pooling: str | None) -> None:
        self._texts = texts
        self._pooling = pooling
        self._start = 0
        self._group_len = 0
        self._parts: list[Embeddings] = []
        self.limits: Mapping[str, int] | None = None

    @property
    def needs_limits(self) -> bool:
        return self.limits is None and 0 < self._start < len(self._texts)

    def next_members(self) -> dict[str, Any] | None:
        """Members of the next request, None if all is done. No texts at all are sent too, for the daemon to refuse."""
        if self._parts and self._start >= len(self._texts):
            return None
        group = self._texts[self._start : self._start + self._most_texts()]
        num_bytes = 0
        for index, text in enumerate(group):
            num_bytes += len(json.dumps(text, ensure_ascii=False).encode("utf-8", "replace"))
            if index and num_bytes > BATCH_BYTES:
                group = group[:index]
                break
        self._group_len = len(group)
        return embed_members(group, self._pooling)

    def add(self, frame: Mapping[str, Any]) -> Embeddings:
        """The vectors of the group that was sent last. Raises `EdgeqwenError` if it came to another end."""
        if "embeddings" not in frame:
            reason = frame.get("finish")
            code = "timeout" if reason == "deadline" else "draining"
            raise EdgeqwenError(f"the embedding ended before its end: {reason}", code=code)
        part = embeddings_of(frame)
        self._parts.append(part)
        self._start += self._group_len
        return part

    @contextlib.contextmanager
    def numbered(self) -> Iterator[None]:
        """An error about a text names its place among all of them."""
        try:
            yield
        except EdgeqwenError as error:
            placed = error.counted_from(self._start)
            if placed is error:
                raise
            raise placed from error

    @property
    def embeddings(self) -> Embeddings:
        """All of them, in the order of the texts."""
        vectors = tuple(vector for part in self._parts for vector in part.vectors)
        return Embeddings(vectors, self._parts[0].dims, sum(part.num_tokens for part in self._parts))

    def _most_texts(self) -> int:
        if self.limits is None or not self._parts:
            return FIRST_TEXTS
        fitting = (self.limits["reply"] - REST_BYTES) // (NUMBER_BYTES * self._parts[0].dims + 1)
        return max(1, min(self.limits["texts"], fitting))
