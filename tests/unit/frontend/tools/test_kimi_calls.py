"""Calls of Kimi K2, whose ids name the function: they are found, and get the form that the template shows."""

from __future__ import annotations

from typing import Any

from every_case import every_case
from parsed_answers import parsed, parsed_calls, shown

from engine.frontend.text.dialect import Dialect, Parsing
from engine.frontend.text.reasoning import CallBegun, Part, ReasoningStart
from engine.frontend.text.tools.families import CALL as CALL_OF_DEEPSEEK
from engine.frontend.text.tools.families import CALLS, FAMILIES, SEPARATOR
from engine.frontend.text.tools.families.kimi_k2 import ARGUMENTS, CALL, END_CALL, END_SECTION, SECTION

TOOLS = ("add", "get_v2", "look")
PROPERTIES: dict[str, dict[str, Any]] = {
    "add": {"n": {"type": "integer"}},
    "get_v2": {"n": {}, "path": {"type": "string"}},
    "look": {"n": {}},
}


def one(written: str, given: str = '{"n": 1}') -> str:
    return f"{CALL}{written}{ARGUMENTS}{given}{END_CALL}"


def parts_of(text: str) -> list[Part]:
    """The parts of a text that the model ended, the same however the text is cut into two."""

    def of(*pieces: str) -> list[Part]:
        return parsed_calls(FAMILIES["kimi_k2"](TOOLS, PROPERTIES), pieces)

    whole = of(text)
    assert of(*text) == whole
    for at in range(len(text)):
        assert of(text[:at], text[at:]) == whole, at
    return whole


def ids_of(parts: list[Part]) -> list[str | None]:
    return [part.id for part in parts if isinstance(part, CallBegun)]


@every_case(
    ("written", "name", "call_id"),
    [
        ("functions.add:0", "add", "functions.add:0"),
        (" functions.add:12 ", "add", "functions.add:12"),
        ("add:3", "add", "functions.add:3"),
        ("add", "add", "functions.add:0"),
        ("functions.add", "add", "functions.add:0"),
        ("functions_add_1", "add", "functions.add:1"),
        ("functionsadd5", "add", "functions.add:5"),
        ("functions.add5", "add", "functions.add:5"),
        ("functions.get_v2:4", "get_v2", "functions.get_v2:4"),
        ("functions.get_v2", "get_v2", "functions.get_v2:0"),
        ("functions.other:2", "other", "functions.other:2"),
    ],
)
def test_an_id_names_the_function(written: str, name: str, call_id: str) -> None:
    """exo issue 2281, SGLang pull request 21377: a call with another sign in its id was dropped, or an error."""
    parts = parts_of(f"{SECTION}{one(written)}{END_SECTION}")
    assert (shown(parts), ids_of(parts)) == ([("call", name, '{"n": 1}')], [call_id])


@every_case(("written", "number"), [("3", "3"), ("call00003", "00003"), ("tool_call_1", "1")])
def test_a_number_alone_is_a_call_of_the_only_tool_that_fits(written: str, number: str) -> None:
    """SGLang pull request 25362: such a call was dropped."""
    only = '{"n": 1, "path": "a"}'
    parts = parts_of(f"{SECTION}{one(written, only)}{END_SECTION}")
    assert shown(parts) == [("call", "get_v2", only)]
    assert ids_of(parts) == [f"functions.get_v2:{number}"]
    for given in ('{"n": 1}', '{"other": 1}', "{}", "[1]"):
        text = SECTION + one(written, given)
        assert shown(parts_of(text)) == [("content", text)]


@every_case(
    ("text", "expected"),
    [
        (f"Sure. {SECTION}{one('functions.add:0')}{one('functions.add:1')}{END_SECTION} ok", ["Sure.", 2, " ok"]),
        (f"{SECTION}\n{one('functions.add:0')}\n{one('functions.add:1')}\n{END_SECTION}", [2]),
        (one("functions.add:0") + one("functions.add:1"), [2]),
        (f'{SECTION}functions.add:0{ARGUMENTS}{{"n": 1}}functions.add:1{ARGUMENTS}{{"n": 1}}', [2]),
        (f"{SECTION}{SECTION}{one('functions.add:0')}{END_SECTION}{END_SECTION}", [1]),
        (f"<|tool_call_section_begin|>{one('functions.add:0')}<|tool_call_section_end|>", [1]),
        (SECTION + one("functions.add:0", '"{\\"n\\": 1}"'), [1]),
        (SECTION + one("functions.add:0", '```json\n{"n": 1}\n```'), [1]),
        (f'{SECTION}{CALL}functions.add:0{{"n": 1}}{END_CALL}', [1]),
        (f"{SECTION}{CALL}add(n=1){END_CALL}{END_SECTION}", [1]),
        (f"{SECTION}{END_SECTION}", [f"{SECTION}{END_SECTION}"]),
        (f"{SECTION} none", [f"{SECTION} none"]),
        (SECTION + one("functions.add:0", "7"), [SECTION + one("functions.add:0", "7")]),
    ],
)
def test_calls_and_the_text_around_them(text: str, expected: list[Any]) -> None:
    found: list[tuple[str, ...]] = []
    for part in expected:
        found += [("content", part)] if isinstance(part, str) else [("call", "add", '{"n": 1}')] * part
    assert [(*part[:-1], part[-1].replace("  ", " ")) for part in shown(parts_of(text))] == found


def test_a_call_without_arguments() -> None:
    assert shown(parts_of(SECTION + one("functions.add:0", ""))) == [("call", "add", "{}")]
    assert shown(parts_of(SECTION + one("functions.add:0", "null"))) == [("call", "add", "{}")]


def test_calls_of_deepseek_end_reasoning() -> None:
    """SGLang pull request 9446: a call of DeepSeek V3.1 in its reasoning was a part of that."""
    dialect = Dialect(family=FAMILIES["deepseek"], reasoning="deepseek-r1")
    parser = dialect.parser(Parsing(tools=TOOLS, reasoning=ReasoningStart.ASSUMED))
    text = f'hm{CALLS}{CALL_OF_DEEPSEEK}add{SEPARATOR}{{"n": 1}}'
    assert shown(parsed(parser, list(text))) == [("reasoning", "hm"), ("call", "add", '{"n": 1}')]


def test_a_section_of_calls_ends_reasoning() -> None:
    """Kimi K2 Thinking at times calls before it has closed its reasoning; the call was a part of that."""
    dialect, text = Dialect(family=FAMILIES["kimi_k2"], reasoning="qwen3"), f"hm {SECTION}{one('functions.add:0')}"
    parsing = Parsing(tools=TOOLS, reasoning=ReasoningStart.OPEN)
    for pieces in ([text], list(text)):
        found = shown(parsed(dialect.parser(parsing), pieces))
        assert found == [("reasoning", "hm"), ("call", "add", '{"n": 1}')]
    silent = shown(parsed(dialect.parser(Parsing(reasoning=ReasoningStart.OPEN)), [text]))
    assert silent == [("reasoning", text)]
