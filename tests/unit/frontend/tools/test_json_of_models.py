"""Arguments that are almost JSON, as models write them: what is certain is mended, in every family of JSON calls."""

from __future__ import annotations

import ast
import itertools
import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from parsed_answers import arguments, cut, in_one_and_by_character, parsed, places, shown

from engine.frontend.text.tools.closing_quotes import MOST_AHEAD
from engine.frontend.text.tools.families import CALL, CALLS, END_CALL, END_CALLS, FAMILIES, SEPARATOR
from engine.frontend.text.tools.families.kimi_k2 import ARGUMENTS, END_SECTION, SECTION
from engine.frontend.text.tools.families.kimi_k2 import CALL as CALL_OF_KIMI
from engine.frontend.text.tools.families.kimi_k2 import END_CALL as END_CALL_OF_KIMI

TOOLS = ("add", "look_up")


def wrapped(family: str, written: str, name: str = "add") -> str:
    """A call with these arguments, as a model of the family writes it."""
    key = "parameters" if family == "llama3" else "arguments"
    body = f'{{"name": "{name}", "{key}": {written}}}'
    match family:
        case "hermes":
            return f"<tool_call>\n{body}\n</tool_call>\n"
        case "llama3":
            return f"{body}; "
        case "mistral":
            return f"[TOOL_CALLS]{name}[ARGS]{written}"
        case "mistral list":
            return f"[TOOL_CALLS][{body}]\n"
        case "kimi_k2":
            return f"{SECTION}{CALL_OF_KIMI}functions.{name}:0{ARGUMENTS}{written}{END_CALL_OF_KIMI}{END_SECTION}"
        case "gpt_oss":
            head = f"<|start|>assistant<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>"
            return f"{head}{written}<|end|>"
        case _:
            return f"{CALLS}{CALL}function{SEPARATOR}{name}\n```json\n{written}\n```{END_CALL}{END_CALLS}"


