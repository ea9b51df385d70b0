"""Values of arguments as models write them where a format is no JSON, and the JSON that clients get of them.

Owns what a value without quotes is: a text where the tool's schema allows nothing else, JSON where it reads as such.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from engine.frontend.tools.call_parts import CallParts

__all__ = ["Properties", "WrittenArguments", "escaped", "is_text", "json_of", "properties_of"]

# The schemas of a tool's arguments by their names.
Properties = Mapping[str, Mapping[str, Any]]

_WORDS = {"True": "true", "False": "false", "None": "null"}
_TYPES = {bool: ("boolean",), int: ("integer", "number"), float: ("number",), str: ("string",), list: ("array",)}


class WrittenArguments:
    """The arguments of one call, which become an object in JSON one after the other."""

    def __init__(self, parts: CallParts) -> None:
        self._parts = parts
        self._begun = False

    def key(self, key: str) -> None:
        """Begin an argument; its value is told to ``add``."""
        self._parts.argue(f'{", " if self._begun else "{"}"{escaped(key)}": ')
        self._begun = True

    def add(self, text: str) -> None:
        """Add a piece of JSON."""
        self._parts.argue(text)

    def end(self) -> None:
        """All arguments are there."""
        self._parts.argue("}" if self._begun else "{}")
        self._parts.end()


def properties_of(parameters: Mapping[str, Any] | None) -> dict[str, dict[str, Any]]:
    """The schemas of a tool's arguments by their names, as far as its schema has them in plain sight."""
    found = (parameters or {}).get("properties")
    if not isinstance(found, dict):
        return {}
    return {name: schema if isinstance(schema, dict) else {} for name, schema in found.items()}


def is_text(schema: Mapping[str, Any]) -> bool:
    """Whether a value of this schema can be nothing but a text, which is then written without quotes."""
    choices = schema.get("enum")
    if isinstance(choices, list):
        return bool(choices) and all(isinstance(choice, str) for choice in choices)
    return schema.get("type") == "string"


def escaped(text: str) -> str:
    """A text as it stands in a JSON string. Pieces can be escaped one by one."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def json_of(written: str, schema: Mapping[str, Any]) -> str:
    """The JSON of a whole value. What is none, or is not of the schema's type while a text is, is a text."""
    stripped = written.strip()
    stripped = _WORDS.get(stripped, stripped)
    try:
        value = json.loads(stripped, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return f'"{escaped(written)}"'
    return stripped if _fits(value, schema) else f'"{escaped(written)}"'


def _fits(value: Any, schema: Mapping[str, Any]) -> bool:
    """True as well for a value of a wrong type where a text would be one too."""
    types = schema.get("type")
    types = [types] if isinstance(types, str) else types
    if not isinstance(types, list) or "string" not in types:
        return True
    return any(name in types for name in (("null",) if value is None else _TYPES.get(type(value), ("object",))))


def _refuse(word: str) -> Any:
    raise ValueError(f"{word} is no JSON")
