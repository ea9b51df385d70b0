"""Lists of distinct items: no output repeats one, and none comes where each item would."""

from __future__ import annotations

import itertools
import json
import random
from typing import Any

import jsonschema
import numpy as np
import pytest

from engine.core.limits import EMBEDDED_FACTS
from engine.grammar.compiled import CompiledGrammars, GrammarError, Matcher
from engine.grammar.distinct import Distinctness
from engine.grammar.json_positions import Position
from engine.grammar.source import fault_of, schema_grammar
from engine.model.embedded import embedded_folder

BYTES = (embedded_folder(0, windowed=False) / "tokenizer.json").read_text()
# Further tokens, each made of the two before it: some complete an item and begin another one, or contain a whole one.
MERGES = [
    *(
        '" ,',
        '", "',
        '"," a',
        '","a "',
        '","a" ,',
        '","a", "',
        '" a',
        '"a "',
        "a b",
        '" ]',
        '[ "',
        "r u",
        "ru e",
        "t rue",
    ),
    *("0 ,", ", 1", "1 0", ",1 0", "} ,", 'a "', 'a" :'),
]


def _with_merges() -> tuple[str, int]:
    """Return the tokenizer with the further tokens before its special ones, and how many they are."""
    told = json.loads(BYTES)
    known, merges = told["model"]["vocab"], told["model"]["merges"]
    for merge in MERGES:
        known[merge.replace(" ", "")] = len(known)
        merges.append(merge)
    for one in told["added_tokens"]:
        one["id"] += len(MERGES)
    return json.dumps(told), len(MERGES)


def _grammars(*, of_bytes: bool) -> CompiledGrammars:
    text, more = (BYTES, 0) if of_bytes else _with_merges()
    ends = [one + more for one in EMBEDDED_FACTS.eos_token_ids]
    return CompiledGrammars(lambda: text, vocab_size=EMBEDDED_FACTS.vocab_size + more, eos_token_ids=ends)


GRAMMARS = {of_bytes: _grammars(of_bytes=of_bytes) for of_bytes in (True, False)}


def matcher_of(schema: Any, *, of_bytes: bool = True) -> Matcher:
    grammars = GRAMMARS[of_bytes]
    grammars.want(1)
    assert grammars.compile(1, schema_grammar(schema)) is None
    return grammars.begin(1)


def output_of(schema: Any, seed: int, *, of_bytes: bool) -> str:
    """What a model of random tokens writes; it likes to repeat itself, and to come to an end."""
    rng, matcher, said = random.Random(seed), matcher_of(schema, of_bytes=of_bytes), np.empty(0, np.int32)
    tokenizer = GRAMMARS[of_bytes]._library_tokenizer()
    for _ in range(3000):
        mask = matcher.allowed(said)
        if rng.random() < 0.3:
            mask = matcher.ending(mask, [])
        allowed = np.flatnonzero(mask).tolist()
        assert allowed, (schema, tokenizer.decode_bytes(said.tolist()))
        if GRAMMARS[of_bytes].ends & set(allowed):
            return str(tokenizer.decode_bytes(said.tolist()).decode())
        repeated = [one for one in allowed if one in said]
        said = np.append(said, np.int32(rng.choice(repeated if repeated and rng.random() < 0.5 else allowed)))
    raise AssertionError(f"no end: {tokenizer.decode_bytes(said.tolist())!r}")


def listed(items: Any, **more: Any) -> dict[str, Any]:
    return {"type": "array", "items": items, "uniqueItems": True, **more}


PAIR = {
    "type": "object",
    "properties": {"a": {"type": "boolean"}, "b": {"enum": ["x", "y"]}},
    "required": ["a"],
    "additionalProperties": False,
}
LISTS: dict[str, dict[str, Any]] = {
    "strings": listed({"type": "string"}, minItems=3),
    "pydantic's set": {"type": "object", "properties": {"tags": listed({"type": "string"})}, "required": ["tags"]},
    "few strings": listed({"type": "string", "pattern": "^[ab]{1,2}$"}, minItems=6),
    "many constants": listed({"enum": list("abcdefg")}, minItems=7),
    "each digit": listed({"type": "integer", "minimum": 0, "maximum": 9}, minItems=10),
    "integers": listed({"type": "integer"}, minItems=4),
    "numbers": listed({"type": "number"}, minItems=4),
    "a few kinds": listed({"anyOf": [{"type": "integer"}, {"type": "boolean"}, {"type": "null"}]}, minItems=5),
    "all objects": listed(PAIR, minItems=6),
    "objects by reference": {
        "$defs": {"T": {"type": "object", "properties": {"id": {"type": "integer"}}, "required": ["id"]}},
        **listed({"$ref": "#/$defs/T"}, minItems=3),
    },
    "lists": listed(listed({"enum": [1, 2, 3, 4, 5, 6, 7]}, maxItems=2), minItems=5),
    "after another item": listed({"enum": [1, 2]}, prefixItems=[{"type": "string"}], minItems=3),
    "numbers after another item": listed(
        {"type": "number", "minimum": 0}, prefixItems=[{"type": "string"}], minItems=3
    ),
    "an item that must be there": listed(True, contains={"const": 0}, maxContains=3),
    "anything": {"type": "array", "uniqueItems": True, "minItems": 2},
    "in a map": {"type": "object", "additionalProperties": listed({"type": "string", "maxLength": 1})},
    "names of any kind": {"type": "object", "additionalProperties": {"type": "null"}, "minProperties": 3},
    "each of the names": {
        "type": "object",
        "patternProperties": {"^[abc]$": {"enum": ["a", "b"]}},
        "additionalProperties": False,
        "minProperties": 3,
    },
    "names beside one": {"type": "object", "properties": {"a": {"type": "null"}}, "minProperties": 3},
    "an alternative": {"anyOf": [listed({"enum": list("abcdefg")}, minItems=3), {"type": "null"}]},
}


