"""Calls in what models write, in the formats that are JSON: found wherever the text is cut, and never an error."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from itertools import cycle
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from parsed_answers import arguments, cut, in_one_and_by_character, parsed, places, shown

from engine.frontend.text.incoming_text import Reading
from engine.frontend.text.tools.call_objects import CallObject
from engine.frontend.text.tools.call_parts import CallParts
from engine.frontend.text.tools.families import FAMILIES, HermesParser, Llama3Parser, MistralParser

TOOLS = ("add", "look_up")
# Families whose calls are objects in JSON.
OF_JSON = ("hermes", "llama3", "mistral")
NESTED = '{"city": "Oslo", "days": [1, {"n": 2}]}'


def parse(family: str, text: str) -> list[tuple[str, ...]]:
    """Parse a text at once and character by character."""
    return in_one_and_by_character(lambda: FAMILIES[family](TOOLS), text)


def entry(name: str, given: str, *, key: str = "arguments") -> str:
    return f'{{"name": "{name}", "{key}": {given}}}'


def tagged(body: str) -> str:
    return f"<tool_call>\n{body}\n</tool_call>"


def written(family: str, calls: list[tuple[str, dict[str, Any]]]) -> str:
    """Calls as a model of the family writes them."""
    key = "parameters" if family == "llama3" else "arguments"
    objects = [json.dumps({"name": name, key: given}, ensure_ascii=False) for name, given in calls]
    match family:
        case "hermes":
            return "\n".join(map(tagged, objects))
        case "llama3":
            return "; ".join(objects)
        case _:
            return f"[TOOL_CALLS] [{', '.join(objects)}]" if calls else ""


@pytest.mark.parametrize(
    ("family", "text", "expected"),
    [
        ("hermes", "plain <b>text</b> \n", [("content", "plain <b>text</b> \n")]),
        (
            "hermes",
            f"Let me see.\n\n{tagged(entry('add', NESTED))}\n",
            [("content", "Let me see."), ("call", "add", NESTED)],
        ),
        ("llama3", entry("add", NESTED, key="parameters"), [("call", "add", NESTED)]),
        ("llama3", "<|python_tag|>" + entry("any", NESTED, key="parameters"), [("call", "any", NESTED)]),
        ("llama3", f'{{"type": "function", "name": "add", "parameters": {NESTED}}}', [("call", "add", NESTED)]),
        ("mistral", f"[TOOL_CALLS] [{entry('add', NESTED)}]", [("call", "add", NESTED)]),
        ("mistral", f"[TOOL_CALLS]{entry('add', NESTED)}", [("call", "add", NESTED)]),
        ("mistral", f"Sure. [TOOL_CALLS]add[ARGS]{NESTED}", [("content", "Sure."), ("call", "add", NESTED)]),
        ("mistral", f"[TOOL_CALLS]add[CALL_ID]x1y2z3a4b[ARGS]{NESTED}", [("call", "add", NESTED)]),
    ],
)
def test_a_call_in_each_format(family: str, text: str, expected: list[tuple[str, ...]]) -> None:
    assert parse(family, text) == expected


@pytest.mark.parametrize(
    ("family", "text"),
    [
        ("hermes", f"{tagged(entry('add', '{}'))}\n{tagged(entry('look_up', NESTED))}"),
        ("hermes", tagged(entry("add", "{}") + "\n" + entry("look_up", NESTED))),
        ("hermes", tagged(f"[{entry('add', '{}')}, {entry('look_up', NESTED)}]")),
        ("llama3", f"{entry('add', '{}')}; {entry('look_up', NESTED)}"),
        ("mistral", f"[TOOL_CALLS][{entry('add', '{}')}, {entry('look_up', NESTED)}]"),
        ("mistral", f"[TOOL_CALLS]add[ARGS]{{}}[TOOL_CALLS]look_up[ARGS]{NESTED}"),
    ],
)
def test_several_calls(family: str, text: str) -> None:
    assert parse(family, text) == [("call", "add", "{}"), ("call", "look_up", NESTED)]


@pytest.mark.parametrize("separator", [";", "; ", ";\n", "\n", " ;  ", ""])
def test_calls_of_llama_are_separated_by_anything_usual(separator: str) -> None:
    """vLLM pull request 49923: it skipped any two characters, and lost the second call."""
    text = separator.join([entry("add", NESTED, key="parameters")] * 3)
    assert parse("llama3", text) == [("call", "add", NESTED)] * 3


@pytest.mark.parametrize("family", OF_JSON)
def test_arguments_may_come_before_the_name(family: str) -> None:
    """vLLM issue 9693: streamed, such a call had no arguments."""
    body = f'{{"arguments": {NESTED}, "name": "add"}}'
    text = {"hermes": tagged(body), "llama3": body, "mistral": f"[TOOL_CALLS][{body}]"}[family]
    assert parse(family, text) == [("call", "add", NESTED)]


@pytest.mark.parametrize("body", ['{"name": "add"}', entry("add", "{}"), entry("add", "null"), entry("add", '""')])
def test_no_arguments_are_an_empty_object(body: str) -> None:
    """vLLM issues 11392 and 28806: streamed, a call of a function without parameters had none at all."""
    ((kind, name, args),) = parse("hermes", tagged(body))
    assert (kind, name, args) == ("call", "add", "{}")


def test_the_last_brace_is_part_of_the_arguments() -> None:
    """vLLM issues 10781 and 32152: it was lost when the closing tokens came together, except after a string."""
    for args in ('{"id": 42}', '{"on": true}', '{"o": {"p": []}}', '{"s": "x"}'):
        text = tagged(entry("add", args))
        for end in range(1, 40):
            pieces = [text[:-end], text[-end:]]
            assert shown(parsed(HermesParser(TOOLS), pieces)) == [("call", "add", args)]


@pytest.mark.parametrize("family", OF_JSON)
def test_an_answer_that_comes_in_one_piece_is_parsed_as_a_stream_is(family: str) -> None:
    """vLLM issues 47907 and 48294: calls that came in one delta were lost."""
    calls = [("add", {"a": 1}), ("look_up", {"b": [2]}), ("add", {})]
    parts = parsed(FAMILIES[family](TOOLS), [written(family, calls)])
    assert [(part[1], json.loads(part[2])) for part in shown(parts)] == calls


def test_a_string_may_name_the_markers() -> None:
    """vLLM issue 45167: the literal marker in a string ended the call, which was dropped."""
    args = json.dumps({"text": 'say "</tool_call>" and <tool_call> \\'})
    assert parse("hermes", tagged(entry("add", args))) == [("call", "add", args)]
    args = json.dumps({"text": "[TOOL_CALLS]x[ARGS]{"})
    assert parse("mistral", f"[TOOL_CALLS]add[ARGS]{args}") == [("call", "add", args)]


def test_arguments_that_are_a_string_are_the_object_in_it() -> None:
    """vLLM pull request 54964: they were encoded once more, and lost from the history."""
    args = {"param": 'max "n"', "sum": "\u20ac"}
    body = json.dumps({"name": "add", "arguments": json.dumps(args)})
    ((kind, _, text),) = parse("hermes", tagged(body))
    assert (kind, json.loads(text)) == ("call", args)


def test_numbers_are_arguments_of_mistral_too() -> None:
    """vLLM issue 13622: a stream with an integer among the arguments could not be parsed."""
    args = '{"a": 3, "b": -1.5e3}'
    assert parse("mistral", f"[TOOL_CALLS] [{entry('add', args)}]") == [("call", "add", args)]


@pytest.mark.parametrize(
    ("family", "text"),
    [
        ("hermes", "<tool_call>add\n{}</tool_call>"),
        ("hermes", "<tool_call>\nadd {}\n</tool_call>\n"),
        ("glm45", "<tool_call>add{}</tool_call>"),
        ("glm45", "<tool_call>add\n{}\n</tool_call>"),
        ("qwen3_coder", "<tool_call>\n<function=add>\n{}\n</function>\n</tool_call>"),
        ("qwen3_coder", "<function=add>{}</function>"),
    ],
)
def test_an_object_of_arguments_may_follow_a_name(family: str, text: str) -> None:
    assert parse(family, text.replace("{}", NESTED)) == [("call", "add", NESTED)]
    assert parse(family, text.replace("{}", NESTED) * 2) == [("call", "add", NESTED)] * 2


def test_mistral_may_leave_the_marker_of_arguments_out() -> None:
    """vLLM issue 30651: ``[TOOL_CALLS]name{...}`` was an error 500."""
    assert parse("mistral", f"[TOOL_CALLS]add{NESTED}") == [("call", "add", NESTED)]


@pytest.mark.parametrize(
    ("family", "text"),
    [
        ("hermes", "<tool_call>"),
        ("hermes", "<tool_call>\nnothing\n</tool_call>"),
        ("hermes", "<tool_call>\n{}\n</tool_call>"),
        ("hermes", '<tool_call>{"name": 5, "arguments": {}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "", "arguments": {}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "add", "arguments": [1]}</tool_call>'),
        ("hermes", '<tool_call>{"name": "add", "arguments": 7}</tool_call>'),
        ("hermes", '<tool_call>{"name": "\\ud800", "arguments": {}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "add", "argu'),
        ("hermes", '<tool_call>{"arguments": {"a": 1'),
        ("hermes", "</tool_call> <tool_cal"),
        ("llama3", '{"answer": 42}'),
        ("llama3", '{"name": "Alice", "parameters": {}}'),
        ("llama3", "a {set} of {x: 1}"),
        ("llama3", '<|python_tag|>brave_search.call(query="x")'),
        ("mistral", "[TOOL_CALLS]"),
        ("mistral", "[TOOL_CALLS][]"),
        ("mistral", "[TOOL_CALLS] add what"),
        ("mistral", "[TOOL_CALLS]add[ARGS]7"),
        ("mistral", "[TOOL_CALLS][TOOL_CALL"),
    ],
)
def test_what_is_no_call_is_content_as_it_was_written(family: str, text: str) -> None:
    """A malformed call, or one that was cut before its arguments, is neither lost nor an error."""
    assert parse(family, text) == [("content", text)]


@pytest.mark.parametrize(
    ("family", "text"),
    [
        ("hermes", '<tool_call>{"name": "add", "arguments": {"a": "b'),
        ("llama3", '{"name": "add", "parameters": {"a": "b'),
        ("mistral", '[TOOL_CALLS]add[ARGS]{"a": "b'),
        ("mistral", '[TOOL_CALLS][{"name": "add", "arguments": {"a": "b'),
    ],
)
def test_a_call_that_was_cut_shows_what_there_is(family: str, text: str) -> None:
    assert parse(family, text) == [("cut", "add", '{"a": "b')]


def test_a_call_after_one_that_does_not_close_is_found() -> None:
    text = f'<tool_call>{{"name": "add", "arguments": {{"a": 1\n</tool_call>{tagged(entry("look_up", NESTED))}'
    assert parse("hermes", text) == [("call", "add", '{"a": 1\n}'), ("call", "look_up", NESTED)]
    text = f'<tool_call>{{"name": "add", "arguments": {{"a": \n</tool_call>{tagged(entry("look_up", NESTED))}'
    assert parse("hermes", text) == [("cut", "add", '{"a": \n'), ("call", "look_up", NESTED)]


def test_a_brace_too_many_or_too_few_is_forgiven() -> None:
    assert parse("hermes", tagged(entry("add", NESTED) + "}")) == [("call", "add", NESTED)]
    assert parse("hermes", tagged(entry("add", NESTED)[:-1])) == [("call", "add", NESTED)]


def test_whitespace_beside_calls_is_no_content() -> None:
    """Qwen3 issue 1755: an answer of a call alone had the content of two line feeds."""
    call = tagged(entry("add", "{}"))
    assert parse("hermes", f"\n\n{call}\n{call}\n") == [("call", "add", "{}")] * 2
    assert parse("hermes", f"One.\n{call}\nTwo.\n") == [
        ("content", "One."),
        ("call", "add", "{}"),
        ("content", "\n\nTwo."),
    ]


@given(st.sampled_from(OF_JSON), st.lists(st.tuples(st.sampled_from(TOOLS), arguments), max_size=3), places)
def test_calls_are_found_wherever_their_text_is_cut(
    family: str, calls: list[tuple[str, dict[str, Any]]], where: list[int]
) -> None:
    """C03: names, order and arguments are what was written, for any arguments."""
    text = written(family, calls)
    found = shown(parsed(FAMILIES[family](TOOLS), cut(text, where)))
    assert [(part[0], part[1], json.loads(part[2])) for part in found] == [("call", *call) for call in calls]


FRAGMENTS = (
    "```", "\n```json\n",
    "<tool_call>", "</tool_call>", "<tool", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "[TOOL", "<|python_tag|>", "{", "}",
    "[", "]", '"', "\\", ":", ",", ";", " ", "\n", '"name"', '"arguments"', '"parameters"', '"add"', "null", "7", "a",
    "\u20ac", '{"name": "add", "arguments": {', '{"name": "add", "parameters": {"x": "', "}}",
)  # fmt: skip
texts = st.lists(st.sampled_from(FRAGMENTS) | st.text(max_size=3), max_size=24).map("".join)


@given(st.sampled_from(OF_JSON), texts, places)
def test_any_text_comes_to_the_same_wherever_it_is_cut(family: str, text: str, where: list[int]) -> None:
    """C03: and none is an error."""
    make = FAMILIES[family]
    whole = parsed(make(TOOLS), [text])
    assert parsed(make(TOOLS), cut(text, where)) == whole
    said = "".join(part[-1] for part in shown(whole))
    assert len(said) <= len(text) + len("{}") * text.count("name")


@given(st.sampled_from(OF_JSON), st.text(alphabet="abc <>[]|\n\u20ac", max_size=40))
def test_text_without_a_call_is_content_to_the_last_character(family: str, text: str) -> None:
    """Stop text never leaks, wherever text is cut (C03)."""
    assert "".join(part[1] for part in parse(family, text)) == text


def test_parts_come_as_soon_as_they_are_certain() -> None:
    """A client sees the name before the arguments are whole, and text at once."""
    parser = HermesParser(TOOLS)
    assert shown(parser.push("Hi")) == [("content", "Hi")]
    assert parser.push(" <tool_call>{") == []
    assert shown(parser.push('"name": "add", "arguments": {"a')) == [("cut", "add", '{"a')]
    assert shown(Llama3Parser(TOOLS).push('see {"x')) == [("content", "see")]
    assert shown(MistralParser(TOOLS).push("x[")) == [("content", "x")]


def test_these_tests_notice_a_parser_that_depends_on_the_cuts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The faults of vLLM issues 10781 and 9693, planted."""
    argue = CallParts.argue

    def lose_a_lone_brace(parts: CallParts, text: str) -> None:
        argue(parts, "" if text == "}" else text)

    with monkeypatch.context() as patch:
        patch.setattr(CallParts, "argue", lose_a_lone_brace)
        with pytest.raises(AssertionError):
            test_the_last_brace_is_part_of_the_arguments()
    monkeypatch.setattr(CallObject, "_read_name", _forget_what_came_before)
    with pytest.raises(AssertionError):
        test_arguments_may_come_before_the_name("hermes")


