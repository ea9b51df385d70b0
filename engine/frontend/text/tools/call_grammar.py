"""Lark grammars for a model's output: reasoning, content, and calls that follow their schemas.

Owns how texts, special tokens and schemas are spelled in them, and how each family's format is written as a grammar, so
that its parser finds a call for sure. Values that can only be strings are written without quotes, unless their schemas
have a pattern or a format. Compiles nothing.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec

from engine.core.messages import Grammar, GrammarKind
from engine.frontend.text.reasoning import BEGIN, CHANNEL, END, END_MESSAGE, MESSAGE, START_MESSAGE, ReasoningStart
from engine.frontend.text.tools.argument_schemas import choices_of, is_text, properties_of
from engine.grammar.automata import plain
from engine.grammar.followable import followable
from engine.grammar.source import MAX_GRAMMAR_CHARS, SPACING

HEADER = "%llguidance {}"
# An escaped character, or a slash, which ends a regex in Lark.
_ESCAPED_OR_SLASH = re.compile(r"\\.|/", re.DOTALL)
# The piece of a form that stands for a number.
DIGITS: Final = "0-9"
# What opens a message on a channel, and what is between two messages, in pieces.
_ANALYSIS: Final = (CHANNEL, "analysis", MESSAGE)
_FINAL: Final = (CHANNEL, "final", MESSAGE)
_NEXT_MESSAGE: Final = (START_MESSAGE, "assistant")
ANY_TEXT = r"TEXT: /(.|\n)*/"


class LarkRules:
    """The rules of one grammar. ``special_ids`` are the special tokens, which have no bytes in the vocabulary."""

    def __init__(self, special_ids: Mapping[str, int]) -> None:
        self._special_ids = special_ids
        self._rules = [HEADER]
        self._chars = 0

    @property
    def is_too_long(self) -> bool:
        """Whether the check refuses the grammar for its length, so that further rules cost time for nothing."""
        return self._chars > MAX_GRAMMAR_CHARS

    def add(self, rule: str) -> None:
        self._chars += len(rule)
        self._rules.append(rule)

    def text(self, *pieces: str) -> str:
        """Write a sequence of pieces; a special token is written as that token."""
        return " ".join(self._piece(piece) for piece in pieces if piece)

    def ending(self, piece: str) -> str | None:
        """Write a piece that is a special token, which ends any text; None for plain text."""
        return self._piece(piece) if piece in self._special_ids else None

    def add_reasoning(self, start: ReasoningStart | None) -> str:
        """Add rules for reasoning; return the reference that precedes the answer, empty without reasoning."""
        if start is None:
            return ""
        if start is ReasoningStart.CHANNELS:
            self._add_thought(END_MESSAGE)
            self.add(f"reasoning: ({self.text(*_ANALYSIS)} thought {self.text(*_NEXT_MESSAGE)})*")
            return "reasoning "
        self.add(r"SPACE: /[ \n]{0,4}/")
        self._add_thought(END)
        begin = self._piece(BEGIN)
        marked = f"{begin} thought SPACE"
        rule = {
            ReasoningStart.OPEN: "thought SPACE",
            ReasoningStart.MARKED: f"({marked})?",
            ReasoningStart.ASSUMED: f"{begin}? thought SPACE",
        }[start]
        self.add(f"reasoning: {rule}")
        return "reasoning "

    def add_messages(self) -> None:
        """Add rules for messages before the last one, and for the last one, on any channels."""
        self._add_thought(END_MESSAGE)
        self.add("KIND: /analysis|commentary|final/")
        begin = f"{self.text(CHANNEL)} KIND {self.text(MESSAGE)}"
        self.add(f"messages: ({begin} thought {self.text(*_NEXT_MESSAGE)})*")
        self.add(f"last: {begin} TEXT")
        self.add(ANY_TEXT)

    def add_answer(self, body: str, start: ReasoningStart | None) -> None:
        """Add a rule ``answer`` for content of this rule, after what opens it."""
        opening = self.text(*_FINAL) if start is ReasoningStart.CHANNELS else ""
        self.add(f"answer: {opening} content" if opening else f"answer: {body}")
        if opening:
            self.add(f"content: {body}")

    def _add_thought(self, marker: str) -> None:
        """Add a rule ``thought`` for any text up to a marker."""
        end = self.ending(marker)
        self.add(rf"thought: /(.|\n)*/ {end}" if end else rf"thought[suffix={json.dumps(marker)}]: /(.|\n)*/")

    def grammar(self) -> Grammar:
        return Grammar(GrammarKind.EBNF, "\n".join(self._rules))

    def _piece(self, piece: str) -> str:
        if piece == DIGITS:
            return "/[0-9]{1,4}/"
        token_id = self._special_ids.get(piece)
        return json.dumps(piece, ensure_ascii=False) if token_id is None else f"<[{token_id}]>"


def after_reasoning(grammar: Grammar, start: ReasoningStart, special_ids: Mapping[str, int]) -> Grammar | None:
    """Extend a grammar of the content to the whole output; None for a kind that cannot be embedded."""
    rules = LarkRules(special_ids)
    body = rule_body(grammar)
    if body is None:
        return None
    rules.add(f"start: {rules.add_reasoning(start)}answer")
    rules.add_answer(body, start)
    return rules.grammar()


def rule_body(grammar: Grammar) -> str | None:
    """Return a grammar as the body of a rule; None for a kind that cannot be embedded."""
    match grammar.kind:
        case GrammarKind.JSON_SCHEMA:
            return "%json " + json.dumps(spaced(json.loads(grammar.text)))
        case GrammarKind.REGEX:
            escaped = _ESCAPED_OR_SLASH.sub(
                lambda found: r"\/" if found[0] == "/" else found[0], plain(grammar.text, is_whole=True) or grammar.text
            )
            return "/" + escaped.replace("\n", r"\n") + "/"
        case GrammarKind.CHOICE:
            return " | ".join(json.dumps(choice, ensure_ascii=False) for choice in json.loads(grammar.text))
        case _:
            return None


def spaced(schema: Any) -> Any:
    """Return a schema that the library can follow, with JSON spaced as models write it."""
    # A schema without a finite value stays unchanged: the check of the whole grammar refuses it.
    mended = followable(schema) or schema
    return {"x-guidance": SPACING, **mended} if isinstance(mended, dict) else mended


DEFINITIONS = ("$defs", "definitions")
_REFERENCE = '"$ref"'
ANY_KEY = "/[A-Za-z_][A-Za-z0-9_]*/"
LONGEST_BOUND = 10_000


class ArgumentForm(msgspec.Struct, frozen=True, kw_only=True):
    """The format in which a family writes arguments, as pieces, some of which are markers.

    An argument is ``before``, its name, ``between``, its value and ``after``; ``separator`` is between two. With
    ``raw`` strings have no quotes.
    """

    before: tuple[str, ...] = ()
    between: tuple[str, ...]
    after: tuple[str, ...] = ()
    separator: tuple[str, ...] = ()
    raw: bool


def add_arguments(rules: LarkRules, form: ArgumentForm, schema: Mapping[str, Any], name: str) -> str:
    """Add rules for the arguments of a tool, in schema order; return the reference to them."""
    schema = followable(schema) or schema
    # Only the reader of texts needs what a reference names; the library resolves the others itself.
    properties = {
        key: one if is_text(one) or not isinstance(described := schema["properties"][key], dict) else described
        for key, one in properties_of(schema).items()
        if schema["properties"][key] is not False
    }
    if not properties:
        return "" if schema.get("additionalProperties") is False else _add_any(rules, form, name)
    required = schema.get("required")
    required = required if isinstance(required, list) else []
    definitions = {key: schema[key] for key in DEFINITIONS if key in schema}
    count, separator = len(properties), rules.text(*form.separator)
    # Two rules for each position: one if no argument precedes it, and one otherwise.
    for number, (key, described) in enumerate(properties.items()):
        if rules.is_too_long:
            break
        one = f"{name}_{number}"
        shared = definitions if _REFERENCE in json.dumps(described) else {}
        value = _add_value(rules, form, shared | described, f"{one}_value")
        rules.add(f"{one}: {rules.text(*form.before, key, *form.between)} {value}")
        last = number == count - 1
        more = "" if last else f"{name}_more_{number + 1}"
        skipped = " | " + ('""' if last else f"{name}_more_{number + 1}")
        rules.add(f"{name}_more_{number}: {separator} {one} {more}" + ("" if key in required else skipped))
        skipped = " | " + ('""' if last else f"{name}_from_{number + 1}")
        rules.add(f"{name}_from_{number}: {one} {more}" + ("" if key in required else skipped))
    return f"{name}_from_0"


def _add_any(rules: LarkRules, form: ArgumentForm, name: str) -> str:
    value = _add_value(rules, form, {"type": "string"} if form.raw else {}, f"{name}_value")
    rules.add(f"{name.upper()}_KEY: {ANY_KEY}")
    rules.add(f"{name}_one: {rules.text(*form.before)} {name.upper()}_KEY {rules.text(*form.between)} {value}")
    rules.add(f"{name}_any: ({name}_one ({rules.text(*form.separator)} {name}_one)*)?")
    return f"{name}_any"


def _add_value(rules: LarkRules, form: ArgumentForm, schema: Mapping[str, Any], name: str) -> str:
    """Add a rule for a value of a followable schema and its closing pieces; return the rule's name."""
    after = rules.text(*form.after)
    if not (form.raw and is_text(schema)):
        rules.add(f"{name}: {name}_json {after}")
        rules.add(f"{name}_json: %json {json.dumps({'x-guidance': SPACING, **schema})}")
    elif listed := choices_of(schema):
        choices = " | ".join(rules.text(choice) or '""' for choice in listed)
        rules.add(f"{name}: ({choices}) {after}")
    else:
        closing, *rest = form.after
        ends = rules.ending(closing)
        text = rf"/(.|\n){_length_of(schema)}/"
        rules.add(f"{name}: {name}_text {rules.text(*rest)}")
        rules.add(f"{name}_text: {text} {ends}" if ends else f"{name}_text[suffix={json.dumps(closing)}]: {text}")
    return name


