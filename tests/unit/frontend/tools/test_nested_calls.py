"""Values that hold calls themselves, as documentation and code about tool calls do: no call comes out of a value."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from parsed_answers import parsed_calls, shown

from engine.frontend.text.reasoning import Part
from engine.frontend.text.tools.families import FAMILIES

TOOLS = ("write", "read")
PROPERTIES = {"text": {"type": "string"}, "n": {"type": "integer"}, "extra": {"type": "object"}}


def qwen(given: dict[str, str], name: str = "write") -> str:
    values = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in given.items())
    return f"<tool_call>\n<function={name}>\n{values}</function>\n</tool_call>"


def glm(given: dict[str, str], name: str = "write") -> str:
    values = "".join(f"<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n" for key, value in given.items())
    return f"<tool_call>{name}\n{values}</tool_call>"


WRITERS = {"qwen3_coder": qwen, "glm45": glm}
OPENERS = {
    qwen: ("<parameter=text>", "<parameter=n>", "<function=read>"),
    glm: ("<arg_key>text</arg_key>", "<arg_key>n</arg_key>", "<arg_key>", "<arg_value>"),
}
CLOSERS = {qwen: ("</parameter>", "</function>"), glm: ("</arg_value>",)}
# What a value may hold, in either family's words.
VALUES = {
    "a call": lambda write: write({"n": "1"}, "read"),
    "a call of the same tool": lambda write: write({"text": "x", "n": "1"}),
    "a call in prose": lambda write: f"Write\n{write({'n': '1'}, 'read')}\nand wait.",
    "two calls": lambda write: f"{write({'n': '1'}, 'read')}\n{write({'n': '2'}, 'read')}",
    "a call in a call": lambda write: write({"text": write({"n": "1"}, "read")}),
    "an argument": lambda write: "".join(write({"n": "1"}).splitlines(keepends=True)[2:-2]).strip() or "x",
    "a call of an unknown tool": lambda write: write({"n": "1"}, "other"),
    "a call in JSON": lambda _: '<tool_call>{"name": "read", "arguments": {}}</tool_call>\n<tool_call>{}</tool_call>',
    "an opening tag": lambda _: 'tag = "<tool_call>"',
    "the tag of its own argument": lambda write: f"see {OPENERS[write][0]} above",
}


def parts_of(family: str, pieces: list[str] | str, *, stopped: bool = True) -> list[Part]:
    return parsed_calls(FAMILIES[family](TOOLS, dict.fromkeys(TOOLS, PROPERTIES)), pieces, stopped=stopped)


def calls_of(family: str, text: str) -> list[tuple[str, Any]]:
    whole = parts_of(family, [text])
    assert parts_of(family, text) == whole
    return [(part[1], json.loads(part[2])) for part in shown(whole) if part[0] == "call"]


@pytest.mark.parametrize("family", WRITERS)
@pytest.mark.parametrize("kind", VALUES)
def test_a_value_holds_calls(family: str, kind: str) -> None:
    """ollama pull request 17021: the inner call's tags ended the outer one, or the inner became a call."""
    write = WRITERS[family]
    value = VALUES[kind](write)
    for given in ({"text": value}, {"text": value, "n": "2"}, {"n": "2", "text": value}):
        expected = [("write", {"text": value} | {"n": 2} if "n" in given else {"text": value}), ("read", {"n": 3})]
        text = f"{write(given)}\n{write({'n': '3'}, 'read')}\ndone"
        assert calls_of(family, text) == expected, text


def test_a_value_holds_the_closing_tags_of_its_call() -> None:
    value = "</function>\n</tool_call>\nends it"
    for given in ({"text": value}, {"text": value, "n": "2"}):
        ((name, found),) = calls_of("qwen3_coder", qwen(given))
        assert (name, found["text"]) == ("write", value)


@pytest.mark.parametrize("family", WRITERS)
def test_space_after_the_tags_in_a_value_makes_no_difference(family: str) -> None:
    """Whatever the tags come to: the same calls, and the same values but for the space."""
    write = WRITERS[family]
    openers = ("<tool_call>", *OPENERS[write])
    for tags in itertools.product((*openers, *CLOSERS[write], "</tool_call>"), repeat=3):
        found = []
        for space in ("", " "):
            value = "".join(tag + space * (tag in openers) for tag in tags)
            parts = shown(parts_of(family, [f"{write({'text': value})}\n{write({'n': '3'}, 'read')}"]))
            found.append([tuple(text.replace(" ", "") for text in part) for part in parts])
        assert found[0] == found[1], tags


@pytest.mark.parametrize("family", WRITERS)
def test_a_value_that_was_cut_inside_a_call_becomes_no_call(family: str) -> None:
    """Whether the inner call is another one is unknown then, and a call that nobody made would be run."""
    write = WRITERS[family]
    text = write({"text": f"Write {write({'n': '1'}, 'read')}"})
    for end in range(text.index("Write") + 5, text.index("Write") + 20):
        assert [part[1] for part in shown(parts_of(family, [text[:end]], stopped=False))] == ["write"]


