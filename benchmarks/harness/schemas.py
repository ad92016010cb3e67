"""Random JSON schemas with the keywords of draft 2020-12 that structured output does not refuse."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

Schema = dict[str, Any]
WORDS = (
    "name", "title", "size", "count", "price", "tags", "address", "street", "city", "code", "kind", "state", "note",
    "owner", "items", "result", "value", "when",
)  # fmt: skip
# Formats whose texts jsonschema can check without other packages.
FORMATS = ("date", "ipv4", "ipv6", "uuid", "email")


class Maker:
    """Makes schemas that end: what a random model writes on is bounded everywhere."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.defined: dict[str, Schema] = {}

    def schema(self, depth: int) -> Schema:
        """Return a schema that is nested so deep, with its definitions."""
        self.defined = {}
        made = {**self.nested(depth), "$schema": "https://json-schema.org/draft/2020-12/schema", "title": self.word()}
        if self.random.random() < 0.3:
            made |= {"$id": f"https://example.com/{self.word()}", "$comment": "random", "description": self.word()}
        return {**made, "$defs": self.defined} if self.defined else made

    def word(self) -> str:
        return self.random.choice(WORDS)

    def nested(self, depth: int) -> Schema:
        if depth < 1:
            return self.random.choice(LEAVES)(self)
        return self.random.choice(INNER)(self, depth - 1)

    # -- values without parts --------------------------------------------------------------------------

    def text(self) -> Schema:
        least = self.random.randint(0, 3)
        return {"type": "string", "minLength": least, "maxLength": least + self.random.randint(1, 8)}

    def pattern(self) -> Schema:
        return {
            "type": "string",
            "pattern": self.random.choice(["^[a-z]{1,6}$", "^(ab|c){2}[0-9]$", "^[A-Z][a-z]{0,5}$"]),
        }

    def format(self) -> Schema:
        return {"type": "string", "format": self.random.choice(FORMATS), "default": "x", "examples": ["x"]}

    def content(self) -> Schema:
        return {**self.text(), "contentEncoding": "base64", "contentMediaType": "text/plain", "deprecated": False}

    def integer(self) -> Schema:
        low = self.random.randint(-50, 50)
        ends = [("minimum", "maximum"), ("exclusiveMinimum", "exclusiveMaximum")]
        names = self.random.choice(ends)
        return {"type": "integer", names[0]: low, names[1]: low + self.random.randint(5, 500)}

    def multiple(self) -> Schema:
        return {"type": "integer", "multipleOf": self.random.randint(2, 9), "minimum": 0, "maximum": 999}

    def number(self) -> Schema:
        return {"type": "number", "minimum": self.random.randint(-5, 5), "exclusiveMaximum": 9.5, "multipleOf": 0.25}

    def chosen(self) -> Schema:
        return {"enum": self.random.sample(["red", 3, None, True, "a b", 2.5, [1], {"k": "v"}], 3)}

    def constant(self) -> Schema:
        return {"const": self.random.choice(["fixed", 7, None, [1, "x"], {"deep": [True]}])}

    def either(self) -> Schema:
        return {
            "type": self.random.choice([["boolean", "null"], "boolean", "null"]),
            "readOnly": True,
            "writeOnly": False,
        }

    # -- values with parts -----------------------------------------------------------------------------

    def object(self, depth: int) -> Schema:
        names = self.random.sample(WORDS, self.random.randint(1, 3))
        parts = {name: self.nested(depth if number == 0 else min(depth, 1)) for number, name in enumerate(names)}
        needed = [names[0], *(name for name in names[1:] if self.random.random() < 0.5)]
        return {"type": "object", "properties": parts, "required": needed, "additionalProperties": False}

    def mapping(self, depth: int) -> Schema:
        bound = {"minProperties": 1, "maxProperties": 2}
        if self.random.random() < 0.5:
            named = {"^[a-c]{1,3}$": self.nested(depth)}
            return {"type": "object", "patternProperties": named, "additionalProperties": False, **bound}
        return {"type": "object", "additionalProperties": self.nested(depth), **bound}

    def array(self, depth: int) -> Schema:
        return {"type": "array", "items": self.nested(depth), "minItems": 1, "maxItems": self.random.randint(1, 2)}

    def tuple(self, depth: int) -> Schema:
        return {"type": "array", "prefixItems": [self.nested(depth), self.nested(0)], "items": False, "minItems": 2}

    def any_of(self, depth: int) -> Schema:
        return {"anyOf": [self.nested(depth), self.nested(0)]}

    def one_of(self, depth: int) -> Schema:
        closed = {"type": "object", "required": ["kind", "value"], "additionalProperties": False}
        named = [{"kind": {"const": name}, "value": self.nested(depth)} for name in ("one", "two")]
        return {"oneOf": [{**closed, "properties": parts} for parts in named]}

    def all_of(self, depth: int) -> Schema:
        first = {"type": "object", "properties": {"left": self.nested(depth)}, "required": ["left"]}
        second = {"properties": {"right": self.nested(0)}, "required": ["right"]}
        return (
            {"allOf": [first, second], "maxProperties": 2}
            if self.random.random() < 0.2
            else {"allOf": [first, second]}
        )

    def reference(self, depth: int) -> Schema:
        name = f"d{len(self.defined)}"
        self.defined[name] = {}
        self.defined[name] |= self.nested(depth)
        if self.random.random() < 0.5:
            self.defined[name]["$anchor"] = f"a-{name}"
            return {"$ref": f"#a-{name}"}
        return {"$ref": f"#/$defs/{name}"}


LEAVES: list[Callable[[Maker], Schema]] = [
    Maker.text, Maker.pattern, Maker.format, Maker.content, Maker.integer, Maker.multiple, Maker.number, Maker.chosen,
    Maker.constant, Maker.either,
]  # fmt: skip
INNER: list[Callable[[Maker, int], Schema]] = [
    Maker.object, Maker.mapping, Maker.array, Maker.tuple, Maker.any_of, Maker.one_of, Maker.all_of, Maker.reference,
]  # fmt: skip


def schemas(count: int, seed: int = 0) -> Iterator[Schema]:
    """Make so many different schemas, every second of which is nested three levels or more."""
    maker = Maker(seed)
    for number in range(count):
        yield maker.schema(number % 2 * 3 + maker.random.randint(0, 2 if number % 2 == 0 else 1))


def keywords_of(schema: Any) -> set[str]:
    """Return the keywords of a schema, those of its parts included."""
    found: set[str] = set()
    if isinstance(schema, dict):
        for name, value in schema.items():
            found.add(name)
            if name in ("properties", "patternProperties", "$defs"):
                found = found.union(*map(keywords_of, value.values()))
            elif name not in ("enum", "const", "default", "examples"):
                found |= keywords_of(value)
    elif isinstance(schema, list):
        found = found.union(*map(keywords_of, schema))
    return found