def _length_of(schema: Mapping[str, Any]) -> str:
    fewest, most = (schema.get(key) for key in ("minLength", "maxLength"))
    fewest = fewest if isinstance(fewest, int) and 0 < fewest <= LONGEST_BOUND else 0
    if not isinstance(most, int) or not fewest <= most <= LONGEST_BOUND:
        return f"{{{fewest},}}" if fewest else "*"
    return f"{{{fewest},{most}}}"


NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
ANY_PARAMETERS: dict[str, Any] = {"type": "object"}


class CallForm(msgspec.Struct, frozen=True, kw_only=True):
    """The format in which a family writes calls, as pieces, some of which are markers.

    ``opening`` and ``closing`` are around all calls, ``separator`` between two of them. A call is ``before``, its name,
    ``between``, its arguments and ``after``; with ``quoted`` the name is a JSON string. If ``arguments`` is None they
    are a JSON object.
    """

    opening: tuple[str, ...] = ()
    before: tuple[str, ...]
    quoted: bool = True
    between: tuple[str, ...]
    after: tuple[str, ...] = ()
    separator: tuple[str, ...] = ()
    closing: tuple[str, ...] = ()
    arguments: ArgumentForm | None = None


class OfferedTool(msgspec.Struct, frozen=True, kw_only=True):
    """A tool and its argument schema, None without arguments. Calls of ``strict`` tools always follow it."""

    name: str
    parameters: dict[str, Any] | None
    strict: bool

    @property
    def schema(self) -> dict[str, Any]:
        """Return the schema of the arguments, always an object."""
        return NO_PARAMETERS if self.parameters is None else ANY_PARAMETERS | self.parameters


