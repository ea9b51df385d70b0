"""Calls in forms that models write although their template has another: doubled tags, Python's words, other keys."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from every_case import every_case
from parsed_answers import parsed_calls, shown

from engine.frontend.text.incoming_text import IncomingText
from engine.frontend.text.tools.families import CALL, CALLS, END_CALL, END_CALLS, FAMILIES, SEPARATOR
from engine.frontend.text.tools.families.kimi_k2 import ARGUMENTS, SECTION
from engine.frontend.text.tools.families.kimi_k2 import CALL as CALL_OF_KIMI

TOOLS = ("add", "look_up", "find", "pick")
PROPERTIES = {"s": {"type": "string"}, "n": {"type": "integer"}, "o": {"type": "object"}}
# Arguments with the names of a call's own keys.
OF_TOOLS = dict.fromkeys(TOOLS[:2], PROPERTIES) | {
    "find": {"type": {"type": "string"}, "input": {}},
    "pick": {"action": {}, "tool": {}, "params": {}},
}
OBJECT = '{"name": "add", "arguments": {"n": 1}}'
WRAPPED = '{"type": "function", "function": {"name": "add", "parameters": {"n": 1}}}'
NAMED = '{"type": "function", "function": "add", "parameters": {"n": 1}}'
TAGS = "<tool_call>\n<function=add>\n<parameter=n>\n1\n</parameter>\n</function>\n</tool_call>"
KEYS = "<tool_call>add\n<arg_key>n</arg_key>\n<arg_value>1</arg_value>\n</tool_call>"
ONE: list[tuple[str, ...]] = [("call", "add", '{"n": 1}')]
NONE: list[tuple[str, ...]] = [("call", "add", "{}")]


def text_of(**given: Any) -> list[tuple[str, ...]]:
    return [("call", "add", json.dumps(given))]


def parse(family: str, text: str) -> list[tuple[str, ...]]:
    """The parts of a text that the model ended, the same however the text is cut into two."""

    def of(*pieces: str) -> list[tuple[str, ...]]:
        return shown(parsed_calls(FAMILIES[family](TOOLS, OF_TOOLS), pieces))

    whole = of(text)
    assert of(*text) == whole
    for at in range(len(text)):
        assert of(text[:at], text[at:]) == whole, at
    return whole


def v31(given: str) -> str:
    return f"{CALLS}{CALL}add{SEPARATOR}{given}{END_CALL}{END_CALLS}"


def v3(given: str) -> str:
    return f"{CALLS}{CALL}function{SEPARATOR}add\n{given}{END_CALL}{END_CALLS}"


@every_case(
    ("family", "text", "expected"),
    [
        ("hermes", f"<tool_call>\n<tool_call>{OBJECT}</tool_call>\n</tool_call>", ONE),
        ("hermes", f"<tool_call>{OBJECT}</tool_call></tool_call> ok", [*ONE, ("content", "ok")]),
        ("hermes", f"A.<tool_call>{OBJECT}</tool_call>\n\nB", [("content", "A."), *ONE, ("content", "\n\nB")]),
        ("qwen3_coder", f"<tool_call>\n{TAGS}</tool_call>", ONE),
        ("glm45", f"<tool_call>{KEYS}\n</tool_call>", ONE),
        ("mistral", '[TOOL_CALLS][TOOL_CALLS]add[ARGS][ARGS]{"n": 1}', ONE),
        ("deepseek", CALLS + v31('{"n": 1}') + END_CALLS, ONE),
        ("llama4", "<|python_start|>[add(n=1)]<|python_end|><|python_end|>", ONE),
        ("hermes", "<tool_call><tool_call> is a tag", [("content", "<tool_call><tool_call> is a tag")]),
    ],
)
def test_doubled_tags_are_no_text(family: str, text: str, expected: list[tuple[str, ...]]) -> None:
    assert parse(family, text) == expected


@every_case(
    ("family", "text"),
    [
        ("hermes", f"<tool_call>{{{OBJECT}}}</tool_call>"),
        ("hermes", f"<tool_call>{WRAPPED}</tool_call>"),
        ("qwen3_coder", f"<tool_call>\n{OBJECT}\n</tool_call>"),
        ("glm45", f"<tool_call>{OBJECT}</tool_call>"),
        ("llama3", WRAPPED),
        ("llama3", NAMED),
        ("mistral", f"[TOOL_CALLS][{WRAPPED}]"),
        ("mistral", '[TOOL_CALLS]"add"[ARGS]{"n": 1}'),
        ("qwen3_coder", TAGS.replace("=add", '="add"').replace("=n", "='n'")),
        ("qwen3_coder", TAGS.replace("<parameter=n>", '<parameter name="n">')),
        ("llama4", "[ add ( n = 1 ) ]"),
        ("llama4", "<|python_start|>add(n=1)<|python_end|>"),
        ("deepseek", v31('\n```json\n{"n": 1}\n```\n')),
        ("deepseek", v3('```\n{"n": 1}\n```')),
        *(("deepseek", form(f"'{json.dumps({'n': 1})}'")) for form in (v31, v3)),
        ("deepseek", f'{CALLS}{CALL}add\n```json\n{{"n": 1}}\n```{END_CALL}{END_CALLS}'),
        ("llama3", '<function=add>{"n": 1}</function>'),
        ("llama3", '<function=add> {"n": 1}'),
        ("qwen3_coder", TAGS.replace("<function=add>", "<add>").replace("</function>", "</add>")),
        ("qwen3_coder", TAGS.replace("<function=add>", '<invoke name="add">').replace("</function>", "</invoke>")),
        ("qwen3_coder", TAGS.replace("<function=add>", "<tool=add>").replace("</function>\n", "")),
    ],
)
def test_a_call_in_the_form_of_another_model(family: str, text: str) -> None:
    assert parse(family, text) == ONE


# A name in the tags of each family, and what models write after it in place of the family's arguments.
NAMES = {
    "hermes": ("<tool_call>\n", "\n</tool_call>"),
    "glm45": ("<tool_call>", "</tool_call>"),
    "qwen3_coder": ("<tool_call>", "</tool_call>"),
    "mistral": ("[TOOL_CALLS]", ""),
    "llama3": ("<|python_tag|>", ""),
    "deepseek": (f"{CALLS}{CALL}", f"{END_CALL}{END_CALLS}"),
    "qwen3_coder function": ("<tool_call><function=", "</function></tool_call>"),
    "qwen3_coder tag": ('<function name="', "></function>"),
    "llama3 function": ("<function=", "</function>"),
    "llama3 tag": ("<function=", "></function>"),
}
WITHOUT_TAG = "(n=1)"


@every_case(("family", "place"), [(name.split()[0], place) for name, place in NAMES.items()])
@every_case(
    "given",
    [WITHOUT_TAG, '({"n": 1})', '{"n": 1}', ' {"n": 1}', " n=1", ' n="1"', ".call(n=1)", " ( n = 1, )", "( n=1"],
)
def test_arguments_follow_the_name_of_a_tool(family: str, place: tuple[str, str], given: str) -> None:
    """The name took them in: a call of a tool that does not exist, without arguments."""
    before, after = place
    name = "add" if "=" in before or "name" in before or given.startswith(" ") else "functions.add"
    quote = '"' * before.endswith('"')
    assert parse(family, f"{before}{name}{quote}{given.removeprefix('.call' * len(quote))}{after}") == ONE
    assert parse(family, f"{before}{name}{quote}(s='a', n=None){after}") == text_of(s="a", n=None)


@pytest.mark.parametrize("tag", ["<function=add>{}</function>", "<function=add>{}", "<function=add >\n{}\n</function>"])
@pytest.mark.parametrize("given", [WITHOUT_TAG, '({"n": 1})', "n=1", "n = '1'", '{"n": 1}'])
def test_arguments_follow_the_tag_of_a_function(tag: str, given: str) -> None:
    assert parse("qwen3_coder", tag.format(given)) == ONE


@pytest.mark.parametrize("text", ["<function=add>{}</function>", "<function=add>\n{}\n</function>"])
@pytest.mark.parametrize(
    "given", [".call(n=1)", "[add(n=1)]", "add(n=1)", "[ functions.add ( n = 1 ) ]", "add.call(n=1)"]
)
@pytest.mark.parametrize("family", ["qwen3_coder", "llama3"])
def test_a_function_is_called_within_its_tag(family: str, text: str, given: str) -> None:
    """The call seemed to have no arguments."""
    assert parse(family, text.format(given)) == ONE


def test_an_attribute_and_a_parameter_are_of_one_call() -> None:
    text = '<tool_call><function=add s="a>b"><parameter=n>\n1\n</parameter></function></tool_call>'
    assert parse("qwen3_coder", text) == text_of(s="a>b", n=1)


@pytest.mark.parametrize("family", ["hermes", "glm45", "qwen3_coder", "mistral", "llama3"])
def test_a_list_of_calls_in_python_follows_a_marker(family: str) -> None:
    before, after = NAMES[family]
    assert parse(family, f"{before}[add(n=1), add(n=1)]{after}") == ONE * 2
    assert parse(family, f"{before}add(n=1)\nadd(n=1){after}") == ONE * 2


@pytest.mark.parametrize("text", ["add n", "add color=red", "add, n=1", "sub(n=1)", "sub n=1", "add (1)", "add is n=1"])
@pytest.mark.parametrize("family", ["hermes", "mistral", "llama3"])
def test_a_name_in_prose_is_no_call(family: str, text: str) -> None:
    before, after = NAMES[family]
    assert parse(family, before + text + after) == [("content", before + text + after)]


@every_case(
    "written",
    [
        f'{CALLS}add{SEPARATOR}{{"n": 1}}{END_CALL}add{SEPARATOR}{{"n": 1}}{END_CALL}{END_CALLS}',
        f'{CALL}add{SEPARATOR}{{"n": 1}}{CALL}add{SEPARATOR}{{"n": 1}}',
        f'{CALLS}function{SEPARATOR}add\n```json\n{{"n": 1}}\n```\nfunction{SEPARATOR}add\n```json\n{{"n": 1}}\n```',
        f'{CALLS}add{{"n": 1}}add(n=1){END_CALLS}',
    ],
)
def test_calls_of_deepseek_lack_markers(written: str) -> None:
    assert parse("deepseek", f"{written}ok") == [*ONE * 2, ("content", "ok")]


def test_calls_of_mistral_lack_markers() -> None:
    assert parse("mistral", '[TOOL_CALLS]add{"n": 1}add{"n": 1} add it') == [*ONE * 2, ("content", "add it")]
    assert parse("mistral", '[TOOL_CALLS]add[ARGS]{"n": 1}\nadd[ARGS]{"n": 1}') == ONE * 2
    assert parse("mistral", '[TOOL_CALLS]add[ARGS]{"n": 1}sub[ARGS]{}') == [*ONE, ("content", "sub[ARGS]{}")]


@every_case(
    ("family", "text"),
    [
        ("llama3", '<function=sub>{"n": 1}</function>'),
        ("llama3", "<function=add>(1)</function>"),
        ("llama3", "<function=add"),
        ("qwen3_coder", "<tool_call>\n<b>add</b>\n</tool_call>"),
        *(
            ("qwen3_coder", f"<function=add>{given}</function>")
            for given in ("n: 1", '[{"n": 1}]', "\n1\n", "<m>1</m>", "addn(n=1)", "add", "[sub(n=1)]")
        ),
        ("deepseek", f"{CALL}sub\n```json\n{{}}\n```{END_CALL}"),
    ],
)
def test_other_tags_are_content_as_they_were_written(family: str, text: str) -> None:
    assert parse(family, text) == [("content", text)]


def test_no_argument_of_a_tag_with_attributes_is_lost() -> None:
    text = '<tool_call><function=add><parameter name="s">a<b</parameter><parameter name="n">2</parameter></function>'
    assert parse("qwen3_coder", text) == text_of(s="a<b", n=2)
    assert parse("qwen3_coder", text.replace("</parameter>", "\n")) == text_of(s="a<b", n=2)


@every_case(
    ("family", "text"),
    [
        ("deepseek", v31("")),
        ("deepseek", v31("null")),
        ("deepseek", v3("")),
        ("deepseek", v3("```json\n\n```")),
        ("mistral", "[TOOL_CALLS]add[ARGS]"),
        ("llama4", "[add( )]"),
    ],
)
def test_a_call_that_ends_before_its_arguments_has_none(family: str, text: str) -> None:
    assert parse(family, text) == NONE


def test_two_calls_without_arguments_are_two() -> None:
    assert parse("mistral", "[TOOL_CALLS]add[ARGS][TOOL_CALLS]add[ARGS]") == NONE * 2
    assert parse("llama4", "[add(n=1); add(n=1)]") == ONE * 2


@pytest.mark.parametrize("family", ["hermes", "llama3"])
def test_words_of_python_are_those_of_json(family: str) -> None:
    body = '{"name": "add", "parameters": {"o": {"a": [True, False,None]}, "s": "True", "n": None}}'
    text = f"<tool_call>{body}</tool_call>" if family == "hermes" else body
    ((kind, _, given),) = parse(family, text)
    assert (kind, json.loads(given)) == ("call", {"o": {"a": [True, False, None]}, "s": "True", "n": None})


@every_case(
    ("written", "value"),
    [
        ('"""a "b" c\n"""', 'a "b" c\n'),
        ("'''it's'''", "it's"),
        ('""', ""),
        ('"a" \'b\'\n"c"', "abc"),
        ('r"a\\d\\"', None),
        ('r"a\\d"', "a\\d"),
        ('b"x"', "x"),
        ("007", 7),
    ],
)
def test_a_literal_of_python(written: str, value: Any) -> None:
    parts = parse("llama4", f"[add(s={written}, n=2)]")
    assert parts == (text_of(s=value, n=2) if value is not None else text_of(s='a\\d\\", n=2)]'))


def test_calls_within_calls_are_one_deep() -> None:
    text = '<tool_call>{"function": {"function": ' + OBJECT
    assert parse("hermes", text) == [("content", text)]
    parser = FAMILIES["hermes"](TOOLS, {})
    assert shown([*parser.push('<tool_call>{"function": ' + '{"function": ' * 4000), *parser.flush()])


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of times that a character was looked at."""
    count, peek = [0], IncomingText.peek

    def counted(text: IncomingText) -> Iterator[None]:
        count[0] += 1
        return peek(text)

    monkeypatch.setattr(IncomingText, "peek", counted)
    return count


