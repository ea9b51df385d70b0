"""Writes the negation of a schema in keywords that the library supports.

A negation is a list of alternatives, each of which breaks the schema. Alternatives that cannot be written are left
out, so that its values always break the schema, but not all that do may be among them.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

from engine.grammar.automata import negated_pattern, plain_parts
from engine.grammar.integers import EXACT
from engine.grammar.schema_ends import listed, named

# Formats that the library supports.
FORMATS: Final = frozenset(
    ("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uri", "uuid")
)
# Formats some of whose texts are also of another one: a date may be the name of a host.
_MEETING_FORMATS: Final = {"hostname": frozenset(("date", "duration", "ipv4", "uuid")), "uri": frozenset(("ipv6",))}
TYPES: Final = ("string", "number", "boolean", "null", "array", "object")
_MOST_DEPTH: Final = 8
_MOST_ALTERNATIVES: Final = 64
_MOST_CONSTANT_CHARS: Final = 60
_FORBIDDEN: Final = False
# Limits by type: the negated keyword and what is added to the limit.
_LIMITS: Final = {
    "minLength": ("string", "maxLength", -1),
    "maxLength": ("string", "minLength", 1),
    "minItems": ("array", "maxItems", -1),
    "maxItems": ("array", "minItems", 1),
    "minProperties": ("object", "maxProperties", -1),
    "maxProperties": ("object", "minProperties", 1),
    "minimum": ("number", "exclusiveMaximum", 0),
    "maximum": ("number", "exclusiveMinimum", 0),
    "exclusiveMinimum": ("number", "maximum", 0),
    "exclusiveMaximum": ("number", "minimum", 0),
}

Target = Callable[[Any], Any]


class Negation:
    """Negates schemas. ``names`` are further properties that values may have, by which they break closed objects."""

    def __init__(self, target: Target, names: Sequence[str] = ()) -> None:
        self._target = target
        self._names = names

    def of(self, schema: Any, depth: int = 0) -> Any:
        """Return a schema whose values all break ``schema``: false if none can be written."""
        if isinstance(schema, bool):
            return not schema
        if not isinstance(schema, dict) or depth > _MOST_DEPTH:
            return _FORBIDDEN
        alternatives: list[Any] = []
        for one in self._alternatives(schema, depth):
            if one is True or one == {}:
                return True
            if one is not False and one not in alternatives:
                alternatives.append(one)
        if not 0 < len(alternatives) <= _MOST_ALTERNATIVES:
            return _FORBIDDEN
        return alternatives[0] if len(alternatives) == 1 else {"anyOf": alternatives}

    def _alternatives(self, schema: dict[str, Any], depth: int) -> Iterator[Any]:
        if "$ref" in schema:
            found = self._target(schema)
            yield _FORBIDDEN if found is schema else self.of(found, depth + 1)
        if "const" in schema or "enum" in schema:
            yield from _other_values([schema["const"]] if "const" in schema else listed(schema, "enum"))
        if "type" in schema:
            yield _other_types(schema["type"])
        for name, (kind, negated, step) in _LIMITS.items():
            limit = schema.get(name)
            if (
                isinstance(limit, int | float)
                and not isinstance(limit, bool)
                and limit + step >= (0 if step else limit)
            ):
                yield {"type": kind, negated: limit + step}
        if isinstance(schema.get("pattern"), str):
            for part in plain_parts(schema["pattern"]) or ():
                pattern = negated_pattern(part)
                yield _FORBIDDEN if pattern is None else {"type": "string", "pattern": pattern}
        yield from self._of_objects(schema, depth)
        yield from self._of_parts(schema, depth)

    def _of_objects(self, schema: dict[str, Any], depth: int) -> Iterator[Any]:
        for key in listed(schema, "required"):
            yield {"type": "object", "properties": {key: _FORBIDDEN}}
        properties = named(schema, "properties")
        for key, part in properties.items():
            negated = self.of(part, depth + 1)
            yield negated and {"type": "object", "required": [key], "properties": {key: negated}}
        if "patternProperties" in schema or not isinstance(schema.get("additionalProperties"), bool | dict):
            return
        negated = self.of(schema["additionalProperties"], depth + 1)
        for key in self._names if negated is not False else ():
            if key not in properties:
                yield {"type": "object", "required": [key], "properties": {key: negated}}

    def _of_parts(self, schema: dict[str, Any], depth: int) -> Iterator[Any]:
        for part in listed(schema, "allOf"):
            yield self.of(part, depth + 1)
        if listed(schema, "anyOf"):
            negated = [self.of(part, depth + 1) for part in schema["anyOf"]]
            yield _FORBIDDEN if False in negated else {"allOf": negated}
        if "not" in schema:
            yield schema["not"]
        if "contains" in schema and schema.get("minContains", 1) == 1:
            negated = self.of(schema["contains"], depth + 1)
            yield {"type": "array", "items": negated}
        if isinstance(schema.get("items"), dict) and "prefixItems" not in schema:
            negated = self.of(schema["items"], depth + 1)
            # The first item is enough to break it.
            yield negated and {"type": "array", "prefixItems": [negated], "minItems": 1}


def _other_types(types: Any) -> Any:
    kinds = types if isinstance(types, list) else [types]
    # There is no type for the numbers that are no integers.
    others = [kind for kind in TYPES if kind not in kinds and not (kind == "number" and "integer" in kinds)]
    return {"type": others} if others else _FORBIDDEN


def _other_values(values: Sequence[Any]) -> Iterator[Any]:
    """Yield schemas of all values that are none of these."""
    texts = [value for value in values if isinstance(value, str)]
    numbers = [value for value in values if isinstance(value, int | float) and not isinstance(value, bool)]
    truths = [value for value in values if isinstance(value, bool)]
    containers = [value for value in values if isinstance(value, list | dict)]
    used = list({_kind_of(value): True for value in values})
    yield _other_types(used)
    if texts:
        yield {"type": "string", "pattern": pattern_excluding(texts)}
    yield from _other_numbers(numbers)
    if len(set(truths)) == 1:
        yield {"const": not truths[0]}
    for kind, limit in (("array", "minItems"), ("object", "minProperties")):
        found = [value for value in containers if isinstance(value, list) == (kind == "array")]
        if found:
            yield {"type": kind, limit: 1 + max(map(len, found))}


def _other_numbers(numbers: Sequence[int | float]) -> Iterator[Any]:
    if not numbers or any(abs(number) >= EXACT for number in numbers):
        return
    ordered = sorted(set(numbers))
    yield {"type": "number", "exclusiveMaximum": ordered[0]}
    for low, high in itertools.pairwise(ordered):
        yield {"type": "number", "exclusiveMinimum": low, "exclusiveMaximum": high}
    yield {"type": "number", "exclusiveMinimum": ordered[-1]}


def pattern_excluding(texts: Sequence[str]) -> str:
    """Return a pattern of all strings but these. Of long ones, it excludes all strings that begin like them."""
    return f"^(?:{_excluding([text[:_MOST_CONSTANT_CHARS] for text in texts], _MOST_CONSTANT_CHARS)})$"


def _excluding(texts: Sequence[str], left: int) -> str:
    """Return an expression of the strings that none of the texts is."""
    by_first: dict[str, list[str]] = {}
    for text in texts:
        if text:
            by_first.setdefault(text[0], []).append(text[1:])
    if not by_first:
        return r"[\s\S]+"
    letters = "".join(f"\\x{{{ord(letter):x}}}" for letter in by_first)
    ways = [rf"[^{letters}][\s\S]*"] + ([] if "" in texts else ["(?:)"])
    for letter, rests in by_first.items():
        if left > 1 or all(rests):
            ways.append(f"\\x{{{ord(letter):x}}}(?:{_excluding(rests, left - 1)})")
    return "|".join(ways)


def kinds_of(schema: dict[str, Any]) -> frozenset[str]:
    """Return the types of the values of a schema, as far as it names them."""
    if "const" in schema or "enum" in schema:
        values = [schema["const"]] if "const" in schema else listed(schema, "enum")
        return frozenset([_kind_of(value) for value in values])
    types = schema.get("type", list(TYPES))
    return frozenset(
        ["number" if kind == "integer" else kind for kind in (types if isinstance(types, list) else [types])]
    )


def _kind_of(value: Any) -> str:
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int | float):
        return "number"
    if isinstance(value, str):
        return "string"
    return "array" if isinstance(value, list) else "object" if isinstance(value, dict) else "null"


def are_disjoint(one: Any, other: Any, target: Target, depth: int = 0) -> bool:
    """Return whether no value is certain to fit both schemas; False in doubt."""
    one, other = target(one), target(other)
    if one is False or other is False:
        return True
    if not isinstance(one, dict) or not isinstance(other, dict) or depth > _MOST_DEPTH:
        return False
    if kinds_of(one).isdisjoint(kinds_of(other)):
        return True
    values, others = _texts_of(one), _texts_of(other)
    if values and others:
        return values.isdisjoint(others)
    if kinds_of(one) & kinds_of(other) == {"string"}:
        return _are_disjoint_formats(one.get("format"), other.get("format"))
    if kinds_of(one) & kinds_of(other) != {"object"}:
        return False
    required = {key for schema in (one, other) for key in listed(schema, "required") if isinstance(key, str)}
    mine, theirs = named(one, "properties"), named(other, "properties")
    return any(
        key in mine and key in theirs and are_disjoint(mine[key], theirs[key], target, depth + 1) for key in required
    )


def _are_disjoint_formats(one: Any, other: Any) -> bool:
    """Return whether no text is of both formats; False for a format that is not enforced."""
    if not isinstance(one, str) or not isinstance(other, str) or one == other or not {one, other} <= FORMATS:
        return False
    return other not in _MEETING_FORMATS.get(one, ()) and one not in _MEETING_FORMATS.get(other, ())


def _texts_of(schema: dict[str, Any]) -> set[str]:
    """Return the values of a schema that enumerates them, as texts that are the same for equal values."""
    values = [schema["const"]] if "const" in schema else listed(schema, "enum")
    is_whole = [isinstance(value, float) and value.is_integer() for value in values]
    return {json.dumps(int(value) if whole else value) for value, whole in zip(values, is_whole, strict=True)}
