"""Single values against their ranges. None is "not given" and passes through; every error names its field."""

from __future__ import annotations

import math
from collections.abc import Collection

from edgeqwen.errors import BadRequest


def floating(
    field: str, value: object, *, least: float | None = None, above: float | None = None, most: float
) -> float | None:
    """`value` as a float in `[least, most]`, or in `(above, most]`. A bool is no number, nor is NaN."""
    if value is None:
        return None
    low = least if above is None else above
    assert low is not None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise BadRequest(f"{field} must be a number", field=field)
    is_in_range = math.isfinite(value) and low <= value <= most and (above is None or value > above)
    if not is_in_range:
        bound = f"above {low:g} and at most {most:g}" if above is not None else f"between {low:g} and {most:g}"
        raise BadRequest(f"{field} must be {bound}", field=field)
    return float(value)


def integer(field: str, value: object, *, least: int, most: int) -> int | None:
    """`value` as an int in `[least, most]`. A bool is no integer."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int):
        raise BadRequest(f"{field} must be an integer", field=field)
    if not least <= value <= most:
        raise BadRequest(f"{field} must be between {least} and {most}", field=field)
    return value


def boolean(field: str, value: object) -> bool | None:
    """`value` if it is a bool."""
    if value is not None and not isinstance(value, bool):
        raise BadRequest(f"{field} must be true or false", field=field)
    return value


def one_of(field: str, value: str | None, names: Collection[str]) -> str | None:
    """`value` if it is one of `names`."""
    if value is not None and value not in names:
        raise BadRequest(f"{field} must be one of {', '.join(names)}", field=field)
    return value
