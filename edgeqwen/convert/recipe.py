"""Which form each linear layer is stored in: the choice between small, fast and exact, tensor by tensor."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from edgeqwen.convert.checkpoint import Checkpoint
from edgeqwen.convert.quantize import Form, block_size_for
from edgeqwen.convert.weights import layer_tensors

CALIBRATED_BLOCK: Final = 128
"""Another seventh faster than blocks of 64; rounded for their outputs, weights bear it."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """Forms of each linear layer by tensor name: `rows8`, and one of `blocks4` and `blocks8`, or either alone.

    Blocks are `block_size` columns wide, or as wide as the tensor's columns allow.
    """

    forms: Mapping[str, tuple[Form, ...]]
    block_size: int = CALIBRATED_BLOCK

    def block_size_of(self, columns: int) -> int:
        """Width of the blocks of a tensor."""
        return block_size_for(columns, preferred=self.block_size)


def uniform_recipe(checkpoint: Checkpoint, forms: tuple[Form, ...], *, block_size: int = CALIBRATED_BLOCK) -> Recipe:
    """The same forms for every linear layer."""
    return Recipe(dict.fromkeys(layer_tensors(checkpoint.tensors), forms), block_size)
