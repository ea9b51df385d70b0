"""Messages of gpt-oss: reasoning, content and calls in channels, wherever the text is cut, and grammars of them."""

from __future__ import annotations

import json
from typing import Any

import pytest
from every_case import every_case
from parsed_answers import parsed_calls, shown
from test_call_grammar import PLAIN_TOOLS, Walk, require_kept, tokenizer

from engine.frontend.text.dialect import Dialect, Parsing
from engine.frontend.text.reasoning import GPT_OSS, ReasoningStart
from engine.frontend.text.tools.call_grammar import (
    OfferedTool,
    after_reasoning,
    calls_if_any,
    calls_or_answer,
    required_calls,
)
from engine.frontend.text.tools.families import FAMILIES
from engine.grammar.source import schema_grammar

CHANNELS = ReasoningStart.CHANNELS
TOOLS = ("add", "look_up")
FORM = FAMILIES["gpt_oss"].form
MARKERS = FAMILIES["gpt_oss"].markers
THOUGHT = "<|channel|>analysis<|message|>hm <|end|><|start|>assistant"
HEAD = "<|channel|>commentary to=functions.add <|constrain|>json<|message|>"
FINAL = "<|channel|>final<|message|>"
ONE = ("call", "add", '{"n": 1}')


def parse(text: str, tools: tuple[str, ...] | None = TOOLS, *, family: str = "gpt_oss") -> list[tuple[str, ...]]:
    """The parts of a text that the model ended, the same however the text is cut into two."""
    dialect = Dialect(family=FAMILIES.get(family), reasoning=GPT_OSS)

    def of(*pieces: str) -> list[tuple[str, ...]]:
        return shown(parsed_calls(dialect.parser(Parsing(tools=tools, reasoning=CHANNELS)), pieces))

    whole = of(text)
    assert of(*text) == whole
    for at in range(len(text)):
        assert of(text[:at], text[at:]) == whole, at
    return whole


@every_case(
    "head",
    [
        HEAD,
        "<|channel|>commentary to=functions.add<|constrain|>json<|message|>",
        "<|channel|>commentary to=functions.add json<|message|>",
        "<|channel|>commentary to=functions.add<|message|>",
        "<|channel|>commentary to=add <|constrain|>json<|message|>",
        " to=functions.add<|channel|>commentary <|constrain|>json<|message|>",
        " to=functions.add<|channel|>commentary json<|message|>",
        "<|channel|>analysis to=functions.add code<|message|>",
        "<|channel|>analysis to=functions.add <|constrain|>json<|message|>",
        "<|channel|>commentary to=tools.add <|constrain|>json<|message|>",
        "<|channel|>commentary to=functions.add <|constrain|>json",
    ],
)
def test_a_header_names_the_function(head: str) -> None:
    """vLLM and llama.cpp take the recipient after the channel or before it; the analysis channel has calls, too."""
    assert parse(f'{head}{{"n": 1}}') == [ONE]
    assert parse(f'{THOUGHT}{head}{{"n": 1}}<|call|>') == [("reasoning", "hm"), ONE]
    twice = f'{THOUGHT}{head}{{"n": 1}}<|end|><|start|>assistant'
    assert parse(twice * 2) == [("reasoning", "hm"), ONE, ("reasoning", "\nhm"), ONE]


@every_case(
    ("written", "given"),
    [
        ('"{\\"n\\": 1}"', '{"n": 1}'),
        ('```json\n{"n": 1}\n```', '{"n": 1}'),
        (' \n{"n": 1}\n', '{"n": 1}'),
        ("null", "{}"),
        ("", "{}"),
    ],
)
def test_arguments_may_be_written_in_another_way(written: str, given: str) -> None:
    for end in ("", "<|call|>", "<|end|>"):
        assert parse(HEAD + written + end) == [("call", "add", given)]


@every_case(
    ("text", "expected"),
    [
        (f"{THOUGHT}{FINAL}Hi {{x}}.<|return|>", [("reasoning", "hm"), ("content", "Hi {x}.")]),
        (f"{THOUGHT}{THOUGHT}{FINAL}Hi", [("reasoning", "hm\nhm"), ("content", "Hi")]),
        (f"{FINAL}a\n<|end|><|start|>assistant{FINAL}b", [("content", "a\n\nb")]),
        ("<|start|>assistant<|message|>Hi", [("content", "Hi")]),
        ("plain, to=x", [("content", "plain, to=x")]),
        (f"<|channel|>commentary<|message|>First.<|end|><|start|>assistant{HEAD}{{}}", [("content", "First."), "{}"]),
        (f"{THOUGHT}<|channel|>fin", [("reasoning", "hm")]),
        (f"{THOUGHT}<|channel|>analysis to=python code<|message|>1 + 1<|call|>", [("reasoning", "hm\n1 + 1")]),
        (f"{HEAD}1 + 1<|call|>", [("content", f"{HEAD}1 + 1")]),
        ("<|channel|>final Hello, you", [("content", "<|channel|>final Hello, you")]),
        ("<|channel|>commentary to=all<|message|>Hi", [("content", "Hi")]),
    ],
)
def test_messages_that_are_no_calls(text: str, expected: list[Any]) -> None:
    assert parse(text) == [("call", "add", part) if isinstance(part, str) else part for part in expected]


