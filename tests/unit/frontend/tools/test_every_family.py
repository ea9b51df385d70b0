"""What holds of the calls of every family: names, escapes, damaged tags, repeated keys, the text around calls."""

from __future__ import annotations

import ast
import itertools
import json
from collections.abc import Callable, Mapping
from typing import Any, Final

import pytest
from parsed_answers import parsed, parsed_calls

from engine.frontend.text.reasoning import CallArguments, CallBegun, CallEnded, Content, Part
from engine.frontend.text.tools.argument_schemas import Properties
from engine.frontend.text.tools.closing_tags import SHORTEST_CUT_TAG
from engine.frontend.text.tools.families import CALL, CALLS, END_CALL, END_CALLS, FAMILIES, SEPARATOR
from engine.frontend.text.tools.families.kimi_k2 import ARGUMENTS, END_SECTION, SECTION
from engine.frontend.text.tools.families.kimi_k2 import CALL as CALL_OF_KIMI
from engine.frontend.text.tools.families.kimi_k2 import END_CALL as END_CALL_OF_KIMI

KINDS: Final = {"s": "string", "n": "integer", "f": "number", "o": "object"}
PROPERTIES: Final = {key: {"type": kind} for key, kind in KINDS.items()}
TOOLS: Final = ("add", "look_up", "a.b-c", "functions.find")
OF_TOOLS: Final = dict.fromkeys(TOOLS, PROPERTIES)
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


def read(family: str, text: str, tools: Mapping[str, Properties] = OF_TOOLS, *, stopped: bool = False) -> list[Any]:
    """Content as it is and each call as its name and arguments: the same in one, by character, and in two anywhere.

    ``stopped``: the model ended the text.
    """

    def of(pieces: list[str]) -> list[Part]:
        return parsed_calls(FAMILIES[family](tools, tools), pieces, stopped=stopped)

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
    parts = parsed(FAMILIES[family](TOOLS, OF_TOOLS), [written[0] + " \n\n"])
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
    for written in NO_NUMBERS:
        if (family, write) in IN_PYTHON.items() and written.isidentifier():
            continue
        assert read(family, write("add", {"f": written})) == [("add", {"f": written})], written


@of_every
def test_a_comma_twice_separates_nothing_in_an_object(family: str, write: Callable[[str, Given], str]) -> None:
    """In a list an item may be missing there."""
    inner = '{,"a": 1,, "b": [2], , "c": {},,}'
    assert read(family, write("add", {"o": inner})) == [("add", {"o": {"a": 1, "b": [2], "c": {}}})]
    if write not in TAGGED.values():
        text = write("add", {"n": "1,", "s": '"x" , ,', "f": "2,"})
        assert read(family, text) == [("add", {"n": 1, "s": "x", "f": 2})]


@pytest.mark.parametrize("family", [*IN_JSON, "qwen3_coder"])
def test_a_call_within_its_own_arguments_is_the_call(family: str) -> None:
    """Unless the tool has arguments with the names of its parts, or the name is another one's."""
    write = IN_JSON.get(family, lambda *_: "<function=add>{}</function>")
    before, after = write("add", {}).split("{}")
    for name, key, space in itertools.product(("add", "functions.add"), ("arguments", "parameters"), ("", "\n ")):
        inner = f'{{{space}"name":{space}"{name}",{space}"{key}": {{"n": 1, "o": {{"a": {{}}}}}}{space}}}'
        text = before + inner + after
        assert read(family, text) == [("add", {"n": 1, "o": {"a": {}}})], text
        assert read(family, f"{text}\n{text}") == [("add", {"n": 1, "o": {"a": {}}})] * 2
        ((_, given),) = read(family, before + inner.replace(name, "look_up") + after)
        assert given["name"] == "look_up"
        parser = FAMILIES[family](TOOLS, {"add": {"name": {}, key: {}}})
        assert in_few_words([*parser.push(text), *parser.flush(stopped=True)])[0][1]["name"] == name


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
        parts = parsed(FAMILIES[family](TOOLS, OF_TOOLS), [*text])
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


# Families with a closing tag, and a call up to it.
BEFORE_CLOSERS: Final = [
    (family, closer, write("add", {"n": "1"}).partition(closer)[0])
    for family, write in EVERY
    for closer in FAMILIES[family].closers
    if closer in write("add", {"n": "1"})
]


