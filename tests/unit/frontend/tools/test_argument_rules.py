"""Grammars of calls in formats other than JSON: any output within one is a call of its schema."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest
from parsed_answers import parsed, shown
from test_call_grammar import Walk, tokenizer
from texts_of_grammars import allowed
from thinned import thinned

from engine.frontend.text.tools.argument_schemas import properties_of
from engine.frontend.text.tools.call_grammar import CallForm, OfferedTool, calls_if_any, calls_or_answer, required_calls
from engine.frontend.text.tools.families import DEEPSEEK_FENCED_FORM, FAMILIES
from engine.grammar.source import MAX_GRAMMAR_CHARS, fault_of, schema_grammar

SCHEMA = {
    "properties": {
        "n": {"$ref": "#/$defs/count"},
        "s": {"type": "string", "minLength": 1, "maxLength": 6},
        "unit": {"enum": ["C", "F"]},
        "on": {"type": "boolean"},
        "l": {"type": "array", "items": {"enum": [1, "a"]}, "maxItems": 2},
    },
    "required": ["n", "unit"],
    "additionalProperties": False,
    "$defs": {"count": {"type": "integer", "minimum": 1, "maximum": 99}},
}
TOOLS = (
    OfferedTool(name="add", parameters=SCHEMA, strict=True),
    OfferedTool(name="look_up", parameters=None, strict=True),
)
LOOSE = OfferedTool(name="loose", parameters=SCHEMA, strict=False)
FORMS = [(name, FAMILIES[name].form) for name in ("llama4", "qwen3_coder", "glm45", "deepseek")]
FORMS.append(("deepseek", DEEPSEEK_FENCED_FORM))
# Calls that no schema holds, as each family writes them.
FREE = {
    "llama4": "other=1",
    "qwen3_coder": "<parameter=other>\n1\n</parameter>\n",
    "glm45": "<arg_key>other</arg_key>\n<arg_value>1</arg_value>\n",
    "deepseek": '{"other": 1}',
}


def calls_of(family: str, text: str) -> list[tuple[str, ...]]:
    names = [tool.name for tool in (*TOOLS, LOOSE)]
    properties = {tool.name: properties_of(tool.parameters) for tool in (*TOOLS, LOOSE)}
    return shown(parsed(FAMILIES[family](names, properties), [text]))


def require_kept(calls: list[tuple[str, ...]]) -> set[str]:
    """Every part is a whole call of a tool, with arguments of its schema."""
    schemas = {tool.name: tool.schema for tool in TOOLS}
    assert calls
    for kind, name, given in calls:
        assert kind == "call"
        jsonschema.validate(json.loads(given), schemas[name])
    return {name for _, name, _ in calls}


@pytest.mark.parametrize("is_special", [False, True])
@pytest.mark.parametrize(("family", "form"), thinned(FORMS, one_in=2))
def test_required_calls_are_whole_and_keep_to_their_schemas(family: str, form: CallForm, is_special: bool) -> None:
    """C01: with markers as text and as special tokens."""
    markers = FAMILIES[family].markers if is_special else ()
    vocabulary = tokenizer(markers)
    special = {text: vocabulary.token_to_id(text) for text in markers}
    grammar = required_calls(form, TOOLS, None, special, several=False)
    names = set[str]()
    for seed in range(6):
        walk = Walk(grammar, vocabulary)
        walk.go_on(seed)
        names |= require_kept(calls_of(family, walk.text))
    assert names == {tool.name for tool in TOOLS}


HELD = {
    "properties": {
        "day": {"type": "string", "format": "date"},
        "code": {"type": "string", "pattern": "^[A-Z]{3}$"},
        "kind": {"type": "string", "const": "fixed"},
        "word": {"type": "string", "format": "password", "maxLength": 3},
    },
    "required": ["day", "code", "kind", "word"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("family", ["qwen3_coder", "glm45"])
def test_a_text_keeps_to_its_pattern_and_format(family: str) -> None:
    """C01: without quotes any text was allowed."""
    tool = OfferedTool(name="add", parameters=HELD, strict=True)
    grammar = required_calls(FAMILIES[family].form, [tool], None, {}, several=False)
    for seed in range(3):
        walk = Walk(grammar, tokenizer(()))
        walk.go_on(seed)
        parser = FAMILIES[family](["add"], {"add": properties_of(HELD)})
        ((kind, _, given),) = shown(parsed(parser, [walk.text]))
        assert kind == "call"
        jsonschema.validate(json.loads(given), HELD, format_checker=jsonschema.FormatChecker())


# Schemas of texts, with what they refer to.
OF_TEXTS: list[dict[str, Any]] = [
    {"type": "string"},
    {"type": "string", "minLength": 2, "maxLength": 3},
    {"type": "string", "not": {"enum": ["ab"]}},
    {"type": "string", "allOf": [{"minLength": 2}]},
    {"type": "string", "anyOf": [{"minLength": 4}, {"maxLength": 1}]},
    {"type": "string", "enum": ["ab", "12"], "not": {"const": "ab"}},
    {"enum": ["ab", "abcd"], "maxLength": 3},
    {"const": "12", "pattern": "^[0-9]+$"},
    {"$ref": "#/$defs/short"},
    {"$ref": "#/$defs/short", "minLength": 1},
    {"$ref": "#/$defs/short", "maxLength": 4, "description": "one of them"},
    {"allOf": [{"$ref": "#/$defs/short"}], "minLength": 1, "maxLength": 9},
    {"allOf": [{"$ref": "#/$defs/short"}], "type": "string"},
    {"anyOf": [{"$ref": "#/$defs/short"}, {"type": "null"}]},
]
NAMES_OF_TEXTS = {"$defs": {"short": {"type": "string", "minLength": 2, "maxLength": 3}}}
TEXTS = ("", "a", "12", "ab", "123", "a<b", "abcd", "null", "true")


@pytest.mark.parametrize("family", ["qwen3_coder", "glm45"])
def test_a_strict_tool_takes_the_texts_of_its_schema_alone(family: str) -> None:
    """In quotes or without. Those with ``not``, ``allOf`` or ``anyOf`` were only held to their length."""
    for schema in OF_TEXTS:
        parameters = {"properties": {"s": schema}, "required": ["s"], "additionalProperties": False} | NAMES_OF_TEXTS
        tool = OfferedTool(name="add", parameters=parameters, strict=True)
        grammar = required_calls(FAMILIES[family].form, [tool], None, {}, several=False)
        calls = [of_tag(family, written) for text in TEXTS for written in (text, json.dumps(text))]
        taken = set()
        for call in allowed(grammar, calls):
            parser = FAMILIES[family](["add"], {"add": properties_of(parameters)})
            ((kind, _, given),) = shown(parsed(parser, [call]))
            value = json.loads(given)["s"]
            jsonschema.validate({"s": value}, parameters)
            assert kind == "call", (schema, call)
            taken.add(value)
        assert taken >= {text for text in TEXTS if jsonschema.Draft202012Validator(parameters).is_valid({"s": text})}


def of_tag(family: str, written: str) -> str:
    """A call with one argument, in the form of the family's grammar."""
    if family == "glm45":
        return f"<tool_call>add\n<arg_key>s</arg_key>\n<arg_value>{written}</arg_value>\n</tool_call>"
    return f"<tool_call>\n<function=add>\n<parameter=s>\n{written}\n</parameter>\n</function>\n</tool_call>"


