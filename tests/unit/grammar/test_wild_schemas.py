"""Schemas as APIs, tools, pydantic and editors have them: they can be followed, and to their end."""

from __future__ import annotations

import json
import random
import time
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
from thinned import thinned

from engine.core.limits import EMBEDDED_FACTS
from engine.core.messages import Grammar, GrammarKind
from engine.grammar.compiled import CompiledGrammars
from engine.grammar.followable import followable
from engine.grammar.patterns import QUIET, is_found
from engine.grammar.source import definition_of, fault_of, schema_grammar
from engine.model.embedded import embedded_folder

SCHEMAS = [json.loads(line) for line in Path(__file__).with_name("wild_schemas.jsonl").read_text().splitlines()]
MOST_REFUSED = 6
MOST_BYTES = 4000
# A vocabulary of bytes.
GRAMMARS = CompiledGrammars(
    (embedded_folder(0, windowed=False) / "tokenizer.json").read_text,
    vocab_size=EMBEDDED_FACTS.vocab_size,
    eos_token_ids=EMBEDDED_FACTS.eos_token_ids,
)
# Bytes that lead to the end of a value.
CLOSING = b'"}]'


def output_of(schema: Any, seed: int) -> str:
    """An output that a model of random bytes writes, with a liking for closing brackets."""
    rng, grammars = random.Random(seed), GRAMMARS
    grammars.want(1)
    error = grammars.compile(1, schema_grammar(schema))
    assert error is None, (schema, error)
    matcher, written = grammars.begin(1), bytearray()
    for _ in range(MOST_BYTES):
        mask = matcher.allowed(np.frombuffer(written, np.uint8).astype(np.int32))
        allowed = np.flatnonzero(mask).tolist()
        assert allowed, (schema, bytes(written))
        if max(allowed) > 255:
            return written.decode()
        closing = [token for token in allowed if token in CLOSING]
        written.append(rng.choice(closing if closing and rng.random() < 0.6 else allowed))
    raise AssertionError(f"no end after {MOST_BYTES} bytes of {schema}")


def test_few_schemas_are_refused_each_with_a_remedy() -> None:
    refused = [fault for schema in SCHEMAS if (fault := fault_of(schema_grammar(schema))) is not None]
    assert len(refused) <= MOST_REFUSED, refused
    assert all("leave" in fault.message for fault in refused), refused
    assert not any("coerce" in fault.message or "Enable" in fault.message for fault in refused)


def test_the_remedy_of_an_unknown_keyword_helps() -> None:
    schema = {"type": "integer", "not": {"multipleOf": 3}}
    fault = fault_of(schema_grammar(schema))
    assert fault is not None
    assert '"x-guidance": {"lenient": true}' in fault.message
    assert fault_of(schema_grammar(schema | {"x-guidance": {"lenient": True}})) is None


def test_outputs_are_of_their_schemas() -> None:
    for number, schema in enumerate(SCHEMAS):
        if fault_of(schema_grammar(schema)) is None:
            for seed in (number, number + 1000):
                jsonschema.validate(json.loads(output_of(schema, seed)), schema)


@pytest.mark.parametrize("name", ["credit-card", "int32", "binary", "color", "uri-reference"])
def test_an_unknown_format_is_an_annotation(name: str) -> None:
    assert fault_of(schema_grammar({"type": "string", "format": name})) is None


CONDITIONS: list[dict[str, Any]] = [
    {"dependentRequired": {"a": ["b"]}},
    {"dependencies": {"a": {"required": ["b"]}}},
    {"if": {"properties": {"a": {"const": True}}, "required": ["a"]}, "then": {"required": ["b"]}},
    {"if": {"properties": {"a": {"const": True}}}, "then": {"required": ["b"]}, "else": {"required": ["c"]}},
    {
        "allOf": [
            {"if": {"properties": {"a": {"const": True}}}, "then": {"required": ["b"]}},
            {"if": {"properties": {"a": {"const": False}}, "required": ["a"]}, "then": {"required": ["c"]}},
        ]
    },
    {"not": {"required": ["b"]}},
    {"oneOf": [{"required": ["a"]}, {"required": ["b"]}]},
    {"propertyNames": {"pattern": "^[ab]$"}},
    {"propertyNames": {"enum": ["a", "c"]}},
    {"propertyNames": {"maxLength": 2}},
    {"unevaluatedProperties": False},
    {"properties": {"a": {"type": "array", "items": {"enum": [1, 2, 3]}, "uniqueItems": True, "minItems": 2}}},
    {"properties": {"a": {"enum": [1, 2, 3], "not": {"const": 2}}}},
    {"properties": {"a": {"not": {"type": ["number", "object"]}}}},
    {"patternProperties": {"^a": {"type": "boolean"}}, "required": ["a"]},
    {"properties": {"a": {"type": "integer"}}, "patternProperties": {"^a": {"minimum": 3}}, "required": ["a"]},
]


