"""Resolves the schemas of a tool's arguments, which decide how its values are written and read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from engine.grammar.complements import FORMATS
from engine.grammar.schema_ends import target_in

# The schemas of a tool's arguments, by name.
Properties = Mapping[str, Mapping[str, Any]]
# The references of one tool to resolve, and the alternatives within alternatives; a client decides how many there are.
_MOST_REFERENCES: Final = 1024
_MOST_NESTED: Final = 8
# Keywords beside a reference that do not change its values.
_NOTES: Final = ("title", "description", "default", "examples", "deprecated")
# Keywords that decide the type of a value.
_TYPING: Final = ("type", "enum", "const", "anyOf", "oneOf")
# Keywords that only JSON can keep to; a list of texts has no bounds, either.
_BEYOND_TEXTS: Final = frozenset(("pattern", "allOf", "anyOf", "oneOf", "not", "if", "$ref", "$dynamicRef"))
_BEYOND_CHOICES: Final = _BEYOND_TEXTS | {"format", "minLength", "maxLength"}


def properties_of(parameters: Mapping[str, Any] | None) -> dict[str, dict[str, Any]]:
    """Return the schemas of a tool's arguments by name, if ``properties`` lists them.

    References are resolved in each schema and its alternatives, because these decide how a value is written.
    """
    found = (parameters or {}).get("properties")
    if not isinstance(found, dict):
        return {}
    references = _References(parameters)
    return {name: references.resolved(schema) if isinstance(schema, dict) else {} for name, schema in found.items()}


def choices_of(schema: Mapping[str, Any]) -> list[Any]:
    """Return the values of a schema that lists them; else none."""
    choices = [schema["const"]] if "const" in schema else schema.get("enum")
    return choices if isinstance(choices, list) else []


def is_text(schema: Mapping[str, Any]) -> bool:
    """Return whether values of a schema are always strings, and written without quotes.

    Without quotes a text keeps to a list or to bounds of its length. Only JSON can keep to a pattern, a format or
    further schemas.
    """
    if "enum" in schema or "const" in schema:
        choices = choices_of(schema) if _BEYOND_CHOICES.isdisjoint(schema) else []
        return bool(choices) and all(isinstance(choice, str) for choice in choices)
    is_bounded = _BEYOND_TEXTS.isdisjoint(schema) and schema.get("format") not in FORMATS
    return schema.get("type") == "string" and is_bounded


class _References:
    """Resolves the references of one tool. A client decides how many there are, and whether they go in circles."""

    def __init__(self, root: Any) -> None:
        self._root = root
        self._left = _MOST_REFERENCES

    def resolved(self, schema: Any, depth: int = 0) -> Any:
        """Return a schema with the keywords of what it refers to; only with those of its type if some are its own."""
        if not isinstance(schema, dict) or depth > _MOST_NESTED:
            return schema
        for keyword in ("anyOf", "oneOf"):
            parts = schema.get(keyword)
            if isinstance(parts, list) and len(parts) <= self._left:
                schema = schema | {keyword: [self.resolved(part, depth + 1) for part in parts]}
        whole = schema.get("allOf")
        (part,) = whole if isinstance(whole, list) and len(whole) == 1 else (schema,)
        target = target_in(self._root, part) if isinstance(part, dict) and self._left > 0 else None
        if target is None or not isinstance(target[1], dict):
            return schema
        self._left -= 1
        named = self.resolved(target[1], depth + 1)
        beside = {
            key: one for key, one in schema.items() if key not in ("allOf" if part is not schema else "$ref", *_NOTES)
        }
        if beside.keys() & named.keys():
            return {key: named[key] for key in _TYPING if key in named} | schema
        return named | beside
