"""Calls whose closing tags and brackets a model has forgotten or damaged: what is certain of them stays."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import pytest
from parsed_answers import parsed_calls, shown

from engine.core.messages import FinishReason
from engine.frontend.protocols.openai.chat_blocks import BlockKind, SpokenChoice
from engine.frontend.schema.native import CachedTokensDetails, GenerateAnswer, MetaInfo
from engine.frontend.text.dialect import AnswerParser
from engine.frontend.text.reasoning import Part
from engine.frontend.text.tools.families import CALL, CALLS, END_CALL, END_CALLS, FAMILIES, SEPARATOR
from engine.frontend.text.tools.families.kimi_k2 import ARGUMENTS, END_SECTION, SECTION
from engine.frontend.text.tools.families.kimi_k2 import CALL as CALL_OF_KIMI
from engine.frontend.text.tools.families.kimi_k2 import END_CALL as END_CALL_OF_KIMI
from engine.frontend.text.tools.families.llama4 import MOST_SKIPPED

TOOLS = ("add", "look_up")
PROPERTIES = {"s": {"type": "string"}, "n": {"type": "integer"}, "l": {"type": "array"}}
GIVEN: dict[str, Any] = {"s": "Oslo", "n": 3, "l": [1, 2]}
# For each family, unless ``--damages`` says otherwise.
DAMAGES = 150
BOTH = [("call", name, GIVEN) for name in TOOLS]


class Closer(NamedTuple):
    text: str


Pieces = list[str | Closer]
OBJECT: Pieces = ['{"s": "Oslo", "n": 3, "l": [1, 2', Closer("]"), Closer("}")]


def _tags(name: str) -> Pieces:
    pieces: Pieces = [f"<tool_call>\n<function={name}>\n"]
    for key, value in (("s", "Oslo"), ("n", "3"), ("l", "[1, 2]")):
        pieces += [f"<parameter={key}>\n{value}\n", Closer("</parameter>"), "\n"]
    return [*pieces, Closer("</function>"), "\n", Closer("</tool_call>"), "\n"]


def _keys(name: str) -> Pieces:
    pieces: Pieces = [f"<tool_call>{name}\n"]
    for key, value in (("s", "Oslo"), ("n", "3"), ("l", "[1, 2]")):
        pieces += [f"<arg_key>{key}", Closer("</arg_key>"), f"\n<arg_value>{value}", Closer("</arg_value>"), "\n"]
    return [*pieces, Closer("</tool_call>"), "\n"]


def _hermes(name: str) -> Pieces:
    return [f'<tool_call>\n{{"name": "{name}", "arguments": ', *OBJECT, Closer("}"), "\n", Closer("</tool_call>"), "\n"]


def _fenced(name: str) -> Pieces:
    return [f"{CALL}function{SEPARATOR}{name}\n```json\n", *OBJECT, "\n", Closer("```"), Closer(END_CALL), "\n"]


def _numbered(name: str, number: int) -> Pieces:
    return [f"{CALL_OF_KIMI}functions.{name}:{number}{ARGUMENTS}", *OBJECT, Closer(END_CALL_OF_KIMI)]


def _message(name: str) -> Pieces:
    return [f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>", *OBJECT]


PYTHON: Pieces = ["(s='Oslo', n=3, l=[1, 2", Closer("]"), Closer(")")]
ATTRIBUTES: Pieces = [' s="Oslo" n="3" l=[1, 2', Closer("]")]


def _around(before: str, given: Pieces, *after: str | Closer) -> Pieces:
    """Both calls with the same text around their names and arguments."""
    return [piece for name in TOOLS for piece in (before + name, *given, *after)]


# Both calls, as the models of each family write them, and in words after the family's name in its tags.
WRITTEN: dict[str, Pieces] = {
    "hermes python": _around("<tool_call>\n", PYTHON, "\n", Closer("</tool_call>"), "\n"),
    "hermes object": _around("<tool_call>", OBJECT, "\n", Closer("</tool_call>"), "\n"),
    "hermes attributes": _around("<tool_call>", ATTRIBUTES, Closer("</tool_call>"), "\n"),
    "glm45 python": _around("<tool_call>", PYTHON, Closer("</tool_call>"), "\n"),
    "glm45 object": _around("<tool_call>", OBJECT, Closer("</tool_call>"), "\n"),
    "qwen3_coder python": _around("<tool_call>", PYTHON, Closer("</tool_call>"), "\n"),
    "qwen3_coder tag": _around("<function=", PYTHON, ">", Closer("</function>"), "\n"),
    "qwen3_coder attributes": _around("<function=", ATTRIBUTES, ">\n", Closer("</function>"), "\n"),
    "qwen3_coder object": _around("<function=", OBJECT, Closer("</function>"), "\n"),
    "mistral python": _around("[TOOL_CALLS]", PYTHON),
    "mistral object": _around("[TOOL_CALLS]", OBJECT),
    "llama3 python": _around("<|python_tag|>", PYTHON),
    "llama3 object": _around("<function=", OBJECT, Closer("</function>"), "\n"),
    "deepseek object": [CALLS, *_around(CALL, OBJECT, Closer(END_CALL)), Closer(END_CALLS)],
    "deepseek python": [CALLS, *_around(CALL, PYTHON, Closer(END_CALL)), Closer(END_CALLS)],
    "hermes": [*_hermes("add"), *_hermes("look_up")],
    "llama3": [
        '{"name": "add", "parameters": ',
        *OBJECT,
        Closer("}"),
        '; {"name": "look_up", "parameters": ',
        *OBJECT,
        Closer("}"),
    ],
    "mistral": ["[TOOL_CALLS]add[ARGS]", *OBJECT, "[TOOL_CALLS]look_up[ARGS]", *OBJECT],
    "llama4": [
        "[add(s='Oslo', n=3, l=[1, 2",
        Closer("]"),
        Closer(")"),
        ", look_up(s='Oslo', n=3, l=[1, 2",
        Closer("]"),
        Closer(")"),
        Closer("]"),
    ],
    "qwen3_coder": [*_tags("add"), *_tags("look_up")],
    "glm45": [*_keys("add"), *_keys("look_up")],
    "gpt_oss": [*_message("add"), Closer("<|end|>"), "<|start|>assistant", *_message("look_up"), Closer("<|call|>")],
    "kimi_k2": [SECTION, *_numbered("add", 0), *_numbered("look_up", 1), Closer(END_SECTION)],
    "kimi_k2 object": [SECTION, *_around(CALL_OF_KIMI, OBJECT, Closer(END_CALL_OF_KIMI)), Closer(END_SECTION)],
    "kimi_k2 python": [SECTION, *_around(CALL_OF_KIMI, PYTHON, Closer(END_CALL_OF_KIMI)), Closer(END_SECTION)],
    "deepseek": [CALLS, *_fenced("add"), *_fenced("look_up"), Closer(END_CALLS)],
}
LISTED: Pieces = [
    '[TOOL_CALLS] [{"name": "add", "arguments": ',
    *OBJECT,
    Closer("}"),
    ', {"name": "look_up", "arguments": ',
    *OBJECT,
    Closer("}"),
    Closer("]"),
]


def parts_of(family: str, pieces: Iterable[str]) -> list[Part]:
    return parsed_calls(FAMILIES[family.split()[0]](TOOLS, dict.fromkeys(TOOLS, PROPERTIES)), pieces)


def calls_of(family: str, text: str) -> list[tuple[Any, ...]]:
    """The calls of a text that the model ended, the same in one and character by character."""
    whole = parts_of(family, [text])
    assert parts_of(family, text) == whole, text
    return [(kind, *rest, json.loads(last)) for kind, *rest, last in shown(whole) if kind != "content"]


def texts_without(pieces: Pieces) -> list[str]:
    """The text without each subset of its closers; of many subsets 256, drawn with a seed."""
    closers = [at for at, piece in enumerate(pieces) if isinstance(piece, Closer)]
    subsets = list(itertools.product((False, True), repeat=len(closers)))
    if len(subsets) > 256:
        subsets = random.Random(46).sample(subsets, 256)
    texts = []
    for subset in subsets:
        gone = set(itertools.compress(closers, subset))
        texts.append("".join("" if at in gone else _text(piece) for at, piece in enumerate(pieces)))
    return texts


def _text(piece: str | Closer) -> str:
    return piece if isinstance(piece, str) else piece.text


@pytest.mark.parametrize("family", WRITTEN)
def test_every_subset_of_closers_may_be_missing(family: str) -> None:
    """C03. vLLM pull requests 23099 and 35615, issue 57699: a value without a closing tag took the next ones in."""
    for text in texts_without(WRITTEN[family]):
        assert calls_of(family, text) == BOTH, text


@pytest.mark.parametrize("family", WRITTEN)
def test_a_call_breaks_off_before_the_next_one(family: str) -> None:
    """The next one is whole, and the first has nothing that was not written."""
    pieces = list(map(_text, WRITTEN[family]))
    following = next(at for at, piece in enumerate(pieces) if "look_up" in piece)
    for end in range(1, following):
        text = "".join([*pieces[:end], "\n" * (not pieces[end - 1].endswith("\n")), *pieces[following:]])
        *first, last = calls_of_damaged(family, text)
        assert last == ("call", "look_up", GIVEN), text
        assert len(first) <= 1, text
        for _, name, given in first:
            assert (name, {**GIVEN, **(given or {})}) == ("add", GIVEN), text


def test_a_list_of_calls_lacks_closers() -> None:
    """Without one of the brackets around a value in a list a call would be one more value of it."""
    bare = '"l": [1, 2, {"name"'
    for text in texts_without(LISTED):
        if bare not in text:
            assert calls_of("mistral", text) == BOTH, text


def said(family: str, text: str, *, end: FinishReason = FinishReason.STOP) -> SpokenChoice:
    parser = FAMILIES[family.split()[0]](TOOLS, dict.fromkeys(TOOLS, PROPERTIES))
    choice = SpokenChoice(AnswerParser(None, parser, parallel=True))
    meta = MetaInfo(
        id="r",
        finish_reason=end,
        prompt_tokens=1,
        completion_tokens=1,
        cached_tokens=0,
        cached_tokens_details=CachedTokensDetails(device=0, host=0),
    )
    for _ in choice.changes(GenerateAnswer(text=text, output_ids=(1,), meta_info=meta)):
        continue
    return choice


def is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except ValueError:
        return False


def damaged(pieces: Sequence[str | Closer], rng: random.Random) -> str:
    """The text with one to three closers that lack a character, have another, one more, or only a beginning."""
    closers = [at for at, piece in enumerate(pieces) if isinstance(piece, Closer)]
    hit = set(rng.sample(closers, rng.randint(1, min(3, len(closers)))))
    return "".join(_damaged(_text(piece), rng) if at in hit else _text(piece) for at, piece in enumerate(pieces))


def _damaged(text: str, rng: random.Random) -> str:
    at, wrong = rng.randrange(len(text)), rng.choice('x/><" 1\n{]')
    return rng.choice(
        (text[:at] + text[at + 1 :], text[:at] + wrong + text[at + 1 :], text[:at] + wrong + text[at:], text[:at])
    )


@pytest.mark.parametrize("family", [family for family, pieces in WRITTEN.items() if OBJECT[0] in pieces])
def test_a_quote_stands_for_the_bracket_of_a_list(family: str) -> None:
    """The quote began a text that took the next call in, and the one call seemed whole."""
    if family == "llama3":
        return  # A text may begin with a semicolon.
    pieces = WRITTEN[family]
    for text in texts_without([*map(_quoted, pieces)]):
        if "[1, 2}" not in text and '[1, 2"' in text:
            found = calls_of_damaged(family, text)
            assert found == BOTH, text


def _quoted(piece: str | Closer) -> str | Closer:
    return '"' if piece == Closer("]") else piece


@pytest.mark.parametrize("family", [*WRITTEN])
def test_damaged_closers_leave_json_or_the_reason_says_so(family: str, request: pytest.FixtureRequest) -> None:
    """C03: and wherever the text is cut, it comes to the same."""
    rng = random.Random(f"46 {family}")
    for _ in range(request.config.getoption("--damages", None) or DAMAGES):
        text = damaged(WRITTEN[family], rng)
        assert parts_of(family, [text]) == parts_of(family, text), text
        choice = said(family, text)
        calls = [block for block in choice.blocks if block.kind is BlockKind.CALL]
        assert calls, text
        assert calls[0].name == "add", text
        if all(is_object(call.text) for call in calls):
            assert choice.finish_reason(FinishReason.STOP) == "tool_calls", text
        else:
            assert choice.finish_reason(FinishReason.STOP) == "length", text


@pytest.mark.parametrize("tag", ["parameter", "function", "tool_call"])
@pytest.mark.parametrize(
    "closing", ["</{}", "</{}/>", "</{}1>", "<{}>", "</{}x>", "</ {}>", "</{}_function>", "</{:.5}"]
)
def test_closing_tags_that_models_damage(tag: str, closing: str) -> None:
    """SGLang issue 27336: such a tag became a part of the value."""
    if tag == "tool_call" and closing == "<{}>":
        return  # The opening tag of a call.
    text = "".join(map(_text, WRITTEN["qwen3_coder"])).replace(f"</{tag}>", closing.format(tag))
    assert calls_of("qwen3_coder", text) == BOTH


@pytest.mark.parametrize(
    ("damage", "given"),
    [
        (("<parameter=n>", "<parameter=n"), GIVEN),
        (("<function=add>", "<function=add"), GIVEN),
        (("<parameter=n>", "<parameter=>"), {"s": "Oslo", "l": [1, 2]}),
        (("<parameter=n>\n3\n", "<parameter=n3\n"), {"s": "Oslo", "l": [1, 2]}),
        (("\n</parameter>\n<parameter=n>", "\n</s>\n<parameter=n>"), GIVEN),
    ],
)
def test_an_opening_tag_of_qwen_is_damaged(damage: tuple[str, str], given: dict[str, Any]) -> None:
    """mlx-lm pull request 1881: without its bracket a name took the value in, and the parameter was lost."""
    text = "".join(map(_text, _tags("add"))).replace(*damage)
    assert calls_of("qwen3_coder", text) == [("call", "add", given)]


@pytest.mark.parametrize(
    ("opening", "closing"),
    [
        ("<param={}>", "</param>"),
        ("<param={}>", "</parameter>"),
        ('<param name="{}">', "</param>"),
        ("<parameter name='{}'>", "</parameter>"),
        ("<parmeter={}>", "</parameter>"),
        ("<argument={}>", "</argument>"),
        ("<parameter: {}>", "</parameter>"),
        ("<parameter {}>", "</parameter>"),
        ("<{}>", "</{}>"),
    ],
)
@pytest.mark.parametrize("function", ["<function={}>", '<function name="{}">', "<function name={}>", "<function='{}'>"])
@pytest.mark.parametrize("outer", [True, False])
def test_tags_of_qwen_are_misspelt(opening: str, closing: str, function: str, *, outer: bool) -> None:
    """Such parameters were left out of a call that seemed whole."""
    text = "".join(map(_text, _tags("add"))).replace("<function=add>", function.format("add"))
    for key in GIVEN:
        named = f"<parameter={key}>"
        begin, end = text.index(named), text.index("</parameter>", text.index(named))
        value = text[begin + len(named) : end]
        written = f"{opening.format(key)}{value}{closing.format(key)}"
        text = text[:begin] + written + text[end + len("</parameter>") :]
    if not outer:
        text = text.replace("<tool_call>\n", "").replace("</tool_call>\n", "")
    assert calls_of("qwen3_coder", text + "ok") == [("call", "add", GIVEN)]


@pytest.mark.parametrize("family", ["qwen3_coder", "glm45"])
def test_lines_end_with_carriage_returns(family: str) -> None:
    """They became a part of each value of Qwen."""
    text = "".join(map(_text, WRITTEN[family]))
    assert calls_of(family, text.replace("\n", "\r\n")) == BOTH
    lines = "a\r\nb\r\n"
    given = GIVEN | {"s": lines}
    written = text.replace("\n", "\r\n").replace("Oslo", lines)
    assert calls_of(family, written) == [("call", name, given) for name in TOOLS]
    assert calls_of(family, text.replace("Oslo", "a\r")) == [("call", name, GIVEN | {"s": "a\r"}) for name in TOOLS]


@pytest.mark.parametrize("value", ['<param name="movie" value="x"></param>', "<n>1</n>", "<argument=n>1</argument>"])
def test_a_value_has_tags_that_only_look_like_parameters(value: str) -> None:
    text = "".join(map(_text, _tags("add"))).replace("Oslo", value)
    assert calls_of("qwen3_coder", text) == [("call", "add", GIVEN | {"s": value})]


@pytest.mark.parametrize(
    ("damage", "given"),
    [
        (("<arg_value>Oslo", "Oslo"), GIVEN),
        (("</arg_key>\n<arg_value>3", "<arg_value>3"), GIVEN),
        (("<arg_key>n</arg_key>", "<arg_key></arg_key>"), {"s": "Oslo", "l": [1, 2]}),
        (("<arg_key>n</arg_key>\n<arg_value>3</arg_value>", "<arg_key>n</arg_key>"), {"s": "Oslo", "l": [1, 2]}),
        (("<arg_value>[1, 2]</arg_value>\n", ""), {"s": "Oslo", "n": 3}),
        (("<arg_key>n</arg_key>", "<arg_key>n</arg_value>"), GIVEN),
        (("<arg_key>n</arg_key>", "n</arg_key>"), GIVEN),
        (("<arg_key>n</arg_key>", "<tool_call>n</arg_key>"), GIVEN),
        (("add\n<arg_key>s", "add\ns"), GIVEN),
        (("add\n<arg_key>s", "add s"), GIVEN),
        (("add\n<arg_key>s", "adds"), GIVEN),
        (("add\n<arg_key>s", "add<tool_call>s"), GIVEN),
        (("add\n<arg_key>s</arg_key>\n<arg_value>Oslo</arg_value>\n<arg_key>n", "add\nn"), {"n": 3, "l": [1, 2]}),
    ],
)
def test_an_opening_tag_of_glm_is_damaged(damage: tuple[str, str], given: dict[str, Any]) -> None:
    """vLLM issue 49248: without the tag of its value a call had no arguments."""
    text = "".join(map(_text, _keys("add"))).replace(*damage)
    assert calls_of("glm45", text) == [("call", "add", given)]


@pytest.mark.parametrize(
    "value",
    [
        "a <parameter=other> b",
        "<parameter=s>\nnested\n</parameter> more",
        "for </function> and </tool_call> in text",
        "<parameters>\n<parameter>x</parameter>\n</parameters>",
        "grep '<parameter=edits>\n(.*?)\n</parameter>' x",
    ],
)
def test_a_value_may_speak_of_tags(value: str) -> None:
    """SGLang issue 39836: the parameter's own tag in its value cut the value's beginning off."""
    text = "".join(map(_text, _tags("add"))).replace("Oslo", value)
    assert calls_of("qwen3_coder", text) == [("call", "add", GIVEN | {"s": value})]


@pytest.mark.parametrize(
    ("written", "given"),
    [
        ('{"s": "a\nb"}', {"s": "a\nb"}),
        ('{"s": "\\d+\\u12"}', {"s": "\\d+\\u12"}),
        ('{"s": "x",}', {"s": "x"}),
        ('{"l": [1, 2}', {"l": [1, 2]}),
    ],
)
def test_json_that_models_write_wrong_is_mended(written: str, given: dict[str, Any]) -> None:
    text = f'<tool_call>{{"name": "add", "arguments": {written}}}</tool_call>'
    assert calls_of("hermes", text) == [("call", "add", given)]


@pytest.mark.parametrize("family", WRITTEN)
def test_a_call_that_the_length_cut_is_not_completed(family: str) -> None:
    text = "".join(map(_text, WRITTEN[family]))
    half = text[: text.rindex("Oslo") + 2]
    choice = said(family, half, end=FinishReason.LENGTH)
    assert choice.blocks[-1].text.endswith('"s": "Os')
    assert choice.finish_reason(FinishReason.LENGTH) == "length"


WRAPPERS: tuple[Callable[[Any], Any], ...] = (
    lambda one: [one],
    lambda one: [1, one],
    lambda one: {"k": one},
    lambda one: {"k": one, "m": 2},
)


def test_a_bracket_of_llama4_closes_those_inside_that_lack_their_own() -> None:
    for wrappers in itertools.product(WRAPPERS, repeat=3):
        value: Any = 5
        for wrapper in wrappers:
            value = wrapper(value)
        written = repr(value)
        for at, (one, after) in enumerate(itertools.pairwise(written)):
            if {one, after} == set("]}"):
                text = f"[add(o={written[:at]}{written[at + 1 :]}, n=3), look_up(n=2)]"
                assert calls_of("llama4", text) == [
                    ("call", "add", {"o": value, "n": 3}),
                    ("call", "look_up", {"n": 2}),
                ]


@pytest.mark.parametrize("damaged", ["@@", "1 2", "", "{1: 2}", "'a' @", "1, 7", "[1, @, 2", "f(1, 2)", "<1"])
@pytest.mark.parametrize("marked", [False, True])
def test_a_call_of_llama4_that_cannot_be_read_leaves_the_later_ones(damaged: str, marked: bool) -> None:
    listed = f"[look_up(s='x'), add(n={damaged}), look_up(s='a, b(c'), add(l=[1, 2])]"
    text = f"<|python_start|>{listed}<|python_end|>" if marked else listed
    calls = [call for call in calls_of_damaged("llama4", text) if call[0] == "call" and call[2] != {"n": 1}]
    assert calls[0] == ("call", "look_up", {"s": "x"})
    assert calls[-2:] == [("call", "look_up", {"s": "a, b(c"}), ("call", "add", {"l": [1, 2]})]


def test_a_call_without_names_is_content_and_leaves_the_later_ones() -> None:
    whole = parts_of("llama4", ["[add(5), look_up(s='x')]"])
    assert parts_of("llama4", "[add(5), look_up(s='x')]") == whole
    assert shown(whole) == [("content", "[add(5),"), ("call", "look_up", '{"s": "x"}')]


def test_a_damaged_call_without_a_later_one_holds_no_more_than_its_bound() -> None:
    parser = FAMILIES["llama4"](TOOLS, dict.fromkeys(TOOLS, PROPERTIES))
    parts = [part for piece in ("[add(n=@), ", *["word, "] * MOST_SKIPPED) for part in parser.push(piece)]
    assert any("word" in str(part) for part in parts)


def calls_of_damaged(family: str, text: str) -> list[tuple[Any, ...]]:
    """Calls as in ``calls_of``, with None for the arguments of one that was cut."""
    whole = parts_of(family, [text])
    assert parts_of(family, text) == whole, text
    return [
        (kind, *rest, json.loads(last) if kind == "call" else None)
        for kind, *rest, last in shown(whole)
        if kind != "content"
    ]
