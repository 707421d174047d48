"""edgeqwen beside the other engines that run such a model on a CPU: speed, memory, quality, all in one run."""