def _forget_what_came_before(reader: CallObject) -> Reading[bool]:
    reader._name = yield from reader._read_text()
    reader._arguments = None
    return True


def with_commas(value: Any, commas: Iterator[str]) -> str:
    """JSON with a comma, or another sign, before some of its closing brackets, as models write it."""
    last = next(commas)
    if isinstance(value, dict):
        inside = ", ".join(f"{json.dumps(key)}: {with_commas(one, commas)}" for key, one in value.items())
        return f"{{{inside}{last if value else ''}}}"
    if isinstance(value, list):
        return f"[{', '.join(with_commas(one, commas) for one in value)}{last if value else ''}]"
    return json.dumps(value)


@given(st.sampled_from(OF_JSON), arguments, st.lists(st.sampled_from(("", ",")), min_size=1), places)
def test_commas_before_closing_brackets_are_left_out(
    family: str, given_arguments: dict[str, Any], commas: list[str], where: list[int]
) -> None:
    key = "parameters" if family == "llama3" else "arguments"
    text = entry("add", with_commas(given_arguments, cycle(commas)), key=key)
    text = {"hermes": tagged(text), "llama3": text, "mistral": f"[TOOL_CALLS] [{text}]"}[family]
    ((kind, name, found),) = shown(parsed(FAMILIES[family](TOOLS), cut(text, where)))
    assert (kind, name, json.loads(found)) == ("call", "add", given_arguments)


@pytest.mark.parametrize("family", OF_JSON)
def test_semicolons_before_closing_brackets_are_left_out(family: str) -> None:
    """A semicolon is a comma that was written wrong, also where it may separate calls."""
    key = "parameters" if family == "llama3" else "arguments"
    for one, other in itertools.product((1, True, None, [2], {"k": [3]}), repeat=2):
        for written in ({"l": [one, other]}, {"a": one, "b": other}, {"a": [one], "b": {"k": other}}):
            text = entry("add", with_commas(written, cycle(";")), key=key)
            text = {"hermes": tagged(text), "llama3": text, "mistral": f"[TOOL_CALLS] [{text}]"}[family]
            ((kind, name, found),) = parse(family, text)
            assert (kind, name, json.loads(found)) == ("call", "add", written), text