def required_calls(
    form: CallForm,
    tools: Sequence[OfferedTool],
    reasoning: ReasoningStart | None,
    special_ids: Mapping[str, int],
    *,
    several: bool,
) -> Grammar:
    """Return the grammar of an output of only calls, one or ``several``, after its reasoning."""
    rules = LarkRules(special_ids)
    rules.add(f"start: {rules.add_reasoning(reasoning)}calls")
    _add_calls(rules, form, tools, several=several)
    return rules.grammar()


def calls_or_answer(
    form: CallForm,
    tools: Sequence[OfferedTool],
    answer: Grammar,
    reasoning: ReasoningStart | None,
    special_ids: Mapping[str, int],
) -> Grammar | None:
    """Return the grammar of an output that is either only calls or content of ``grammar``.

    None if the two cannot be distinguished: for a grammar that cannot be embedded, and for calls that begin like JSON.
    """
    body = rule_body(answer)
    if body is None or (form.opening or form.before)[0].startswith("{"):
        return None
    rules = LarkRules(special_ids)
    rules.add(f"start: {rules.add_reasoning(reasoning)}(answer | calls)")
    rules.add_answer(body, reasoning)
    _add_calls(rules, form, tools, several=True, only_strict=True)
    return rules.grammar()


def calls_if_any(
    form: CallForm, tools: Sequence[OfferedTool], reasoning: ReasoningStart | None, special_ids: Mapping[str, int]
) -> Grammar:
    """Return the grammar of an output with calls anywhere; calls of strict tools follow their schemas."""
    rules = LarkRules(special_ids)
    if reasoning is ReasoningStart.CHANNELS:
        rules.add("start: messages (last | calls)")
        rules.add_messages()
        _add_calls(rules, form, tools, several=True, only_strict=True)
        return rules.grammar()
    trigger, *rest = form.opening or form.before
    rules.add(f"start: {rules.add_reasoning(reasoning)}(head calls)* TEXT")
    rules.add(ANY_TEXT)
    rules.add(
        f"head: TEXT {rules.text(trigger)}" if trigger in special_ids else f"head[lazy]: TEXT {rules.text(trigger)}"
    )
    if form.opening:
        more = f"({rules.text(*form.separator)} call)*"
        rules.add(f"calls: {rules.text(*rest)} call {more} {rules.text(*form.closing)}")
        rules.add(f"call: {_choice_of(rules, form, tools, skip=0, only_strict=True)}")
    else:
        rules.add(f"calls: {_choice_of(rules, form, tools, skip=1, only_strict=True)}")
    return rules.grammar()


