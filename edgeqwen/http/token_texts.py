"""Texts of single tokens, which formats want beside log-probabilities."""

from __future__ import annotations

from typing import Final

from edgeqwen.core.request import TokenLogprob
from edgeqwen.engine.inference import Inference

MAX_CACHED_TEXTS: Final = 1 << 18


class TokenTexts:
    """Bytes of tokens; asked of the engine once each."""

    def __init__(self, inference: Inference) -> None:
        self._inference = inference
        self._known: dict[int, bytes] = {}

    async def of(self, token: int) -> bytes:
        data = self._known.get(token)
        if data is None:
            data = await self._inference.detokenize([token])
            if len(self._known) < MAX_CACHED_TEXTS:
                self._known[token] = data
        return data

    async def alternatives(self, logprob: TokenLogprob) -> list[tuple[bytes, float]]:
        """Bytes and log-probability of the likeliest tokens in the place of this one."""
        return [(await self.of(token), value) for token, value in logprob.top]