OPENERS: dict[str, tuple[str, ...]] = {
    "hermes": (
        "<tool_call>add(",
        "<tool_call>add(l=[",
        "<tool_call>add n=",
        "<tool_call>[add(n=1),",
        '<tool_call>add(s="',
        "<tool_call>",
        '<tool_call>{"name": "add", "arguments": {',
        '<tool_call>{"function": {',
        "{",
        '<tool_call>{"name": "add", "arguments": {"s": """',
        '<tool_call>{"name": "add", "arguments": {//',
        '<tool_call>{"name": "add", "arguments": {"s": "{"',
        '<tool_call>{"s": "a", /*',
    ),
    "llama3": (
        "<function=add(",
        "<|python_tag|>add(n=1, ",
        "<|python_tag|>add n=1 ",
        "{",
        '{"name": "add", "parameters": {',
        '{"function": {',
        "<|python_tag|>{{",
    ),
    "mistral": (
        "[TOOL_CALLS]add(n={",
        "[TOOL_CALLS]add",
        "[TOOL_CALLS]add[ARGS]{}add[ARGS]{}add",
        "[TOOL_CALLS]",
        "[TOOL_CALLS]add[ARGS]",
        '[TOOL_CALLS][{"arguments": {',
    ),
    "llama4": ("[", "[add(n=1,<", "[add(n=1,x", "[add(n=[", "<|python_start|>add(", ",add", "[add(n='''"),
    "qwen3_coder": (
        "<function=add n=",
        "<function=add(n=[",
        "<function=add>(",
        "<function=add s='",
        "<tool_call>",
        "<tool_call>{",
        "<tool_call><function=add><parameter=",
        "</parameter",
    ),
    "glm45": (
        "<tool_call>add(n=[",
        "<tool_call>add n=1",
        "<tool_call>",
        "<tool_call>{",
        "<tool_call>add<arg_key>n<arg_value>",
        "</arg_value>",
    ),
    "gpt_oss": (
        "<|channel|>",
        "<|start|>assistant",
        "<|channel|>commentary to=functions.add <|constrain|>json<|message|>",
        "<|channel|>commentary to=functions.add<|message|>{",
        "<|channel|>analysis<|message|>hm <|end|>",
        "<|start|> to=functions.add",
        "<|message|> ",
    ),
    "kimi_k2": (
        SECTION,
        CALL_OF_KIMI,
        f"{CALL_OF_KIMI}add:0",
        f"{CALL_OF_KIMI}add:0{ARGUMENTS}",
        f"{CALL_OF_KIMI}7{ARGUMENTS}{{",
        f"{CALL_OF_KIMI}add(n=[",
        f"{SECTION}add:0{ARGUMENTS}{{}}",
    ),
    "deepseek": (
        f"{CALL}add(n=[",
        f"{CALLS}add{SEPARATOR}",
        f"{CALLS}add",
        CALLS,
        CALL,
        f"{CALL}add{SEPARATOR}",
        f"{CALL}add{SEPARATOR}```",
        f"{CALL}add{SEPARATOR}{{",
    ),
}


