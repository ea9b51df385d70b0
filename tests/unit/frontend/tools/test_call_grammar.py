"""Grammars of calls: for any output within one, its parser finds calls that follow their schemas."""

from __future__ import annotations

import json
import random
from typing import Any

import jsonschema
import numpy as np
import pytest
from llguidance import LLMatcher, LLTokenizer
from parsed_answers import parsed, shown
from texts_of_grammars import allowed
from tokenizers import AddedToken, Tokenizer

from engine.core.messages import Grammar, GrammarKind
from engine.frontend.text.dialect import AnswerParser
from engine.frontend.text.reasoning import ReasoningSplitter, ReasoningStart
from engine.frontend.text.tools.call_grammar import (
    DIGITS,
    CallForm,
    OfferedTool,
    after_reasoning,
    calls_if_any,
    calls_or_answer,
    required_calls,
)
from engine.frontend.text.tools.families import DEEPSEEK_FENCED_FORM, FAMILIES, MISTRAL_NAMED_FORM
from engine.grammar.source import definition_of, fault_of, schema_grammar
from engine.model import embedded

END = 257
LONGEST = 400
REFERRING = {
    "properties": {"n": {"$ref": "#/$defs/count"}, "s": {"type": "string", "maxLength": 6}, "on": {"type": "boolean"}},
    "required": ["n"],
    "additionalProperties": False,
    "$defs": {"count": {"type": "integer", "minimum": 1, "maximum": 99}},
}
TOOLS = (
    OfferedTool(name='a "b"\n', parameters=REFERRING, strict=True),
    OfferedTool(name="look_up", parameters=None, strict=True),
)
PLAIN_TOOLS = (OfferedTool(name="add", parameters=REFERRING, strict=True), TOOLS[1])
FORMS = [
    ("hermes", FAMILIES["hermes"].form, TOOLS),
    ("llama3", FAMILIES["llama3"].form, TOOLS),
    ("mistral", FAMILIES["mistral"].form, TOOLS),
    ("mistral", MISTRAL_NAMED_FORM, PLAIN_TOOLS),
    ("kimi_k2", FAMILIES["kimi_k2"].form, PLAIN_TOOLS),
    ("gpt_oss", FAMILIES["gpt_oss"].form, PLAIN_TOOLS),
]


def tokenizer(special: tuple[str, ...]) -> Tokenizer:
    made = embedded._tokenizer()
    made.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in special])
    return made


class Walk:
    """A model that chooses any token that a grammar allows."""

    def __init__(self, grammar: Grammar, vocabulary: Tokenizer) -> None:
        assert fault_of(grammar) is None
        self._vocabulary = vocabulary
        self._size = vocabulary.get_vocab_size()
        library = LLTokenizer(vocabulary.to_str(), n_vocab=self._size, eos_token=[END])
        self._matcher = LLMatcher(library, definition_of(grammar))
        assert not self._matcher.is_error(), self._matcher.get_error()
        self.ids: list[int] = []

    def say(self, text: str) -> None:
        """Say a text, every token of which must be allowed."""
        for token_id in self._vocabulary.encode(text).ids:
            assert self._matcher.consume_token(token_id), f"{text!r} must be allowed, at {self.text!r}"
            self.ids.append(token_id)

    def refuses(self, text: str) -> bool:
        """Whether a text must not follow."""
        ids = self._vocabulary.encode(text).ids
        return self._matcher.deep_copy().try_consume_tokens(ids) < len(ids)

    def go_on(self, seed: int) -> None:
        """Choose anything until the grammar is complete, ending as soon as that is allowed."""
        chance = random.Random(seed)
        while not self._matcher.is_stopped() and len(self.ids) < LONGEST:
            mask = np.unpackbits(np.frombuffer(self._matcher.compute_bitmask(), np.uint8), bitorder="little")
            allowed = np.flatnonzero(mask[: self._size])
            chosen = END if END in allowed else int(chance.choice(allowed))
            assert self._matcher.consume_token(chosen)
            if chosen != END:
                self.ids.append(chosen)
        assert self._matcher.is_stopped(), f"the output must end, got {self.text!r}"

    @property
    def text(self) -> str:
        return self._vocabulary.decode(self.ids, skip_special_tokens=False)


def calls_of(family: str, text: str, reasoning: ReasoningStart | None = None) -> list[tuple[str, ...]]:
    splitter = None if reasoning is None else ReasoningSplitter(reasoning)
    names = [tool.name for tool in (*TOOLS, *PLAIN_TOOLS)]
    parser = AnswerParser(splitter, FAMILIES[family]([*names, "loose"]), parallel=True)
    return shown(parsed(parser, [text]))


def require_kept(calls: list[tuple[str, ...]], tools: tuple[OfferedTool, ...]) -> None:
    """Every part is a whole call of a tool, with arguments of its schema."""
    schemas = {tool.name: tool.schema for tool in tools}
    assert calls
    for kind, name, given in calls:
        assert kind == "call"
        jsonschema.validate(json.loads(given), schemas[name])


