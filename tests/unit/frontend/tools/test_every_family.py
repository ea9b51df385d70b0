"""What holds of the calls of every family: names, escapes, damaged tags, repeated keys, the text around calls."""

from __future__ import annotations

import ast
import itertools
import json
from collections.abc import Callable
from typing import Any, Final

import pytest
from parsed_answers import parsed

from engine.frontend.text.reasoning import CallArguments, CallBegun, CallEnded, Content, Part
from engine.frontend.text.tools.families import CALL, CALLS, END_CALL, END_CALLS, FAMILIES, SEPARATOR
from engine.frontend.text.tools.families.kimi_k2 import ARGUMENTS, END_SECTION, SECTION
from engine.frontend.text.tools.families.kimi_k2 import CALL as CALL_OF_KIMI
from engine.frontend.text.tools.families.kimi_k2 import END_CALL as END_CALL_OF_KIMI

PROPERTIES: Final = {"s": {"type": "string"}, "n": {"type": "integer"}, "f": {"type": "number"}}
TOOLS: Final = ("add", "look_up", "a.b-c", "functions.find")
Given = dict[str, str]


def entries(given: Given, sign: str) -> str:
    return ", ".join(f'"{key}": {value}' if sign == ":" else f"{key}={value}" for key, value in given.items())


def in_json(before: str, between: str, after: str) -> Callable[[str, Given], str]:
    return lambda name, given: f"{before}{name}{between}{{{entries(given, ':')}}}{after}"


def in_python(before: str, after: str) -> Callable[[str, Given], str]:
    return lambda name, given: f"{before}{name}({entries(given, '=')}){after}"


def qwen(name: str, given: Given) -> str:
    values = "".join(f"<parameter={key}>\n{one}\n</parameter>\n" for key, one in given.items())
    return f"<tool_call>\n<function={name}>\n{values}</function>\n</tool_call>"


def glm(name: str, given: Given) -> str:
    values = "".join(f"<arg_key>{key}</arg_key>\n<arg_value>{one}</arg_value>\n" for key, one in given.items())
    return f"<tool_call>{name}\n{values}</tool_call>"


TAGGED: Final = {"qwen3_coder": qwen, "glm45": glm}
IN_JSON: Final = {
    "hermes": in_json('<tool_call>\n{"name": "', '", "arguments": ', "}\n</tool_call>"),
    "llama3": in_json('<|python_tag|>{"name": "', '", "parameters": ', "}"),
    "mistral": in_json("[TOOL_CALLS]", "[ARGS]", ""),
    "deepseek": in_json(CALLS + CALL, SEPARATOR, END_CALL + END_CALLS),
    "kimi_k2": in_json(
        f"{SECTION}{CALL_OF_KIMI}functions.", f":7{ARGUMENTS}", END_CALL_OF_KIMI + END_SECTION
    ),
    "gpt_oss": in_json("<|start|>assistant<|channel|>commentary to=functions.", " <|message|>", "<|call|>"),
}  # fmt: skip
IN_PYTHON: Final = {
    "llama4": in_python("<|python_start|>[", "]<|python_end|>"),
    "hermes": in_python("<tool_call>", "</tool_call>"),
    "qwen3_coder": in_python("<tool_call><function=", "></function></tool_call>"),
    "llama3": in_python("<function=", "></function>"),
}
EVERY: Final = [*IN_JSON.items(), *IN_PYTHON.items(), *TAGGED.items()]
of_every = pytest.mark.parametrize(("family", "write"), EVERY, ids=lambda one: one if isinstance(one, str) else "")


def distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    assert len({key for key, _ in pairs}) == len(pairs), pairs
    return dict(pairs)


