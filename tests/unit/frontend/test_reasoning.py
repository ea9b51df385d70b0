"""Reasoning: split off the answer wherever the text is cut, and found where the prompt says that it begins."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from parsed_answers import cut, in_one_and_by_character, parsed, places

from engine.frontend.text import incoming_text
from engine.frontend.text.dialect import AnswerParser
from engine.frontend.text.reasoning import (
    DEEPSEEK_R1,
    GPT_OSS,
    QWEN3,
    ReasoningSplitter,
    ReasoningStart,
    reasoning_of_template,
    reasoning_start,
)
from engine.frontend.text.tools.families import HermesParser

OPEN, MARKED, ASSUMED = ReasoningStart.OPEN, ReasoningStart.MARKED, ReasoningStart.ASSUMED
CALL = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'


def split(start: ReasoningStart, text: str) -> list[tuple[str, ...]]:
    return in_one_and_by_character(lambda: ReasoningSplitter(start), text)


@pytest.mark.parametrize(
    ("start", "text", "expected"),
    [
        (MARKED, "<think>\nhm\n</think>\n\nyes", [("reasoning", "hm"), ("content", "yes")]),
        (MARKED, "\n <think>hm</think>yes", [("reasoning", "hm"), ("content", "yes")]),
        (MARKED, " no thought </think>", [("content", " no thought </think>")]),
        (MARKED, "<thin", [("content", "<thin")]),
        (MARKED, "", []),
        (MARKED, "  ", [("content", "  ")]),
        (MARKED, "<think>\n\n</think>\n\nyes", [("content", "yes")]),
        (MARKED, "<think>cut \n", [("reasoning", "cut")]),
        (OPEN, "\nhm\n</think>\nyes\n", [("reasoning", "hm"), ("content", "yes\n")]),
        (OPEN, "<think>again</think>yes", [("reasoning", "again"), ("content", "yes")]),
        (OPEN, "a </thin", [("reasoning", "a </thin")]),
        (ASSUMED, "hm</think>yes", [("reasoning", "hm"), ("content", "yes")]),
        (ASSUMED, "all of it", [("reasoning", "all of it")]),
    ],
)
def test_reasoning_and_answer(start: ReasoningStart, text: str, expected: list[tuple[str, ...]]) -> None:
    assert split(start, text) == expected


def test_markers_in_the_answer_are_text() -> None:
    """vLLM pull request 53924: streamed, a marker after the block vanished from the answer."""
    assert split(OPEN, "hm</think>write </think> after <think>") == [
        ("reasoning", "hm"),
        ("content", "write </think> after <think>"),
    ]


def test_a_marker_may_come_with_the_text_around_it() -> None:
    """vLLM issue 55195: a marker that came with other tokens was shown, or what came with it was lost."""
    for pieces in (["<think>a", " b</think>c", " d"], ["<think>a b</think>c d"], ["<th", "ink>a b</", "think>c d"]):
        assert parsed(ReasoningSplitter(MARKED), pieces) == parsed(ReasoningSplitter(OPEN), ["a b</think>c d"])


@pytest.mark.parametrize(
    ("parser", "prompt", "start"),
    [
        (QWEN3, "<|im_start|>assistant\n", MARKED),
        (QWEN3, "<|im_start|>assistant\n<think>\n", OPEN),
        (QWEN3, "<|im_start|>assistant\n<think>\n\n</think>\n\n", None),
        (DEEPSEEK_R1, "<\uff5cAssistant\uff5c>", ASSUMED),
        (DEEPSEEK_R1, "<\uff5cAssistant\uff5c><think>\n", OPEN),
        (DEEPSEEK_R1, "<\uff5cAssistant\uff5c></think>", None),
        (QWEN3, "<think>user's own</think><|im_start|>assistant\n", MARKED),
        (GPT_OSS, "<|start|>user<|message|>x<|end|><|start|>assistant", ReasoningStart.CHANNELS),
        (GPT_OSS, "<|start|>assistant<|channel|>final<|message|>To", None),
    ],
)
def test_the_end_of_the_prompt_says_where_reasoning_begins(
    parser: str, prompt: str, start: ReasoningStart | None
) -> None:
    """vLLM issue 53284: a prompt that closes the block without ``enable_thinking`` made all of the answer reasoning."""
    assert reasoning_start(parser, prompt) is start


@pytest.mark.parametrize(
    ("template", "parser"),
    [
        ("{{ message.content }}", None),
        ("<|start|>assistant<|channel|>final<|message|>{{ content }}", GPT_OSS),
        ("{{ content.split('</think>')[-1] }}<|im_start|>assistant", QWEN3),
        ("{{ '<\uff5cAssistant\uff5c>' }}{{ content.split('</think>') }}", DEEPSEEK_R1),
    ],
)
def test_the_parser_of_a_template(template: str, parser: str | None) -> None:
    assert reasoning_of_template(template) == parser


def test_a_call_inside_reasoning_is_reasoning_and_one_after_it_is_a_call() -> None:
    """vLLM issue 39056 and its kin: engines parsed drafts of calls, or lost the call after them."""

    def make() -> AnswerParser:
        return AnswerParser(ReasoningSplitter(OPEN), HermesParser(["f"]), parallel=True)

    text = f"I could {CALL} here\n</think>\n\n{CALL}"
    assert in_one_and_by_character(make, text) == [("reasoning", f"I could {CALL} here"), ("call", "f", "{}")]


def test_of_several_calls_a_client_may_want_one() -> None:
    """vLLM issue 9451 and SGLang issue 9696: ``parallel_tool_calls=false`` changed nothing."""

    def make() -> AnswerParser:
        return AnswerParser(None, HermesParser(["f"]), parallel=False)

    assert in_one_and_by_character(make, f"a{CALL}b{CALL}{CALL}c") == [
        ("content", "a"),
        ("call", "f", "{}"),
        ("content", "bc"),
    ]


FRAGMENTS = ("<think>", "</think>", "<", "think>", "</", " ", "\n", "a", "\u20ac", CALL, "<tool_call>", "{")
texts = st.lists(st.sampled_from(FRAGMENTS) | st.text(max_size=3), max_size=16).map("".join)


@given(st.sampled_from(ReasoningStart), st.booleans(), texts, places)
def test_any_text_comes_to_the_same_wherever_it_is_cut(
    start: ReasoningStart, has_tools: bool, text: str, where: list[int]
) -> None:
    """Stop text never leaks, wherever text is cut (C03)."""

    def make() -> AnswerParser:
        return AnswerParser(ReasoningSplitter(start), HermesParser(["f"]) if has_tools else None, parallel=True)

    assert parsed(make(), cut(text, where)) == parsed(make(), [text])


def test_these_tests_notice_a_marker_that_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """The usual fault, planted: text is given out though it may be the beginning of a marker."""
    monkeypatch.setattr(incoming_text, "partial_length", lambda *_: 0)
    with pytest.raises(AssertionError):
        split(OPEN, "hm</think>yes")
