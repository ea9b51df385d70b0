"""Calls drawn with a seed and written in each family's ways, with a reference of what each of them means."""

from __future__ import annotations

import ast
import itertools
import json
import random
from collections.abc import Callable, Iterator
from typing import Any

import jsonschema
import pytest
from parsed_answers import parsed_calls, shown
from texts_of_grammars import allowed

from engine.frontend.text.reasoning import Part
from engine.frontend.text.tools.argument_schemas import is_text, properties_of
from engine.frontend.text.tools.call_grammar import OfferedTool, required_calls
from engine.frontend.text.tools.families import CALL, CALLS, END_CALL, END_CALLS, FAMILIES, SEPARATOR
from engine.frontend.text.tools.tagged_values import is_argument, json_of

Draw = random.Random
TOOLS = ("add", "look_up", "a.b-c")
PROPERTIES = {"s": {"type": "string"}, "n": {"type": "integer"}, "l": {"type": "array"}, "o": {"type": "object"}}
Call = tuple[str, str, Any]


def parts_of(family: str, pieces: list[str] | str, *, stopped: bool = True) -> list[Part]:
    return parsed_calls(FAMILIES[family](TOOLS, dict.fromkeys(TOOLS, PROPERTIES)), pieces, stopped=stopped)


def read(family: str, text: str, *, stopped: bool = True) -> list[tuple[Any, ...]]:
    """Content and calls, the same in one, character by character and in two halves."""
    whole = parts_of(family, [text], stopped=stopped)
    assert parts_of(family, text, stopped=stopped) == whole, text
    assert parts_of(family, [text[: len(text) // 2], text[len(text) // 2 :]], stopped=stopped) == whole, text
    return [(*rest, json.loads(last)) if kind == "call" else (kind, last) for kind, *rest, last in shown(whole)]


WORDS = ("", "a", "Oslo", "it's", 'say "x"', "a, b", "1", "true", "null", "x: y", "{", "]}", "\n", "\\", "\u20ac",
         "</a>", "// no", "# no", "a;b", "\t", "\\n", "[TOOL", "`")  # fmt: skip


def value(draw: Draw, depth: int = 2) -> Any:
    kind = draw.random()
    if depth and kind < 0.25:
        return [value(draw, depth - 1) for _ in range(draw.randint(0, 3))]
    if depth and kind < 0.5:
        return {draw.choice(WORDS[1:5]): value(draw, depth - 1) for _ in range(draw.randint(0, 2))}
    return draw.choice([None, True, False, 0, 1, -7, 2.5, 1e30, *draw.sample(WORDS, 6)])


def arguments(draw: Draw) -> dict[str, Any]:
    """Arguments of a tool, each of its type."""
    found = {"s": draw.choice(WORDS), "n": draw.randint(-9, 99), "l": [value(draw, 1)], "o": {"k": value(draw)}}
    return {key: found[key] for key in draw.sample(sorted(found), draw.randint(0, 4))}


def as_json(draw: Draw, one: Any) -> str:
    """JSON as models write it, which has no other meaning: Python's words and quotes, keys without quotes, commas and
    comments before brackets, numbers of Python, characters by number."""
    if isinstance(one, dict):
        keys = [key if key.isalpha() and draw.random() < 0.2 else as_json(draw, key) for key in one]
        entries = [
            f"{key}{draw.choice([':', ': ', ' : '])}{as_json(draw, each)}"
            for key, each in zip(keys, one.values(), strict=True)
        ]
        return f"{{{around(draw, entries)}}}"
    if isinstance(one, list):
        return f"[{around(draw, [as_json(draw, each) for each in one])}]"
    if isinstance(one, str):
        written = json.dumps(one, ensure_ascii=draw.random() < 0.5)
        if draw.random() < 0.2 and not {"'", "\\", '"'} & {*one} and one.isprintable():
            return f"'{one}'"
        return written.replace("/", r"\/") if draw.random() < 0.3 else written
    if draw.random() < 0.3:
        return repr(one) if not isinstance(one, int) or isinstance(one, bool) else f"+{one}" if one > 0 else str(one)
    return json.dumps(one)


def around(draw: Draw, entries: list[str]) -> str:
    space = draw.choice(["", " ", "\n  "])
    last = draw.choice(["", "", "", ",", ", // done\n", " /* all */", ";"]) if entries else ""
    return space + draw.choice([", ", ",", ",\n"]).join(entries) + last + space


def tagged(draw: Draw, name: str, given: dict[str, Any]) -> str:
    text = f"<tool_call>\n<function={name}>\n"
    for key, one in given.items():
        text += f"<parameter={key}>\n{one if isinstance(one, str) else as_json(draw, one)}\n</parameter>\n"
    return f"{text}</function>\n</tool_call>"


def keyed(draw: Draw, name: str, given: dict[str, Any]) -> str:
    space, text = draw.choice(["", "\n"]), f"<tool_call>{name}"
    for key, one in given.items():
        written = one if isinstance(one, str) else as_json(draw, one)
        text += f"{space}<arg_key>{key}</arg_key>{space}<arg_value>{written}</arg_value>"
    return f"{text}{space}</tool_call>"


def hermes(draw: Draw, name: str, given: dict[str, Any]) -> str:
    entries = [f'"name": "{name}"', f'"arguments": {as_json(draw, given)}']
    draw.shuffle(entries)
    return f"<tool_call>\n{{{', '.join(entries)}}}\n</tool_call>"


def fenced(draw: Draw, name: str, given: dict[str, Any]) -> str:
    if draw.random() < 0.5:
        return f"{CALLS}{CALL}{name}{SEPARATOR}{as_json(draw, given)}{END_CALL}{END_CALLS}"
    return f"{CALLS}{CALL}function{SEPARATOR}{name}\n```json\n{as_json(draw, given)}\n```{END_CALL}{END_CALLS}"


def llama3(draw: Draw, name: str, given: dict[str, Any]) -> str:
    key = draw.choice(["parameters", "arguments"])
    return f'<|python_tag|>{{"name": "{name}", "{key}": {as_json(draw, given)}}}'


def mistral(draw: Draw, name: str, given: dict[str, Any]) -> str:
    if draw.random() < 0.5:
        return f"[TOOL_CALLS]{name}[ARGS]{as_json(draw, given)}"
    return f'[TOOL_CALLS][{{"name": "{name}", "arguments": {as_json(draw, given)}}}]'


WRITERS: dict[str, Callable[[Draw, str, dict[str, Any]], str]] = {
    "hermes": hermes,
    "llama3": llama3,
    "mistral": mistral,
    "deepseek": fenced,
    "qwen3_coder": tagged,
    "glm45": keyed,
}
# What a model says before its calls.
BEFORE = ("", "Let me see.", "a < b, {x} and [1]", "```python\nx = 1\n```", "See </tool_call>")


@pytest.mark.parametrize("family", WRITERS)
def test_calls_are_what_was_written(family: str) -> None:
    draw = Draw(family)
    for _ in range(120):
        calls = [(draw.choice(TOOLS), arguments(draw)) for _ in range(draw.randint(1, 2))]
        before = draw.choice(BEFORE)
        text = "\n".join([*([before] if before else []), *(WRITERS[family](draw, *call) for call in calls)])
        expected = [*([("content", before)] if before else []), *calls]
        assert read(family, text) == expected, text


def quoted(draw: Draw, text: str) -> str:
    """A string as Python has it."""
    written = repr(text)
    if draw.random() < 0.2:
        return "".join(f"\\x{ord(one):02x}" if ord(one) < 256 else f"\\u{ord(one):04x}" for one in text).join('""')
    if draw.random() < 0.2 and "\\" not in text and not {"'", '"'} & {*text}:
        return f'"""{text}"""'
    if draw.random() < 0.2 and "\\" in text and not {"'", '"', "\n", "\t"} & {*text} and not text.endswith("\\"):
        return f"r'{text}'"
    if draw.random() < 0.2:
        return f"{text[: len(text) // 2]!r} {text[len(text) // 2 :]!r}"
    return written


def literal(draw: Draw, one: Any) -> str:
    """A literal as Python has it."""
    if isinstance(one, dict):
        return f"{{{', '.join(f'{quoted(draw, key)}: {literal(draw, each)}' for key, each in one.items())}}}"
    if isinstance(one, list):
        items = ", ".join(literal(draw, each) for each in one)
        comma = "," if one and draw.random() < 0.3 else ""
        return f"({items},)" if one and draw.random() < 0.2 else f"[{items}{comma}]"
    if isinstance(one, str):
        return quoted(draw, one)
    if isinstance(one, int) and not isinstance(one, bool) and draw.random() < 0.4:
        return draw.choice([hex(one), bin(one), f"{one:_}", oct(one)])
    return repr(one)


def listed(one: Any) -> Any:
    """JSON has lists in place of tuples."""
    if isinstance(one, dict):
        return {key: listed(each) for key, each in one.items()}
    return [listed(each) for each in one] if isinstance(one, list | tuple) else one


def test_calls_in_python_are_what_python_reads() -> None:
    draw = Draw(7)
    for _ in range(200):
        given = {key: literal(draw, one) for key, one in arguments(draw).items()}
        calls = [(draw.choice(TOOLS[:2]), given) for _ in range(draw.randint(1, 2))]
        written = ", ".join(
            f"{name}({', '.join(f'{key}={one}' for key, one in given.items())})" for name, given in calls
        )
        expected = [(name, {key: listed(ast.literal_eval(one)) for key, one in given.items()}) for name, given in calls]
        before = draw.choice(("", "<|python_start|>"))
        after = "<|python_end|>" if before else ""
        assert read("llama4", f"{before}[{written}]{after}") == expected, written


def test_brackets_that_are_missing_at_the_end_are_added() -> None:
    """And none while more may come: a call that was cut shows what there is."""
    draw = Draw(8)
    for _ in range(150):
        given = {"o": {"k": value(draw, 3)}, "l": [value(draw, 3)]}
        written = json.dumps(given)
        closers = len(written) - len(written.rstrip("]}"))
        kept = written[: len(written) - draw.randint(0, closers)]
        for family, before, after in (
            ("hermes", '<tool_call>{"name": "add", "arguments": ', "\n</tool_call>"),
            ("mistral", "[TOOL_CALLS]add[ARGS]", ""),
            ("deepseek", f"{CALLS}{CALL}add{SEPARATOR}", f"{END_CALL}{END_CALLS}"),
        ):
            text = f"{before}{kept}{'}' * (family == 'hermes' and kept == written)}{after}"
            assert read(family, text) == [("add", given)], text
            # A comment in which the call ends takes nothing with it, neither its marker nor the next call.
            if after and kept != written:
                whole = f"{before}{written}{'}' * (family == 'hermes')}{after}"
                assert read(family, f"{before}{kept} // so{after}{whole}") == [("add", given)] * 2, kept
            if not after and kept != written:
                ((kind, said),) = read(family, text, stopped=False)
                assert (kind, said.rstrip("]}")) == ("cut", kept.rstrip("]}")), text


OF_VALUES: tuple[dict[str, Any], ...] = (
    *({"type": kind} for kind in ("string", "integer", "number", "boolean", "null", "array", "object")),
    *({"type": kinds} for kinds in (["integer", "null"], ["boolean", "number"], ["array", "object"])),
    *({"enum": values} for values in ([1, 2], ["1", "2"], ["a", "true"], [True, None], ["Oslo", "null"], [1.5, [1]])),
    *({"const": one} for one in ("1", 1, True, "true", None, "null", [1])),
    *({word: [{"type": "integer"}, {"type": "null"}]} for word in ("anyOf", "oneOf")),
    {"anyOf": [{"enum": ["1", "a"]}, {"const": "2"}]},
    {"anyOf": [{"type": "array"}, {"anyOf": [{"type": "boolean"}, {"const": 1}]}]},
    {"$ref": "#/$defs/text"},
    {"$ref": "#/$defs/count", "description": "how many"},
    {"allOf": [{"$ref": "#/$defs/count"}], "default": 3},
    {"anyOf": [{"$ref": "#/$defs/count"}, {"$ref": "#/$defs/nothing"}]},
)  # fmt: skip
NAMED = {"$defs": {"text": {"type": "string"}, "count": {"type": "integer"}, "nothing": {"type": "null"}}}
WRITTEN = ("1", "2", "1.0", "1.5", "-3", "true", "false", "null", "a", "Oslo", '"1"', "[1]", "[]", '{"a": 1}', "{}",
           "1 2", " 1 ", "True", "None", "[1, 'a',]", "", "NaN", "0x1", "{a: 1}")  # fmt: skip
PYTHON = {"True": True, "None": None, "[1, 'a',]": [1, "a"], "{a: 1}": {"a": 1}, " 1 ": 1}


def meanings(written: str) -> list[Any]:
    """What a text without quotes may mean: itself, and the value that it spells."""
    if written in PYTHON:
        return [written, PYTHON[written]]
    try:
        return [written, json.loads(written, parse_constant=lambda _: 1 / 0)]
    except (ValueError, ZeroDivisionError):
        return [written]


def test_a_text_between_tags_is_the_one_of_its_meanings_that_fits() -> None:
    for schema in OF_VALUES:
        whole = {"properties": {"x": schema}} | NAMED
        resolved = properties_of(whole)["x"]
        judge = jsonschema.Draft202012Validator(whole)
        for written in WRITTEN:
            fitting = [one for one in meanings(written) if judge.is_valid({"x": one})]
            found = json.loads(json_of(written, resolved))
            if len(fitting) == 1:
                assert json.dumps(found) == json.dumps(fitting[0]), (schema, written)
            if fitting:
                assert is_argument(written, resolved), (schema, written)
            for family, text in (
                (
                    "qwen3_coder",
                    f"<tool_call>\n<function=add>\n<parameter=x>\n{written}\n</parameter>\n</function>\n</tool_call>",
                ),
                ("glm45", f"<tool_call>add\n<arg_key>x</arg_key>\n<arg_value>{written}</arg_value>\n</tool_call>"),
            ):
                parser = FAMILIES[family](["add"], {"add": properties_of(whole)})
                parts = shown([*parser.push(text), *parser.flush(stopped=True)])
                assert len(parts) == 1
                # A text that may be shown as it arrives has no quotes around it.
                if len(fitting) == 1 and not (is_text(resolved) and written.startswith('"')):
                    assert json.loads(parts[0][2]) == {"x": fitting[0]}, (family, schema, written)


FORMED: dict[str, Callable[[dict[str, Any]], str]] = {
    "qwen3_coder": lambda given: (
        "<tool_call>\n<function=add>\n"
        + "".join(
            f"<parameter={key}>\n{one if isinstance(one, str) else json.dumps(one)}\n</parameter>\n"
            for key, one in given.items()
        )
        + "</function>\n</tool_call>"
    ),
    "glm45": lambda given: (
        "<tool_call>add\n"
        + "".join(
            f"<arg_key>{key}</arg_key>\n<arg_value>{one if isinstance(one, str) else json.dumps(one)}</arg_value>\n"
            for key, one in given.items()
        )
        + "</tool_call>"
    ),
    "hermes": lambda given: f'<tool_call>\n{{"name": "add", "arguments": {json.dumps(given)}}}\n</tool_call>',
    "deepseek": lambda given: f"{CALLS}{CALL}add{SEPARATOR}{json.dumps(given)}{END_CALL}{END_CALLS}",
}
OF_ARGUMENTS: tuple[dict[str, Any], ...] = (
    {"type": "integer"},
    {"type": "string"},
    {"type": "string", "maxLength": 1},
    {"type": "string", "minLength": 1, "maxLength": 1},
    {"enum": ["a", "b"]},
    {"type": ["integer", "null"]},
    {"const": "a"},
)
GIVEN = [
    dict(zip(keys, values, strict=True))
    for count in range(4)
    for keys in itertools.combinations("abc", count)
    for values in itertools.product((1, "a", "bb"), repeat=count)
]


def meant(family: str, given: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """What arguments may mean: without quotes a number is a text, too."""
    is_raw = family in ("qwen3_coder", "glm45")
    each = [(one, str(one)) if is_raw and isinstance(one, int) else (one,) for one in given.values()]
    for values in itertools.product(*each):
        yield dict(zip(given, values, strict=True))


@pytest.mark.parametrize("family", FORMED)
def test_a_strict_tool_may_be_called_with_the_arguments_of_its_schema_alone(family: str) -> None:
    """In the order of the schema."""
    draw = Draw(9)
    texts = {FORMED[family](given): given for given in GIVEN}
    for _ in range(30):
        names = "abc"[: draw.randint(1, 3)]
        schema: dict[str, Any] = {"properties": {name: draw.choice(OF_ARGUMENTS) for name in names}}
        schema |= {"required": draw.sample(names, draw.randint(0, len(names))), "additionalProperties": False}
        tool = OfferedTool(name="add", parameters=schema, strict=True)
        grammar = required_calls(FAMILIES[family].form, [tool], None, {}, several=False)
        judge = jsonschema.Draft202012Validator(schema)
        fitting = {text for text, given in texts.items() if any(map(judge.is_valid, meant(family, given)))}
        assert set(allowed(grammar, texts)) == fitting, schema
