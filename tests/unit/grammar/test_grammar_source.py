"""Errors about grammars name the fault and its place in the schema."""

from __future__ import annotations

from typing import Any

import pytest
from texts_of_grammars import allowed

from engine.core.messages import Grammar, GrammarKind
from engine.frontend.text.reasoning import ReasoningStart
from engine.frontend.text.tools.call_grammar import after_reasoning
from engine.grammar import source
from engine.grammar.source import MAX_GRAMMAR_CHARS, fault_of, schema_grammar

OBJECT = {"type": "object"}


def at(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties}


def deep(levels: int) -> dict[str, Any]:
    """A schema within a schema, and so on."""
    return {} if not levels else {"items": deep(levels - 1)}


@pytest.mark.parametrize(
    ("schema", "place", "message"),
    [
        ({"type": "strng"}, "", "strng"),
        (at(a=at(**{"b/c~d": {"type": "foo"}})), "/properties/a/properties/b~1c~0d", "foo"),
        (at(ok={"type": "string"}, a={"items": {"not": {"format": "uuid"}}}), "/properties/a/items", "not"),
        ({"anyOf": [{"type": "string"}, {"type": "x"}]}, "/anyOf/1", "x"),
        ({"$defs": {"x": {"type": "foo"}}, **at(a={"$ref": "#/$defs/x"})}, "/$defs/x", "foo"),
        (at(a={"$ref": "#/$defs/x"}), "/properties/a", "does not exist"),
        (at(a={"type": "integer", "minimum": 5, "maximum": 2}) | {"required": ["a"]}, "", "'a' is unsatisfiable"),
        ("nonsense", "", "line 1"),
        ("[" * 5000, "", "move inner ones into $defs"),
        (deep(130), "", "at most 124 levels of JSON are read"),
        ({"allOf": [{"pattern": f"^.*{one}.{{{n + 5}}}$"} for n, one in enumerate("abcdefgh")], "type": "string"}, "",
         "its patterns are too large to be combined; write one pattern"),
        ({"$ref": "#"}, "", "it has no finite value"),
        ({"not": {}}, "", "schema is false"),
        ({"type": "integer", "minimum": 2**64}, "", "no double of 64 bits"),
    ],
)  # fmt: skip
def test_the_place_of_a_fault(schema: Any, place: str, message: str) -> None:
    fault = fault_of(schema_grammar(schema))
    assert fault is not None
    assert fault.place == place
    assert message in fault.message


@pytest.mark.parametrize(
    ("kind", "text", "message"),
    [
        (GrammarKind.REGEX, "(a", "unclosed group"),
        (GrammarKind.REGEX, "(?=a)b", "look-around"),
        (GrammarKind.REGEX, "(" * 5000 + "a" + ")" * 5000, "nest"),
        (GrammarKind.EBNF, 'root ::= "a" | c', "Rule 'c' not found"),
        (GrammarKind.EBNF, "start: " + "(" * 5000 + '"a"' + ")" * 5000, "nested"),
        (GrammarKind.EBNF, "start: start", "it has no finite text"),
        (GrammarKind.EBNF, "\n".join(f'rule{n} ::= "a"' for n in range(1001)), "at most 1000 rules, got 1001"),
        (GrammarKind.CHOICE, "no JSON", "Expecting value"),
        (GrammarKind.REGEX, "\ud800", "Unicode"),
        (GrammarKind.REGEX, "a" * (MAX_GRAMMAR_CHARS + 1), "characters"),
    ],
)
def test_a_wrong_grammar_is_named(kind: GrammarKind, text: str, message: str) -> None:
    fault = fault_of(Grammar(kind, text))
    assert fault is not None
    assert message in fault.message


@pytest.mark.parametrize("schema", [OBJECT, True, "{}", at(a={"type": "string", "pattern": "^[a-z]+$"})])
def test_a_right_schema_has_no_fault(schema: Any) -> None:
    assert fault_of(schema_grammar(schema)) is None


@pytest.mark.parametrize("text", ["(?!ab)[abc]{2}", "^(?=a.)[ab]+$"])
def test_an_expression_may_look_ahead(text: str) -> None:
    grammar = Grammar(GrammarKind.REGEX, text)
    assert fault_of(grammar) is None
    embedded = after_reasoning(grammar, ReasoningStart.OPEN, {})
    assert embedded is not None
    assert fault_of(embedded) is None


@pytest.mark.parametrize(
    ("text", "taken", "refused"),
    [
        ('root ::= ("a"+)? "b"', ["b", "ab", "aab"], ["a", "ba"]),
        ('root ::= ("a"{2}){3}', ["a" * 6], ["a" * 4, "a" * 5]),
        ('root ::= (("a" | "+)?")+)? # ("a"+)?', ["", "a", "+)?a"], ["+"]),
        ("root ::= ([a-z*)?]{1,3} )* digits\ndigits ::= ([0-9]?)+", ["", "ab*)?1", "1"], ["1a", "A"]),
        ('root ::= ((("a"?)*)+)?', ["", "aaa"], ["b"]),
    ],
)
def test_a_group_that_is_one_repetition_may_be_repeated(text: str, taken: list[str], refused: list[str]) -> None:
    grammar = Grammar(GrammarKind.EBNF, text)
    assert fault_of(grammar) is None
    assert allowed(grammar, [*taken, *refused]) == taken


@pytest.mark.parametrize(
    ("schema", "remedy"),
    [
        (deep(200), "move inner ones into $defs"),
        (at(**{f"p{number}": {"type": "integer"} for number in range(900)}), "let fewer parts be optional"),
    ],
    ids=["deep", "wide"],
)
def test_too_large_a_schema_is_refused_at_once(schema: Any, remedy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its place is not looked for: each look compiles a part, and it took a second or two."""
    looks: list[Grammar] = []

    def counted(grammar: Grammar) -> str:
        looks.append(grammar)
        return complaint(grammar)

    complaint = source._complaint
    monkeypatch.setattr(source, "_complaint", counted)
    fault = fault_of(schema_grammar(schema))
    assert fault is not None
    assert remedy in fault.message
    assert len(looks) == 1