@pytest.mark.parametrize("family", WRITERS)
def test_a_call_after_one_without_closing_tags_is_a_call(family: str) -> None:
    """The same tags pair up in another way: no closing tag is left for the first value."""
    write = WRITERS[family]
    lost = write({"text": "Oslo"})
    lost = lost[: lost.index("Oslo") + 4]
    text = f"{lost}\n{write({'text': write({'n': '1'}, 'read')})}"
    assert calls_of(family, text) == [("write", {"text": "Oslo"}), ("write", {"text": write({"n": "1"}, "read")})]


def half(family: str, key: str, value: str) -> str:
    """A call of the other tool without any of its closing tags."""
    if family == "qwen3_coder":
        return f"<tool_call>\n<function=read>\n<parameter={key}>\n{value}\n"
    return f"<tool_call>read\n<arg_key>{key}</arg_key>\n<arg_value>{value}"


# The schemas of the other tool, which has no argument ``extra``.
OF_TOOLS = {"write": PROPERTIES, "read": {"n": {"type": "integer"}, "mode": {"enum": ["r", "b"]}, "path": {}}}


def calls_of_tools(family: str, text: str) -> list[tuple[str, Any]]:
    def of(pieces: list[str] | str) -> list[tuple[str, ...]]:
        return shown(parsed_calls(FAMILIES[family](TOOLS, OF_TOOLS), pieces))

    whole = of([text])
    assert of(text) == whole
    return [(part[1], json.loads(part[2])) for part in whole if part[0] == "call"]


@pytest.mark.parametrize("family", WRITERS)
@pytest.mark.parametrize(
    ("before", "key", "value", "after"),
    [
        ("Write ", "n", "1", ""),
        ("Write ", "path", "a", "\nand wait"),
        ("Write\n", "n", "1", " and wait"),
        ("Write\n", "n", "1\nand wait", ""),
        ("", "mode", "r and wait", ""),
        ("", "other", "1", ""),
    ],
)
@pytest.mark.parametrize("more", [{}, {"n": "2"}, {"extra": "{}"}])
def test_a_value_holds_a_half_call_that_could_not_be_made(
    family: str, before: str, key: str, value: str, after: str, more: dict[str, str]
) -> None:
    """Its closing tags are those of the call around it, which became two calls."""
    write = WRITERS[family]
    text = f"{before}{half(family, key, value)}{after}"
    written = f"{write({'text': text} | more)}\n{write({'n': '3'}, 'read')}\ndone"
    expected = {"text": text} | {key: json.loads(one) for key, one in more.items()}
    assert calls_of_tools(family, written) == [("write", expected), ("read", {"n": 3})]


@pytest.mark.parametrize("family", WRITERS)
def test_an_argument_of_the_call_around_follows_a_half_call(family: str) -> None:
    write = WRITERS[family]
    text = f"Write\n{half(family, 'path', 'a')}".rstrip()
    assert calls_of_tools(family, write({"text": text, "extra": "{}"})) == [("write", {"text": text, "extra": {}})]
    # Without any sign it is the call around that has lost its closing tags.
    called = [("write", {"text": "Write"}), ("read", {"path": "a", "n": 2})]
    assert calls_of_tools(family, write({"text": text, "n": "2"})) == called


@pytest.mark.parametrize("family", WRITERS)
def test_a_half_call_without_a_sign_is_two_calls(family: str) -> None:
    """The text is the same as that of two calls of which the first has lost its closing tags."""
    write = WRITERS[family]
    for before, (key, value) in itertools.product(
        ("Write", "a\nb", "x <b>"), (("n", "1"), ("mode", "r"), ("path", "a\nb"), ("path", "{}"))
    ):
        lost = write({"text": before}).partition(before)[0] + before
        text = f"{lost}\n{write({key: value}, 'read')}"
        assert write({"text": f"{before}\n{half(family, key, value).rstrip()}"}) == text
        given = {key: value if value not in ("1", "{}") else json.loads(value)}
        assert calls_of_tools(family, text) == [("write", {"text": before}), ("read", given)]


@pytest.mark.parametrize("family", WRITERS)
@pytest.mark.parametrize("tool", ["", " y", "other", "other(1)"])
def test_closing_tags_and_an_opening_one_begin_no_call(family: str, tool: str) -> None:
    """Only a tool's name makes what follows the tags a call."""
    write = WRITERS[family]
    end = "</function>\n</tool_call>" if family == "qwen3_coder" else "</tool_call>"
    begin = f"<tool_call>\n<function={tool}" if family == "qwen3_coder" and tool else f"<tool_call>{tool}"
    for given in ({"text": f"x {end}\n{begin} y"}, {"text": f"x {end}\n{begin}", "n": "2"}):
        expected = {key: 2 if key == "n" else value for key, value in given.items()}
        text = f"{write(given)}\n{write({'n': '3'}, 'read')}"
        assert calls_of_tools(family, text) == [("write", expected), ("read", {"n": 3})]
