"""Keywords of schemas side by side and within each other, drawn with a seed, against a validator."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Callable, Iterator
from typing import Any

import jsonschema
import numpy as np
import pytest
from test_distinct import GRAMMARS
from test_values_of_schemas import VALUES, orders, shown
from texts_of_grammars import allowed

from engine.grammar.compiled import GrammarError
from engine.grammar.distinct import needs_guard
from engine.grammar.source import fault_of, rewritten_schema, schema_grammar

# The tokens after which a model that wants to end has ended, if it takes any of those that are left to it; more where
# the first items of a list may all be others than the one that it must have.
MOST_TO_END = 40
MOST_TO_END_WITH_CONTAINED = 160
NULL: dict[str, Any] = {"type": "null"}
Draw = random.Random
# Keywords that go together, of the values that they concern.
OF_OBJECTS: tuple[Callable[[Draw], dict[str, Any]], ...] = (
    lambda draw: {"properties": {name: part(draw) for name in names(draw)}},
    lambda draw: {"required": names(draw)},
    lambda draw: {"additionalProperties": draw.choice([False, NULL, {"const": 1}])},
    lambda draw: {"patternProperties": {pattern: part(draw) for pattern in draw.sample(PATTERNS, draw.randint(1, 2))}},
    lambda draw: {"propertyNames": draw.choice(NAMES)},
    lambda draw: {"minProperties": draw.randint(0, 3)},
    lambda draw: {"maxProperties": draw.randint(0, 2)},
    lambda draw: {"dependentRequired": {draw.choice("abx"): names(draw)}},
    lambda draw: {"dependentSchemas": {draw.choice("abx"): objects(draw, 1)}},
)
OF_LISTS: tuple[Callable[[Draw], dict[str, Any]], ...] = (
    lambda draw: {"items": draw.choice([NULL, {"enum": [0, None]}, {"enum": [None, 0, "a"]}, False, True])},
    lambda draw: {"prefixItems": [part(draw) for _ in range(draw.randint(1, 2))]},
    lambda draw: {"minItems": draw.randint(0, 3)},
    lambda draw: {"maxItems": draw.randint(0, 3)},
    lambda draw: {"contains": draw.choice([{"const": 0}, NULL, {"type": "string"}])} | limits(draw),
    lambda draw: {"uniqueItems": True},
)
OF_SCALARS: tuple[Callable[[Draw], dict[str, Any]], ...] = (
    lambda draw: {"minimum": draw.choice([-1, 0, 1, 2])},
    lambda draw: {"maximum": draw.choice([0, 1, 2])},
    lambda draw: {"exclusiveMinimum": draw.choice([-1, 0, 1])},
    lambda draw: {"exclusiveMaximum": draw.choice([0, 1, 2])},
    lambda draw: {"minLength": draw.randint(0, 2)},
    lambda draw: {"maxLength": draw.randint(0, 2)},
    lambda draw: {"pattern": draw.choice(["^a", "b$", "^(?!a)", "a|b", r"^\d", "^.$"])},
    lambda draw: {"enum": draw.sample(["a", "ab", "", 0, 1, None, True, False, "1"], 4)},
    lambda draw: {"type": draw.choice([["string", "number"], ["integer", "string"], ["null", "string", "boolean"]])},
)
PATTERNS = ["^a", "^[ab]$", "x", "^[^a]"]
NAMES = [{"enum": ["a", "x"]}, {"pattern": "^[^a]"}, {"const": "b"}, {"not": {"const": "a"}}, {"maxLength": 1}]
KINDS = {"object": OF_OBJECTS, "array": OF_LISTS, None: OF_SCALARS}


def names(draw: Draw) -> list[str]:
    return sorted(draw.sample("abx", draw.randint(1, 3)))


def limits(draw: Draw) -> dict[str, int]:
    found = {}
    if draw.random() < 0.5:
        found["minContains"] = draw.randint(0, 2)
    if draw.random() < 0.5:
        found["maxContains"] = draw.randint(found.get("minContains", 1), 3)
    return found


def part(draw: Draw) -> Any:
    """A schema of a value within another one."""
    return draw.choice([True, NULL, {"const": 1}, {"enum": [None, 1]}, {"type": "integer"}, {"minimum": 1}, False])


def together(draw: Draw, kind: str | None, most: int) -> dict[str, Any]:
    found: dict[str, Any] = {} if kind is None else {"type": kind}
    for keyword in draw.sample(KINDS[kind], draw.randint(1, most)):
        found |= keyword(draw)
    return found


def objects(draw: Draw, most: int = 3) -> dict[str, Any]:
    return together(draw, "object", most)


def lists(draw: Draw) -> dict[str, Any]:
    return together(draw, "array", 3)


def scalars(draw: Draw) -> dict[str, Any]:
    return together(draw, None, 2)


def both(draw: Draw) -> dict[str, Any]:
    """Two schemas of one kind in the place of one."""
    of = draw.choice([objects, objects, lists, scalars])
    one, other = of(draw), of(draw)
    word = draw.choice(["allOf", "anyOf", "beside", "reference"])
    if word == "beside":
        return one | {"allOf": [other]}
    if word == "reference":
        return {"$defs": {"one": one, "other": other}, "$ref": "#/$defs/one", "allOf": [{"$ref": "#/$defs/other"}]}
    return {word: [one, other]}


def excluding(draw: Draw) -> dict[str, Any]:
    """Alternatives and conditions: of these the grammar may leave values out, and has no others."""
    of = draw.choice([objects, objects, lists, scalars])
    one, other, third = of(draw), of(draw), of(draw)
    match draw.choice(["oneOf", "if", "not", "closed", "closed", "spread"]):
        case "oneOf":
            return {"oneOf": draw.choice([[one, other], [one, other, third]])}
        case "if":
            return {"if": one, "then": other, "else": third}
        case "not":
            return one | {"not": other}
        case "spread":
            return {"allOf": [{"if": one, "then": other}, {"if": third, "else": other}]}
    one, other = objects(draw, 2), objects(draw, 2)
    ways = draw.choice([{"allOf": [one]}, {"anyOf": [one, other]}, {"oneOf": [one, other]}, {"if": one, "then": other}])
    return {"type": "object", "unevaluatedProperties": draw.choice([False, NULL])} | ways


def nested(draw: Draw) -> dict[str, Any]:
    """A schema in a place of another one, and by reference."""
    inner = draw.choice([objects, lists, scalars])(draw)
    place = draw.choice(
        ["properties", "items", "prefixItems", "reference", "patternProperties", "additionalProperties"]
    )
    if place in ("items", "prefixItems"):
        return {"type": "array", place: inner if place == "items" else [inner, inner], "minItems": 1}
    if place == "reference":
        return {"type": "object", "properties": {"b": inner, "a": {"$ref": "#/properties/b"}}, "required": ["a"]}
    of_place = inner if place == "additionalProperties" else {"^a$" if place == "patternProperties" else "a": inner}
    return {"type": "object", place: of_place, "required": ["a"]}


def texts_of(value: Any) -> Iterator[str]:
    """The texts of a value, as JSON is spaced where lists have distinct items, and without spaces."""
    for text in orders(value):
        yield text
        if isinstance(value, list | dict):
            yield json.dumps(json.loads(text))


def texts_within(value: Any) -> Iterator[str]:
    for text in texts_of(value):
        yield f"[{text}]"
        yield f'{{"a": {text}}}'


PLAIN = {text: value for value in VALUES for text in texts_of(value)}
OUTER = ([], [1, 2], [None, "a"], {}, {"a": 1, "x": None}, {"b": 1}, {"a": None, "b": "a"})
WITHIN = {text: json.loads(text) for inner in VALUES for text in texts_within(inner)} | {
    text: value for value in OUTER for text in texts_of(value)
}


def found_in(schema: dict[str, Any], texts: dict[str, Any]) -> set[str]:
    """The values that a grammar takes in some order of their members; the guard of distinct items takes part."""
    grammar = schema_grammar(schema)
    taken = allowed(grammar, texts)
    if needs_guard(rewritten_schema(grammar)):
        GRAMMARS[True].want(1)
        assert GRAMMARS[True].compile(1, grammar) is None
        taken = [text for text in taken if is_taken(text)]
    return {shown(texts[text]) for text in taken}


def is_taken(text: str) -> bool:
    try:
        mask = GRAMMARS[True].begin(1).allowed(np.array(list(text.encode()), np.int32))
    except GrammarError:
        return False
    return bool(mask[[*GRAMMARS[True].ends]].any())


# How many schemas of a kind to draw, how many that have values may be refused, and how many values the grammars of the
# others may leave out: of negations, of distinct items among alternatives, and of few distinct values in another order.
MAKERS = {
    objects: (80, 1, 0),
    lists: (60, 0, 2),
    scalars: (40, 0, 0),
    both: (40, 5, 10),
    excluding: (60, 14, 55),
    nested: (60, 0, 0),
}


@pytest.mark.parametrize("maker", MAKERS)
def test_a_grammar_allows_the_values_of_its_schema_alone(maker: Callable[[Draw], dict[str, Any]]) -> None:
    draw, refused, missing = Draw(maker.__name__), 0, 0
    count, most_refused, most_missing = MAKERS[maker]
    texts = WITHIN if maker is nested else PLAIN
    values = {shown(value): value for value in texts.values()}
    for _ in range(count):
        schema = maker(draw)
        judge = jsonschema.Draft202012Validator(schema)
        fitting = {one for one, value in values.items() if judge.is_valid(value)}
        if fault_of(schema_grammar(schema)) is not None:
            refused += bool(fitting)
            continue
        found = found_in(schema, texts)
        assert not found - fitting, schema
        missing += len(fitting - found)
    assert refused <= most_refused
    assert missing <= most_missing


def steps_to_end(draw: Draw, schema: dict[str, Any], most: int) -> int:
    """How many tokens a model that wants to end somewhere still says: any that is left to it, a quote before others."""
    GRAMMARS[True].want(1)
    assert GRAMMARS[True].compile(1, schema_grammar(schema)) is None
    matcher, said, wants_end = GRAMMARS[True].begin(1), np.empty(0, np.int32), draw.randint(1, 12)
    for at in range(wants_end + most):
        mask = matcher.allowed(said)
        if at >= wants_end:
            mask = matcher.ending(mask, [])
        allowed_now = np.flatnonzero(mask).tolist()
        if GRAMMARS[True].ends & set(allowed_now):
            return max(0, at - wants_end)
        quotes = [one for one in allowed_now if one == ord('"')]
        # Where a bracket closes, a quote would begin one more string.
        assert at < wants_end or not quotes or not {*b"]}"} & {*allowed_now}, (schema, bytes(said.tolist()))
        # Space between tokens is bounded, and a model that wants to end writes none.
        more = [one for one in allowed_now if one not in b" \t\n\r"]
        said = np.append(said, np.int32(draw.choice(quotes or more or allowed_now)))
    raise AssertionError((schema, bytes(said.tolist())))


def test_a_model_that_wants_to_end_comes_to_an_end_with_any_token_that_is_left() -> None:
    """At any place of an output: its list, its object or its string is closed, and no other one is begun."""
    draw, steps = Draw("ending"), 0
    for _ in range(80):
        schema = draw.choice([objects, lists, nested, both])(draw)
        if fault_of(schema_grammar(schema)) is None:
            most = MOST_TO_END_WITH_CONTAINED if '"contains"' in shown(schema) else MOST_TO_END
            steps = max(steps, steps_to_end(draw, schema, most))
    assert steps


# Patterns of which several certain characters must follow each other before the text may end.
CERTAIN = ["[ab],*x", "ax", r"\d-\d", "xyz", "(?:ab|cd)ef", "a{3}b", 'q"', r"\\n", "^[a-z]*7,", "\u00e9!$", "[^a]b+,"]
PLACES: tuple[Callable[[str, str], dict[str, Any]], ...] = (
    lambda one, other: {"type": "string", "pattern": one},
    lambda one, other: {"type": "array", "items": {"type": "string", "pattern": one}, "minItems": 2},
    lambda one, other: {"type": "string", "allOf": [{"pattern": one}, {"pattern": other}]},
    lambda one, other: {
        "type": "object",
        "properties": {"k": {"type": "string", "pattern": one, "minLength": 4}},
        "required": ["k"],
        "additionalProperties": False,
    },
)


@pytest.mark.parametrize("place", PLACES)
def test_a_text_of_certain_characters_comes_to_its_end(place: Callable[[str, str], dict[str, Any]]) -> None:
    draw = Draw("certain")
    for pattern in CERTAIN:
        steps = [steps_to_end(draw, place(pattern, draw.choice(["ax", r"\d-", "xyz"])), MOST_TO_END) for _ in range(3)]
        assert max(steps), pattern


FEW: tuple[dict[str, Any], ...] = (
    {"const": 0},
    NULL,
    {"type": "boolean"},
    {"enum": [0, None]},
    {"enum": [1, 1.0, "a"]},
)
FEW_NAMES: tuple[dict[str, Any], ...] = (
    {"propertyNames": {"const": "a"}},
    {"propertyNames": {"enum": ["a", "x"]}},
    {"propertyNames": {"pattern": "^[ab]$"}},
    {"patternProperties": {"^a$": NULL}, "additionalProperties": False},
    {"properties": {"a": True, "b": NULL}, "additionalProperties": False},
    {"properties": {"x": True}, "patternProperties": {"^[ab]$": NULL}, "additionalProperties": False},
    {"allOf": [{"propertyNames": {"enum": ["a", "b"]}}]},
)
DISTINCT = [
    *(list(some) for size in range(4) for some in itertools.permutations((0, None, True, False, 1, "a", "b"), size)),
    *(dict.fromkeys(some) for size in range(4) for some in itertools.combinations("abx", size)),
]


def crowded(draw: Draw) -> dict[str, Any]:
    """A list of distinct items, or an object with several names, for which there may be too few."""
    count, few = draw.randint(1, 3), draw.choice(FEW)
    if draw.random() < 0.4:
        return {"type": "object", "minProperties": count} | draw.choice(FEW_NAMES)
    found: dict[str, Any] = {"type": "array", "uniqueItems": True}
    match draw.choice(["contains", "items", "first", "beside"]):
        case "contains":
            found |= {"contains": few, "minContains": count}
        case "items":
            found |= {"items": few, "minItems": count}
        case "first":
            found |= {"prefixItems": [few, *[draw.choice(FEW)] * (count - 1)], "minItems": count}
        case "beside":
            return {"allOf": [found, {"type": "array", "items": few, "minItems": count}]}
    return found


def test_what_has_too_few_distinct_values_is_refused_and_all_else_comes_to_an_end() -> None:
    """Also within another schema, where a model may be led into it."""
    draw, refused, traps = Draw("crowded"), 0, 0
    for _ in range(40):
        schema = crowded(draw)
        judge = jsonschema.Draft202012Validator(schema)
        has_values = any(judge.is_valid(value) for value in DISTINCT)
        place = draw.choice([{"$": schema}, {"properties": {"k": schema}}, {"items": schema, "minItems": 1}])
        whole = place.get("$") or {"type": "object" if "properties" in place else "array"} | place
        fault = fault_of(schema_grammar(whole))
        refused += fault is not None
        # Refused are also lists whose first item may take the only value that another one may have.
        traps += has_values and fault is not None
        if fault is None:
            assert has_values, whole
            steps_to_end(draw, whole, MOST_TO_END_WITH_CONTAINED)
    assert refused > 5 * (traps + 1)


def test_items_are_distinct_in_the_alternatives_alone_that_say_so() -> None:
    """Where a list is certain to fit another one its items may repeat, and where it may fit none they may not."""
    unique: dict[str, Any] = {
        "type": "array",
        "items": {"type": ["null", "integer"]},
        "uniqueItems": True,
        "minItems": 1,
    }
    for other in (
        {"type": "array", "items": {"const": 0}},
        {"type": "array", "items": NULL, "minItems": 3},
        {"type": "array", "items": {"enum": [0, "a"]}, "maxItems": 2},
        {"type": "array", "prefixItems": [{"const": 0}, {"const": 0}], "items": NULL},
        {"type": "array", "items": {"type": "integer", "multipleOf": 2}},
        {"$ref": "#/$defs/n"},
        {"type": "object"},
    ):
        for alternatives in ([unique, other], [other, unique]):
            schema = {"anyOf": alternatives, "$defs": {"n": {"type": "array", "items": NULL}}}
            for one in (schema, {"type": "object", "properties": {"a": schema}} | {"$defs": schema["$defs"]}):
                judge = jsonschema.Draft202012Validator(one)
                texts = PLAIN if one is schema else WITHIN
                fitting = {shown(value) for value in texts.values() if judge.is_valid(value)}
                found = found_in(one, texts)
                # What is not certain to fit, as a multiple, is distinct.
                missing = {text for text in fitting - found if "multipleOf" not in shown(other)}
                assert (found - fitting, missing) == (set(), set()), one
