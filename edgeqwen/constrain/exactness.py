"""JSON schemas put so that llguidance follows them exactly: what it lets come is a value of the schema.

Two things it takes too wide:

* Formats. Its dates have a 29 February in every year, its times a second 60, its mail addresses and host names no
  greatest length. Patterns of our own stand for these; years are those from 1000 to 2999, fractions of a second have up
  to six digits, and names are of a usual length.
* Exclusive bounds of numbers. 0 < x <= 0.5 lets 0 come, and so does every bound that is a whole number, where the other
  one lies within the same unit. An inclusive bound a little further inside says the same, for whole numbers too.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

_DAY: Final = (
    "[12][0-9]{3}-(0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])"
    "|[12][0-9]{3}-(0[469]|11)-(0[1-9]|[12][0-9]|30)"
    "|[12][0-9]{3}-02-(0[1-9]|1[0-9]|2[0-8])"
    "|([12][0-9](0[48]|[2468][048]|[13579][26])|(12|16|20|24|28)00)-02-29"
)
_TIME: Final = r"([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\.[0-9]{1,6})?(Z|[+-]([01][0-9]|2[0-3]):[0-5][0-9])"
_LABEL: Final = "[A-Za-z0-9]([A-Za-z0-9-]{0,30}[A-Za-z0-9])?"
_HOST: Final = rf"({_LABEL}\.){{0,3}}[A-Za-z]{{2,12}}"
_WORD: Final = "[A-Za-z0-9_+-]"

PATTERNS: Final[Mapping[str, str]] = {
    "date": f"^({_DAY})$",
    "time": f"^{_TIME}$",
    "date-time": f"^({_DAY})T{_TIME}$",
    "hostname": f"^{_HOST}$",
    "email": rf"^{_WORD}{{1,32}}(\.{_WORD}{{1,16}})?@{_LABEL}\.{_HOST}$",
}
"""What stands for a format."""

_INSIDE: Final = 1e-9
_LARGEST: Final = 1e6
"""Beyond, the next number is further away than `_INSIDE`, and bounds stay as they are."""

_DATA: Final = frozenset({"const", "enum", "default", "example", "examples", "required"})
_NAMED: Final = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})


def exact(schema: Mapping[str, Any]) -> dict[str, Any]:
    """The schema, and all within it, with the above instead. The nesting of `schema` is bounded."""
    found: dict[str, Any] = {}
    for key, value in schema.items():
        if key in _DATA:
            found[key] = value
        elif key in _NAMED and isinstance(value, Mapping):
            found[key] = {name: _within(each) for name, each in value.items()}
        else:
            found[key] = _within(value)
    _put_pattern(found)
    if found.get("type") != "integer":
        _put_bound(found, "exclusiveMinimum", "minimum", _INSIDE)
        _put_bound(found, "exclusiveMaximum", "maximum", -_INSIDE)
    return found


def _within(value: Any) -> Any:
    if isinstance(value, Mapping):
        return exact(value)
    return [_within(each) for each in value] if isinstance(value, list | tuple) else value


def _put_pattern(schema: dict[str, Any]) -> None:
    name = schema.get("format")
    if not isinstance(name, str) or name not in PATTERNS:
        return
    del schema["format"]
    if "pattern" not in schema:
        schema["pattern"] = PATTERNS[name]
    else:
        others = schema.get("allOf")
        schema["allOf"] = [*(others if isinstance(others, list) else ()), {"pattern": PATTERNS[name]}]


def _put_bound(schema: dict[str, Any], exclusive: str, inclusive: str, step: float) -> None:
    bound = schema.get(exclusive)
    if isinstance(bound, bool) or not isinstance(bound, int | float) or abs(bound) > _LARGEST:
        return
    other = schema.get(inclusive)
    inner = bound + step
    if isinstance(other, int | float) and not isinstance(other, bool):
        inner = max(inner, other) if step > 0 else min(inner, other)
    del schema[exclusive]
    schema[inclusive] = inner
