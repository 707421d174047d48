"""Prompts that stay once they are known; only a request that needs their very room while nothing runs moves them."""

from __future__ import annotations

from edgeqwen.core.request import Request, SamplingParams
from edgeqwen.kvcache import Block, BlockStore


class KeptPrompts:
    """Pins the blocks of prompts as soon as all of one are in memory."""

    def __init__(self, store: BlockStore) -> None:
        self._store = store
        self._wanted: dict[str, Request] = {}
        self._pinned: dict[str, tuple[Request, tuple[Block, ...]]] = {}

    def add(self, owner: str, prompt_ids: tuple[int, ...]) -> None:
        key = f"kept {len(self._wanted) + len(self._pinned)}"
        self._wanted[key] = Request("", owner, prompt_ids, SamplingParams(), max_tokens=0, is_lasting=True)

    def pin_known(self) -> None:
        """Pin what has come to be known."""
        for key, request in tuple(self._wanted.items()):
            ids = request.prompt_ids
            match = self._store.match(request.owner, ids, limit=len(ids))
            if match.length == len(ids) and not match.unloaded:
                self._store.pin(match.blocks)
                self._pinned[key] = request, match.blocks
                del self._wanted[key]

    def release(self) -> dict[str, Request]:
        """Let all go; returns, by a key of its own, what makes each known again, if it should have to go."""
        released = {key: request for key, (request, _) in self._pinned.items()}
        for _, blocks in self._pinned.values():
            self._store.unpin(blocks)
        self._pinned.clear()
        self._wanted |= released
        return released
