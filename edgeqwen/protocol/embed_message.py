"""The operation `embed`."""

from __future__ import annotations

from edgeqwen.protocol.operation import LaterOperation


class Embed(LaterOperation, frozen=True, kw_only=True):
    """Vectors of texts, or of lists of token ids. It counts as what the engine works on, and can be cancelled by id."""

    texts: list[str] | None = None
    tokens: list[list[int]] | None = None
    pooling: str | None = None
    deadline_ms: int | None = None
    priority: str | None = None
    wait: bool | None = None
