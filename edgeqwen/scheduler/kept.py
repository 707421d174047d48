"""Prompts that stay once they are known; only a request that needs their very room while nothing runs moves them."""

from __future__ import annotations

from itertools import count

from edgeqwen.core.request import Request, SamplingParams
from edgeqwen.kvcache import Block, BlockStore
from edgeqwen.scheduler.background import Background


class KeptPrompts:
    """Pins the blocks of prompts as soon as all of one are in memory; wishes in `background` bring them back."""

    def __init__(self, store: BlockStore, background: Background) -> None:
        self._store = store
        self._background = background
        self._numbers = count()
        self._wanted: dict[str, Request] = {}
        self._pinned: dict[str, tuple[Request, tuple[Block, ...]]] = {}

    def remove(self, owner: str, prompt_ids: tuple[int, ...]) -> None:
        """This prompt need not stay any more."""
        pinned = {key: request for key, (request, _) in self._pinned.items()}
        for key, request in {**self._wanted, **pinned}.items():
            if (request.owner, request.prompt_ids) == (owner, prompt_ids):
                self._wanted.pop(key, None)
                self._background.forget(key)
                if key in self._pinned:
                    self._store.unpin(self._pinned.pop(key)[1])

    def add(self, owner: str, prompt_ids: tuple[int, ...]) -> None:
        """This prompt is to stay once it is known."""
        key = f"kept {next(self._numbers)}"
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

    def release(self) -> bool:
        """Let all go, and have it computed again when there is nothing else to do. False if there was none."""
        released, self._pinned = self._pinned, {}
        for key, (request, blocks) in released.items():
            self._store.unpin(blocks)
            self._wanted[key] = request
            self._background.want(key, request)
        return bool(released)
