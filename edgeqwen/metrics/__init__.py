"""What the process measures, of itself and of its work, and how that is told.

`process` reads /proc, `histogram` counts durations, `exposition` writes what Prometheus reads.
"""

from __future__ import annotations

from edgeqwen.metrics.exposition import CONTENT_TYPE, Exposition, Labels
from edgeqwen.metrics.histogram import Histogram
from edgeqwen.metrics.process import ProcessFacts, process_facts, resident_bytes

__all__ = [
    "CONTENT_TYPE",
    "Exposition",
    "Histogram",
    "Labels",
    "ProcessFacts",
    "process_facts",
    "resident_bytes",
]
