"""edgeqwen: a CPU-only inference daemon for small language models."""

__version__ = "0.1.0"