@every_case(("family", "opener"), [(family, opener) for family, openers in OPENERS.items() for opener in openers])
def test_twice_the_openers_cost_twice_the_reads(family: str, opener: str, reads: list[int]) -> None:
    def cost(text: str) -> int:
        parser, before = FAMILIES[family](TOOLS, dict.fromkeys(TOOLS, PROPERTIES)), reads[0]
        parser.push(text)
        parser.flush(stopped=True)
        return reads[0] - before

    few, many = cost(opener * 300), cost(opener * 1200)
    assert many <= 5 * few + 100, f"{few} reads for 300, {many} for 1200"


@pytest.mark.parametrize("family", ["hermes", "llama3", "mistral"])
@every_case(
    ("written", "given"),
    [
        ('{"name": "add", "s": "a", "n": 1}', {"s": "a", "n": 1}),
        ('{"s": "say "hi" x", "name": "add", "o": {"k": [1, True]}}', {"s": 'say "hi" x', "o": {"k": [1, True]}}),
        ('{"type": "function", "function": "add", "id": "c1", "s": "a"}', {"s": "a"}),
        ('{"type": "function", "function": {"name": "add", "s": "a"}}', {"s": "a"}),
        ('{"name": "find", "type": "file", "input": "x y"}', {"type": "file", "input": "x y"}),
        ('{"name": "find", "type": "function", "input": [1]}', {"input": [1]}),
        ('{"input": "x", "name": "find"}', {"input": "x"}),
        ('{"name": "find", "input": {"input": "x"}}', {"input": "x"}),
        ('{"name": "add", "n": null, "s": ""}', {"n": None, "s": ""}),
        ("{'name': 'add', 'n': None, 's': 'it's'}", {"n": None, "s": "it's"}),
        ('{"name": "add", "arguments": "{"n": 1}"}', {"n": 1}),
        ('{"name": "add", "arguments": {}, "s": "a"}', {"s": "a"}),
        ('{"s": "a", "name": "add", "arguments": {"n": 1}, "o": {}}', {"n": 1, "s": "a", "o": {}}),
        ('{"arguments": {"n": 1, "s": "b"}, "s": "a", "name": "add"}', {"n": 1, "s": "b"}),
        ('{"name": "add", "arguments": null, "s": "a"}', {"s": "a"}),
        ('{"name": "add", "arguments": "{\\"n\\": 1}", "s": "a"}', {"n": 1, "s": "a"}),
        ('{"name": "find", "arguments": {}, "type": "file"}', {}),
    ],
)
def test_arguments_stand_beside_the_name(family: str, written: str, given: dict[str, Any]) -> None:
    """The call seemed whole and had no arguments."""
    text = {"hermes": f"<tool_call>{written}</tool_call>", "llama3": written, "mistral": f"[TOOL_CALLS][{written}]"}
    ((kind, _, said),) = parse(family, text[family])
    assert (kind, json.loads(said)) == ("call", given)


