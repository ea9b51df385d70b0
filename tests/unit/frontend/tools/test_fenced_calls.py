"""Calls in Markdown fences, which models put around and inside the markers: the fences are no content."""

from __future__ import annotations

import itertools
import json

import pytest
from parsed_answers import in_one_and_by_character

from engine.frontend.text.tools.families import FAMILIES

CALL = '{"name": "add", "arguments": {"n": 1}}'
TAGS = "<function=add>\n<parameter=n>\n1\n</parameter>\n</function>"
KEYS = "add\n<arg_key>n</arg_key>\n<arg_value>1</arg_value>"
OF_FAMILY = {
    "hermes": f"<tool_call>\n{CALL}\n</tool_call>",
    "llama3": CALL,
    "mistral": f"[TOOL_CALLS][{CALL}]",
    "llama4": "[add(n=1)]",
    "qwen3_coder": f"<tool_call>\n{TAGS}\n</tool_call>",
    "glm45": f"<tool_call>{KEYS}\n</tool_call>",
}


def parts_of(family: str, text: str) -> list[tuple[str, ...]]:
    found = in_one_and_by_character(lambda: FAMILIES[family](("add",)), text)
    return [(*part[:-1], str(json.loads(part[-1]))) if part[0] == "call" else part for part in found]


FOUND = ("call", "add", "{'n': 1}")


@pytest.mark.parametrize(
    ("family", "text"),
    [
        ("hermes", f"<tool_call>\n```json\n{CALL}\n```\n</tool_call>"),
        ("hermes", f"<tool_call>```{CALL}```</tool_call>"),
        ("hermes", f"<tool_call>\n```json\n[{CALL}]\n```"),
        ("llama3", f"<|python_tag|>```json\n{CALL}\n```"),
        ("llama3", f"[{CALL}]"),
        ("mistral", f"[TOOL_CALLS]```json\n[{CALL}]\n```"),
        ("mistral", '[TOOL_CALLS]add[ARGS]```json\n{"n": 1}\n```'),
        ("qwen3_coder", f"<tool_call>\n```xml\n{TAGS}\n```\n</tool_call>"),
        ("qwen3_coder", f"<tool_call>\n```json\n{CALL}\n```\n</tool_call>"),
        ("glm45", f"<tool_call>\n```json\n{CALL}\n```\n</tool_call>"),
    ],
)
def test_a_fence_inside_the_markers(family: str, text: str) -> None:
    """vLLM leaves such a call in the content."""
    assert parts_of(family, text) == [FOUND]


@pytest.mark.parametrize("family", OF_FAMILY)
def test_a_fence_around_calls_is_no_content(family: str) -> None:
    call = OF_FAMILY[family]
    assert parts_of(family, f"```json\n{call}\n```") == [FOUND]
    assert parts_of(family, f"```\n{call}\n```\n\n```\n{call}\n```\n") == [FOUND] * 2
    (said, found, after) = parts_of(family, f"I will add:\n```tool_call\n{call}\n```\nThen `x`.")
    assert (said, found, after[0], after[1].strip()) == (("content", "I will add:"), FOUND, "content", "Then `x`.")


@pytest.mark.parametrize("family", OF_FAMILY)
def test_a_fence_that_is_content_stays(family: str) -> None:
    call = OF_FAMILY[family]
    block = "```python\nx = 1\n```"
    assert parts_of(family, f"{block}\n{call}") == [("content", block), FOUND]
    ((_, first), found, (_, second)) = parts_of(family, f"{block}\n{call}\n{block}\n")
    assert (first, found, second.strip()) == (block, FOUND, block)
    ((_, first), found) = parts_of(family, f"Use ```x```\n``\n{call}")
    assert (first, found) == ("Use ```x```\n``", FOUND)
    for text in ("```", "a\n```json", "``", "```json\n", f"{block}\n", "```json\n{}\n```"):
        assert parts_of(family, text) == [("content", text)]


@pytest.mark.parametrize("family", OF_FAMILY)
def test_calls_and_blocks_of_content_come_in_any_order(family: str) -> None:
    call = OF_FAMILY[family]
    calls = (call, f"```json\n{call}\n```")
    for count in (1, 2, 3):
        for written in itertools.product((*calls, "Some `x`.", "```python\nx = 1\n```"), repeat=count):
            runs = itertools.groupby(written, key=calls.__contains__)
            expected: list[tuple[str, ...]] = []
            for are_calls, run in runs:
                expected += [FOUND for _ in run] if are_calls else [("content", "\n".join(run))]
            found = parts_of(family, "\n".join(written))
            assert [(*part[:-1], part[-1].strip()) for part in found] == expected


def test_a_fence_without_a_call_stays() -> None:
    for text in ("<tool_call>\n```json\nno\n```\n</tool_call>", '<tool_call>{"arguments": {"n": 1}}</tool_call>'):
        assert parts_of("hermes", text) == [("content", text)]
