"""Programs that measure: `scripts/benchmark NAME`, or `python -m benchmarks.NAME` from the checkout."""
