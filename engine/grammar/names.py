"""Rewrites rules about the names of an object's properties as ``patternProperties`` that exclude each other."""

from __future__ import annotations

import itertools
import re
from typing import Any, Final

from engine.grammar.automata import NOTHING, pattern_of_both, plain
from engine.grammar.complements import Target
from engine.grammar.exclusive import values_of
from engine.grammar.patterns import is_found
from engine.grammar.schema_ends import listed, named

_FORBIDDEN: Final = False
_ANY_NAME: Final = ""
_MOST_DEPTH: Final = 6
_MOST_PATTERNS: Final = 4
_NOTES: Final = frozenset(("type", "title", "description", "$comment", "examples", "default"))
_LISTING: Final = frozenset((*_NOTES, "enum", "const"))
_FORMATS: Final = {
    "uuid": "^[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}$",
    "date": r"^\d{4}-(?:0[1-9]|1[0-2])-(?:0[1-9]|1\d|2[0-8])$",
    "ipv4": r"^(?:(?:25[0-5]|2[0-4]\d|1?\d?\d)\.){3}(?:25[0-5]|2[0-4]\d|1?\d?\d)$",
    "email": r"^[\w.+-]+@(?:[A-Za-z\d-]+\.)+[A-Za-z]{2,}$",
}


def name_properties(part: dict[str, Any], target: Target) -> None:
    """Rewrite ``propertyNames`` as ``properties`` if all names are known and needed, else as ``patternProperties``."""
    names, more = part.get("propertyNames"), part.get("additionalProperties", True)
    if names is None or (named(part, "properties") and more is not True):
        return
    listing = target(names)
    is_listing = isinstance(listing, dict) and listing.keys() <= _LISTING
    known = [one for one in values_of(listing) if isinstance(one, str)] if is_listing else []
    declared = named(part, "properties")
    if known and not part.get("patternProperties") and {*declared, *listed(part, "required")}.issuperset(known):
        # After the last of them a pattern would allow a comma, and then no name.
        del part["propertyNames"]
        properties = {key: schema if key in known else _FORBIDDEN for key, schema in declared.items()}
        part |= {"properties": dict.fromkeys(known, more) | properties, "additionalProperties": False}
        return
    pattern = _pattern_of_names(names, target)
    allowed = None if pattern is None else _within(pattern, named(part, "patternProperties"), more)
    if pattern is None or allowed is None:
        return
    del part["propertyNames"]
    if pattern == _ANY_NAME:
        return
    part["properties"] = {
        key: schema if is_found(pattern, key) else _FORBIDDEN for key, schema in named(part, "properties").items()
    }
    part |= {"patternProperties": allowed, "additionalProperties": False}


def _within(pattern: str, patterns: dict[str, Any], more: Any) -> dict[str, Any] | None:
    """Return the patterns of an object's names among those that a pattern matches; None if they cannot be written."""
    if not patterns:
        return {pattern: more}
    found = {pattern_of_both((one, pattern)): schema for one, schema in patterns.items()}
    if more is not False:
        found[pattern_of_both((pattern,), tuple(patterns))] = more
    written = {one: schema for one, schema in found.items() if one is not None and one != NOTHING}
    return None if None in found else written


def _pattern_of_names(schema: Any, target: Target, depth: int = 0) -> str | None:
    """Return a pattern of the strings that fit a schema; None if there is none."""
    schema = target(schema)
    if isinstance(schema, bool):
        return _ANY_NAME if schema else NOTHING
    if not isinstance(schema, dict) or depth > _MOST_DEPTH:
        return None
    if "string" not in (schema.get("type", "string"), *listed(schema, "type")):
        return NOTHING
    patterns: list[str | None] = [_own_pattern(schema)]
    patterns += [_pattern_of_names(one, target, depth + 1) for one in listed(schema, "allOf")]
    if listed(schema, "anyOf"):
        choices = [_pattern_of_names(one, target, depth + 1) for one in schema["anyOf"]]
        known = [one for one in choices if one is not None]
        patterns.append("|".join(f"(?:{one})" for one in known) if len(known) == len(choices) else None)
    needed = [one for one in patterns if one is not None and one != _ANY_NAME]
    if None in patterns:
        return None
    return (
        (plain(needed[0]) or needed[0]) if len(needed) == 1 else pattern_of_both(tuple(needed)) if needed else _ANY_NAME
    )


def _own_pattern(schema: dict[str, Any]) -> str | None:
    """Return a pattern of the keywords that concern strings; None with others."""
    found = []
    for name, value in schema.items():
        if name == "pattern":
            found.append(value)
        elif name in ("enum", "const"):
            texts = [one for one in ([value] if name == "const" else value) if isinstance(one, str)]
            found.append(f"^(?:{'|'.join(map(re.escape, texts))})$" if texts else NOTHING)
        elif name == "format" and value in _FORMATS:
            found.append(_FORMATS[value])
        elif name not in _NOTES and name not in ("minLength", "maxLength", "allOf", "anyOf", "$ref"):
            return None
    if "minLength" in schema or "maxLength" in schema:
        found.append(rf"^[\s\S]{{{schema.get('minLength', 0)},{schema.get('maxLength', '')}}}$")
    if not found:
        return _ANY_NAME
    return str(found[0]) if len(found) == 1 else pattern_of_both(tuple(found))


def part_patterns(part: dict[str, Any]) -> None:
    """Rewrite patterns that match the same names as patterns of which each name matches one."""
    patterns = named(part, "patternProperties")
    if not 1 < len(patterns) <= _MOST_PATTERNS:
        return
    if all(pattern_of_both(pair) == NOTHING for pair in itertools.combinations(patterns, 2)):
        return
    regions: dict[str, Any] = {}
    for size in range(1, len(patterns) + 1):
        for some in itertools.combinations(patterns, size):
            region = pattern_of_both(some, tuple(one for one in patterns if one not in some))
            if region is None:
                return
            if region != NOTHING:
                regions[region] = patterns[some[0]] if size == 1 else {"allOf": [patterns[one] for one in some]}
    part["patternProperties"] = regions