@every_case(
    "written",
    ['{"name": "add", "s": "a"', '{"name": "add", "s": "a", ', '{"s": "a", "name": "add"', '{"name": "add", "s": "a"}'],
)
def test_such_a_call_lacks_its_bracket(written: str) -> None:
    assert parse("hermes", f"<tool_call>{written}</tool_call>ok") == [*text_of(s="a"), ("content", "ok")]
    assert parse("llama3", written) == text_of(s="a")
    assert parse("hermes", '<tool_call>{"name": "add", "arguments": {"s": "a", </tool_call>ok')[1:] == [
        ("content", "ok")
    ]
    assert parse("hermes", '<tool_call>{"name": "add", "o": {"k": 1</tool_call>') == text_of(o={"k": 1})


@every_case(
    "written",
    [
        '{"name": "add", "color": "red"}',
        '{"name": "Ann", "s": "a"}',
        '{"s": "a", "n": 1}',
        '{"input": "x", "name": "add"}',
    ],
)
def test_an_answer_in_json_is_no_call(written: str) -> None:
    """Only a tool's own arguments make an object without a marker its call."""
    assert parse("llama3", written) == [("content", written)]


@pytest.mark.parametrize("family", ["hermes", "mistral", "llama3"])
@every_case(
    "written",
    [
        OBJECT,
        f"[{OBJECT}]",
        f"```json\n{OBJECT}\n```",
        f"```\n[{OBJECT}]\n```\n",
        f" \n{WRAPPED}",
        'add{"n": 1}',
        'add\n{"n": 1}',
        f'{{"tool_calls": [{OBJECT}]}}',
    ],
)
def test_an_answer_begins_with_a_call_without_a_marker(family: str, written: str) -> None:
    """vLLM leaves such a call in the content; Qwen2.5-Coder, Mistral 7B and Llama write it."""
    assert parse(family, written) == ONE
    unknown = written.replace("add", "sub")
    (first, *more) = parse(family, unknown)
    assert (first[0], more) == ("content", [])
    if family != "llama3":
        shown_first = f"For example: {written}"
        assert [part[0] for part in parse(family, shown_first)] == ["content"]


