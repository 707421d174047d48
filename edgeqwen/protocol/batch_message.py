"""The operation `batch`: many requests of one kind in one line."""

from __future__ import annotations

from typing import Any

import msgspec

from edgeqwen.protocol.operation import Operation


class Batch(Operation, frozen=True, kw_only=True):
    """Answer each of `items`, the members of an `each`; what `common` holds counts where an item does not say it."""

    items: list[Any]
    each: str = "chat"
    common: dict[str, Any] | None = None


class BatchHead(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What stands before the items where these come one by one."""

    each: str | None = None
    common: dict[str, Any] | None = None