FAMILIES_OF_JSON = ("hermes", "llama3", "mistral", "mistral list", "deepseek", "kimi_k2", "gpt_oss")
MENDED: list[tuple[str, dict[str, Any]]] = [
    # Python's quotes and words.
    ("{'s': 'Oslo', 'n': None, 'l': [True, 'x']}", {"s": "Oslo", "n": None, "l": [True, "x"]}),
    ("{'s': \"it's\", 't': 'say \"hi\"', 'o': {'k': False}}", {"s": "it's", "t": 'say "hi"', "o": {"k": False}}),
    (r"{'s': 'it\'s', 't': 'a\nb\\c'}", {"s": "it's", "t": "a\nb\\c"}),
    (r"""{"s": "it\'s"}""", {"s": "it's"}),
    ("{'s': 'it's late', 'n': 2}", {"s": "it's late", "n": 2}),
    # Quotes that are not escaped.
    ('{"s": "he said "hi" to", "n": 2}', {"s": 'he said "hi" to', "n": 2}),
    ('{"s": "he said "hi", then left", "n": 2}', {"s": 'he said "hi", then left', "n": 2}),
    ('{"s": "print("{}")", "n": 2}', {"s": 'print("{}")', "n": 2}),
    ('{"s": "x = {"a": 1, "b": [2]}; y", "n": 2}', {"s": 'x = {"a": 1, "b": [2]}; y', "n": 2}),
    ('{"s": "<a href="x">y</a>", "n": 2}', {"s": '<a href="x">y</a>', "n": 2}),
    ('{"s": "he said "hi"", "n": 2}', {"s": 'he said "hi"', "n": 2}),
    ('{"s": ""hi" he said"}', {"s": '"hi" he said'}),
    ('{"l": ["a "b" c", "d"], "s": "x"}', {"l": ['a "b" c', "d"], "s": "x"}),
    ('{"s": "if a == "b":\n\tpass", "n": 2}', {"s": 'if a == "b":\n\tpass', "n": 2}),
    ('{"l": ["a]";]}', {"l": ["a]"]}),
    ('{"l": ["a]"; "b"; "c]";], "n": 2}', {"l": ["a]", "b", "c]"], "n": 2}),
    ('{"s": "a}"; "n": 2;}', {"s": "a}", "n": 2}),
    ('{"s": "x = ["a"]; y = {"b": "c"};", "n": 2}', {"s": 'x = ["a"]; y = {"b": "c"};', "n": 2}),
    ('{"s": "if (a["b"]) { return "c"; }", "n": 2}', {"s": 'if (a["b"]) { return "c"; }', "n": 2}),
    ('{"s": "```py\nprint("a")\n```", "n": 2}', {"s": '```py\nprint("a")\n```', "n": 2}),
    # What only looks like such quotes.
    ('{"s": "a", "n": "}", "l": ["", "]"], "t": ""}', {"s": "a", "n": "}", "l": ["", "]"], "t": ""}),
    ('{"it\'s": "a", "s": "it\'s", "t": "b:"}', {"it's": "a", "s": "it's", "t": "b:"}),
    (r'{"s": "{\"a\": \"b\"}", "n": "\", \"n\": 2"}', {"s": '{"a": "b"}', "n": '", "n": 2'}),
    # Lines and tabs in strings, keys without quotes, separators.
    ('{"s": "a\nb\tc\r\nd"}', {"s": "a\nb\tc\r\nd"}),
    ('{s: "a", n: 2, o: {k_1: true}}', {"s": "a", "n": 2, "o": {"k_1": True}}),
    ('{"n": 1; "s": "a; b"; "l": [1; 2]}', {"n": 1, "s": "a; b", "l": [1, 2]}),
    ('{"l": ["x", 1; 2; ], "s": "a"}', {"l": ["x", 1, 2], "s": "a"}),
    ('{"s": "a" "n": 2 "l": ["x" "y"]}', {"s": "a", "n": 2, "l": ["x", "y"]}),
    # Three quotes.
    ('{"s": """a"""}', {"s": "a"}),
    ('{"s": """a "b",\n{"c": "d"}, ""\n""", "n": 2}', {"s": 'a "b",\n{"c": "d"}, ""\n', "n": 2}),
    ("{'s': '''it's''', 'n': 2}", {"s": "it's", "n": 2}),
    ('{"s": """say "a"""", "l": ["""b""", """"c" d"""]}', {"s": 'say "a"', "l": ["b", '"c" d']}),
    (r'{"s": """a\n\"b\" \d""", "n": 2}', {"s": 'a\n"b" \\d', "n": 2}),
    ('{"s": """""", "n": 2}', {"s": "", "n": 2}),
    # Quotes that are the text.
    ('{"s": """, "n": 2}', {"s": '"', "n": 2}),
    ('{"s": """", "n": """""}', {"s": '""', "n": '"""'}),
    # Comments.
    (
        '{\n // a "b", {c}\n "s": "a", // it\'s\n "n": 2, # two\n "l": [1, /* "2" */ 3] //\n}',
        {"s": "a", "n": 2, "l": [1, 3]},
    ),
    ('{"s": "a" // b\n, "n": 2 # c\n, "l": # d\n[] /**/}', {"s": "a", "n": 2, "l": []}),
    ('{"s": "a", /* b */ "n": 2}', {"s": "a", "n": 2}),
    ('{"s": "http://a/#b", "t": "/* c */ // d", "n": 2}', {"s": "http://a/#b", "t": "/* c */ // d", "n": 2}),
    ('{"s": "x("a"), // b\ny", "n": 2}', {"s": 'x("a"), // b\ny', "n": 2}),
    # Numbers of Python, and texts without quotes.
    ('{"n": +5, "f": -.5, "l": [1_000, 2., +1e3]}', {"n": 5, "f": -0.5, "l": [1000, 2, 1000]}),
    (
        '{"s": ls -la, "t": a/b.c#1, u: http://a/b?c=d, "n": 2}',
        {"s": "ls -la", "t": "a/b.c#1", "u": "http://a/b?c=d", "n": 2},
    ),
    (
        '{"l": [a, b c, 03106, #fff], "n": NaN, "v": 1.2.3}',
        {"l": ["a", "b c", "03106", "#fff"], "n": "NaN", "v": "1.2.3"},
    ),
    # Several objects whose quotes are not escaped.
    ('{"s": "{"a": "b"}\n{"c": "d"}", "n": 2}', {"s": '{"a": "b"}\n{"c": "d"}', "n": 2}),
    ('{"s": "[\n {"a": "b"},\n {"c": "d"}\n]", "n": 2}', {"s": '[\n {"a": "b"},\n {"c": "d"}\n]', "n": 2}),
    ('{"s": "{"a": "b"} and {"c": {"d": "e"}}.", "n": 2}', {"s": '{"a": "b"} and {"c": {"d": "e"}}.', "n": 2}),
    ('{"n": 2, "s": "x = {"a": ["b"]}; f({"c": "d"})"}', {"n": 2, "s": 'x = {"a": ["b"]}; f({"c": "d"})'}),
    # Brackets that only look like theirs.
    ('{"s": "a {", "o": {"s": "b [{"}, "n": 2}', {"s": "a {", "o": {"s": "b [{"}, "n": 2}),
    ('{"s": "a {"}', {"s": "a {"}),
    ('{"o": {"s": "[[{"}}', {"o": {"s": "[[{"}}),
]