@pytest.mark.parametrize("name", LISTS)
@pytest.mark.parametrize("of_bytes", [True, False])
def test_no_output_repeats_an_item(name: str, of_bytes: bool) -> None:
    schema = LISTS[name]
    assert fault_of(schema_grammar(schema)) is None
    for seed in range(4):
        output = output_of(schema, seed, of_bytes=of_bytes)
        jsonschema.Draft202012Validator(schema).validate(json.loads(output))


NAMES = {
    "type": "object",
    "patternProperties": {"^[ab]$": {"type": "integer"}},
    "additionalProperties": False,
    "minProperties": 2,
}


@pytest.mark.parametrize(
    ("schema", "said", "forbidden", "free"),
    [
        (listed({"type": "string"}), '["a","a', '"', "b"),
        (listed({"type": "string"}), '["\\n","\\u000a', '"', "b"),
        (listed({"type": "integer"}), "[1,1", ",] ", "0"),
        (listed({"type": "number"}), "[1,1.0", ",]", "5"),
        (listed({"type": "number"}), "[1,1e0", "0,]", "1"),
        (listed({"type": "number"}), "[1e99", "9", "]"),
        (listed({}), f"[[1e{'9' * 30}], [1E{'9' * 30}", "]", ","),
        (listed({"type": "boolean", "title": "b"}, prefixItems=[{}]), "[true,", "t", "f"),
        (listed({"enum": list("abcdefg")}), '["a","', "a", "b"),
        (listed({"type": "string", "maxLength": 1}), '["", "', '"', "a"),
        (listed({"type": "object"}), '[{"a": 1, "b": 2}, {"b": 2.0, "a": 1', "}", "0"),
        (listed({}), '[["a", 1.0], ["a", 1', "]", "0"),
        (listed(PAIR), '[{"a": true}, {"a": true', "}", ","),
        (listed(PAIR), '[{"a": true, "b": "x"}, {"a": true, "b": "', "x", "y"),
        (listed({"type": "string", "pattern": "^[ab]$"}), '["b","a"', ",", "]"),
        ({"type": "object", "minProperties": 2}, '{"a":1,"a', '"', "b"),
        (NAMES, '{"a":1,"b":1', ",", "}"),
        (listed(listed({"type": "null"}, maxItems=1)), "[[], [", "]", "n"),
    ],
)
def test_where_an_item_would_repeat_another_one(schema: Any, said: str, forbidden: str, free: str) -> None:
    """The first that is forbidden ends a duplicate, or leads to nothing else."""
    matcher = matcher_of(schema)
    mask = matcher.allowed(np.array(list(said.encode()), np.int32))
    assert not mask[list(forbidden.encode())].any()
    assert mask[list(free.encode())].all()


def test_a_guess_that_repeats_an_item_is_taken_back() -> None:
    """With drafts the same row is asked for several outputs, of which the later ones may be wrong."""
    matcher = matcher_of(LISTS["strings"])

    def allowed(text: str) -> bytes:
        return bytes(np.flatnonzero(matcher.allowed(np.array(list(text.encode()), np.int32))).tolist())

    with pytest.raises(GrammarError, match="does not allow token 34 after 7 tokens"):
        matcher.allowed(np.array(list(b'["a","a"'), np.int32))
    assert b'"' not in allowed('["a","a')
    assert b'"' in allowed('["a","b')
    assert b'"' in allowed('["b')
    assert b'"' in allowed('["b","a')
    assert b'"' not in allowed('["b","a","b')


TWO_LISTS = {
    "type": "object",
    "properties": {
        "a": listed({"type": "string", "pattern": "^[a-h]$"}),
        "b": listed({"type": "string", "pattern": "^[ab]$"}),
        "c": listed({"anyOf": [{"type": "boolean"}, {"type": "integer"}]}),
    },
}
BEGINNINGS = (
    '{"a":["',
    '{"a":["a"',
    '{"a":["a","b","',
    '{"b":["a"',
    '{"b":["a","b"',
    '{"b":["b","',
    '{"c":[1,',
    '{"c":[true,false',
)


