"""How much memory keys and values may take: what the settings say, or a part of what is free."""

from __future__ import annotations

from typing import Final

from edgeqwen.core.step import RuntimeSpec
from edgeqwen.cpu import read_memory
from edgeqwen.engine.settings import KvSettings
from edgeqwen.errors import ConfigInvalid
from edgeqwen.kvcache import BlockStore

LEAST_TOKENS: Final = 64
"""A cache that holds fewer is of no use to anybody."""

FREE_SHARE: Final = 0.25
MOST_FREE_SHARE: Final = 0.75


def make_store(spec: RuntimeSpec, kv: KvSettings) -> BlockStore:
    """An empty store with the budget that the settings give, or that what is free now allows.

    Raises `ConfigInvalid` if it would hold next to nothing.
    """
    budget_bytes = kv.memory_bytes or _free_part(spec)
    least_bytes = LEAST_TOKENS * spec.kv_bytes_per_token
    if budget_bytes < least_bytes:
        raise ConfigInvalid(
            f"kv.memory_mb: {budget_bytes} bytes hold {budget_bytes // spec.kv_bytes_per_token} tokens; give at least"
            f" {-(-least_bytes // (1 << 20))} MiB"
        )
    return BlockStore(
        budget_bytes=budget_bytes,
        token_bytes=spec.kv_bytes_per_token,
        capacity=spec.capacity,
        disk_limit_bytes=0 if kv.folder is None else kv.disk_bytes,
    )


def _free_part(spec: RuntimeSpec) -> int:
    """A quarter of what is free; more if that is less than one whole context, but never nearly all of it."""
    free_bytes = read_memory().free
    if not free_bytes:  # nothing is known
        return spec.num_slots * spec.capacity * spec.kv_bytes_per_token
    whole_bytes = spec.capacity * spec.kv_bytes_per_token
    least_bytes = LEAST_TOKENS * spec.kv_bytes_per_token
    return max(int(FREE_SHARE * free_bytes), min(whole_bytes, int(MOST_FREE_SHARE * free_bytes)), least_bytes)
