"""Calls whose arguments are no JSON, but stand between tags or are Python. They become JSON, wherever they are cut."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from parsed_answers import cut, in_one_and_by_character, parsed, places, shown

from engine.frontend.text.reasoning import CallArguments
from engine.frontend.text.tools.argument_schemas import properties_of
from engine.frontend.text.tools.families import CALL, CALLS, END_CALL, END_CALLS, FAMILIES, SEPARATOR
from engine.frontend.text.tools.tagged_values import TaggedValues, json_of

TOOLS = ("add", "look_up", "mcp__gmail-list")
SCHEMAS = {
    "s": {"type": "string"},
    "n": {"type": "integer"},
    "f": {"type": "number"},
    "b": {"type": "boolean"},
    "o": {"type": "object"},
    "l": {"type": "array"},
    "z": {"type": ["string", "null"]},
}
NAMED = ("llama4", "qwen3_coder", "glm45")
Call = tuple[str, dict[str, Any]]


def parser(family: str) -> Any:
    return FAMILIES[family](TOOLS, dict.fromkeys(TOOLS, SCHEMAS))


def parse(family: str, text: str) -> list[tuple[str, ...]]:
    """Parse a text at once and character by character."""
    return in_one_and_by_character(lambda: parser(family), text)


def raw(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def written(family: str, calls: list[Call]) -> str:
    """Calls as a model of the family writes them."""
    if family == "llama4":
        of_each = [f"{name}({', '.join(f'{key}={value!r}' for key, value in given.items())})" for name, given in calls]
        return f"[{', '.join(of_each)}]" if calls else ""
    if family == "qwen3_coder":
        bodies = [
            f"<function={name}>\n"
            + "".join(f"<parameter={key}>\n{raw(value)}\n</parameter>\n" for key, value in given.items())
            + "</function>\n"
            for name, given in calls
        ]
        return "\n".join(f"<tool_call>\n{body}</tool_call>" for body in bodies)
    bodies = [
        f"{name}\n"
        + "".join(f"<arg_key>{key}</arg_key>\n<arg_value>{raw(value)}</arg_value>\n" for key, value in given.items())
        for name, given in calls
    ]
    return "\n".join(f"<tool_call>{body}</tool_call>" for body in bodies)


texts = st.text(st.characters(exclude_categories=("Cs",)), max_size=10)
# As Python's repr and JSON both write them.
inner = st.recursive(
    st.integers(-(10**6), 10**6) | texts | st.booleans() | st.none(),
    lambda more: st.lists(more, max_size=3) | st.dictionaries(texts, more, max_size=2),
    max_leaves=4,
)
arguments = st.fixed_dictionaries(
    {},
    optional={
        "s": texts,
        "n": st.integers(-(10**9), 10**9),
        "f": st.floats(-1e6, 1e6, allow_nan=False).map(float),
        "b": st.booleans(),
        "o": st.dictionaries(texts, inner, max_size=2),
        "l": st.lists(inner, max_size=3),
    },
)


@given(st.sampled_from(NAMED), st.lists(st.tuples(st.sampled_from(TOOLS), arguments), max_size=3), places)
def test_calls_are_found_wherever_their_text_is_cut(family: str, calls: list[Call], where: list[int]) -> None:
    """C03: names, order, types and values are what was written."""
    found = shown(parsed(parser(family), cut(written(family, calls), where)))
    assert [(part[0], part[1], json.loads(part[2])) for part in found] == [("call", *call) for call in calls]


FRAGMENTS = (
    "<tool_call>", "</tool_call>", "<function=", "<function=add>", "</function>", "<parameter=", "<parameter=s>",
    "</parameter>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "<|python_start|>", "<|python_end|>",
    "[", "]", "(", ")", "=", "{", "}", "'", '"', "\\", "\\u00", "add", "add(", "s", "n", ",", ":", "1", "None", " ",
    "\n", CALLS, CALL, SEPARATOR, END_CALL, END_CALLS, *FAMILIES["kimi_k2"].markers,
    *FAMILIES["gpt_oss"].markers, "assistant", "analysis", "commentary", "to=functions.add",
    "functions.add:0", "```json", "```", '{"a": 1}', "\u20ac",
)  # fmt: skip
jumbles = st.lists(st.sampled_from(FRAGMENTS) | st.text(max_size=3), max_size=24).map("".join)


@given(st.sampled_from((*NAMED, "deepseek", "kimi_k2", "gpt_oss")), jumbles, places)
def test_any_text_comes_to_the_same_wherever_it_is_cut(family: str, text: str, where: list[int]) -> None:
    """C03: and none is an error; a whole call has arguments that are JSON."""
    whole = parsed(parser(family), [text])
    assert parsed(parser(family), cut(text, where)) == whole
    if family in NAMED:
        for part in shown(whole):
            if part[0] == "call":
                json.loads(part[2])


@pytest.mark.parametrize(
    ("family", "text"),
    [
        ("llama4", "[add()]"),
        ("llama4", "<|python_start|>[add()]<|python_end|>"),
        ("qwen3_coder", "<tool_call>\n<function=add>\n</function>\n</tool_call>"),
        ("qwen3_coder", "<function=add></function>"),
        ("glm45", "<tool_call>add</tool_call>"),
        ("glm45", "<tool_call>add\n</tool_call>\n"),
        ("deepseek", f"{CALLS}{CALL}add{SEPARATOR}{{}}{END_CALL}{END_CALLS}"),
    ],
)
def test_a_call_without_arguments(family: str, text: str) -> None:
    """vLLM issue 44326: streamed, a call of GLM without arguments was lost."""
    assert parse(family, text) == [("call", "add", "{}")]


@pytest.mark.parametrize(
    ("family", "text"),
    [
        ("qwen3_coder", "<tool_call>\n<function=add>\n<parameter=s>\n{}\n</parameter>\n</function>\n</tool_call>"),
        ("glm45", "<tool_call>add\n<arg_key>s</arg_key>\n<arg_value>{}</arg_value>\n</tool_call>"),
    ],
)
@pytest.mark.parametrize("value", ["03106", "true", "a </parameter> b </arg_value> c", "x\n\ny", '{"a": 1}', "", " "])
def test_a_text_is_what_was_written(family: str, text: str, value: str) -> None:
    """SGLang pull request 13411: a text of digits became a number; vLLM pull request 33965: a tag in it ended it."""
    assert parse(family, text.format(value)) == [("call", "add", json.dumps({"s": value}))]


def test_a_long_text_is_passed_on_as_it_comes() -> None:
    """vLLM issue 30439, SGLang issue 27005: a file's content was held up to its last line."""
    reader = parser("qwen3_coder")
    reader.push("<tool_call>\n<function=add>\n<parameter=s>\n")
    assert reader.push('line "1"\nli') == [CallArguments('line \\"1\\"\\nli')]
    assert reader.push("ne 2\n") == [CallArguments("ne 2")]


