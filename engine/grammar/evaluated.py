"""Rewrites ``unevaluatedProperties`` as alternatives of closed objects, one for each way to fit the schema.

A value that fits in several ways may have the properties of one of them only.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any, Final, NamedTuple

from engine.grammar.complements import Target, are_disjoint
from engine.grammar.schema_ends import listed, named

_MOST_WAYS: Final = 32
_MOST_DEPTH: Final = 6
_CHOOSING: Final = (
    "allOf",
    "anyOf",
    "oneOf",
    "$ref",
    "if",
    "then",
    "else",
    "dependentSchemas",
    "unevaluatedProperties",
)
_FORBIDDEN: Final = False


class _Way(NamedTuple):
    """Schemas that hold together, and the properties that they evaluate; all with ``is_open``."""

    parts: tuple[Any, ...]
    names: frozenset[str] = frozenset()
    patterns: frozenset[str] = frozenset()
    is_open: bool = False


class _TooManyError(Exception):
    pass


def closed_alternatives(schema: dict[str, Any], target: Target) -> dict[str, Any] | None:
    """Return a schema with ``unevaluatedProperties`` rewritten; None if it has too many alternatives."""
    more, own = schema["unevaluatedProperties"], _own(schema)
    try:
        ways = _Ways(target).of(schema, 0)
    except _TooManyError:
        return None
    alternatives = []
    for way in ways:
        closed = {
            "properties": dict.fromkeys(sorted(way.names), True),
            "patternProperties": dict.fromkeys(sorted(way.patterns), True),
            "additionalProperties": more,
        }
        alternatives.append({"allOf": [*way.parts[1:], *([] if way.is_open else [closed])]})
    return own | {"anyOf": alternatives}


def _own(schema: dict[str, Any]) -> dict[str, Any]:
    """Return a schema without the keywords that hold further schemas for the same value."""
    return {name: one for name, one in schema.items() if name not in _CHOOSING}


class _Ways:
    def __init__(self, target: Target) -> None:
        self._target = target

    def of(self, schema: Any, depth: int) -> list[_Way]:
        """Return the ways in which a value can fit a schema."""
        if not isinstance(schema, dict):
            return [_Way((schema,))]
        if depth > _MOST_DEPTH:
            raise _TooManyError
        is_open = "additionalProperties" in schema or (depth > 0 and "unevaluatedProperties" in schema)
        names, patterns = frozenset(named(schema, "properties")), frozenset(named(schema, "patternProperties"))
        ways = [_Way((_own(schema),), names, patterns, is_open)]
        found = self._target(schema)
        for part in (*([found] if found is not schema else []), *listed(schema, "allOf")):
            ways = _both(ways, self.of(part, depth + 1))
        if listed(schema, "anyOf"):
            ways = _both(ways, [way for part in schema["anyOf"] for way in self.of(part, depth + 1)])
        if listed(schema, "oneOf"):
            ways = _both(ways, self._exclusive(schema["oneOf"], depth))
        if "if" in schema:
            held = _both(self.of(schema["if"], depth + 1), self.of(schema.get("then", True), depth + 1))
            otherwise = _both([_Way(({"not": schema["if"]},))], self.of(schema.get("else", True), depth + 1))
            ways = _both(ways, [*held, *otherwise])
        for key, part in named(schema, "dependentSchemas").items():
            present = _both([_Way(({"required": [key]},))], self.of(part, depth + 1))
            ways = _both(ways, [_Way(({"properties": {key: _FORBIDDEN}},)), *present])
        return ways

    def _exclusive(self, alternatives: list[Any], depth: int) -> list[_Way]:
        ways = []
        for place, part in enumerate(alternatives):
            others = [
                {"not": other}
                for at, other in enumerate(alternatives)
                if at != place and not are_disjoint(part, other, self._target)
            ]
            ways += _both([_Way(tuple(others))], self.of(part, depth + 1))
        return ways


def _both(ways: Iterable[_Way], others: Iterable[_Way]) -> list[_Way]:
    found = [
        _Way(
            (*one.parts, *other.parts),
            one.names | other.names,
            one.patterns | other.patterns,
            one.is_open or other.is_open,
        )
        for one, other in itertools.product(ways, others)
    ]
    if len(found) > _MOST_WAYS:
        raise _TooManyError
    return found
