"""What the process measures, of itself and of its work: `process` reads /proc, `histogram` counts durations."""

from __future__ import annotations

from edgeqwen.metrics.histogram import Histogram
from edgeqwen.metrics.process import resident_bytes

__all__ = ["Histogram", "resident_bytes"]