@pytest.mark.parametrize("condition", thinned(CONDITIONS, one_in=3))
def test_conditions_hold_in_every_output(condition: dict[str, Any]) -> None:
    properties = {"a": {"type": "boolean"}, "b": {"type": "integer"}, "c": {"type": "null"}}
    schema = {"type": "object"} | condition
    schema["properties"] = properties | condition.get("properties", {})
    assert fault_of(schema_grammar(schema)) is None
    found = {output_of(schema, seed) for seed in range(30)}
    for output in found:
        jsonschema.validate(json.loads(output), schema)
    assert len(found) > 1


def _object(properties: dict[str, Any], *required: str, **more: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(required), **more}


CAT = _object({"kind": {"const": "cat", "default": "cat"}, "meow": {"type": "integer"}}, "meow")
DOG = _object({"kind": {"const": "dog", "default": "dog"}, "bark": {"type": "null"}}, "bark")
A = _object({"a": {"type": "integer"}}, "a")
B = _object({"b": {"type": "null"}}, "b")
CLOSED: dict[str, Any] = {"unevaluatedProperties": False}
PRESENT = {"if": {"required": ["b"]}, "then": {"required": ["c"]}, "else": {"required": ["a"]}}
ALTERNATIVES: dict[str, dict[str, Any]] = {
    "pydantic's discriminator, with defaults": {
        "$defs": {"Cat": CAT, "Dog": DOG},
        "oneOf": [{"$ref": "#/$defs/Cat"}, {"$ref": "#/$defs/Dog"}],
        "discriminator": {"propertyName": "kind", "mapping": {"cat": "#/$defs/Cat", "dog": "#/$defs/Dog"}},
    },
    "a constant that nothing requires": {"oneOf": [CAT, DOG]},
    "a required property of its own for each": {"oneOf": [A, B]},
    "three of them, one with two": {"oneOf": [A, B, _object({"c": True, "d": True}, "c", "d")]},
    "an alternative that allows the other's property": {"oneOf": [_object(A["properties"] | {"b": {}}, "a"), B]},
    "zod's never": _object({"a": {"type": "integer"}, "b": {"not": {}}}, "a", additionalProperties=False),
    "parts of an object that is closed": {"allOf": [A, B]} | CLOSED,
    "parts with one property twice": {"allOf": [A, _object({"a": {"minimum": 3}}, "a")]} | CLOSED,
    "a list that is closed": {"type": "array", "prefixItems": [{"type": "null"}], "unevaluatedItems": False},
    "one that is the other with more": {"oneOf": [A, _object({"a": {"type": "integer"}, "b": {}}, "a", "b")]},
    "a constant among the other's": {"oneOf": [CAT, _object({"kind": {"enum": ["cat", "dog"]}, "meow": {}}, "meow")]},
    "also other values than objects": {"oneOf": [{"properties": A["properties"], "required": ["a"]}, B]},
    "numbers of two ranges": {"oneOf": [{"type": "integer", "minimum": 3}, {"type": "integer", "maximum": 5}]},
    "closed objects, one with more": {
        "oneOf": [
            _object({"a": {"type": "null"}}, additionalProperties=False),
            _object({"a": {"type": "null"}, "b": {"type": "null"}}, additionalProperties=False),
        ]
    },
    "no such word": _object({"a": {"type": "string", "not": {"enum": ["admin", "root", ""]}, "maxLength": 4}}, "a"),
    "no such number": {"type": "integer", "minimum": 0, "maximum": 4, "not": {"enum": [1, 3]}},
    "no such word, of any type": {"not": {"const": "x"}},
    "neither of two": {"type": "string", "maxLength": 3, "not": {"anyOf": [{"pattern": "^a"}, {"minLength": 3}]}},
    "not both": _object({"a": {"type": "null"}, "b": {"type": "null"}}, **{"not": {"required": ["a", "b"]}}),
    "not within": {"type": "number", "not": {"minimum": -1, "maximum": 1}},
    "a condition on any value": _object({"a": {"type": "string"}, "b": {"type": "integer"}}, "a")
    | {
        "if": {"properties": {"a": {"minLength": 2}}},
        "then": {"required": ["b"]},
        "else": {"not": {"required": ["b"]}},
    },
    "one of a kind": {"type": "array", "items": {"enum": [0, 1, 2]}, "contains": {"const": 2}, "maxItems": 4},
    "two or three": {"type": "array", "contains": {"type": "null"}, "minContains": 2, "maxContains": 3},
    "one admin": {
        "type": "array",
        "items": _object({"role": {"enum": ["admin", "user"]}}, "role", additionalProperties=False),
        "contains": {"properties": {"role": {"const": "admin"}}},
        "maxContains": 1,
    },
    "at most one": {
        "type": "array",
        "items": {"type": "integer"},
        "contains": {"minimum": 5},
        "minContains": 0,
        "maxContains": 1,
    },
    "each of two": {
        "items": {"type": "string"},
        "allOf": [{"contains": {"const": "a"}}, {"contains": {"const": "b"}}],
        "type": "array",
    },
    "none of a kind": {
        "type": "array",
        "items": {"enum": ["a", "b", "c"]},
        "not": {"contains": {"const": "a"}},
        "minItems": 1,
    },
    "closed, of which one may be": _object({"a": {"type": "null"}})
    | {"anyOf": [_object({"b": {"type": "null"}}, "b"), _object({"c": {"type": "null"}}, "c")]}
    | CLOSED,
    "closed, by reference": {"$defs": {"B": B}, "$ref": "#/$defs/B", "properties": {"y": {"type": "null"}}} | CLOSED,
    "closed, on a condition": _object({"k": {"enum": ["a", "b"]}}, "k")
    | {"if": {"properties": {"k": {"const": "a"}}}, "then": A, "else": B}
    | CLOSED,
    "closed, one alternative": {"oneOf": [A, B]} | CLOSED,
    "closed, beside a presence": _object({"a": {"type": "null"}}) | {"dependentSchemas": {"a": B}} | CLOSED,
    "two of three": _object({key: {"type": "null"} for key in "abc"}, additionalProperties=False, minProperties=2),
    "two of three at most": _object({key: {"type": "null"} for key in "abc"}, additionalProperties=False)
    | {"maxProperties": 2},
    "exactly two": _object({key: {"type": "null"} for key in "abc"}, "a", additionalProperties=False)
    | {"minProperties": 2, "maxProperties": 2},
    "one at least, of any name": _object({key: {"type": "null"} for key in "ab"}, minProperties=1),
    "names that look ahead": {"type": "object", "propertyNames": {"pattern": "^(?!_)[a-z_]{1,8}$"}, "minProperties": 1},
    "names of two kinds": {
        "type": "object",
        "propertyNames": {"anyOf": [{"const": "id"}, {"pattern": "^x-"}]},
        "minProperties": 1,
    },
    "names that are not": {"type": "object", "propertyNames": {"not": {"enum": ["a", "b"]}}, "minProperties": 1},
    "names within patterns": {
        "type": "object",
        "patternProperties": {"^[ab]+$": {"type": "integer"}},
        "propertyNames": {"maxLength": 2},
        "additionalProperties": {"type": "null"},
        "minProperties": 1,
    },
    "a closed list of parts": {
        "type": "array",
        "prefixItems": [{"type": "integer"}],
        "allOf": [{"prefixItems": [True, {"type": "null"}]}],
        "unevaluatedItems": False,
    },
    "names of a format": {"type": "object", "propertyNames": {"format": "uuid"}, "minProperties": 1},
    "short names": {"type": "object", "propertyNames": {"pattern": "^[ab]+$", "maxLength": 3}, "minProperties": 1},
    "patterns of the same names": {
        "type": "object",
        "patternProperties": {"^[ab]+$": {"type": "integer"}, "^[bc]+$": {"minimum": 3}},
        "additionalProperties": False,
        "minProperties": 1,
    },
    "a dependency of alternatives": _object({"a": {"type": "null"}, "c": {"type": "integer"}})
    | {
        "dependencies": {
            "a": {"required": ["c"], "oneOf": [{"properties": {"c": {"minimum": 5}}}, {"maxProperties": 0}]}
        }
    },
    "a password": {"type": "string", "pattern": r"^(?=.*[A-Z])(?=.*\d)[A-Za-z\d]{8,}$", "maxLength": 9},
    "a name that is not reserved": {"type": "string", "pattern": "^(?!(?:ad|ro)$)[adro]{1,3}$"},
    "names without a prefix": {
        "type": "object",
        "patternProperties": {"^(?!x-)[a-x-]{1,4}$": {"type": "null"}},
        "additionalProperties": False,
        "minProperties": 1,
    },
    "a condition on a presence": _object({key: {"type": "boolean"} for key in "abc"}, additionalProperties=False)
    | PRESENT,
    "zod's reference to where a part stood first": _object(
        {"a": {"oneOf": [{"type": "integer"}, {"enum": ["x", "y"]}]}, "b": {"$ref": "#/properties/a/oneOf/1"}}, "a", "b"
    ),
    "a reference past an alternative that never fits": _object(
        {"a": {"anyOf": [False, {"type": "integer"}, {"enum": ["x", "y"]}]}, "b": {"$ref": "#/properties/a/anyOf/2"}},
        "b",
    ),
    "a reference into a condition": _object({"k": {"enum": ["a", "b"]}}, "k")
    | {
        "if": {"properties": {"k": {"const": "a"}}},
        "then": B,
        "else": _object({"c": {"$ref": "#/then/properties/b"}}, "c"),
    },
    "components of an API": {
        "$ref": "#/components/schemas/A",
        "components": {
            "schemas": {
                "A": {"type": "array", "items": {"$ref": "#/components/schemas/P"}, "minItems": 1},
                "P": {"oneOf": [CAT, {"enum": [1, 2]}, {"enum": [2, 3]}]},
            }
        },
    },
    "names and values that look like references": _object(
        {"$ref": {"enum": [{"$ref": "#/properties/$ref"}, 1]}, "part-0": {"$ref": "#/properties/$ref"}},
        "$ref",
        "part-0",
    )
    | {"$defs": {"part-0": {"type": "null"}}},
}


