"""Texts that the package carries."""