def test_these_tests_notice_a_closing_tag_that_is_taken_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fault of vLLM pull request 33965, planted."""
    made = TaggedValues.__init__

    def close_anywhere(self: TaggedValues, text: Any, **details: Any) -> None:
        made(self, text, **{**details, "followers": ("",)})

    monkeypatch.setattr(TaggedValues, "__init__", close_anywhere)
    text = "<tool_call>add\n<arg_key>s</arg_key>\n<arg_value>a</arg_value> b</arg_value>\n</tool_call>"
    with pytest.raises(AssertionError):
        assert parse("glm45", text) == [("call", "add", json.dumps({"s": "a</arg_value> b"}))]


@pytest.mark.parametrize(
    ("text", "given"),
    [
        (r"""[add(s='it\'s', l=["a", 'b\n'], b=True)]""", {"s": "it's", "l": ["a", "b\n"], "b": True}),
        (r"""[add(s="\u20ac\x41\U0001f98a\/", o={'k': (1, 2)})]""", {"s": "\u20acA\U0001f98a/", "o": {"k": [1, 2]}}),
        ("[add(n=-3, z=None)]", {"n": -3, "z": None}),
        ("[add(n=1_000, f=.5, l=[1., 0x10,])]", {"n": 1000, "f": 0.5, "l": [1.0, 16]}),
        ("[add(b=true, z=null, s=\"'\" )]", {"b": True, "z": None, "s": "'"}),
        ("[ add( n = 1 ) ]", {"n": 1}),
    ],
)  # fmt: skip
def test_literals_of_python_become_json(text: str, given: dict[str, Any]) -> None:
    ((kind, name, said),) = parse("llama4", text)
    assert (kind, name, json.loads(said)) == ("call", "add", given)


@pytest.mark.parametrize(
    ("family", "text"),
    [
        ("llama4", "[1] and [2], a[0](x)"),
        ("llama4", "[unknown(a=1)]"),
        ("llama4", "[add('x')]"),
        ("llama4", "[add"),
        ("llama4", "<|python_start|> 1 + 1"),
        ("qwen3_coder", "<tool_call>\nnothing\n</tool_call>"),
        ("qwen3_coder", "<function=unknown>"),
        ("qwen3_coder", "<tool_call><function=></tool_call>"),
        ("glm45", "<tool_call>"),
        ("glm45", "<tool_call>two words</tool_call>"),
        ("glm45", "<tool_call>add"),
        ("deepseek", f"{CALLS}{END_CALLS}"),
        ("deepseek", f"{CALLS}{CALL}sub{{}}"),
        ("deepseek", f"{CALL}function{SEPARATOR}add\n```json\n7"),
    ],
)
def test_what_is_no_call_is_content_as_it_was_written(family: str, text: str) -> None:
    assert parse(family, text) == [("content", text)]


@pytest.mark.parametrize(
    ("family", "text", "said"),
    [
        ("llama4", "[add(s='a', n=", '{"s": "a", "n": '),
        ("llama4", "[add(s=x)]", '{"s": '),
        ("llama4", f"[add(l={'[' * 500}", '{"l": ' + "[" * 64),
        ("qwen3_coder", "<tool_call><function=add><parameter=s>\nab", '{"s": "ab'),
        ("qwen3_coder", "<tool_call><function=add><parameter=n>\n4", '{"n": '),
        ("glm45", "<tool_call>add<arg_key>s</arg_key><arg_value>ab", '{"s": "ab'),
        ("glm45", "<tool_call>add<arg_key>s</arg_key>", ""),
        ("glm45", "<tool_call>add<arg_key>s</arg_key>x", '{"s": "x'),
        ("deepseek", f'{CALL}add{SEPARATOR}{{"a": ', '{"a": '),
    ],
)
def test_a_call_that_was_cut_shows_what_there_is(family: str, text: str, said: str) -> None:
    first = parse(family, text)[0]
    assert first == ("cut", "add", said)


def test_tags_that_are_doubled_are_no_part_of_a_key() -> None:
    text = "<tool_call>add<arg_key><arg_key>s</arg_key></arg_key><arg_value>x</arg_value></tool_call>"
    assert parse("glm45", text) == [("call", "add", '{"s": "x"}')]


@pytest.mark.parametrize("fenced", [False, True])
def test_calls_of_deepseek_older_and_newer(fenced: bool) -> None:
    """vLLM pull request 23454: the two put the name on different sides of the separator."""
    args = '{"a": "```", "b": [1]}'
    one = f"function{SEPARATOR}add\n```json\n{args}\n```" if fenced else f"add{SEPARATOR}{args}"
    call = f"{CALL}{one}{END_CALL}"
    text = f"Sure.{CALLS}{call}\n{call}{END_CALLS}"
    assert parse("deepseek", text) == [("content", "Sure."), ("call", "add", args), ("call", "add", args)]


def test_llama_4_may_write_json_after_its_marker() -> None:
    text = '<|python_start|>{"name": "add", "parameters": {"n": 1}}<|python_end|>'
    assert parse("llama4", text) == [("call", "add", '{"n": 1}')]


@pytest.mark.parametrize(("written", "given"), [('"{\\"n\\": 1}"', '{"n": 1}'), ("null", "{}")])
@pytest.mark.parametrize(
    ("family", "text"),
    [
        ("mistral", "[TOOL_CALLS]add[ARGS]{}"),
        ("deepseek", f"{CALLS}{CALL}function{SEPARATOR}add\n```json\n{{}}\n```{END_CALL}{END_CALLS}"),
        ("deepseek", f"{CALLS}{CALL}add{SEPARATOR}{{}}{END_CALL}{END_CALLS}"),
        ("hermes", '<tool_call>{{"name": "add", "arguments": {}}}</tool_call>'),
    ],
)
def test_arguments_may_be_an_object_in_a_string_or_null(family: str, text: str, written: str, given: str) -> None:
    """Models of every family encode their arguments twice at times: the call was content, or named by a quote."""
    if family == "deepseek" and "function" not in text and written == "null":
        return  # A name, before a fence.
    assert parse(family, text.format(written)) == [("call", "add", given)]


@pytest.mark.parametrize("said", ['"no object"', '"{', "nulls", "7", '"[1]"'])
def test_other_arguments_are_content_as_they_were_written(said: str) -> None:
    text = f"[TOOL_CALLS]add[ARGS]{said}"
    assert parse("mistral", text) == [("content", text)]


@pytest.mark.parametrize(
    ("said", "schema", "value"),
    [
        ("5", {"type": "integer"}, 5),
        ("2026-01-15", {"type": "integer"}, "2026-01-15"),
        ("5", {"type": ["string", "null"]}, "5"),
        ("null", {"type": ["string", "null"]}, None),
        ("True", {"type": "boolean"}, True),
        ("abc", {}, "abc"),
        ('["a"]', {}, ["a"]),
        ("NaN", {"type": "number"}, "NaN"),
        ("[" * 100_000, {}, "[" * 100_000),
        ("1" * 5000, {}, "1" * 5000),
        ("7", {"type": 3}, 7),
        ("03106", {"anyOf": [{"type": "string"}, {"type": "null"}]}, "03106"),
        ("12345", {"anyOf": [{"type": "string"}, {"type": "null"}]}, "12345"),
        ("null", {"anyOf": [{"type": "string"}, {"type": "null"}]}, None),
        ("5", {"oneOf": [{"enum": ["5"]}, {"type": "boolean"}]}, "5"),
        ("5", {"anyOf": [{"type": "string"}, {"type": "integer"}]}, 5),
        ("5", {"anyOf": [{"type": "string"}, {"$ref": "#/$defs/N"}]}, 5),
        ("5", {"enum": ["5", 7, None]}, "5"),
        ("7", {"enum": ["5", 7, None]}, 7),
        ("true", {"enum": ["true", 1]}, "true"),
        ("0.0", {"enum": ["0.0", 0, False]}, "0.0"),
        ("true", {"const": "true"}, "true"),
        ("12345", {"type": "string", "pattern": "^[0-9]+$"}, "12345"),
        ("2026-01-15", {"type": "string", "format": "date"}, "2026-01-15"),
    ],
)
def test_a_value_without_quotes_is_of_its_schema(said: str, schema: dict[str, Any], value: Any) -> None:
    """mlx-lm pull request 1310: a value of another type than the schema's lost the call."""
    assert json.loads(json_of(said, schema)) == value