LOOP: dict[str, Any] = {
    "$defs": {"node": {"type": "object", "properties": {"next": {"$ref": "#/$defs/node"}}, "required": ["next"]}},
    "properties": {"n": {"type": "integer"}, "x": {"$ref": "#/$defs/node"}},
}


@pytest.mark.parametrize("family", FAMILIES)
def test_arguments_that_never_end_are_refused_or_left_out(family: str) -> None:
    """C01: a required call of such a tool filled its whole length, and its arguments were no JSON."""

    def required(more: dict[str, Any]) -> Grammar:
        tool = OfferedTool(name="add", parameters=LOOP | more, strict=True)
        return required_calls(FAMILIES[family].form, (tool,), None, {}, several=False)

    fault = fault_of(required({"required": ["x"]}))
    assert fault is not None
    assert "it has no finite" in fault.message
    for seed in range(3):
        walk = Walk(required({"required": ["n"], "additionalProperties": False}), tokenizer(()))
        walk.go_on(seed)
        assert "next" not in walk.text


@pytest.mark.parametrize("is_special", [False, True])
@pytest.mark.parametrize(("family", "form", "tools"), FORMS)
def test_required_calls_are_whole_and_keep_to_their_schemas(
    family: str, form: CallForm, tools: tuple[OfferedTool, ...], is_special: bool
) -> None:
    """C01: with markers as text and as special tokens."""
    vocabulary = tokenizer(FAMILIES[family].markers if is_special else ())
    special = {text: vocabulary.token_to_id(text) for text in FAMILIES[family].markers} if is_special else {}
    grammar = required_calls(form, tools, None, special, several=True)
    names = set()
    for seed in range(6):
        walk = Walk(grammar, vocabulary)
        walk.go_on(seed)
        calls = calls_of(family, walk.text)
        require_kept(calls, tools)
        names |= {call[1] for call in calls}
    assert names == {tool.name for tool in tools}


@pytest.mark.parametrize("several", [False, True])
def test_one_call_or_several(several: bool) -> None:
    grammar = required_calls(FAMILIES["hermes"].form, PLAIN_TOOLS, None, {}, several=several)
    walk = Walk(grammar, tokenizer(()))
    walk.say('<tool_call>\n{"name": "look_up", "arguments": {}}\n</tool_call>')
    assert walk.refuses("\n<tool_call>") is not several
    assert walk.refuses("x")


@pytest.mark.parametrize("is_special", [False, True])
@pytest.mark.parametrize(
    ("start", "thought"),
    [
        (ReasoningStart.OPEN, "hm {} \n</think>\n\n"),
        (ReasoningStart.MARKED, "<think>\nhm <tool_call>\n</think>\n\n"),
        (ReasoningStart.MARKED, ""),
        (ReasoningStart.ASSUMED, "hm</think>"),
        (ReasoningStart.ASSUMED, "<think>hm</think>"),
    ],
)
def test_reasoning_comes_before_calls_that_are_required(start: ReasoningStart, thought: str, is_special: bool) -> None:
    """vLLM pull request 46149: a required call with reasoning was an error where the one became the other."""
    vocabulary = tokenizer(("<think>", "</think>") if is_special else ())
    special = {text: vocabulary.token_to_id(text) for text in ("<think>", "</think>")} if is_special else {}
    grammar = required_calls(FAMILIES["hermes"].form, PLAIN_TOOLS, start, special, several=False)
    walk = Walk(grammar, vocabulary)
    walk.say(thought)
    assert thought or walk.refuses("hm")
    walk.say("<tool_call>")
    walk.go_on(1)
    parts = calls_of("hermes", walk.text, start)
    require_kept([part for part in parts if part[0] != "reasoning"], PLAIN_TOOLS)


@pytest.mark.parametrize(("family", "form", "tools"), FORMS)
def test_strict_tools_are_held_to_their_schemas_wherever_they_are_called(
    family: str, form: CallForm, tools: tuple[OfferedTool, ...]
) -> None:
    """A call may come after any text, or none may; what is not strict may have any arguments."""
    strict, *_ = tools
    loose = OfferedTool(name="loose", parameters=REFERRING, strict=False)
    grammar = calls_if_any(form, (strict, loose), None, {})
    opening = "".join(form.opening + form.before)
    for name, has_schema in ((strict.name, True), ("loose", False)):
        walk = Walk(grammar, tokenizer(()))
        walk.say(f"Any text, {{}} too.\n{opening}")
        walk.say((json.dumps(name) if form.quoted else name) + "".join(form.between).replace(DIGITS, "12"))
        assert walk.refuses('{"other": 1') is has_schema
        walk.say(('{"n": 5}' if has_schema else '{"other": 1}') + "".join(form.after + form.closing))
        walk.go_on(0)
        calls = [part for part in calls_of(family, walk.text) if part[0] != "content"]
        assert [call[:2] for call in calls] == [("call", name)]
    silent = Walk(grammar, tokenizer(()))
    silent.say("No call at all.")
    silent.go_on(0)
    assert silent.text == "No call at all."


