"""Rewrites schemas for the library: the same values, in keywords that it supports.

Optional parts without a finite value are forbidden, unknown formats become annotations, and conditions on the
properties of an object become alternatives. The library refuses the keywords that remain.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any, Final

from engine.grammar.automata import plain, plain_parts
from engine.grammar.complements import FORMATS, Negation, Target, are_disjoint, kinds_of
from engine.grammar.contained import count_contained
from engine.grammar.evaluated import closed_alternatives
from engine.grammar.exclusive import tell_apart, values_of
from engine.grammar.integers import drop_unwritable, is_writable, round_bounds
from engine.grammar.json_positions import DISTINCT_NAMES
from engine.grammar.list_alternatives import DISTINCT
from engine.grammar.names import name_properties, part_patterns
from engine.grammar.presences import count_properties
from engine.grammar.references import settled
from engine.grammar.schema_ends import LISTED_PARTS, PARTS_BY_NAME, SINGLE_PARTS, SchemaEnds, listed, named

# With more values, listing their subsets would make the schema too long.
MOST_UNIQUE_VALUES: Final = 6
_FORBIDDEN: Final = False
# A letter of a property name, or an escaped sign.
_NAME: Final = r"(?:[\w /:@-]|\\[^\w\s])"
_LISTED_NAMES: Final = re.compile(
    rf"\^(?:\((?:\?:)?(?P<alternatives>{_NAME}+(?:\|{_NAME}+)*)\)|\[(?P<characters>\w+)\]|(?P<one>{_NAME}+))\$"
)
_CHOOSING_ITEMS: Final = frozenset(("anyOf", "oneOf", "if", "contains"))
# With more, combining the alternatives of oneOf would take long.
_MOST_OVERLAPS: Final = 24


def followable(schema: Any, *, marks_distinct: bool = False) -> Any:
    """Return the rewritten schema; false for a schema without a finite value.

    With ``marks_distinct`` lists of distinct items are marked for a guard; else the library refuses them.
    """
    if not isinstance(schema, dict):
        return schema
    root = settled(schema)
    return _Mending(root, marks_distinct=marks_distinct).mended(root)


def misreads(schema: Any) -> bool:
    """Return whether numbers that the library misreads are among the values of a schema, or are all of them."""
    if not isinstance(schema, dict):
        return False
    root = settled(schema)
    mending = _Mending(root)
    return (mending.mended(root) is False and mending.lacks_numbers) or mending.misreads


class _Mending:
    def __init__(self, root: dict[str, Any], *, marks_distinct: bool = False) -> None:
        self._marks_distinct = marks_distinct and named(root, "x-guidance").get("lenient") is not True
        self._ends = SchemaEnds(root)
        self._anchors = dict(_dynamic_anchors(root, ""))
        self.misreads = False
        # Whether bounds leave no integer of a part that the library reads as it is.
        self.lacks_numbers = False

    def mended(self, part: Any, *, is_in_all_of: bool = False) -> Any:
        if not self._ends.ends(part):
            return _FORBIDDEN
        if not isinstance(part, dict):
            return part
        if "unevaluatedProperties" in part and (closed := closed_alternatives(part, self._target)) is not None:
            return self.mended(closed)
        mended = dict(part)
        for name in (*PARTS_BY_NAME, "dependencies"):
            if isinstance(mended.get(name), dict):
                mended[name] = {
                    key: one if isinstance(one, list) else self.mended(one) for key, one in mended[name].items()
                }
        for name in LISTED_PARTS:
            if isinstance(mended.get(name), list):
                parts = [self.mended(one, is_in_all_of=name == "allOf") for one in mended[name]]
                mended[name] = [one for one in parts if one is not False] if name in ("anyOf", "oneOf") else parts
        for name in SINGLE_PARTS:
            if isinstance(mended.get(name), dict):
                mended[name] = self.mended(mended[name])
        for name in ("if", "then", "else", "not", "propertyNames"):
            if isinstance(mended.get(name), dict):
                mended[name] = self.mended(mended[name])
        if mended.get("not") in ({}, True):
            return _FORBIDDEN
        self.misreads |= not is_writable([mended.get("const"), mended.get("enum")])
        has_numbers = round_bounds(mended)
        self.lacks_numbers |= not has_numbers
        if not (drop_unwritable(mended) and has_numbers):
            return _FORBIDDEN
        mended = self._in_known_keywords(mended)
        if "contains" in mended:
            wanted = part["contains"]
            count_contained(mended, self.mended(wanted), lambda: self.mended(Negation(self._target).of(wanted)))
        if "oneOf" in mended:
            self._exclude_each_other(mended, listed(part, "oneOf"))
        for one, given in zip(listed(mended, "allOf"), listed(part, "allOf"), strict=False):
            self._settle(one, given)
        if not is_in_all_of:
            self._settle(mended, part)
        self._negate(mended, part)
        return mended

    def _exclude_each_other(self, mended: dict[str, Any], alternatives: list[Any]) -> None:
        """Rewrite ``oneOf`` as ``anyOf`` of the alternatives without the values of the others, where they overlap."""
        names = {key: True for one in alternatives for key in named(self._of_object(one), "properties")}
        negation, kept, overlaps = Negation(self._target, list(names)), [], 0
        for at, one in enumerate(alternatives):
            others = [
                other
                for place, other in enumerate(alternatives)
                if place != at and not are_disjoint(one, other, self._target)
            ]
            overlaps += len(others)
            without = [negation.of(other) for other in others]
            if overlaps > _MOST_OVERLAPS or "anyOf" in mended or self._leaves_fractions(one, others):
                return
            if any(part is False and other not in (True, {}) for part, other in zip(without, others, strict=True)):
                return
            whole = [self.mended(part) for part in (one, *without)]
            if False not in whole:
                kept.append(whole[0] if len(whole) == 1 else {"allOf": whole})
        del mended["oneOf"]
        mended["anyOf"] = kept

    def _leaves_fractions(self, one: Any, others: list[Any]) -> bool:
        """Return whether numbers without the integers are left, which no keyword describes."""
        if self._of_object(one).get("type") == "integer" or "number" not in kinds_of(self._of_object(one)):
            return False
        return any(self._of_object(other).get("type") == "integer" for other in others)

    def _of_object(self, schema: Any) -> dict[str, Any]:
        found = self._target(schema)
        return found if isinstance(found, dict) else {}

    def _settle(self, mended: Any, part: Any) -> None:
        """Rewrite a condition as two alternatives: it holds, or its negation."""
        if not isinstance(mended, dict) or not isinstance(part, dict) or "if" not in mended or "if" not in part:
            return
        negated = self.mended(Negation(self._target).of(part["if"]))
        if negated is False and part["if"] not in (True, {}):
            return
        held = {"allOf": [mended.pop("if"), mended.pop("then", True)]}
        otherwise = {"allOf": [negated, mended.pop("else", True)]}
        mended["allOf"] = [*listed(mended, "allOf"), {"anyOf": [held, otherwise]}]

    def _negate(self, mended: dict[str, Any], part: dict[str, Any]) -> None:
        """Rewrite ``not`` as its negation, unless that leaves out all numbers that fit."""
        if "not" in part and kinds_of(part) == {"number"} and self._leaves_fractions(part, [part["not"]]):
            return
        negated = self.mended(Negation(self._target).of(part["not"])) if "not" in mended and "not" in part else False
        if negated is not False:
            del mended["not"]
            mended["allOf"] = [*listed(mended, "allOf"), negated]

    def _in_known_keywords(self, part: dict[str, Any]) -> dict[str, Any]:
        if isinstance(part.get("format"), str) and part["format"] not in FORMATS:
            del part["format"]
        if isinstance(part.get("pattern"), str):
            _read_pattern(part)
        if "patternProperties" in part:
            patterns = named(part, "patternProperties")
            part["patternProperties"] = {plain(pattern) or pattern: one for pattern, one in patterns.items()}
        part.pop("$dynamicAnchor", None)
        _exclude_bounds(part)
        if isinstance(part.get("$dynamicRef"), str) and part["$dynamicRef"] in self._anchors:
            part["$ref"] = self._anchors[part.pop("$dynamicRef")]
        name_properties(part, self._target)
        _merge_exhausted_patterns(part)
        part_patterns(part)
        _list_unique_values(part, self._target)
        if part.get("uniqueItems") is True and self._marks_distinct:
            del part["uniqueItems"]
            part[DISTINCT] = True
        _close_list(part, self._target)
        if self._marks_distinct:
            _mark_names(part)
        count_properties(part)
        tell_apart(part, self._target)
        _spread_conditions(part)
        conditions = [*_dependent(part), *_conditional(part)]
        if conditions:
            part["allOf"] = [*listed(part, "allOf"), *conditions]
        return part

    def _target(self, schema: Any) -> Any:
        """Return the schema that a reference points to, or the schema itself."""
        target = self._ends.target_of(schema) if isinstance(schema, dict) else None
        return schema if target is None else target[1]


def _dynamic_anchors(part: Any, place: str) -> Iterator[tuple[str, str]]:
    """Yield each dynamic anchor with the plain reference that replaces it, which is equivalent within one schema."""
    if not isinstance(part, dict):
        return
    if isinstance(part.get("$dynamicAnchor"), str):
        yield f"#{part['$dynamicAnchor']}", f"#{place}"
    for key, one in named(part, "$defs").items():
        yield from _dynamic_anchors(one, f"{place}/$defs/{key.replace('~', '~0').replace('/', '~1')}")


def _read_pattern(part: dict[str, Any]) -> None:
    """Replace a pattern by patterns without look-aheads."""
    first, *more = plain_parts(part["pattern"]) or (part["pattern"],)
    part["pattern"] = first
    if more:
        part["allOf"] = [*listed(part, "allOf"), *({"pattern": pattern} for pattern in more)]


def _merge_exhausted_patterns(part: dict[str, Any]) -> None:
    """Merge patterns that match only declared properties into these properties.

    For such a pattern the library would allow a comma before another property, and then no name.
    """
    properties, patterns = dict(named(part, "properties")), dict(named(part, "patternProperties"))
    for pattern, schema in named(part, "patternProperties").items():
        names = _names_of(pattern)
        if names and names <= properties.keys():
            del patterns[pattern]
            for name in names if schema is not True else ():
                properties[name] = {"allOf": [properties[name], schema]}
    if len(patterns) < len(named(part, "patternProperties")):
        part |= {"properties": properties, "patternProperties": patterns}


def _names_of(pattern: str) -> set[str]:
    """Return the names that an anchored pattern lists as alternatives or as a class of characters; else none."""
    found = _LISTED_NAMES.fullmatch(pattern)
    if found is None:
        return set()
    if found["characters"] is not None:
        return set(found["characters"])
    alternatives = found["alternatives"] if found["alternatives"] is not None else found["one"]
    return {re.sub(r"\\(.)", r"\1", name) for name in alternatives.split("|")}


def _list_unique_values(part: dict[str, Any], target: Any) -> None:
    """Rewrite a list of distinct values out of a small set as an enumeration, in the order of the values.

    Lists that begin with other items are not changed.
    """
    if part.get("uniqueItems") is False or part.get("maxItems") in (0, 1):
        part.pop("uniqueItems", None)
    if not part.keys().isdisjoint(("prefixItems", "contains")):
        return
    listed_values = values_of(target(part["items"])) if isinstance(part.get("items"), dict) else []
    # In JSON 1 and 1.0 are the same value, and true is another.
    values = list({_identity(value): value for value in reversed(listed_values)}.values())[::-1]
    fewest, most = part.get("minItems", 0), part.get("maxItems", len(values))
    if part.get("uniqueItems") is not True or not 0 < len(values) <= MOST_UNIQUE_VALUES:
        return
    if not isinstance(fewest, int) or not isinstance(most, int):
        return
    subsets = [[value for at, value in enumerate(values) if subset >> at & 1] for subset in range(1 << len(values))]
    chosen = [some for some in subsets if fewest <= len(some) <= most]
    if not chosen:
        return
    for name in ("uniqueItems", "items", "minItems", "maxItems"):
        part.pop(name, None)
    part["enum"] = chosen


def _identity(value: Any) -> str:
    """Return a text that is the same for values that are equal in JSON."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return json.dumps(value, sort_keys=True)