@pytest.mark.parametrize("said", BEGINNINGS)
def test_nothing_is_left_of_a_guess_that_was_taken_back(said: str) -> None:
    """Not even what was counted at a place where another list is now."""
    text = np.array(list(said.encode()), np.int32)
    expected = matcher_of(TWO_LISTS).allowed(text)
    for guess in BEGINNINGS:
        matcher = GRAMMARS[True].begin(1)
        for end in range(len(guess)):
            matcher.allowed(np.array(list(guess[: end + 1].encode()), np.int32))
        assert (matcher.allowed(text) == expected).all(), guess


ITEMS = (True, False, 1, 0, 1.0, "1", "true", None, [], [1], [True], {}, {"a": 1}, {"a": True}, {"a": 1.0})


def test_items_are_distinct_as_in_json() -> None:
    schema = {"type": "array", "uniqueItems": True}
    matcher_of(schema)
    judge = jsonschema.Draft202012Validator(schema)
    for pair in itertools.product(ITEMS, repeat=2):
        text = np.array(list(json.dumps(pair).encode()), np.int32)
        try:
            is_taken = bool(GRAMMARS[True].begin(1).allowed(text)[[*GRAMMARS[True].ends]].any())
        except GrammarError:
            is_taken = False
        assert is_taken is judge.is_valid([*pair]), pair


@pytest.mark.parametrize("most", [{"type": "string", "pattern": "^[ab]$"}, {"type": "boolean"}, {"enum": [1, 1.0, 2]}])
def test_too_few_values_for_a_list_are_refused(most: Any) -> None:
    fault = fault_of(schema_grammar({"type": "object", "properties": {"a": listed(most, minItems=3)}}))
    assert fault is not None
    assert "a list needs 3 distinct items, but has fewer to choose from" in fault.message
    assert fault.place == "/properties/a"


def test_too_few_names_for_an_object_are_refused() -> None:
    names = {"patternProperties": {"^[ab]$": {}}, "additionalProperties": False, "minProperties": 3}
    fault = fault_of(schema_grammar({"type": "object"} | names))
    assert fault is not None
    assert "an object needs 3 distinct names" in fault.message


def test_a_lenient_schema_leaves_its_items_to_the_model() -> None:
    schema = listed({"type": "string"}) | {"x-guidance": {"lenient": True}}
    mask = matcher_of(schema).allowed(np.array(list(b'["a","a'), np.int32))
    assert mask[ord('"')]


@pytest.mark.parametrize(
    ("items", "said", "forbidden", "free"),
    [
        ({"type": "string"}, '["a', ['","a"', '","a",', '","a","'], ['","a', '","', "a"]),
        ({"type": "string", "pattern": "^[ab]$"}, '["b","a', ['",', '","'], ['"', '"]']),
        ({"type": "boolean", "title": "either"}, "[true,", ["true"], ["f"]),
    ],
)
def test_a_token_with_a_whole_item(items: Any, said: str, forbidden: list[str], free: list[str]) -> None:
    grammars = GRAMMARS[False]
    matcher, tokenizer = matcher_of(listed(items, prefixItems=[{}]), of_bytes=False), grammars._library_tokenizer()
    texts = [tokenizer.decode_bytes([token]).decode(errors="replace") for token in range(tokenizer.vocab_size)]
    mask = matcher.allowed(np.array(tokenizer.greedy_tokenize(said), np.int32))
    assert [text for text in (*forbidden, *free) if mask[texts.index(text)]] == free


def test_an_item_with_a_text_to_come_is_not_looked_ahead_of(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each look costs a mask of the library, and an item whose text is still to come may become any."""
    looks, leads_on = list[bytes](), Distinctness._leads_on

    def counted(items: Distinctness, matcher: Any, token: int, then: Position, text: bytes, ahead: int) -> bool:
        looks.append(text)
        return leads_on(items, matcher, token, then, text, ahead)

    monkeypatch.setattr(Distinctness, "_leads_on", counted)
    text = b'[{"n": 1, "s": "a", "o": true}, {"n": 1, "s": "a", "o": false}, {"n": 1, "s": "b", "o": true}]'
    properties = {"n": {"type": "integer"}, "s": {"type": "string"}, "o": {"type": "boolean"}}
    item = {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}
    matcher = matcher_of({"type": "array", "items": item, "uniqueItems": True})
    tokenizer = GRAMMARS[True]._library_tokenizer()
    said = np.array(tokenizer.tokenize_bytes(text), np.int32)
    for end in range(len(said)):
        assert matcher.allowed(said[:end])[said[end]], text[:end]
    assert looks
    assert all(b'"s' in look.rpartition(b"{")[2] for look in looks)
    assert not any(look.endswith((b"}", b"},", b"}, ")) for look in looks)
