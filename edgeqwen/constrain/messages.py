"""What llguidance finds wrong, in our words: its own repeat the client's text.

Only what it says in fixed words, names of JSON Schema's keywords and places in a text are taken over.
"""

from __future__ import annotations

import re
from typing import Final

_KEYS: Final = re.compile(r"Unimplemented keys: \[(.*)\]")
_KEY: Final = re.compile(r'"(\$?[A-Za-z]{1,24})"')
_REGEX_ERROR: Final = re.compile(r"^error: ([a-zA-Z0-9 ,;'\-]+)$", re.MULTILINE)
_PLACE: Final = re.compile(r"^(?:at )?(\d+)\((\d+)\):")

_FIXED: Final = (
    ("Unknown format", "holds a `format` that is not supported"),
    ("Invalid type", "holds a `type` that JSON Schema does not have"),
    ("Unsatisfiable schema", "cannot be satisfied by any value"),
    ("oneOf constraints", "holds `oneOf` with branches that may overlap: use `anyOf`"),
    ("Pointer", "holds a `$ref` that points to nothing in it"),
    ("Resource", "holds a `$ref` that points outside of it"),
    ("min/maxProperties", "bounds the number of properties where not all that it names are required"),
    ("'multipleOf'", "holds a `multipleOf` that cannot be followed"),
    ("circular references", "holds a `$ref` in a circle, with other keywords beside it"),
    ("no start rule", "has no rule named start"),
    ("unknown name", "uses a name that no rule has"),
    ("unknown special token", "uses a special token that the model does not have"),
    ("too deeply nested", "is nested too deep"),
    ("number range", "holds bounds that cannot be followed"),
    ("Failed to generate regex for", "holds bounds that cannot be followed"),
    ("NoExtension", "cannot be satisfied by any text"),
)
"""What a message of llguidance holds, and ours. The first that fits counts."""

_TOO_COMPLEX: Final = (
    "too large", "too many", "too complex", "too big", "exhausted", "limit", "Unable to determine", "max is",
    "precomputation failed",
)  # fmt: skip

TOO_COMPLEX: Final = "is too complex"


def describe(text: str, *, has_lines: bool = False) -> str:
    """What is wrong, to follow the name of the member; `text` is what llguidance says. `has_lines`: the client wrote
    the text that its places are of.
    """
    place = _PLACE.match(text)
    return f"{_what(text)} (line {place[1]}, column {place[2]})" if place and has_lines else _what(text)


def _what(text: str) -> str:
    if keys := _KEYS.search(text):
        return f"uses keywords that are not supported: {', '.join(_KEY.findall(keys[1])) or 'unknown ones'}"
    if wrong := _REGEX_ERROR.search(text):
        return f"holds a regular expression that is not supported: {wrong[1]}"
    for part, ours in _FIXED:
        if part in text:
            return ours
    lower = text.lower()
    if any(part.lower() in lower for part in _TOO_COMPLEX):
        return TOO_COMPLEX
    return "cannot be followed"
