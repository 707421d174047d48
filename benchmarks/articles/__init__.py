"""Everyday questions to the real model: plain transformers and edgeqwen's daemon, end to end."""
