"""Implementations of `core.step.Runtime`, one module each; nothing above imports them but the composition root."""
