"""Where the keys and values of sequences live."""

from __future__ import annotations

from edgeqwen.kvcache.slots import SlotTable

__all__ = ["SlotTable"]