REFERRED: dict[str, Any] = {
    "properties": {
        "city": {"$ref": "#/$defs/text"},
        "unit": {"allOf": [{"$ref": "#/$defs/unit"}], "default": "1"},
        "area": {"anyOf": [{"$ref": "#/$defs/text"}, {"type": "null"}], "description": "or none"},
        "count": {"$ref": "#/$defs/more~1count"},
        "ring": {"$ref": "#/$defs/ring"},
        "short": {"$ref": "#/$defs/text", "minLength": 1},
        "lost": {"$ref": "#/$defs/nothing"},
    },
    "$defs": {
        "text": {"$ref": "#/$defs/plain"},
        "plain": {"type": "string", "title": "Text"},
        "unit": {"enum": ["1", "2"]},
        "more/count": {"type": "integer"},
        "ring": {"$ref": "#/$defs/ring"},
    },
}


@pytest.mark.parametrize("family", ["qwen3_coder", "glm45"])
def test_a_type_behind_a_reference_decides_how_a_value_is_read(family: str) -> None:
    given = dict.fromkeys(REFERRED["properties"], "1")
    read = parsed(FAMILIES[family](("add",), {"add": properties_of(REFERRED)}), [written(family, [("add", given)])])
    ((_, _, said),) = shown(read)
    assert json.loads(said) == given | {"count": 1, "ring": 1, "lost": 1}


@pytest.mark.parametrize("note", ["title", "description", "default", "examples", "deprecated"])
def test_a_note_beside_a_reference_leaves_its_rules(note: str) -> None:
    short = {"type": "string", "maxLength": 2, note: "short"}
    asked = {"properties": {"a": {"$ref": "#/$defs/short", note: "a"}}, "$defs": {"short": short}}
    assert properties_of(asked)["a"] == short


def test_references_are_resolved_no_further_than_a_bound() -> None:
    wide = {"anyOf": [{"$ref": "#/$defs/wide"}] * 50}
    assert properties_of({"properties": {"a": wide}, "$defs": {"wide": wide}})["a"]["anyOf"]
