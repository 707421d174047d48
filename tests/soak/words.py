"""Prompts: words in no order, the same for the same seed."""

from __future__ import annotations

import random
from typing import Final

from edgeqwen.evaluate import built_in_texts

ENGLISH: Final = tuple(built_in_texts()["english"].split())


def some_words(rng: random.Random, num_words: int) -> str:
    """`num_words` of them."""
    return " ".join(rng.choices(ENGLISH, k=num_words))