def calls_of(family: str, text: str) -> list[tuple[str, str, Any]]:
    found = in_one_and_by_character(lambda: FAMILIES[family.split(" ", maxsplit=1)[0]](TOOLS), text)
    return [(kind, *rest, json.loads(last)) for kind, *rest, last in found if kind != "content" or last.strip()]


@pytest.mark.parametrize("family", FAMILIES_OF_JSON)
@pytest.mark.parametrize(("written", "expected"), MENDED)
def test_arguments_that_are_almost_json(family: str, written: str, expected: dict[str, Any]) -> None:
    """vLLM and SGLang give such a call up as text; json-repair reads it."""
    both = wrapped(family, written) + wrapped(family, '{"n": 3}', "look_up")
    assert calls_of(family, both) == [("call", "add", expected), ("call", "look_up", {"n": 3})]


@pytest.mark.parametrize("family", ["hermes", "llama3", "mistral list"])
def test_a_whole_call_is_a_dict_of_python(family: str) -> None:
    text = wrapped(family, "{'s': None}").replace('"', "'")
    assert calls_of(family, text) == [("call", "add", {"s": None})]


@pytest.mark.parametrize("family", FAMILIES_OF_JSON)
@pytest.mark.parametrize("quotes", ['"', '""', '"""', '""""'])
def test_three_quotes_are_closed_by_others(family: str, quotes: str) -> None:
    """Where the call ends, fewer are enough; one more is a part of the text."""
    text = wrapped(family, f'{{"n": 2, "s": """a "b" c{quotes}}}')
    ((*call, given),) = calls_of(family, text)
    assert (*call, given) == ("call", "add", {"n": 2, "s": 'a "b" c' + quotes[3:]})


def test_comments_stand_between_the_parts_of_a_call() -> None:
    text = '<tool_call>{ // "name": "x"\n"name": "add", # it\n"arguments": {"n": 1} /* } */ }</tool_call>'
    assert calls_of("hermes", text) == [("call", "add", {"n": 1})]


@pytest.mark.parametrize("key", ["arguments", "parameters", "args", "input"])
def test_the_arguments_of_a_call_have_one_of_these_names(key: str) -> None:
    """Under another name than usual they were left out of a call that seemed whole."""
    text = f'<tool_call>{{"name": "add", "{key}": {{"n": 1}}}}</tool_call>'
    assert calls_of("hermes", text) == [("call", "add", {"n": 1})]


NEIGHBOURS: tuple[Any, ...] = ("x", "it's", "}", 1, -2.5, True, None, [], ["y"], {}, {"k": "v"})


@pytest.mark.parametrize("write", [json.dumps, repr])
@pytest.mark.parametrize("family", ["hermes", "llama3"])
def test_values_of_any_two_kinds_come_after_each_other(family: str, write: Callable[[Any], str]) -> None:
    """What ends the first one is known when the second one has only begun."""
    for pair in itertools.product(NEIGHBOURS, repeat=2):
        for written in ({"l": [*pair]}, dict(zip("ab", pair, strict=True))):
            assert calls_of(family, wrapped(family, write(written))) == [("call", "add", written)]


