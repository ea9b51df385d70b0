"""Numbers of schemas beyond 2^53, where not every integer is a double: no output breaks a bound or a constant."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from texts_of_grammars import allowed, allows

from engine.core.messages import Grammar, GrammarKind
from engine.grammar.source import fault_of, schema_grammar

EDGES = sorted(
    {sign * (2**power + step) for power in (52, 53, 54, 62, 63, 64) for step in range(-2, 3) for sign in (1, -1)}
)
BOUNDS = ("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum")
bounds = st.dictionaries(
    st.sampled_from(BOUNDS), st.sampled_from([*EDGES, 0, 7, 10**400]) | st.sampled_from(EDGES).map(float)
)


def test_one_matcher_judges_each_text_by_itself() -> None:
    grammar = schema_grammar({"type": "integer", "minimum": 5})
    assert allowed(grammar, ["7", "3", "x", "55", "4"]) == ["7", "55"]


@given(bounds, st.sampled_from(["integer", ["integer", "null"]]))
@example({"exclusiveMinimum": 2**53}, "integer")
@example({"exclusiveMaximum": -(2**53)}, "integer")
def test_no_integer_breaks_its_bounds(bounds: dict[str, Any], kind: Any) -> None:
    schema = bounds | {"type": kind}
    grammar = schema_grammar(schema)
    if fault_of(grammar) is not None:
        return
    for text in allowed(grammar, map(str, (*EDGES, 0, 7))):
        jsonschema.validate(int(text), schema)


@pytest.mark.parametrize(("low", "high"), [(-(2**63), 2**63 - 1), (0, 2**64 - 1), (-(10**30), 10**30), (-1e30, 1e30)])
@pytest.mark.parametrize("kind", ["integer", "number"])
def test_the_bounds_of_wide_types_are_no_fault(low: float, high: float, kind: str) -> None:
    grammar = schema_grammar({"type": kind, "minimum": low, "maximum": high})
    assert fault_of(grammar) is None
    assert allows(grammar, "7")
    assert allows(grammar, str(2**62))


@pytest.mark.parametrize(
    "schema",
    [
        {"const": 2**53 + 1},
        {"const": -(2**63)},
        {"enum": ["a", 10**400]},
        {"type": "object", "properties": {"id": {"const": {"of": [2**53 + 1]}}}},
        {"type": "integer", "minimum": 2**53 + 1, "maximum": 2**53 + 1},
        {"type": "integer", "minimum": -1e300, "maximum": -1e299},
    ],
)
def test_constants_that_would_be_misread_are_refused(schema: dict[str, Any]) -> None:
    fault = fault_of(schema_grammar(schema))
    assert fault is not None
    assert "describe it as a string" in fault.message


def test_a_property_with_the_name_of_a_keyword_is_no_constant() -> None:
    described = {"type": "integer", "maximum": 2**63 - 1}
    assert fault_of(schema_grammar({"type": "object", "properties": {"const": described, "enum": described}})) is None


def test_a_constant_in_lark_never_stands_for_another() -> None:
    grammar = Grammar(GrammarKind.EBNF, f"start: %json {json.dumps({'enum': [2**53 + 1, 5]})}")
    assert not allows(grammar, str(2**53))
    assert allows(grammar, "5")


@pytest.mark.parametrize(
    ("written", "text"),
    [
        (r'"\u0042"', "B"),
        (r'"\U0001F600\\u00e9"', "\U0001f600\\u00e9"),
        (r"[\u0041-\u0043]+", "ABC"),
        (r'"\u00e9\u0022"', '\u00e9"'),
    ],
)
def test_characters_of_gbnf_by_number(written: str, text: str) -> None:
    grammar = Grammar(GrammarKind.EBNF, f'root ::= {written} # not "\\u0041\n')
    assert fault_of(grammar) is None
    assert allows(grammar, text)