def test_definitions_are_not_written_for_each_argument() -> None:
    """C01: a body of 30 KB made a grammar of 5 MB, which took the event loop four seconds."""
    shared = {f"d{i}": {"type": "array", "items": {"$ref": f"#/$defs/d{(i + 1) % 300}"}} for i in range(300)}
    plain = {f"p{i}": {"type": "integer"} for i in range(60)}
    refer = {f"p{i}": {"$ref": f"#/$defs/d{i}"} for i in range(300)}
    for properties, is_taken in ((plain, True), (refer, False)):
        tool = OfferedTool(name="add", parameters={"properties": properties, "$defs": shared}, strict=True)
        grammar = required_calls(FAMILIES["qwen3_coder"].form, [tool], None, {}, several=False)
        assert len(grammar.text) < 2 * MAX_GRAMMAR_CHARS
        assert (fault_of(grammar) is None) is is_taken


@pytest.mark.parametrize(("family", "form"), FORMS[:4])
def test_only_strict_tools_are_held_to_their_schemas(family: str, form: CallForm) -> None:
    grammar = calls_if_any(form, (TOOLS[0], LOOSE), None, {})
    opening = "".join(form.opening + form.before)
    for name, has_schema in (("add", True), ("loose", False)):
        walk = Walk(grammar, tokenizer(()))
        walk.say(f"Any text.\n{opening}{name}{''.join(form.between)}")
        assert walk.refuses(FREE[family]) is has_schema
        if not has_schema:
            walk.say(FREE[family] + "".join(form.after + form.closing))
        walk.go_on(0)
        calls = [part for part in calls_of(family, walk.text) if part[0] != "content"]
        assert calls[0][:2] == ("call", name)
        assert all(kind == "call" for kind, *_ in calls)


@pytest.mark.parametrize(("family", "form"), FORMS)
def test_an_answer_of_a_schema_and_calls_are_both_possible(family: str, form: CallForm) -> None:
    grammar = calls_or_answer(form, TOOLS, schema_grammar({"const": [1]}), None, {})
    assert grammar is not None
    answering, calling = Walk(grammar, tokenizer(())), Walk(grammar, tokenizer(()))
    answering.say("[1]")
    answering.go_on(0)
    calling.say((form.opening or form.before)[0])
    calling.go_on(4)
    require_kept(calls_of(family, calling.text))