@pytest.mark.parametrize("family", FAMILIES_OF_JSON)
def test_items_of_a_list_lack_their_commas(family: str) -> None:
    """The arguments were no JSON, or an object after one with a last comma was taken for the next call."""
    firsts, seconds = ("{}", '{"a": 1,}', "[1,]", "[[]]", '{"a": [1,]}', "1", "null"), ("{}", '{"b": 2}', "[3]", '"c"')
    for first, space, second in itertools.product(firsts, ("", " ", "\n "), seconds):
        expected = [json.loads(one.replace(",]", "]").replace(",}", "}")) for one in (first, second)]
        text = wrapped(family, f'{{"l": [{first}{space}{second}], "n": 2}}')
        assert calls_of(family, text) == [("call", "add", {"l": expected, "n": 2})], text


@pytest.mark.parametrize("family", FAMILIES_OF_JSON)
def test_brackets_that_a_string_only_closes_say_nothing_of_its_end(family: str) -> None:
    for closed, after in itertools.product(("}", "]]", "} }", "{}}}"), ("<b>", "[1]", "{x}", "`c`", "", ".")):
        said = f'a {closed} x = {{"k": "v"}} {after}'
        text = wrapped(family, f'{{"s": "{said}", "n": 2}}')
        assert calls_of(family, text) == [("call", "add", {"s": said, "n": 2})], text


@pytest.mark.parametrize("family", [family for family in FAMILIES_OF_JSON if FAMILIES[family.split()[0]].closes])
@pytest.mark.parametrize("comment", ["// so", "# so", "/* so"])
def test_a_comment_leaves_what_the_call_ends_with(family: str, comment: str) -> None:
    """It took the marker in which it ended, and with that the content after it."""
    whole = wrapped(family, '{"n": 1}').rstrip("\n")
    written, _, closing = whole.partition("}")
    text = written + " " + comment + closing.lstrip("`}\n") + "It is."
    *call, (_, said) = in_one_and_by_character(lambda: FAMILIES[family.split()[0]](TOOLS), text)
    assert (call, said.strip()) == ([("call", "add", '{"n": 1 }')], "It is."), text


@pytest.mark.parametrize("family", ["hermes", "llama3", "mistral"])
def test_a_string_ends_before_any_sign_and_key(family: str) -> None:
    """One before ``;}`` took in the key that holds a quote of the other kind, and one before a comment the rest.

    A long text follows, so that the end of the call does not say it.
    """
    values = ('"a"', "'a'", r'"say \"a\""')
    signs = ("},", ";},", " /* b */},", "}, // b\n", "}, /* b */")
    for value, sign, key in itertools.product(values, signs, ('"k"', "'k'", '"it\'s"', "'say \"b\"'")):
        written = f'{{"o": {{"s": {value}{sign} {key}: "{"c" * MOST_AHEAD}"}}'
        expected = {"o": {"s": ast.literal_eval(value)}, ast.literal_eval(key): "c" * MOST_AHEAD}
        assert calls_of(family, wrapped(family, written)) == [("call", "add", expected)], written


@pytest.mark.parametrize("family", FAMILIES_OF_JSON)
def test_content_after_a_call_is_no_part_of_its_last_string(family: str) -> None:
    for space, after in itertools.product((" ", "\n", "\n\n"), ('"so" he said', "'x' is", "word", "7", "(x)", ": b")):
        text = wrapped(family, '{"s": "a"}').rstrip("; \n") + space + after
        found = in_one_and_by_character(lambda: FAMILIES[family.split(" ", maxsplit=1)[0]](TOOLS), text)
        assert found[:1] == [("call", "add", '{"s": "a"}')], text
        assert [(kind, rest[-1].strip()) for kind, *rest in found[1:]] == [("content", after)], text


