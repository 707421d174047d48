"""Speed of a model on this machine: what is loaded (`subject`), and what is timed of it (`measurement`)."""

from edgeqwen.bench.measurement import BenchReport, Speeds, bench, measure
from edgeqwen.bench.subject import BenchOptions

__all__ = ["BenchOptions", "BenchReport", "Speeds", "bench", "measure"]
