"""How many tokens of a prompt one step computes: a matter of time, so that decoding sequences never pause for long.

The seconds that a prompt token takes are measured, step by step; they differ by two orders of magnitude between
machines and grow with the length of the context. Only chunks of at least `MIN_CHUNK` tokens count: in shorter ones the
fixed cost of a step hides the cost of a token.
"""

from __future__ import annotations

from typing import Final

MIN_CHUNK: Final = 16
FIRST_CHUNK: Final = 64
UNSEEN_TOKEN_S: Final = 0.002
_WEIGHT_OF_NEWEST = 0.5


class ChunkSizer:
    """Sizes chunks so that one takes `shared_s` while others decode and `alone_s` otherwise; at most `max_chunk`.

    `row_costs` as in `RuntimeSpec`: what is known before the first chunk.
    """

    def __init__(
        self, *, max_chunk: int, shared_s: float, alone_s: float, row_costs: tuple[tuple[int, float], ...] = ()
    ) -> None:
        assert max_chunk >= 1
        assert 0 < shared_s <= alone_s
        self._max_chunk = max_chunk
        self._shared_s = shared_s
        self._alone_s = alone_s
        self._token_s: float | None = None
        if row_costs:
            self.observe(*row_costs[-1])

    def size(self, *, is_shared: bool) -> int:
        """Tokens for the next chunk: a multiple of 16 where `max_chunk` allows."""
        if self._token_s is None:
            return min(FIRST_CHUNK, self._max_chunk)
        limit_s = self._shared_s if is_shared else self._alone_s
        affordable = min(limit_s / max(self._token_s, 1e-9), float(self._max_chunk))
        return min(max(MIN_CHUNK, int(affordable) // MIN_CHUNK * MIN_CHUNK), self._max_chunk)

    def seconds(self, num_tokens: int) -> float:
        """How long a prompt of `num_tokens` takes, by what is known."""
        return num_tokens * (UNSEEN_TOKEN_S if self._token_s is None else self._token_s)

    def observe(self, num_tokens: int, duration_s: float) -> None:
        """A chunk of `num_tokens` took `duration_s`."""
        if num_tokens < min(MIN_CHUNK, self._max_chunk):
            return
        token_s = duration_s / num_tokens
        if self._token_s is None:
            self._token_s = token_s
        else:
            self._token_s += _WEIGHT_OF_NEWEST * (token_s - self._token_s)
