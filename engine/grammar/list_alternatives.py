"""Finds the alternatives of a list's schema in which its items may repeat, and the values that are certain to fit them.

Certainty is what counts: where a value may or may not fit, its list must have distinct items.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Iterator
from decimal import Decimal
from typing import Any, Final

from engine.grammar.schema_ends import listed

# In a rewritten schema: the items of this list are distinct. The library ignores the word.
DISTINCT: Final = "x-distinct"
# The most alternatives of one list, and the most schemas within each other.
_MOST_WAYS: Final = 16
_MOST_DEPTH: Final = 8
_NOTES: Final = frozenset(("title", "description", "default", "examples", "$comment", "$defs", "definitions"))
_JOINING: Final = frozenset(("$ref", "allOf", "anyOf"))
_OF_LISTS: Final = _NOTES | _JOINING | {"type", "items", "prefixItems", "minItems", "maxItems", DISTINCT, "x-guidance"}
_OF_ITEMS: Final = _NOTES | _JOINING | {"type", "enum", "const"}

Schemas = tuple[dict[str, Any], ...]
Target = Callable[[Any], Any]


class Alternatives:
    """The alternatives in one schema, whose references ``target`` resolves."""

    def __init__(self, target: Target) -> None:
        self._target = target

    def repeating(self, schemas: tuple[Any, ...]) -> Iterator[Schemas]:
        """Yield the alternatives, each the schemas that hold together, in which the items of a list may repeat."""
        ways: list[Schemas] = [()]
        for one in schemas:
            ways = _together(ways, self._ways_of(one, 0))
        for way in ways if len(ways) <= _MOST_WAYS else ():
            is_of_lists = all(one.keys() <= _OF_LISTS and one.get("type", "array") == "array" for one in way)
            if is_of_lists and not any(one.get(DISTINCT) is True for one in way):
                yield way

    def fitting(self, ways: tuple[Schemas, ...], place: int, value: Any) -> tuple[Schemas, ...]:
        """Return the alternatives that an item at this place is certain to fit."""
        return tuple([way for way in ways if all(self._fits(_item_at(one, place), value, 0) for one in way)])

    def _ways_of(self, schema: Any, depth: int) -> list[Schemas]:
        if schema is False or depth > _MOST_DEPTH:
            return []
        if not isinstance(schema, dict):
            return [()]
        ways: list[Schemas] = [(schema,)]
        found = self._target(schema)
        for part in (*([found] if found is not schema else []), *listed(schema, "allOf")):
            ways = _together(ways, self._ways_of(part, depth + 1))
        if listed(schema, "anyOf"):
            ways = _together(ways, [way for part in schema["anyOf"] for way in self._ways_of(part, depth + 1)])
        return ways

    def _fits(self, schema: Any, value: Any, depth: int) -> bool:
        """Return whether a value is certain to fit a schema."""
        if not isinstance(schema, dict):
            return schema is not False
        if depth > _MOST_DEPTH or not schema.keys() <= _OF_ITEMS:
            return False
        found = self._target(schema)
        parts = [*([found] if "$ref" in schema else []), *listed(schema, "allOf")]
        if ("$ref" in schema and found is schema) or not all(self._fits(one, value, depth + 1) for one in parts):
            return False
        if "anyOf" in schema and not any(self._fits(one, value, depth + 1) for one in listed(schema, "anyOf")):
            return False
        values = [*listed(schema, "enum"), *([schema["const"]] if "const" in schema else [])]
        if values and identity(value) not in [identity(_in_decimals(one)) for one in values]:
            return False
        types = schema.get("type", list(_kinds_of(value)))
        return not _kinds_of(value).isdisjoint(types if isinstance(types, list) else [types])


def has_length(way: Schemas, size: int) -> bool:
    """Return whether an alternative lets a list end with so many items."""
    return all(one.get("minItems", 0) <= size <= one.get("maxItems", size) for one in way)


def identity(value: Any) -> Hashable:
    """Return what is the same for equal JSON values only."""
    if isinstance(value, list):
        return ("list", *map(identity, value))
    if isinstance(value, dict):
        return frozenset([(key, identity(one)) for key, one in value.items()])
    return ("bool", value) if isinstance(value, bool) else value


def _together(ways: list[Schemas], others: list[Schemas]) -> list[Schemas]:
    found = itertools.islice(itertools.product(ways, others), _MOST_WAYS + 1)
    return [(*one, *other) for one, other in found]


def _item_at(schema: dict[str, Any], place: int) -> Any:
    first = listed(schema, "prefixItems")
    return first[place] if place < len(first) else schema.get("items", True)


def _in_decimals(value: Any) -> Any:
    """Return a value with its numbers as they are read from a text."""
    if isinstance(value, list):
        return [_in_decimals(one) for one in value]
    if isinstance(value, dict):
        return {key: _in_decimals(one) for key, one in value.items()}
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return Decimal(repr(value)) if is_number else value


def _kinds_of(value: Any) -> frozenset[str]:
    """Return the names of the types of a value in schemas."""
    if isinstance(value, Decimal):
        return frozenset(("number", "integer") if value == value.to_integral_value() else ("number",))
    names = {bool: "boolean", str: "string", list: "array", dict: "object", type(None): "null"}
    return frozenset((names[type(value)],))