OF_TYPES: list[tuple[str, dict[str, Any], Any]] = [
    ("{'a': 1, 'b': None}", {"type": "object"}, {"a": 1, "b": None}),
    ("['x', 'it\\'s', True]", {"type": "array"}, ["x", "it's", True]),
    ('{"a": "say "hi" x", }', {"type": ["object", "null"]}, {"a": 'say "hi" x'}),
    ('{"a": [1, 2}', {"anyOf": [{"type": "object"}, {"type": "null"}]}, {"a": [1, 2]}),
    ("{'a': 1}", {"type": "string"}, "{'a': 1}"),
    ("{'a': 1}", {"type": ["object", "string"]}, "{'a': 1}"),
    ("{'a': 1}", {}, "{'a': 1}"),
    ("['a' @@ x", {"type": "array"}, "['a' @@ x"),
    ("[1, @]", {"type": "array"}, [1, "@"]),
    ("[a b, c]", {"type": "array"}, ["a b", "c"]),
]


@pytest.mark.parametrize("family", ["qwen3_coder", "glm45"])
@pytest.mark.parametrize(("written", "schema", "expected"), OF_TYPES)
def test_a_value_between_tags_is_almost_json(family: str, written: str, schema: dict[str, Any], expected: Any) -> None:
    """Only where the schema has no text: there it is what was written."""
    text = {
        "qwen3_coder": f"<tool_call>\n<function=add>\n<parameter=v>\n{written}\n</parameter>\n</function>\n",
        "glm45": f"<tool_call>add\n<arg_key>v</arg_key>\n<arg_value>{written}</arg_value>\n</tool_call>",
    }[family]
    ((_, _, found),) = in_one_and_by_character(lambda: FAMILIES[family](TOOLS, {"add": {"v": schema}}), text)
    assert json.loads(found) == {"v": expected}


@pytest.mark.parametrize("family", FAMILIES_OF_JSON)
@given(arguments, places, st.sampled_from((None, 1)))
def test_json_is_what_it_says(family: str, written: dict[str, Any], where: list[int], indent: int | None) -> None:
    """C03: no mending changes arguments that are JSON, wherever their text is cut."""
    text = wrapped(family, json.dumps(written, ensure_ascii=False, indent=indent))
    parser = FAMILIES[family.split(" ", maxsplit=1)[0]](TOOLS)
    (found, *_) = [part for part in shown(parsed(parser, cut(text, where))) if part[0] != "content"]
    assert (found[0], json.loads(found[2])) == ("call", written)


PIECES = (
    '"',
    "'",
    ",",
    ":",
    ";",
    "{",
    "}",
    "[",
    "]",
    " ",
    "\n",
    "a",
    "1",
    "\\",
    '"k": ',
    "</tool_call>",
    "None",
    "//",
    "#",
    '"""',
)


@pytest.mark.parametrize("family", FAMILIES_OF_JSON)
@given(st.lists(st.sampled_from(PIECES), max_size=40).map("".join), places)
def test_damaged_json_comes_to_the_same_wherever_it_is_cut(family: str, written: str, where: list[int]) -> None:
    """C03: and a call has an end only if its arguments are an object."""
    text = wrapped(family, f'{{"s": "x{written}')
    make = FAMILIES[family.split(" ", maxsplit=1)[0]]
    whole = parsed(make(TOOLS), [text])
    assert parsed(make(TOOLS), cut(text, where)) == whole
    assert all(isinstance(json.loads(part[2]), dict) for part in shown(whole) if part[0] == "call")


@pytest.mark.parametrize("comment", ["#", "//", "/*"])
@pytest.mark.parametrize("end", ["\n", "*/\n"])
def test_a_comment_does_not_hide_the_end_of_a_call(comment: str, end: str) -> None:
    """Whether the comment or the call ends first must not depend on how much of both has come."""
    text = f'[TOOL_CALLS]add[ARGS]{{"s": "a"read"{comment} ]""b"[TOOL_CALLS]look_up[ARGS]{{"n": 3}}{end}'
    found = in_one_and_by_character(lambda: FAMILIES["mistral"](TOOLS), text)
    assert ("call", "look_up", '{"n": 3}') in found