@every_case(
    ("family", "text"),
    [
        ("mistral", 'add[ARGS]{"n": 1}'),
        ("llama3", 'add{"n": 1}</function>'),
        ("llama3", '<function=add={"n": 1}</function>'),
        ("llama3", '<function=add={"n": 1}></function>'),
        ("llama3", '<function(add){"n": 1}</function>'),
        ("hermes", f"<tools>\n{OBJECT}\n</tools>"),
        ("hermes", f"<function_call>{OBJECT}</function_call>"),
        ("hermes", '<tool_call>add: {"n": 1}</tool_call>'),
    ],
)
def test_a_call_has_other_signs_around_it(family: str, text: str) -> None:
    """smolagents issue 1119, freellmapi pull request 291: the first two of Llama were refused by a provider."""
    assert parse(family, text) == ONE


@pytest.mark.parametrize("text", ["<tools>add</tools>", '<tools>{"name": "sub", "arguments": {}}</tools>', "<tools> {"])
def test_tags_of_a_prompt_are_content(text: str) -> None:
    assert parse("hermes", text) == [("content", text)]


PART = '{"id": "c1", "type": "function", "function": {"name": "add", "arguments": "{\\"n\\": 1}"}}'


@pytest.mark.parametrize("family", ["hermes", "mistral", "llama3", "glm45", "qwen3_coder"])
@every_case(
    ("written", "calls"),
    [
        (f'{{"tool_calls": [{PART}]}}', 1),
        (f'{{"tool_calls": [{OBJECT}, {PART}]}}', 2),
        (f'{{"function_calls": [{OBJECT}, {OBJECT}', 2),
        (f'{{"tool_call": {OBJECT}}}', 1),
        (f'{{"function_call": {OBJECT}}}', 1),
        ('{"type": "function", "function": {"name": "add"}, "parameters": {"n": 1}}', 1),
        (f'{{"tool_calls": [{{"function": {{"name": "add"}}, "parameters": {{"n": 1}}}}, {OBJECT}]}}', 2),
    ],
)
def test_calls_are_wrapped_as_in_a_reply_of_the_protocol(family: str, written: str, calls: int) -> None:
    """The call was content, or its arguments beside the function were lost without a sign."""
    before, after = NAMES[family]
    text = written if family == "llama3" else f"{before}{written}{after}"
    assert parse(family, text) == ONE * calls