@pytest.mark.parametrize("name", ALTERNATIVES)
def test_forms_of_generators_are_followed(name: str) -> None:
    """They were refused: models of pydantic and zod, with the advice to write another schema."""
    schema = ALTERNATIVES[name]
    assert fault_of(schema_grammar(schema)) is None
    found = {output_of(schema, seed) for seed in range(20)}
    for output in found:
        jsonschema.validate(json.loads(output), schema)
    assert len({json.dumps(json.loads(output), sort_keys=True) for output in found}) > 1


def test_each_alternative_can_be_written() -> None:
    for name in list(ALTERNATIVES)[:3]:
        outputs = [json.loads(output_of(ALTERNATIVES[name], seed)) for seed in range(30)]
        keys = {key for output in outputs for key in output} & {"meow", "bark", "a", "b"}
        assert keys in ({"meow", "bark"}, {"a", "b"}), name


@pytest.mark.parametrize(
    "alternatives",
    [
        [{"type": "number"}, {"type": "integer"}],
        [{"type": "integer", "multipleOf": 3}, {"type": "integer", "multipleOf": 5}],
        [_object({"a": {"type": kind}}, "a") for kind in ("integer", "number")],
        [{"type": "string", "format": name} for name in ("date", "hostname")],
        [{"type": "string", "format": name} for name in ("uri", "ipv6")],
        [{"type": "string", "format": name} for name in ("date", "color")],
    ],
)
def test_alternatives_that_may_both_match_are_refused(alternatives: list[Any]) -> None:
    fault = fault_of(schema_grammar({"oneOf": alternatives}))
    assert fault is not None
    assert "use anyOf" in fault.message
    # Only objects can have a property that tells them apart.
    are_objects = any(one["type"] == "object" for one in alternatives)
    assert ("by a required property" in fault.message) is are_objects, fault.message


