"""Finds the parts of a JSON schema that have a finite value, by a least fixpoint over its references.

A model can never finish a part that requires itself. In doubt a part has a finite value.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Any, Final
from urllib.parse import unquote

from engine.grammar.patterns import is_found

PARTS_BY_NAME: Final = ("$defs", "definitions", "properties", "patternProperties", "dependentSchemas")
LISTED_PARTS: Final = ("anyOf", "oneOf", "allOf", "prefixItems", "items")
SINGLE_PARTS: Final = ("items", "additionalProperties", "additionalItems", "unevaluatedProperties", "unevaluatedItems")


def target_in(root: Any, schema: dict[str, Any]) -> tuple[str, Any] | None:
    """Return the pointer and the part that a local reference names in the whole schema; None for other references."""
    reference = schema.get("$ref")
    if not isinstance(reference, str) or not (reference == "#" or reference.startswith("#/")):
        return None
    found = root
    place = unquote(reference[1:])
    for step in place.split("/")[1:]:
        key = step.replace("~1", "/").replace("~0", "~")
        if isinstance(found, dict) and key in found:
            found = found[key]
        elif isinstance(found, list) and key.isdecimal() and int(key) < len(found):
            found = found[int(key)]
        else:
            return None
    return place, found


class SchemaEnds:
    """The parts of one schema that have a finite value."""

    def __init__(self, root: Any) -> None:
        self._root = root
        self._parts: dict[int, dict[str, Any]] = {}
        self._ends: set[int] = set()
        self._waiting: dict[int, list[dict[str, Any]]] = defaultdict(list)
        self._collect(root)
        self._solve()

    def ends(self, schema: Any) -> bool:
        return schema is not False and (id(schema) in self._ends or id(schema) not in self._parts)

    def target_of(self, schema: dict[str, Any]) -> tuple[str, Any] | None:
        """Return the pointer and the part of a local reference; None for other references."""
        return target_in(self._root, schema)

    def _collect(self, root: Any) -> None:
        open_parts = [root]
        while open_parts:
            part = open_parts.pop()
            if not isinstance(part, dict) or id(part) in self._parts:
                continue
            self._parts[id(part)] = part
            open_parts += [child for _, child in parts_of(part)]
            target = self.target_of(part)
            if target is not None:
                open_parts.append(target[1])

    def _solve(self) -> None:
        todo = list(self._parts.values())
        while todo:
            part = todo.pop()
            if id(part) not in self._ends and self._has_finite_value(part):
                self._ends.add(id(part))
                todo += self._waiting.pop(id(part), ())

    def _has_finite_value(self, schema: dict[str, Any]) -> bool:
        """Return whether each keyword by itself allows a finite value, given the parts known so far."""
        return all(self._known(need, schema) for need in self.needs(schema)) and all(
            any(self._known(one, schema) for one in choices) for choices in self.choices(schema)
        )

    def _known(self, part: Any, asker: dict[str, Any]) -> bool:
        if self.ends(part):
            return True
        self._waiting[id(part)].append(asker)
        return False

    def needs(self, schema: dict[str, Any]) -> Iterator[Any]:
        """Yield the required parts."""
        target = self.target_of(schema)
        if target is not None:
            yield target[1]
        yield from listed(schema, "allOf")
        if "enum" in schema or "const" in schema:
            return
        types = schema.get("type")
        if types == "object" or types == ["object"]:
            yield from _needed_of_object(schema)
        elif types == "array" or types == ["array"]:
            yield from _needed_of_array(schema)

    def choices(self, schema: dict[str, Any]) -> Iterator[list[Any]]:
        """Yield lists of parts; one part of each list is required."""
        for name in ("anyOf", "oneOf"):
            if listed(schema, name):
                yield listed(schema, name)


def listed(schema: dict[str, Any], name: str) -> list[Any]:
    found = schema.get(name)
    return found if isinstance(found, list) else []


def named(schema: dict[str, Any], name: str) -> dict[str, Any]:
    found = schema.get(name)
    return found if isinstance(found, dict) else {}


def _needed_of_object(schema: dict[str, Any]) -> Iterator[Any]:
    properties = named(schema, "properties")
    for key in listed(schema, "required"):
        if not isinstance(key, str):
            continue
        found = [properties[key]] if key in properties else []
        found += [part for pattern, part in named(schema, "patternProperties").items() if is_found(pattern, key)]
        yield from found or [schema.get("additionalProperties", True)]


def _needed_of_array(schema: dict[str, Any]) -> Iterator[Any]:
    fewest = schema.get("minItems", 0)
    if not isinstance(fewest, int):
        return
    items = schema.get("items", True)
    first = items if isinstance(items, list) else listed(schema, "prefixItems")
    yield from first[: max(0, fewest)]
    if fewest > len(first):
        yield schema.get("additionalItems", True) if isinstance(items, list) else items


def parts_of(schema: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the direct subschemas, with the steps of a JSON pointer to them."""
    for name in PARTS_BY_NAME:
        for key, part in named(schema, name).items():
            yield f"/{name}/{key.replace('~', '~0').replace('/', '~1')}", part
    for name in LISTED_PARTS:
        for index, part in enumerate(listed(schema, name)):
            yield f"/{name}/{index}", part
    for name in SINGLE_PARTS:
        if isinstance(schema.get(name), dict | bool):
            yield f"/{name}", schema[name]


def endless_place(schema: Any) -> str | None:
    """Return a JSON pointer to a required part that requires itself, or None."""
    if not isinstance(schema, dict):
        return None
    found = SchemaEnds(schema)
    if found.ends(schema):
        return None
    place, part, seen = "", schema, {id(schema)}
    while True:
        target = found.target_of(part)
        steps = [target] if target is not None and not found.ends(target[1]) else []
        inside = {id(child): place + step for step, child in parts_of(part)}
        needed = [*found.needs(part), *(one for choices in found.choices(part) for one in choices)]
        steps += [(inside[id(one)], one) for one in needed if not found.ends(one) and id(one) in inside]
        following = [(to, one) for to, one in steps if isinstance(one, dict) and id(one) not in seen]
        if not following:
            return place
        place, part = following[0]
        seen.add(id(part))