def read(family: str, text: str) -> list[Any]:
    """Content as it is and each call as its name and arguments: the same in one, by character, and in two anywhere."""

    def of(pieces: list[str]) -> list[Part]:
        return parsed(FAMILIES[family](TOOLS, dict.fromkeys(TOOLS, PROPERTIES)), pieces)

    whole = of([text])
    assert of([*text]) == whole, text
    for at in range(1, len(text), max(1, len(text) // 16)):
        assert of([text[:at], text[at:]]) == whole, (text, at)
    return in_few_words(whole)


def in_few_words(parts: list[Part]) -> list[Any]:
    found: list[Any] = []
    for part in parts:
        match part:
            case CallBegun(name):
                found.append((name, ""))
            case CallArguments(text):
                found[-1] = (found[-1][0], found[-1][1] + text)
            case CallEnded():
                found[-1] = (found[-1][0], json.loads(found[-1][1], object_pairs_hook=distinct))
            case Content(text):
                found.extend([text.strip()] if text.strip() else [])
    return found


@of_every
def test_a_tool_has_the_name_that_was_given(family: str, write: Callable[[str, Given], str]) -> None:
    """A namespace is a part of the name of a tool that has it, and of no other one."""
    for name in TOOLS:
        assert read(family, write(name, {"n": "1"})) == [(name, {"n": 1})]
    assert read(family, write("functions.add", {"n": "1"})) == [("add", {"n": 1})]


@of_every
def test_text_is_before_between_and_after_calls(family: str, write: Callable[[str, Given], str]) -> None:
    calls = [("add", {"n": 1}), ("look_up", {"n": 2}), ("add", {"n": 1})]
    written = [write(name, {"n": str(given["n"])}) for name, given in calls]
    if family == "gpt_oss":
        assert read(family, "<|end|>".join(written)) == calls
        return
    for before, after in itertools.product(("", "Let me see.\n"), ("", "\n\nIt is.")):
        assert read(family, before + "\n".join(written) + after) == [
            *([before.strip()] if before else []), *calls, *([after.strip()] if after else [])
        ]  # fmt: skip
    # White space after the last call is no content.
    parts = parsed(FAMILIES[family](TOOLS, dict.fromkeys(TOOLS, PROPERTIES)), [written[0] + " \n\n"])
    assert not [part for part in parts if isinstance(part, Content)], parts


@of_every
def test_a_tool_that_nobody_has_given(family: str, write: Callable[[str, Given], str]) -> None:
    """Where only a tool's name shows a call the text is content, and elsewhere it is the call of another tool."""
    text = write("other", {"n": "1"})
    is_shown = family == "llama4" or (family, write) not in IN_PYTHON.items()
    assert read(family, text) == ([("other", {"n": 1})] if is_shown else [text])


@pytest.mark.parametrize(("recipient", "tool"), [("functions.other", "other"), ("other", "other"), ("add", "add")])
def test_a_tool_that_nobody_has_given_is_called_outside_of_reasoning(recipient: str, tool: str) -> None:
    for channel in ("commentary", "final", "analysis"):
        text = f'<|channel|>{channel} to={recipient}<|message|>{{"n": 1}}<|call|>'
        is_thought = channel == "analysis" and recipient == "other"
        assert read("gpt_oss", text) == ([] if is_thought else [(tool, {"n": 1})]), text


NUMBERS: Final = ("-7", "+5", "2.", ".5", "-.5", "1_000", "1e3", "1E+3", "2.e1", "1_0.5_0", "0.0", "-0", "9" * 40)
NO_NUMBERS: Final = ("1_", "1__0", "_1", "1.5.2", "1-2", "+-1", ".", "1._5", "e3")


@of_every
def test_a_number_is_what_python_reads(family: str, write: Callable[[str, Given], str]) -> None:
    for written in NUMBERS:
        ((_, given),) = read(family, write("add", {"f": written}))
        assert given == {"f": ast.literal_eval(written)}, written
    for written in NO_NUMBERS if (family, write) not in IN_PYTHON.items() else ():
        assert read(family, write("add", {"f": written})) == [("add", {"f": written})], written


TEXTS: Final = (
    "it's",
    'say "x"',
    "'",
    '"',
    'a "b", "c": d',
    "`x`",
    '"""',
    "\\",
    r"C:\new",
    '\\"',
    "{'a': \"b\"}",
    "\\'",
)


@of_every
def test_quotes_in_a_text_are_its_own(family: str, write: Callable[[str, Given], str]) -> None:
    """In the quotes and escapes of JSON or Python, or in none between tags."""
    for one in TEXTS:
        spelled = [json.dumps(one), *([repr(one)] if (family, write) in IN_PYTHON.items() else [])]
        for written in [one] if write in TAGGED.values() else spelled:
            assert read(family, write("add", {"s": written, "n": "1"})) == [("add", {"s": one, "n": 1})], written


@pytest.mark.parametrize("family", TAGGED)
@pytest.mark.parametrize("name", ["other(n=1)", '{"n": 1}', "other n=1", "other[1]", "'other"])
def test_what_is_no_name_is_not_called(family: str, name: str) -> None:
    """It was the name of a tool without arguments, which were in it."""
    text = TAGGED[family](name, {})
    assert read(family, text) == [text]


CHARACTERS: Final = ("a", "/", "\u00e9", "\u20ac", "\U0001f600", "\n", "\x7f", '"', "\\")


def codes(one: str) -> list[str]:
    units = one.encode("utf-16-be")
    return [f"{high:02x}{low:02X}" for high, low in zip(units[::2], units[1::2], strict=True)]


@pytest.mark.parametrize(("family", "write"), [*IN_JSON.items(), *IN_PYTHON.items()], ids=lambda one: str(one)[:9])
def test_a_character_is_the_same_in_all_its_spellings(family: str, write: Callable[[str, Given], str]) -> None:
    """In codes of four digits, of which some take two, and in what else a language has."""
    for one in CHARACTERS:
        spellings = ["".join(f"\\u{code}" for code in codes(one)), json.dumps(one)[1:-1]]
        spellings += [one] if one.isprintable() and one not in '"\\' else []
        if (family, write) in IN_PYTHON.items():
            spellings += [f"\\U{ord(one):08x}", *([f"\\x{ord(one):02x}"] if ord(one) < 256 else [])]
        for spelling in spellings:
            assert read(family, write("add", {"s": f'"x{spelling}y"'})) == [("add", {"s": f"x{one}y"})], spelling


@pytest.mark.parametrize("family", ["qwen3_coder", "llama3"])
def test_attributes_end_where_their_element_does(family: str) -> None:
    """A slash before that is no part of the last one, and any other slash is a part of its text."""
    values = {"n": ["1", '"1"', "'1'"], "s": ["a/b", '"a/b"', "'a/b'"]}
    for (one, other), end in itertools.product(itertools.permutations(values), ("/>", " />", ">")):
        for first, second in itertools.product(values[one], values[other]):
            text = f"<function=add {one}={first} {other}={second}{end}</function>"
            assert read(family, text) == [("add", {"n": 1, "s": "a/b"})], text


def marked(name: str, call_id: str) -> str:
    return f'{name}[CALL_ID]{call_id}[ARGS]{{"n": 1}}'


def numbered(name: str, call_id: str) -> str:
    return f'{call_id}{ARGUMENTS}{{"n": 1}}{END_CALL_OF_KIMI}'


@pytest.mark.parametrize(
    ("family", "opening", "marker", "call"),
    [("mistral", "", "[TOOL_CALLS]", marked), ("kimi_k2", SECTION, CALL_OF_KIMI, numbered)],
)
def test_calls_keep_the_ids_that_are_written(
    family: str, opening: str, marker: str, call: Callable[[str, str], str]
) -> None:
    """Whether or not each of them has its marker."""
    ids = [("add", "functions.add:4"), ("look_up", "functions.look_up:9"), ("add", "functions.add:5")]
    for markers in itertools.product((marker, ""), repeat=len(ids)):
        text = opening + "".join(before + call(*one) for before, one in zip(markers, ids, strict=True))
        assert read(family, text) == [(name, {"n": 1}) for name, _ in ids], text
        parts = parsed(FAMILIES[family](TOOLS, dict.fromkeys(TOOLS, PROPERTIES)), [*text])
        assert [(part.name, part.id) for part in parts if isinstance(part, CallBegun)] == ids, text


@pytest.mark.parametrize("family", [family for family in FAMILIES if FAMILIES[family].closers])
def test_spaces_in_a_closing_tag_are_no_damage(family: str) -> None:
    write = dict(EVERY)[family]
    for name in ("add", "look_up"):
        written = write(name, {"n": "1"})
        for closer in FAMILIES[family].closers:
            inside = closer.strip("<>")
            for spaced in (f"<{' '.join(inside)}>", f"< {inside}   >", f"<{inside}\t\t\t >"):
                text = written.replace(closer, spaced)
                assert read(family, f"{text}\nIt is.") == [(name, {"n": 1}), "It is."], text


@pytest.mark.parametrize("family", TAGGED)
def test_an_argument_between_tags_comes_once(family: str) -> None:
    """The first of two values of it is kept."""
    one, two = (TAGGED[family]("add", {"n": value, "s": "x"}) for value in "12")
    tags = {"qwen3_coder": ("<parameter", "</function"), "glm45": ("<arg_key", "</tool_call")}
    begin, end = (one.index(tag) for tag in tags[family])
    assert read(family, one[:end] + two[begin:]) == [("add", {"n": 1, "s": "x"})]


BEFORE_NAMES: Final = {
    "hermes": "<tool_call>",
    "glm45": "<tool_call>",
    "mistral": "[TOOL_CALLS]",
    "llama3": "<|python_tag|>",
}


@pytest.mark.parametrize("family", BEFORE_NAMES)
def test_a_quote_on_one_side_of_a_name_makes_no_call(family: str) -> None:
    before = BEFORE_NAMES[family]
    for written in ('"add(n=1)', 'add"(n=1)', "'add\"(n=1)"):
        assert read(family, before + written) == [before + written]
    for written in ('"add"(n=1)', "'add'(n=1)", '"add"{"n": 1}', "'functions.add' (n=1)"):
        assert read(family, before + written) == [("add", {"n": 1})]
