"""From a row of logits to a token: masks, penalties, filters, the draw, and log-probabilities."""

from __future__ import annotations

from edgeqwen.sampling.sampler import Sampled, Sampler

__all__ = ["Sampled", "Sampler"]