@pytest.mark.parametrize(("family", "closer", "call"), BEFORE_CLOSERS)
def test_a_closing_tag_that_is_cut_closes(family: str, closer: str, call: str) -> None:
    """It could be any tag if less is left of it. One that is written twice closes once."""
    for length in range(SHORTEST_CUT_TAG, len(closer)):
        assert read(family, f"{call}{closer[:length]}\nIt is.") == [("add", {"n": 1}), "It is."], length
    for again in (closer * 2, f"{closer}\n{closer}", closer * 3):
        assert read(family, f"{call}{again}\nIt is.") == [("add", {"n": 1}), "It is."], again


@pytest.mark.parametrize("family", TAGGED)
def test_the_line_end_before_a_tag_that_is_missing_is_no_text(family: str) -> None:
    """A value ends where the next argument, the next call or the end of the answer is certain."""
    text, call = TAGGED[family]("add", {"s": "x"}), TAGGED[family]("look_up", {"n": "1"})
    end, after = text.index("x") + 1, [("look_up", {"n": 1})]
    for rest in ("", "\n", "\n\n" if family == "qwen3_coder" else ""):
        assert read(family, text[:end] + rest, stopped=True) == [("add", {"s": "x"})]
        if rest:
            assert read(family, f"{text[:end]}{rest}{call}", stopped=True) == [("add", {"s": "x"}), *after]
    assert read(family, f"{text[:end]}\n\n\n", stopped=True) == [
        ("add", {"s": "x\n" if family == "qwen3_coder" else "x\n\n"})
    ]
    # Calls on one line, of which the first has lost its tags.
    one, other = (written.replace("\n", "") for written in (text, call))
    for value in ("x", "x y", "see "):
        written = f"{one[: one.index('x')]}{value}{other}"
        assert read(family, written, stopped=True) == [("add", {"s": value}), *after], value


def test_a_value_on_lines_of_any_kind_has_no_line_end() -> None:
    for end in ("\n", "\r\n"):
        text = qwen("add", {"s": f"a{end}b", "n": "1"})
        assert read("qwen3_coder", text.replace("\r", "").replace("\n", end)) == [("add", {"s": f"a{end}b", "n": 1})]


def test_a_name_that_runs_into_a_key_calls_the_only_tool_that_fits() -> None:
    """GLM forgets the tag between them."""
    tools: dict[str, Properties] = {"add": {"n": {}, "all": {}}, "ad": {"dn": {}, "m": {}}, "addall": {"n": {}}}
    for run, found in {
        "addn": None,
        "addall": None,
        "adm": ("ad", "m"),
        "addalln": ("addall", "n"),
        "adall": None,
    }.items():
        text = f"<tool_call>{run}</arg_key><arg_value>1</arg_value></tool_call>"
        assert read("glm45", text, tools) == ([text] if found is None else [(found[0], {found[1]: 1})]), run


@of_every
def test_tools_whose_names_begin_alike_are_told_apart(family: str, write: Callable[[str, Given], str]) -> None:
    tools = dict.fromkeys(("ad", "add", "add2", "add_all", "add_all.n", "n"), PROPERTIES)
    for name in tools:
        assert read(family, write(name, {"n": "1"}), tools) == [(name, {"n": 1})]
        parts = parsed(FAMILIES[family](tools, tools), [write(name, {"n": "1"})])
        ids = [part.id for part in parts if isinstance(part, CallBegun)]
        assert ids == ([f"functions.{name}:7"] if family == "kimi_k2" else [None])


def test_a_call_of_kimi_without_a_number_gets_its_own() -> None:
    """The digits that end a tool's name are none."""
    tools = dict.fromkeys(("add2", "sha256"), PROPERTIES)
    for written in itertools.product(("add2", "functions.add2", "sha256"), repeat=2):
        calls = [f'{CALL_OF_KIMI}{one}{ARGUMENTS}{{"n": 1}}{END_CALL_OF_KIMI}' for one in written]
        parts = parsed(FAMILIES["kimi_k2"](tools, tools), [SECTION, *calls, END_SECTION])
        names = [one.removeprefix("functions.") for one in written]
        expected = [(name, f"functions.{name}:{number}") for number, name in enumerate(names)]
        assert [(part.name, part.id) for part in parts if isinstance(part, CallBegun)] == expected


