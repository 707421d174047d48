"""From a checkpoint to a model package: readers, quantisation, graph. Knows `core` and `errors`, never a runtime."""