def test_texts_of_formats_exclude_each_other() -> None:
    """No text is both a date and an address of mail."""
    schema = {"oneOf": [{"type": "string", "format": name} for name in ("date", "email", "ipv4", "ipv6", "uuid")]}
    for seed in range(12):
        jsonschema.validate(json.loads(output_of(schema, seed)), schema, format_checker=jsonschema.FormatChecker())


def test_exclusive_bounds_of_old_drafts_hold() -> None:
    schema = {"type": "integer", "minimum": 0, "exclusiveMinimum": True, "maximum": 2, "exclusiveMaximum": False}
    assert {output_of(schema, seed).strip() for seed in range(20)} == {"1", "2"}


@pytest.mark.parametrize("pattern", [r"(a)\1", r"(?<=ab)c"])
def test_what_patterns_lack_has_a_remedy(pattern: str) -> None:
    for grammar in (schema_grammar({"type": "string", "pattern": pattern}), Grammar(GrammarKind.REGEX, pattern)):
        fault = fault_of(grammar)
        assert fault is not None
        assert fault.message.endswith("leave it out of the pattern, or say in the prompt what it is for")


def test_equal_numbers_are_one_value_of_a_list() -> None:
    schema = {"type": "array", "items": {"enum": [1, 1.0, True, 2]}, "uniqueItems": True, "minItems": 3}
    for seed in range(5):
        assert sorted(json.loads(output_of(schema, seed))) == [1, 1, 2]


