"""Which small values the grammar of a schema allows, against a validator: never one that the schema forbids."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jsonschema
import pytest
from texts_of_grammars import allowed

from engine.grammar.source import schema_grammar


def objects(names: str, values: Sequence[Any]) -> Iterator[dict[str, Any]]:
    """All objects with some of these names in order, of these values."""
    for some in itertools.product((*values, ...), repeat=len(names)):
        yield {name: value for name, value in zip(names, some, strict=True) if value is not ...}


SCALARS = (None, True, False, -1, 0, 1, 2, 2.5, "", "a", "b", "ab", "1")
VALUES = (
    *SCALARS,
    *(list(items) for count in range(4) for items in itertools.product((None, 0), repeat=count)),
    *(["a"], [0, "a"], [None, "a"], ["a", 0, 1], [[]], [{}], [{"a": 1}, 1], {"a": []}, {"a": {"a": 0}}, {"b": "a"}),
    *objects("abx", (None, 1)),
)


def orders(value: Any) -> Iterator[str]:
    """The texts of a value; of an object with its members in each order."""
    for members in itertools.permutations(value.items()) if isinstance(value, dict) else [value]:
        yield json.dumps(dict(members) if isinstance(value, dict) else value, separators=(",", ":"))


TEXTS = {text: value for value in VALUES for text in orders(value)}
NULL: dict[str, Any] = {"type": "null"}
# One rule each.
RULES: list[dict[str, Any]] = [
    {},
    *({"type": kind} for kind in ("string", "number", "boolean", "null", "array", "object", ["integer", "null"])),
    *({"const": value} for value in ("a", 1, True, None, [0], [0, "a"], [], {"a": 1}, {"a": 1, "b": 1})),
    *({"enum": values} for values in (["a", "ab", ""], [0, 1], [[0], [None, "a"]], [True, None, {}], [0, False])),
    *({"minLength": 1}, {"maxLength": 1}, {"pattern": "^a"}, {"pattern": "^(?!a)"}, {"pattern": r"^\D*$"}),
    *({"minimum": 1}, {"maximum": 1}, {"exclusiveMinimum": 0}, {"exclusiveMaximum": 2}),
    *({"minItems": 2}, {"maxItems": 1}, {"items": NULL}, {"prefixItems": [NULL, {"const": 0}]}),
    {"prefixItems": [NULL], "items": False},
    *({"contains": {"const": 0}} | more for more in ({}, {"minContains": 0}, {"minContains": 2})),
    *({"contains": {"const": 0}, "maxContains": 1} | more for more in ({}, {"minContains": 0}, {"maxContains": 2})),
    *({"required": ["a"]}, {"required": ["a", "b"]}, {"properties": {"a": NULL}}),
    {"properties": {"a": NULL}, "additionalProperties": False},
    {"properties": {"a": True, "b": True}, "additionalProperties": NULL},
    {"patternProperties": {"^[ab]$": NULL}},
    {"patternProperties": {"^a$": NULL, "^[ab]$": True}, "additionalProperties": {"const": 1}},
    *({"propertyNames": names} for names in ({"enum": ["a", "x"]}, {"enum": [".", "b"]}, {"pattern": "^[^a]"})),
    {"properties": {"a": True, "b": True, "x": True}, "required": ["a"], "maxProperties": 2},
    {"properties": {"a": True, "b": True, "x": True}, "required": ["b"], "minProperties": 2},
    *({"dependentRequired": {"a": ["b"]}}, {"dependentSchemas": {"a": {"properties": {"b": NULL}}}}),
    *({"not": {"required": ["a"]}}, {"anyOf": [NULL, {"required": ["b"]}]}),
    {"allOf": [{"minItems": 1}, {"minimum": 1}]},
    {"oneOf": [{"required": ["a"]}, {"required": ["b"]}], "type": "object"},
    {"oneOf": [{"required": ["b"]}, {"required": ["a", "x"]}], "type": "object", "required": ["a"]},
    {"if": {"required": ["a"]}, "then": {"required": ["b"]}, "else": {"properties": {"b": NULL}}},
    *({"properties": {"a": {"enum": [None, 1]}}, "if": {"properties": {"a": {"const": 1}}} | more,
       "then": {"not": {"const": "b"}}, "else": {"not": {"const": 0}}}
      for more in ({}, {"required": ["a"]}, {"type": "object"}, {"type": "array"})),
    *({"$ref": f"#/$defs/{name}", "$defs": {"~1": NULL, "/": {"type": "string"}, "~": {"minimum": 1}}}
      for name in ("~01", "~1", "~0", "%7E01")),
]  # fmt: skip


def _within(rule: dict[str, Any], of: Callable[[dict[str, Any]], dict[str, Any]]) -> dict[str, Any]:
    """A rule in a place of another schema, which has its definitions."""
    return of({name: one for name, one in rule.items() if name != "$defs"}) | {"$defs": rule.get("$defs", {})}


CLOSED: dict[str, Any] = {"type": "object", "unevaluatedProperties": False}
# Places of a rule where another one is written for it.
PLACES: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "alone": lambda rule: rule,
    "negated": lambda rule: {"not": rule},
    "closed": lambda rule: CLOSED | {"allOf": [rule]},
    "an exclusive alternative": lambda rule: {"oneOf": [rule, {"type": ["object", "number"]}]},
    "a condition": lambda rule: {"if": rule, "then": {"not": {"const": "b"}}, "else": {"not": {"const": 0}}},
}
NEGATING = ("negated", "an exclusive alternative", "a condition")


def shown(value: Any) -> str:
    return json.dumps(value, sort_keys=True)


@pytest.mark.parametrize("place", PLACES)
def test_a_grammar_allows_the_values_of_its_schema_alone(place: str) -> None:
    """And all of them, where no rule is negated: not every negation can be written."""
    for rule in RULES:
        schema = _within(rule, PLACES[place])
        judge = jsonschema.Draft202012Validator(schema)
        fitting = {shown(value) for value in VALUES if judge.is_valid(value)}
        found = {shown(TEXTS[text]) for text in allowed(schema_grammar(schema), TEXTS)}
        assert not found - fitting, schema
        assert found == fitting or place in NEGATING, (schema, fitting - found)
