"""The tokens that a session's next prompt will begin with: how many there are, which are known, and settling.

A template renders a past turn otherwise than it was generated (a thought is cut, an empty block of thought is left
out), so the last answer would have to be computed again when the conversation goes on. The engine is asked to do that
beforehand, while nothing else is to do: to *settle* the session. From that it also learns what is worth a place on
disk.
"""

from __future__ import annotations

import contextlib
from array import array
from collections import OrderedDict
from collections.abc import Callable
from typing import Final

from edgeqwen.engine.generation import GenerationInput
from edgeqwen.engine.inference import Inference
from edgeqwen.errors import EdgeqwenError
from edgeqwen.sessions.session import Session

MAX_REMEMBERED: Final = 4 << 20
"""Token ids that are remembered, of all sessions together: 16 MB."""


class SessionTokens:
    """Token ids by session and revision, as many as are remembered, and the engine's part in them. `is_current`
    tells whether a session has neither gone on nor gone: reading takes a while, and nothing may be remembered of what
    is no more.
    """

    def __init__(self, inference: Inference, is_current: Callable[[Session], bool]) -> None:
        self._inference = inference
        self._is_current = is_current
        self._known: OrderedDict[str, tuple[int, array[int]]] = OrderedDict()
        self._num_remembered = 0

    async def sizes(self, session: Session, *, may_read: bool = True) -> tuple[int, int]:
        """Tokens of the history, and bytes of keys and values that are there for them. Unless they are remembered or
        `may_read`, the tokens are those that the last turn counted, and nothing is known of keys and values.
        """
        if not session.turns:
            return 0, 0
        rev, known = self._known.get(session.id, (-1, None))
        ids = tuple(known) if known is not None and rev == session.rev else None
        if ids is None and may_read and self._inference.context > 0:  # 0: the model still loads
            # Another model's template may refuse what was said.
            with contextlib.suppress(EdgeqwenError):
                ids = await self.read(session, GenerationInput(messages=session.history()))
        if ids is None:
            return session.num_tokens, 0
        num_cached = self._inference.cached_tokens(session.owner, ids)
        return len(ids), num_cached * self._inference.kv_bytes_per_token

    async def read(self, session: Session, given: GenerationInput) -> tuple[int, ...]:
        """The ids for `given`, whose messages are the session's history. Raises what `Inference.history_ids` does."""
        ids = await self._inference.history_ids(given)
        self._forget_ids(session)
        if not self._is_current(session):
            return ids
        self._known[session.id] = (session.rev, array("I", ids))
        self._num_remembered += len(ids)
        while self._num_remembered > MAX_REMEMBERED:
            _, (_, oldest) = self._known.popitem(last=False)
            self._num_remembered -= len(oldest)
        return ids

    def settle(self, session: Session, ids: tuple[int, ...]) -> None:
        """The session goes on with `ids`: have them kept, and computed when there is nothing else to do."""
        self._inference.settle(session.id, session.owner, ids)

    def unsettle(self, session: Session) -> None:
        """What was to be computed for `session` is no longer what its next prompt begins with."""
        self._inference.unsettle(session.id)

    async def discard(self, session: Session) -> None:
        """The session is gone, and on purpose: nothing of what was said in it is to stay."""
        if session.turns and session.id not in self._known and self._inference.context > 0:
            with contextlib.suppress(EdgeqwenError):
                ids = await self._inference.history_ids(GenerationInput(messages=session.history()))
                self._inference.discard(session.owner, ids)
        self.forget(session)

    def forget(self, session: Session) -> None:
        """The session is gone."""
        self.unsettle(session)
        if (known := self._known.get(session.id)) is not None:
            self._inference.discard(session.owner, tuple(known[1]))
        self._forget_ids(session)

    def _forget_ids(self, session: Session) -> None:
        if (known := self._known.pop(session.id, None)) is not None:
            self._num_remembered -= len(known[1])