@pytest.mark.parametrize(
    ("schema", "remedy"),
    [
        ({"type": "number", "multipleOf": 0.5, "not": {"multipleOf": 1}}, "leave them out"),
        (
            {
                "oneOf": [{"type": "object", "properties": {"v": {"type": kind}}} for kind in ("integer", "number")],
                "discriminator": {"propertyName": "t"},
            },
            "use anyOf",
        ),
        ({"$dynamicRef": [1]}, "leave them out"),
    ],
)
def test_a_form_that_is_not_followed_names_a_remedy(schema: dict[str, Any], remedy: str) -> None:
    """A discriminator of nothing was believed."""
    fault = fault_of(schema_grammar(schema))
    assert fault is not None
    assert remedy in fault.message


def test_a_dynamic_anchor_may_have_any_name() -> None:
    schema = {"$defs": {"a/b~c": {"$dynamicAnchor": "n", "type": "integer"}}, "$dynamicRef": "#n"}
    assert isinstance(json.loads(output_of(schema, 1)), int)


@pytest.mark.parametrize("pattern", thinned(["^a$", "^(a|b)$", "^(?:b|a)$", "^[ab]$", "^a", "a"], one_in=3))
def test_a_declared_property_may_match_a_pattern_too(pattern: str) -> None:
    """Where no other name matches, the library allowed a comma after the last property, and nothing after that."""
    schema = {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"type": "number"}},
        "patternProperties": {pattern: {"minimum": 1}},
        "required": ["a"],
        "additionalProperties": False,
    }
    assert fault_of(schema_grammar(schema)) is None
    for seed in range(60):
        value = json.loads(output_of(schema, seed))
        jsonschema.validate(value, schema)


# Python's expressions try this for seconds, and twice as long for each further letter.
BACKTRACKING, NAME = "^(a+)+$", "a" * 26 + "!"


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object", "patternProperties": {BACKTRACKING: {"type": "integer"}}, "required": [NAME]},
        {"type": "object", "propertyNames": {"pattern": BACKTRACKING}, "properties": {NAME: {"type": "integer"}}},
    ],
)
def test_a_pattern_stops_no_event_loop(schema: dict[str, Any]) -> None:
    """C01: the front end rewrites the schemas of tools in its event loop."""
    begun_s = time.process_time()
    followable(schema)
    assert time.process_time() - begun_s < 1


@pytest.mark.parametrize(
    ("pattern", "name", "found"),
    [
        ("^a", "ab", True),
        ("b", "abc", True),
        ("^a$", "ab", False),
        ("^(x-|y)", "x-1", True),
        ("^\\d+$", "12", True),
        ("^.$", "\u20ac", True),
        ('^"$', '"', True),
        ("", "any", True),
        ("(", "a", None),
    ],
)
def test_a_pattern_is_found_as_the_library_finds_it(pattern: str, name: str, found: bool | None) -> None:
    assert is_found(pattern, name) is found


LOOP = {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}
TWO = {
    "$defs": {
        "A": {"type": "object", "properties": {"b": {"$ref": "#/$defs/B"}}, "required": ["b"]},
        "B": {"type": "object", "properties": {"a": {"$ref": "#/$defs/A"}}, "required": ["a"]},
    }
}