@pytest.mark.parametrize("key", ["tool_calls", "function", "tool_call"])
def test_wrapped_calls_without_arguments(key: str) -> None:
    one = '[{"name": "add"}]' if key == "tool_calls" else '{"name": "add"}'
    assert parse("hermes", f'<tool_call>{{"{key}": {one}}}</tool_call>') == NONE


@pytest.mark.parametrize("family", ["hermes", "mistral", "llama3", "glm45", "qwen3_coder"])
def test_the_sign_after_the_key_of_a_name_is_another(family: str) -> None:
    """maclocal-api issue 141: Qwen3.6 writes it, and the call was content."""
    before, after = NAMES[family]
    text = '{"name="add", "arguments": {"n": 1}}'
    assert parse(family, before + text + after) == ONE
    for other in ('{"name="add', '{"name="', '{"name="a b", "arguments": {}}'):
        assert [part[0] for part in parse(family, before + other + after)] == ["content"]


def test_a_tool_may_be_a_whole_call() -> None:
    """mlx-lm pull request 792: GLM writes it. Unless a tool has an argument of this name."""
    text = '<tool_call>{"tool": {"name": "add", "arguments": {"n": 1}}}</tool_call>'
    parser = FAMILIES["glm45"](("add",), {"add": PROPERTIES})
    assert shown([*parser.push(text), *parser.flush(stopped=True)]) == ONE


