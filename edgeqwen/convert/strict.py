"""What every reader checks: the families there are, and the tensors that a model of a family must have."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final, get_args

from edgeqwen.convert.checkpoint import expected_tensors
from edgeqwen.core.model import Family, ModelSpec
from edgeqwen.errors import ModelInvalid

FAMILIES: Final[tuple[str, ...]] = get_args(Family)
MAX_LAYERS: Final = 1024
"""Far above any model; keeps a hostile number from filling the memory with names."""


def check_tensors(
    path: Path,
    spec: ModelSpec,
    found: Mapping[str, tuple[int, ...]],
    *,
    stored_name: Callable[[str], str] = str,
) -> None:
    """Raises `ModelInvalid` naming the first tensor that is missing, unexpected or of another shape.

    `stored_name` gives the name that the file has for a canonical one.
    """
    expected = expected_tensors(spec)
    for name, shape in expected.items():
        if name not in found:
            raise ModelInvalid(f"{path}: tensor '{stored_name(name)}' is missing{_summary(expected, found)}")
        if found[name] != shape:
            raise ModelInvalid(
                f"{path}: tensor '{stored_name(name)}' has shape {list(found[name])}, but the configuration "
                f"asks for {list(shape)}: weights and configuration belong to different models"
            )
    for name in found:
        if name not in expected:
            raise ModelInvalid(f"{path}: tensor '{stored_name(name)}' is not part of a {spec.family} model")


def _summary(expected: Mapping[str, object], found: Mapping[str, object]) -> str:
    num_missing = sum(name not in found for name in expected)
    return f" ({num_missing} of {len(expected)} are)" if num_missing > 1 else ""