def test_a_namespace_of_the_models_own_is_no_part_of_a_name() -> None:
    for space in ("", "functions.", "tools.", "a.b."):
        assert read("gpt_oss", f'<|channel|>commentary to={space}add<|message|>{{"n": 1}}<|call|>') == [
            ("add", {"n": 1})
        ]
        assert read("gpt_oss", f"<|channel|>commentary to={space}look_up<|message|>{{}}<|call|>") == [("look_up", {})]


WRAPPINGS: Final = (
    "*",
    '{"function": *}',
    '{"type": "function", "function": *}',
    '{"tool_calls": [*]}',
    '{"tool_calls": [{"function": *}]}',
    '{"tool_call": *}',
    "[*]",
)


@pytest.mark.parametrize("family", ["hermes", "llama3", "mistral"])
@pytest.mark.parametrize("wrapping", WRAPPINGS)
def test_what_is_around_a_call_is_no_text(family: str, wrapping: str) -> None:
    """Brackets after a quote that is no end count as many as are open, however many objects are around the call."""
    before, after = {
        "hermes": ("<tool_call>", "</tool_call>"),
        "llama3": ("<|python_tag|>", ""),
        "mistral": ("[TOOL_CALLS]", ""),
    }[family]
    depth = wrapping.count("{") + 2
    for text in ("x", 'say "x"', *(f'a"{"}" * count} b' for count in range(1, depth)), "it's", 'a", b'):
        call = f'{{"name": "add", "arguments": {{"s": "{text}"}}}}'
        assert read(family, f"{before}{wrapping.replace('*', call)}{after}") == [("add", {"s": text})], text
    calls = '{"name": "add", "arguments": {"n": 1}}, {"name": "look_up", "arguments": {"n": 2}}'
    if "[*]" in wrapping and after:
        text = f"{before}{wrapping.replace('*', calls)}{after} It is."
        assert read(family, text) == [("add", {"n": 1}), ("look_up", {"n": 2}), "It is."]


@pytest.mark.parametrize("family", IN_JSON)
def test_semicolons_and_quotes_of_either_kind_are_those_of_json(family: str) -> None:
    for key, comma, text in itertools.product(
        ('"s"', "'s'", "s"), (",", ";", " ; "), ("'x'", '"x"', r'"it\'s"', r"'it\'s'")
    ):
        if key == "s" and comma != "," and ";" in FAMILIES[family].separators:
            continue  # There it is between two calls.
        written = IN_JSON[family]("add", {"n": f"1{comma} {key}: {text}{comma} 'f': 2"})
        given = {"n": 1, "s": ast.literal_eval(text), "f": 2}
        assert read(family, written) == [("add", given)], written


def test_a_call_that_is_damaged_says_nothing_once_it_has_begun() -> None:
    """What stands for it before that is content."""
    for damage in ("!x", "x y", "s='a' b=)", "o={1: 2}", "f=%"):
        parts = read("llama4", f"[add(n=1, {damage}), look_up(n=2)] It is.")
        assert [part if isinstance(part, str) else part[0] for part in parts] == ["add", "look_up", "It is."], damage
        assert parts[1] == ("look_up", {"n": 2})
    assert read("llama4", "[add(!x), look_up(n=2)]") == ["[add(!x),", ("look_up", {"n": 2})]


@of_every
def test_the_fence_around_a_call_is_no_text(family: str, write: Callable[[str, Given], str]) -> None:
    """Its end may be missing: what follows is as it was written."""
    if family == "gpt_oss":
        return
    call = write("add", {"n": "1"})
    for end, rest in itertools.product(("", "\n```"), ("", "\n\nIt is.\n", " It is.")):
        parts = parsed(FAMILIES[family](TOOLS, OF_TOOLS), [*f"So:\n```json\n{call}{end}{rest}"])
        said = "".join(part.text for part in parts if isinstance(part, Content))
        # Space before the text is its own.
        assert said.endswith(rest.rstrip() if not end else rest.strip()), said
        assert in_few_words([part for part in parts if not isinstance(part, Content)]) == [("add", {"n": 1})]
