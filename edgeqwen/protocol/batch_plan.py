"""What all items of a batch have in common, and how one of them is read."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from edgeqwen.errors import BadRequest
from edgeqwen.protocol.messages import OPERATIONS, Generation, RequestId, given_members, read_id, read_operation
from edgeqwen.protocol.operation import Operation

EACH: Final = tuple(name for name in ("chat", "generate", "embed") if name in OPERATIONS)
_OF_A_REQUEST: Final = ("op", "v", "close")
_FIRST_NAME: Final = re.compile(r"[.\[]")


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """`each` is the operation, `common` what an item need not say. `has_ids`: an item may have an id of its own."""

    each: str
    common: Mapping[str, Any]
    has_ids: bool

    def read_item(self, item: Any) -> tuple[RequestId | None, Operation]:
        """The id and the operation of one item. Raises `BadRequest` with the item's member as field."""
        if not isinstance(item, dict):
            raise BadRequest("an item must be an object")
        refused = [name for name in (*_OF_A_REQUEST, *(() if self.has_ids else ("id",))) if name in item]
        if refused:
            raise BadRequest(f"{refused[0]} has no place in an item, which is known by its number", field=refused[0])
        item_id = read_id(item)
        message = read_operation(self.each, {**self.common, **item})
        if isinstance(message, Generation) and message.stream:
            raise _no_streams("stream")
        return item_id, message


def read_plan(each: str, common: Mapping[str, Any] | None, *, has_ids: bool) -> BatchPlan:
    """Raises `BadRequest` for what would be wrong with every item: fields `each` and `common...`."""
    if each not in EACH:
        raise BadRequest(f"each must be one of {', '.join(EACH)}", field="each")
    given = given_members(common or {})
    for name in ("id", *_OF_A_REQUEST):
        if name in given:
            raise BadRequest(f"{name} has no place in common", field=f"common.{name}")
    if given.get("stream"):
        raise _no_streams("common.stream")
    try:
        read_operation(each, given)
    except BadRequest as exc:
        field = exc.field or ""
        if _FIRST_NAME.split(field, maxsplit=1)[0] in given:  # what is missing here may stand in the items
            raise BadRequest(f"in common: {exc.message}", field=f"common.{field}") from exc
    return BatchPlan(each, given, has_ids)


def _no_streams(field: str) -> BadRequest:
    return BadRequest("an item is answered in one piece: leave stream out", field=field)
