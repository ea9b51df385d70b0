"""Long texts that a grammar forces: found in every kind of grammar, and left to the model, not to the library."""

from __future__ import annotations

import json

import numpy as np
import pytest

from engine.core.messages import Grammar, GrammarKind
from engine.grammar.compiled import CompiledGrammars
from engine.grammar.source import definition_of, fault_of, may_force_too_much
from engine.model.embedded import embedded_folder

LIST = {"type": "array", "items": {"const": "abc"}}
LONG = [
    (GrammarKind.REGEX, "a{100000}"),
    (GrammarKind.REGEX, "a{1000000}"),
    (GrammarKind.REGEX, "[xy]a{5000}"),
    (GrammarKind.REGEX, "(a{80}){80}"),
    (GrammarKind.REGEX, "ab" * 3000),
    (GrammarKind.CHOICE, json.dumps(["no", "ab" * 3000])),
    (GrammarKind.EBNF, 'start: "a"{5000}'),
    (GrammarKind.EBNF, 'root ::= "a"{5000} "b"'),
    (GrammarKind.EBNF, 'start: b{80}\nb: "c"{80}'),
    (GrammarKind.JSON_SCHEMA, json.dumps({"const": "ab" * 3000})),
    (GrammarKind.JSON_SCHEMA, json.dumps({"type": "string", "pattern": "^a{5000}$"})),
    (GrammarKind.JSON_SCHEMA, json.dumps(LIST | {"minItems": 3000})),
]
SHORT = [
    (GrammarKind.REGEX, "[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}"),
    (GrammarKind.REGEX, "a{0,100000}"),
    (GrammarKind.CHOICE, json.dumps(["yes", "no"] * 3000)),
    (GrammarKind.EBNF, "start: word+\n" + 'word: "a" | "b"'),
    (GrammarKind.JSON_SCHEMA, json.dumps(LIST | {"minItems": 3, "description": "x" * 9000})),
    (GrammarKind.JSON_SCHEMA, "[" * 100_000),
]


@pytest.mark.parametrize(("kind", "text"), LONG)
def test_a_long_forced_text_is_left_to_the_model(kind: GrammarKind, text: str) -> None:
    """B11: what a token of it costs does not depend on what is left of it."""
    grammar = Grammar(kind, text)
    assert may_force_too_much(grammar)
    assert definition_of(grammar).startswith('%llguidance {"no_forcing": true}\n')
    assert fault_of(grammar) is None


@pytest.mark.parametrize(("kind", "text"), SHORT)
def test_others_are_tokenized_as_they_were(kind: GrammarKind, text: str) -> None:
    grammar = Grammar(kind, text)
    assert not may_force_too_much(grammar)


@pytest.mark.parametrize(("text", "said"), [("[xy]a{5000}z", b"xaa"), ("(ab){4999}", b"aba"), ("a{5000}", b"")])
def test_the_same_may_come(text: str, said: bytes) -> None:
    """In a vocabulary of bytes there is one way to say a text."""
    tokenizer = (embedded_folder(0) / "tokenizer.json").read_text()
    grammars = CompiledGrammars(lambda: tokenizer, vocab_size=264, eos_token_ids=(257,))
    grammars.want(1)
    assert grammars.compile(1, Grammar(GrammarKind.REGEX, text)) is None
    allowed = np.flatnonzero(grammars.begin(1).allowed(np.frombuffer(said, np.uint8).astype(np.int32)))
    assert allowed.tolist() == [ord({b"xaa": "a", b"aba": "b", b"": "a"}[said])]


def test_a_fault_of_a_long_one_is_told_as_ever() -> None:
    schema = {"properties": {"a": {"const": "x" * 9000}, "b": {"items": {"type": "strng"}}}}
    fault = fault_of(Grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema)))
    assert fault is not None
    assert fault.place == "/properties/b/items"