@every_case(
    "written",
    [
        '{"tool": "add", "arguments": {"n": 1}}',
        '{"tool_name": "add", "tool_input": {"n": 1}}',
        '{"action_input": {"n": 1}, "action": "add"}',
        '{"function_name": "add", "params": {"n": 1}}',
        '{"name": "functions.add", "arguments": {"n": 1}}',
        '{"add": {"n": 1}}',
        '{"add": {"n": 1',
    ],
)
def test_a_call_has_the_keys_of_another_format(written: str) -> None:
    """Only a tool's name behind a marker makes them those of a call."""
    assert parse("hermes", f"<tool_call>{written}</tool_call>") == ONE
    assert parse("mistral", f"[TOOL_CALLS]{written}") == ONE
    assert parse("llama3", written) == [("content", written)]
    unknown = written.replace("add", "sub")
    parts = parse("hermes", f"<tool_call>{unknown}</tool_call>")
    assert [kind for kind, *_ in parts] == ["call" if "functions" in written else "content"]


def test_an_argument_has_the_name_of_another_formats_key() -> None:
    text = '<tool_call>{"name": "pick", "action": "add", "tool": "find", "params": {"n": 1}}</tool_call>'
    assert parse("hermes", text) == [("call", "pick", '{"action": "add", "tool": "find", "params": {"n": 1}}')]


def test_other_keys_are_arguments_behind_a_marker() -> None:
    """The client, and not the parser, refuses what the tool does not declare."""
    assert parse("hermes", '<tool_call>{"name": "new", "color": "red"}</tool_call>') == [
        ("call", "new", '{"color": "red"}')
    ]