def test_without_tools_a_message_is_what_its_channel_says() -> None:
    assert parse(f"{THOUGHT}{HEAD}{{}}", None) == [("reasoning", "hm"), ("content", "{}")]
    assert parse(f"{THOUGHT}{FINAL}Hi", None, family="none") == [("reasoning", "hm"), ("content", "Hi")]


def test_calls_of_another_family_may_be_in_the_content() -> None:
    text = f'{THOUGHT}{FINAL}<tool_call>{{"name": "add", "arguments": {{"n": 1}}}}</tool_call>'
    assert parse(text, family="hermes") == [("reasoning", "hm"), ONE]


def test_markers_are_kept_for_every_answer() -> None:
    dialect = Dialect(family=FAMILIES["gpt_oss"], reasoning=GPT_OSS)
    assert set(dialect.markers(Parsing(reasoning=CHANNELS))) == set(MARKERS)
    assert dialect.end_of_reasoning(CHANNELS) == "<|end|>"
    assert dialect.end_of_reasoning(ReasoningStart.OPEN) == "</think>"


def walk_of(grammar: Any, *, is_special: bool) -> Walk:
    return Walk(grammar, tokenizer(MARKERS if is_special else ()))


def ids(*, is_special: bool) -> dict[str, int]:
    vocabulary = tokenizer(MARKERS)
    return {text: vocabulary.token_to_id(text) for text in MARKERS} if is_special else {}


def calls_of(walk: Walk) -> list[tuple[str, ...]]:
    names = tuple(tool.name for tool in PLAIN_TOOLS)
    return [part for part in parse(walk.text, (*names, "loose")) if part[0] != "reasoning"]


@pytest.mark.parametrize("is_special", [False, True])
@pytest.mark.parametrize("thought", ["", THOUGHT, THOUGHT * 2])
def test_a_required_call_comes_after_reasoning(thought: str, is_special: bool) -> None:
    grammar = required_calls(FORM, PLAIN_TOOLS, CHANNELS, ids(is_special=is_special), several=False)
    walk = walk_of(grammar, is_special=is_special)
    walk.say(thought)
    assert walk.refuses("Hi")
    assert walk.refuses(FINAL)
    walk.say("<|channel|>commentary to=functions.")
    walk.go_on(1)
    require_kept(calls_of(walk), PLAIN_TOOLS)


@pytest.mark.parametrize("is_special", [False, True])
def test_an_answer_of_a_schema_is_on_its_channel(is_special: bool) -> None:
    answer = schema_grammar({"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"]})
    special = ids(is_special=is_special)
    for grammar in (
        after_reasoning(answer, CHANNELS, special),
        calls_or_answer(FORM, PLAIN_TOOLS, answer, CHANNELS, special),
    ):
        assert grammar is not None
        walk = walk_of(grammar, is_special=is_special)
        walk.say(THOUGHT)
        assert walk.refuses('{"a"')
        walk.say(FINAL)
        assert walk.refuses("Hi")
        walk.go_on(0)
        ((kind, said),) = calls_of(walk)
        assert (kind, json.loads(said)) == ("content", {"a": 1})
    calling = walk_of(grammar, is_special=is_special)
    calling.say("<|channel|>commentary")
    calling.go_on(2)
    require_kept(calls_of(calling), PLAIN_TOOLS)


@pytest.mark.parametrize("is_special", [False, True])
def test_a_strict_tool_is_held_to_its_schema_and_all_else_is_free(is_special: bool) -> None:
    strict, *_ = PLAIN_TOOLS
    loose = OfferedTool(name="loose", parameters=strict.parameters, strict=False)
    grammar = calls_if_any(FORM, (strict, loose), CHANNELS, ids(is_special=is_special))
    for name, has_schema in ((strict.name, True), ("loose", False)):
        walk = walk_of(grammar, is_special=is_special)
        walk.say(f"{THOUGHT}<|channel|>commentary<|message|>So, {{}}.<|end|><|start|>assistant")
        walk.say(HEAD.replace("add", name))
        assert walk.refuses('{"other": 1') is has_schema
        walk.say('{"n": 5}' if has_schema else '{"other": 1}')
        walk.go_on(0)
        assert [part[:2] for part in calls_of(walk) if part[0] == "call"] == [("call", name)]
    silent = walk_of(grammar, is_special=is_special)
    silent.say(f"{THOUGHT}{FINAL}No call at all.")
    silent.go_on(0)
    assert calls_of(silent) == [("content", "No call at all.")]