def _exclude_bounds(part: dict[str, Any]) -> None:
    """Rewrite exclusive bounds as drafts before 6 have them: true beside the bound."""
    for bound, exclusive in (("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")):
        if isinstance(part.get(exclusive), bool):
            excludes = part.pop(exclusive)
            if excludes and bound in part:
                part[exclusive] = part.pop(bound)


def _mark_names(part: dict[str, Any]) -> None:
    """Mark an object whose names count, if they are not only declared ones: the library counts a repeated one twice."""
    fewest, is_closed = part.get("minProperties"), part.get("additionalProperties") is False
    if isinstance(fewest, int) and fewest > 1 and not (is_closed and not part.get("patternProperties")):
        part[DISTINCT_NAMES] = True


def _close_list(part: dict[str, Any], target: Target) -> None:
    """Rewrite ``unevaluatedItems`` where what is evaluated is certain."""
    found = target(part)
    parts = [part, *([] if found is part else [found]), *map(target, listed(part, "allOf"))]
    if "unevaluatedItems" not in part or not all(isinstance(one, dict) for one in parts):
        return
    if not all(one.keys().isdisjoint(_CHOOSING_ITEMS) for one in parts):
        return
    if any("allOf" in one or "$ref" in one for one in parts[1:]):
        return
    more = part.pop("unevaluatedItems")
    if not any("items" in one for one in parts):
        first = [True] * max(len(listed(one, "prefixItems")) for one in parts)
        part["allOf"] = [*listed(part, "allOf"), {"prefixItems": first, "items": more}]


