"""What a schema, a regular expression or a grammar may hold at most; checked before any of it is compiled.

llguidance bounds most of what would take it long. Left to us are the size; nesting, which it follows by recursion; and
`multipleOf`: it builds an automaton with a state for each remainder, and for several that meet one for each remainder
of their least common multiple, hundreds of megabytes for a million.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from decimal import Decimal, InvalidOperation
from typing import Any, Final

import msgspec

from edgeqwen.errors import BadRequest

MAX_BYTES: Final = 64 << 10
MAX_NESTING: Final = 64
MAX_MULTIPLE: Final = 100_000
"""Of the least common multiple of all `multipleOf` of a schema, counted in the last decimal place of any of them."""

_INLINE_SCHEMA: Final = re.compile(r"%json\s*")
_DECIMAL_PLACES: Final = 12


def check_schema(schema: Any, field: str) -> None:
    """Raise `BadRequest` unless `schema` is an object within the limits."""
    if not isinstance(schema, Mapping):
        raise BadRequest(f"{field} must be a JSON schema, an object", field=field)
    _check_size(len(msgspec.json.encode(schema)), field)
    numbers = []
    for depth, key, value in _walk(schema):
        if depth > MAX_NESTING:
            raise BadRequest(f"{field} is nested more than {MAX_NESTING} deep", field=field)
        if key == "multipleOf":
            numbers.append(value)
    _check_multiples(numbers, field)


def check_regex(text: str, field: str) -> None:
    """Raise `BadRequest` if `text` is too long."""
    _check_size(len(text.encode("utf-8", "surrogatepass")), field)


def check_grammar(text: str, field: str) -> None:
    """Raise `BadRequest` if `text` is too long, or holds a schema that is beyond the limits."""
    check_regex(text, field)
    for match in _INLINE_SCHEMA.finditer(text):
        try:
            schema, _ = json.JSONDecoder().raw_decode(text, match.end())
        except (ValueError, RecursionError):
            continue  # the compiler says what is wrong with it
        if isinstance(schema, Mapping):
            check_schema(schema, field)


def _check_size(num_bytes: int, field: str) -> None:
    if num_bytes > MAX_BYTES:
        raise BadRequest(f"{field} has {num_bytes} bytes; at most {MAX_BYTES} are read", field=field)


def _walk(value: Any) -> Iterator[tuple[int, str | None, Any]]:
    """Depth, key and value of everything below; without recursion, of which there might be too much."""
    waiting: list[tuple[int, str | None, Any]] = [(0, None, value)]
    while waiting:
        depth, key, value = waiting.pop()
        yield depth, key, value
        if isinstance(value, Mapping):
            waiting += [(depth + 1, name, each) for name, each in value.items()]
        elif isinstance(value, list | tuple):
            waiting += [(depth + 1, None, each) for each in value]


def _check_multiples(values: list[Any], field: str) -> None:
    numbers = [Decimal(str(value)) for value in values if isinstance(value, int | float) and value > 0]
    try:
        whole = [int(number.scaleb(_DECIMAL_PLACES).to_integral_exact()) for number in numbers]
    except (InvalidOperation, OverflowError, ValueError):
        whole = [0]
    if not whole:
        return
    # In units of the last place that any of them has: 0.25 and 5 are 25 and 500.
    common = math.lcm(*whole) // math.gcd(*whole, 10**_DECIMAL_PLACES) if 0 not in whole else MAX_MULTIPLE + 1
    if common > MAX_MULTIPLE:
        message = (
            f"{field}: what `multipleOf` asks for together is beyond {MAX_MULTIPLE}, the most that can be followed"
        )
        raise BadRequest(message, field=field)
