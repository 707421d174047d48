"""What the HTTP side needs of the server that it is part of, and is given by it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from edgeqwen.protocol.answers import Emit
from edgeqwen.protocol.messages import Generation, RequestId
from edgeqwen.protocol.operation import LaterOperation, Operation
from edgeqwen.protocol.peer import Peer


class Work(Protocol):
    """A generation on its way; see the server's class of this name."""

    def start(self) -> None: ...

    def cancel(self) -> None: ...

    def pump(self) -> None: ...


class Operations(Protocol):
    """The operations of the socket protocol."""

    def start(self, message: Generation, peer: Peer, *, emit: Emit, is_writable: Callable[[], bool]) -> Work: ...

    def answer(self, message: Operation, peer: Peer, *, cancel_id: Callable[[RequestId], int]) -> dict[str, Any]: ...

    async def answer_later(self, message: LaterOperation, peer: Peer) -> dict[str, Any]: ...

    def remember(self, rid: str, owner: str) -> None: ...
