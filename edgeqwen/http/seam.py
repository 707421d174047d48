"""What the HTTP side needs of the server that it is part of, and is given by it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from edgeqwen.protocol.messages import RequestId
from edgeqwen.protocol.operation import Operation
from edgeqwen.protocol.peer import Peer
from edgeqwen.server.batch import ItemServer


class Operations(ItemServer, Protocol):
    """The operations of the socket protocol, one at a time and as the items of a batch."""

    def answer(self, message: Operation, peer: Peer, *, cancel_id: Callable[[RequestId], int]) -> dict[str, Any]: ...

    def note_response(self, status: int) -> None: ...

    def remember(self, rid: str, owner: str) -> None: ...