def _add_calls(
    rules: LarkRules, form: CallForm, tools: Sequence[OfferedTool], *, several: bool, only_strict: bool = False
) -> None:
    """Add a rule ``calls`` for calls and their surrounding pieces."""
    more = f" ({rules.text(*form.separator)} call)*" if several else ""
    rules.add(f"calls: {rules.text(*form.opening)} call{more} {rules.text(*form.closing)}")
    rules.add(f"call: {_choice_of(rules, form, tools, skip=0, only_strict=only_strict)}")


def _choice_of(
    rules: LarkRules, form: CallForm, tools: Sequence[OfferedTool], *, skip: int, only_strict: bool = False
) -> str:
    """Add a rule for a call of each tool, without its first ``skip`` pieces; return the alternatives."""
    for number, tool in enumerate(tools):
        if rules.is_too_long:
            break
        name = json.dumps(tool.name, ensure_ascii=False) if form.quoted else tool.name
        schema = tool.schema if tool.strict or not only_strict else ANY_PARAMETERS
        before, after = rules.text(*form.before[skip:], name, *form.between), rules.text(*form.after)
        if form.arguments is not None:
            rules.add(f"call_{number}: {before} {add_arguments(rules, form.arguments, schema, f'a{number}')} {after}")
            continue
        rules.add(f"call_{number}: {before} arguments_{number} {after}")
        rules.add(f"arguments_{number}: %json {json.dumps(spaced(schema))}")
    return " | ".join(f"call_{number}" for number in range(len(tools)))