@pytest.mark.parametrize(
    ("schema", "place"),
    [
        (LOOP, "/properties/a"),
        ({"type": "array", "items": {"$ref": "#"}, "minItems": 1}, "/items"),
        (TWO | {"$ref": "#/$defs/A"}, "/$defs/B/properties/a"),
        (TWO | {"anyOf": [{"$ref": "#/$defs/A"}, {"$ref": "#/$defs/B"}]}, "/$defs"),
        ({"type": "object", "additionalProperties": {"$ref": "#"}, "required": ["x"]}, "/additionalProperties"),
        ({"type": "object", "properties": {"list": {"allOf": [LOOP | {"$ref": "#"}]}}, "required": ["list"]}, None),
    ],
)
def test_a_schema_without_a_finite_value_is_refused(schema: dict[str, Any], place: str | None) -> None:
    """The library takes it, and its outputs fill their whole length."""
    fault = fault_of(schema_grammar(schema))
    assert fault is not None
    assert "it has no finite" in fault.message
    if place is not None:
        assert fault.place.startswith(place)


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object", "properties": {"a": {"$ref": "#"}}},
        {"type": "object", "properties": {"a": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}}, "required": ["a"]},
        {"type": "array", "items": {"$ref": "#"}},
        TWO | {"type": "object", "properties": {"n": {"type": "integer"}, "x": {"$ref": "#/$defs/A"}}},
        TWO | {"anyOf": [{"$ref": "#/$defs/A"}, {"type": "integer"}]},
        TWO | {"type": "array", "items": {"$ref": "#/$defs/B"}},
        {"type": ["object", "null"], "properties": {"a": {"$ref": "#"}}, "required": ["a"]},
    ],
)
def test_every_output_of_a_schema_that_refers_to_itself_ends(schema: dict[str, Any]) -> None:
    """Also where an optional part never ends: no output enters it."""
    assert fault_of(schema_grammar(schema)) is None
    for seed in range(10):
        jsonschema.validate(json.loads(output_of(schema, seed)), schema)


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ('start: "a" start', "start"),
        ('root ::= "(" root ")" | x\nx ::= "[" x "]"', ""),
        ('start: "a" | b\nb: "x" c+\nc: "y" b', "b"),
        ('start: a{2}\na: "(" a ")"', "start"),
        (f"start: %json {json.dumps(LOOP)}", "start"),
        (f'start: "x" | call\ncall: "<" %json {json.dumps(LOOP)} ">"', "call"),
    ],
)
def test_a_grammar_without_a_finite_text_is_refused(text: str, rule: str) -> None:
    fault = fault_of(Grammar(GrammarKind.EBNF, text))
    assert fault is not None
    assert "it has no finite" in fault.message
    assert f"rule '{rule}" in fault.message


def test_whitespace_in_the_json_of_a_grammar_is_bounded() -> None:
    """A model that has lost its way filled its whole length with spaces."""
    from llguidance import LLMatcher, LLTokenizer

    grammar = Grammar(GrammarKind.EBNF, 'start: %json {"type": "array", "items": {"type": "integer"}}')
    matcher = LLMatcher(LLTokenizer("byte"), definition_of(grammar), log_level=QUIET)
    assert matcher.consume_token(ord("["))
    taken = 0
    while taken < MOST_BYTES and matcher.try_consume_tokens([ord(" ")]):
        taken += 1
    assert taken < 100


@pytest.mark.parametrize(
    "text",
    [
        'root ::= "a" root | "b"',
        'start: "a" start?',
        'start: b*\nb: "x" c | "z"\nc: "y" b',
        'start: "(" start{0,3} ")"',
        "start: A\nA: /[a-z]+/ // start: start\nunused: unused",
        f"start: %json {json.dumps({'type': 'array', 'items': {'$ref': '#'}})}",
    ],
)
def test_a_grammar_that_can_end_is_taken(text: str) -> None:
    assert fault_of(Grammar(GrammarKind.EBNF, text)) is None


def test_numbers_without_the_integers_are_refused_and_not_called_impossible() -> None:
    """The library has no keyword for them. One half fits the schema, whose refusal said that nothing does."""
    fault = fault_of(schema_grammar({"type": "number", "not": {"type": "integer"}}))
    assert fault is not None
    assert '"not"' in fault.message
    assert fault_of(schema_grammar({"not": {"type": "integer"}})) is None
