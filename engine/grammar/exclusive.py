"""Rewrites ``oneOf`` as ``anyOf`` where the alternatives exclude each other, or can be made to.

What is added forbids only values that fit several alternatives, which are not values of ``oneOf``, or that leave out
the property by which alternatives are told apart.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

from engine.grammar.schema_ends import listed, named

# With more alternatives, comparing each with each would take long.
MOST_ALTERNATIVES: Final = 64
_FORBIDDEN: Final = False

Target = Callable[[Any], Any]


def tell_apart(part: dict[str, Any], target: Target) -> None:
    """Rewrite ``oneOf`` of mutually exclusive alternatives as ``anyOf``."""
    alternatives = listed(part, "oneOf")
    discriminator = part.pop("discriminator", None) if alternatives else None
    if not 0 < len(alternatives) <= MOST_ALTERNATIVES or "anyOf" in part:
        return
    schemas = [target(one) for one in alternatives]
    name = discriminator.get("propertyName") if isinstance(discriminator, dict) else None
    # The named property, which all require, makes the alternatives exclusive.
    if name is not None and all(isinstance(one, dict) and name in listed(one, "required") for one in schemas):
        rules: list[dict[str, Any]] | None = [{}] * len(alternatives)
    else:
        rules = _rules(part, schemas, target)
    if rules is not None:
        del part["oneOf"]
        part["anyOf"] = [_with(one, rule) for one, rule in zip(alternatives, rules, strict=True)]


def _with(alternative: Any, rule: dict[str, Any]) -> Any:
    if not rule:
        return alternative
    is_plain = isinstance(alternative, dict) and alternative.keys() == {"required"} and "required" not in rule
    return alternative | rule if is_plain else {"allOf": [alternative, rule]}


def _rules(part: dict[str, Any], schemas: Sequence[Any], target: Target) -> list[dict[str, Any]] | None:
    """Return what each alternative needs to exclude the others; None if they cannot be told apart."""
    if not all(_is_of_objects(part, one) for one in schemas):
        return None
    for key in named(schemas[0], "properties"):
        if _tells_apart(key, schemas, target):
            return [{} if key in listed(one, "required") else {"required": [key]} for one in schemas]
    required = [frozenset(key for key in listed(one, "required") if isinstance(key, str)) for one in schemas]
    shared = frozenset(key for key in listed(part, "required") if isinstance(key, str))
    forbidden: list[dict[str, Any]] = [{} for _ in schemas]
    for at, mine in enumerate(required):
        for other, theirs in enumerate(required):
            if at != other:
                free = sorted(theirs - mine - shared)
                if not free:
                    return None
                forbidden[at][next((key for key in free if key in forbidden[at]), free[0])] = _FORBIDDEN
    return [{"properties": keys} if keys else {} for keys in forbidden]


def _is_of_objects(part: dict[str, Any], schema: Any) -> bool:
    """Return whether all values are objects; a list of required properties alone says so of the objects among them."""
    if not isinstance(schema, dict):
        return False
    return "object" in (part.get("type"), schema.get("type")) or schema.keys() == {"required"}


def _tells_apart(key: str, schemas: Sequence[Any], target: Target) -> bool:
    """Return whether a property has other values in each alternative."""
    seen: list[Any] = []
    for one in schemas:
        schema = target(named(one, "properties").get(key))
        values = values_of(schema) if isinstance(schema, dict) else []
        if not values or not all(isinstance(value, str) for value in values) or any(value in seen for value in values):
            return False
        seen += values
    return True


def values_of(schema: dict[str, Any]) -> list[Any]:
    """Return the values of a schema that enumerates them; else none."""
    if "const" in schema:
        return [schema["const"]]
    if schema.get("type") == "boolean" and "enum" not in schema:
        return [True, False]
    return listed(schema, "enum")