def _dependent(part: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Rewrite dependencies as alternatives: the property is absent, or its requirements hold."""
    for name in ("dependentRequired", "dependentSchemas", "dependencies"):
        for key, needs in named(part, name).items():
            also = {"required": [key, *needs]} if isinstance(needs, list) else {"required": [key], "allOf": [needs]}
            yield {"anyOf": [_without(key), also]}
        if isinstance(part.get(name), dict):
            del part[name]


def _without(key: str) -> dict[str, Any]:
    return {"properties": {key: _FORBIDDEN}}


def _absent(key: str, also: Any) -> dict[str, Any]:
    """Return a schema of the objects without a property: any other value fits what such a property demands."""
    return {"allOf": [{"type": "object"} | _without(key), also]}


def _spread_conditions(part: dict[str, Any]) -> None:
    """Rewrite several conditions in one ``allOf``, each on a property that is declared beside the ``allOf``."""
    parts = []
    for one in listed(part, "allOf"):
        alone = {"properties": named(part, "properties"), **one} if isinstance(one, dict) else {}
        is_condition = isinstance(one, dict) and "if" in one and one.keys() <= {"if", "then", "else"}
        parts += (list(_conditional(alone)) if is_condition else []) or [one]
    if parts:
        part["allOf"] = parts


def _conditional(part: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Rewrite a condition on a property with enumerated values as alternatives by its value, or by its presence."""
    condition = part.get("if")
    if isinstance(condition, dict) and condition.keys() == {"required"} and len(listed(condition, "required")) == 1:
        (key,) = condition["required"]
        yield {"anyOf": [{"required": [key], "allOf": [part.get("then", True)]}, _absent(key, part.get("else", True))]}
        for name in ("if", "then", "else"):
            part.pop(name, None)
        return
    if not isinstance(condition, dict) or not condition.keys() <= {"properties", "required", "type"}:
        return
    tested = named(condition, "properties")
    key = next(iter(tested), None)
    if key is None or len(tested) > 1 or listed(condition, "required") not in ([], [key]):
        return
    if condition.get("type", "object") != "object":
        return
    wanted, declared = tested[key], named(part, "properties").get(key)
    if not isinstance(wanted, dict) or not wanted.keys() <= {"const", "enum", "type"} or not isinstance(declared, dict):
        return
    values, all_values = values_of(wanted), values_of(declared)
    if not values or not all_values:
        return
    others = [value for value in all_values if value not in values]
    fits: dict[str, Any] = {"properties": {key: {"enum": values}}}
    differs: dict[str, Any] = {"properties": {key: {"enum": others} if others else _FORBIDDEN}}
    # All values but objects fit the condition, unless it demands an object.
    (fits if "type" in condition else differs)["type"] = "object"
    has_key = {"required": [key]}
    (fits if listed(condition, "required") else differs).update(has_key)
    if "then" in part:
        fits = {"allOf": [fits, part["then"]]}
    if "else" in part:
        differs = {"allOf": [differs, part["else"]]}
    for name in ("if", "then", "else"):
        part.pop(name, None)
    yield {"anyOf": [fits, differs]}
