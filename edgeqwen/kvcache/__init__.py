"""Where the keys and values of sequences live: slots while they run, blocks before and after."""

from __future__ import annotations

from edgeqwen.kvcache.blocks import BLOCK_TOKENS, SHARED, Block, Match
from edgeqwen.kvcache.slots import SlotTable
from edgeqwen.kvcache.spares import Spare, SpareSlots
from edgeqwen.kvcache.store import BlockStore, StoreStats

__all__ = ["BLOCK_TOKENS", "SHARED", "Block", "BlockStore", "Match", "SlotTable", "Spare", "SpareSlots", "StoreStats"]