ANSWER = schema_grammar({"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"]})


@pytest.mark.parametrize(("family", "form", "tools"), [entry for entry in FORMS if entry[0] != "llama3"])
def test_an_answer_of_a_schema_and_calls_are_both_possible(
    family: str, form: CallForm, tools: tuple[OfferedTool, ...]
) -> None:
    """As in the protocol: ``response_format`` defines the answer, and the model may call tools before it."""
    grammar = calls_or_answer(form, tools, ANSWER, None, {})
    assert grammar is not None
    answering, calling = Walk(grammar, tokenizer(())), Walk(grammar, tokenizer(()))
    assert answering.refuses("Hello")
    answering.say('{"a": 1}')
    answering.go_on(0)
    calling.say((form.opening or form.before)[0])
    calling.go_on(4)
    require_kept(calls_of(family, calling.text), tools)


EVERY_FORM = [*((family.name, family.form) for family in FAMILIES.values()), *(entry[:2] for entry in FORMS[3:4])]


@pytest.mark.parametrize(("family", "form"), [*EVERY_FORM, ("deepseek", DEEPSEEK_FENCED_FORM)])
def test_a_grammar_allows_as_many_calls_as_are_wanted(family: str, form: CallForm) -> None:
    """One or several where calls are required, several beside an answer, and any number, even none, beside text."""
    tools = [OfferedTool(name="look_up", parameters=None, strict=True)]
    name, given = ('"look_up"' if form.quoted else "look_up"), "{}" if form.arguments is None else ""
    call = "".join((*form.before, name, *form.between, given, *form.after)).replace(DIGITS, "7")
    opening, separator, closing = ("".join(pieces) for pieces in (form.opening, form.separator, form.closing))
    texts = [opening + separator.join([call] * count) + closing for count in range(1, 4)]
    for text in texts:
        assert [part[:2] for part in calls_of(family, text)] == [("call", "look_up")] * (texts.index(text) + 1)
    others = ["", '{"a": 1}', '{"a": 1}' + texts[0], texts[0] + '{"a": 1}', opening + closing]
    for several, wanted in ((False, texts[:1]), (True, texts)):
        assert allowed(required_calls(form, tools, None, {}, several=several), texts + others) == wanted
    beside = calls_or_answer(form, tools, ANSWER, None, {})
    assert beside is None or allowed(beside, texts + others) == [*texts, others[1]]
    assert allowed(calls_if_any(form, tools, None, {}), texts + others[:2]) == texts + others[:2]


def test_calls_that_begin_as_json_are_not_told_from_an_answer_in_json() -> None:
    assert calls_or_answer(FAMILIES["llama3"].form, PLAIN_TOOLS, ANSWER, None, {}) is None
    lark = Grammar(GrammarKind.EBNF, 'start: "a"')
    assert calls_or_answer(FAMILIES["hermes"].form, PLAIN_TOOLS, lark, None, {}) is None


@pytest.mark.parametrize(
    ("grammar", "answer"),
    [
        (schema_grammar({"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"]}), '{"a": 1}'),
        (Grammar(GrammarKind.REGEX, "a/b\nc+"), "a/b\ncc"),
        (Grammar(GrammarKind.REGEX, r"a\/b\\/"), "a/b\\/"),
        (Grammar(GrammarKind.CHOICE, json.dumps(['yes "sir"', "no"])), 'yes "sir"'),
    ],
)
def test_a_grammar_of_the_answer_leaves_room_for_reasoning(grammar: Grammar, answer: str) -> None:
    """Without it a model whose prompt opened the block would have to write its answer as reasoning."""
    whole = after_reasoning(grammar, ReasoningStart.OPEN, {})
    assert whole is not None
    walk = Walk(whole, tokenizer(()))
    walk.say("Let me think: no JSON here. </think>\n")
    assert walk.refuses("Z")
    walk.say(answer)
    walk.go_on(0)
    assert walk.text.endswith(answer)


def test_a_grammar_in_a_language_of_its_own_has_no_room_for_reasoning() -> None:
    assert after_reasoning(Grammar(GrammarKind.EBNF, 'start: "a"'), ReasoningStart.OPEN, {}) is None


def test_names_and_schemas_reach_the_grammar_as_they_are() -> None:
    """Escapes and other alphabets, in names and in schemas."""
    name, schema = "\u540d/\\", {"properties": {"\u20ac": {"const": '</tool_call> "\\'}}, "required": ["\u20ac"]}
    tool: Any = OfferedTool(name=name, parameters=schema, strict=True)
    walk = Walk(required_calls(FAMILIES["hermes"].form, [tool], None, {}, several=False), tokenizer(()))
    walk.go_on(0)
    ((kind, called, given),) = calls_of("hermes", walk.text)
    assert (kind, called) == ("call", name)
    assert json.loads(given)["\u20ac"] == '</tool_call> "\\'
