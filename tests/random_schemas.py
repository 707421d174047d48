"""JSON schemas by lot, as people write them for answers, each of which something satisfies."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, Final

Schema = dict[str, Any]

NAMES: Final = ("name", "age", "city", "tags", "price", "is_open", "kind", "items", "größe", "a b", 'q"uote', "note")
PATTERNS: Final = (r"^[A-Z]{2}-\d{3}$", r"^\d+$", r"^(red|green|blue)$", r"^[a-z]+(_[a-z]+)*$", "ab*c")
FORMATS: Final = ("date", "time", "date-time", "ipv4", "uuid", "email", "hostname", "duration")


class SchemaMaker:
    """Schemas by a seed. Objects and arrays are nested at most `depth` deep."""

    def __init__(self, seed: int, *, depth: int = 3) -> None:
        self._rng = random.Random(seed)
        self._depth = depth
        self._defs: Schema = {}

    def make(self) -> Schema:
        """An object at the top, as clients of structured output send it; what it refers to lies in `$defs`."""
        self._defs = {}
        if self._rng.random() < 0.4:
            self._defs["part"] = self._object(self._depth - 1)
        schema = self._object(self._depth)
        if self._defs and self._rng.random() < 0.3:
            schema["properties"]["next"] = {"anyOf": [{"$ref": "#/$defs/part"}, {"type": "null"}]}
        return {**schema, "$defs": self._defs} if self._defs else schema

    def _any(self, depth: int) -> Schema:
        leaves: list[Callable[[], Schema]] = [
            self._string, self._string, self._number, self._integer, self._enum, self._const, self._other,
        ]  # fmt: skip
        nested: list[Callable[[int], Schema]] = [self._object, self._array, self._any_of]
        place = self._rng.randrange(len(leaves) + (len(nested) if depth > 0 else 0))
        return leaves[place]() if place < len(leaves) else nested[place - len(leaves)](depth - 1)

    def _other(self) -> Schema:
        kinds: list[Schema] = [{"type": "boolean"}, {"type": "null"}, {"type": ["string", "null"]}]
        return self._rng.choice(kinds + ([{"$ref": "#/$defs/part"}] if self._defs else []))

    def _object(self, depth: int) -> Schema:
        rng = self._rng
        names = rng.sample(NAMES, rng.randint(1, 4))
        schema: Schema = {"type": "object", "properties": {name: self._any(depth) for name in names}}
        schema["required"] = names if rng.random() < 0.6 else rng.sample(names, rng.randint(0, len(names)))
        if rng.random() < 0.8:
            schema["additionalProperties"] = False
        elif rng.random() < 0.5:
            schema["additionalProperties"] = {"type": "integer"}
        return schema

    def _array(self, depth: int) -> Schema:
        rng = self._rng
        least = rng.randint(0, 2)
        schema: Schema = {"type": "array", "items": self._any(depth)}
        if rng.random() < 0.3:
            schema["prefixItems"] = [self._any(0), self._any(0)]
        return schema | {"minItems": least, "maxItems": least + rng.randint(0, 3)}

    def _any_of(self, depth: int) -> Schema:
        return {"anyOf": [self._any(depth) for _ in range(self._rng.randint(1, 3))]}

    def _string(self) -> Schema:
        rng = self._rng
        match rng.randrange(4):
            case 0:
                return {"type": "string", "pattern": rng.choice(PATTERNS)}
            case 1:
                return {"type": "string", "format": rng.choice(FORMATS)}
            case 2:
                least = rng.randint(0, 10)
                return {"type": "string", "minLength": least, "maxLength": least + rng.randint(0, 20)}
        return {"type": "string", "maxLength": 40}

    def _number(self) -> Schema:
        low = self._rng.choice([-1.5, 0, 0.25, 10])
        schema: Schema = {"type": "number", "minimum": low, "maximum": low + self._rng.choice([0.5, 3, 1000])}
        if self._rng.random() < 0.3:
            schema["exclusiveMinimum"] = schema.pop("minimum")
        return schema

    def _integer(self) -> Schema:
        low = self._rng.randint(-100, 100)
        schema: Schema = {"type": "integer", "minimum": low, "maximum": low + self._rng.randint(10, 500)}
        return schema | {"multipleOf": 5} if self._rng.random() < 0.2 else schema

    def _enum(self) -> Schema:
        values = ["red", "green", 'b"lue', 1, 2.5, True, None, [1], {"a": 1}, "ünï"]
        return {"enum": self._rng.sample(values, self._rng.randint(1, 4))}

    def _const(self) -> Schema:
        return {"const": self._rng.choice(["fixed", 7, None, False, ["a", 1]])}
