"""Grammars of calls: an output that must have some, or in which each call of a strict tool keeps to its schema.

Owns how each family's format is written as a grammar, so that its parser finds a call for sure.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from engine.frontend.lark import ANY_TEXT, LarkRules, rule_body, spaced
from engine.frontend.reasoning import ReasoningStart
from engine.frontend.tools.argument_rules import ArgumentForm, add_arguments
from engine.messages import Grammar

__all__ = ["CallForm", "OfferedTool", "calls_if_any", "calls_or_answer", "required_calls"]

NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
ANY_PARAMETERS: dict[str, Any] = {"type": "object"}


class CallForm(msgspec.Struct, frozen=True, kw_only=True):
    """How a family writes calls, in pieces of which some are markers.

    ``opening`` and ``closing`` stand around all calls, ``separator`` between two of them. A call is ``before``, its
    name, ``between``, its arguments and ``after``; ``quoted`` says that the name is a JSON string. Without
    ``arguments`` they are an object in JSON.
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
    """A tool with the schema of its arguments; None: it has none. ``strict`` ones are held to it in every call."""

    name: str
    parameters: dict[str, Any] | None
    strict: bool

    @property
    def schema(self) -> dict[str, Any]:
        """What the arguments must be: always an object."""
        return NO_PARAMETERS if self.parameters is None else ANY_PARAMETERS | self.parameters


def required_calls(
    form: CallForm,
    tools: Sequence[OfferedTool],
    reasoning: ReasoningStart | None,
    special_ids: Mapping[str, int],
    *,
    several: bool,
) -> Grammar:
    """The grammar of an output that is calls alone, one or ``several``, after its reasoning."""
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
    """The grammar of an output that is calls alone or an answer of a grammar.

    None where the one could not be told from the other: for a grammar that cannot be a part of another, and for calls
    that begin as JSON does.
    """
    body = rule_body(answer)
    if body is None or (form.opening or form.before)[0].startswith("{"):
        return None
    rules = LarkRules(special_ids)
    rules.add(f"start: {rules.add_reasoning(reasoning)}(answer | calls)")
    rules.add(f"answer: {body}")
    _add_calls(rules, form, tools, several=True, only_strict=True)
    return rules.grammar()


def calls_if_any(
    form: CallForm, tools: Sequence[OfferedTool], reasoning: ReasoningStart | None, special_ids: Mapping[str, int]
) -> Grammar:
    """The grammar of an output that may have calls anywhere, those of strict tools with arguments of their schemas."""
    rules = LarkRules(special_ids)
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
    """Add a rule ``calls`` for calls and what stands around them."""
    more = f" ({rules.text(*form.separator)} call)*" if several else ""
    rules.add(f"calls: {rules.text(*form.opening)} call{more} {rules.text(*form.closing)}")
    rules.add(f"call: {_choice_of(rules, form, tools, skip=0, only_strict=only_strict)}")


def _choice_of(
    rules: LarkRules, form: CallForm, tools: Sequence[OfferedTool], *, skip: int, only_strict: bool = False
) -> str:
    """Add a rule for a call of each tool, without its first ``skip`` pieces; returns the choice between them."""
    for number, tool in enumerate(tools):
        name = json.dumps(tool.name, ensure_ascii=False) if form.quoted else tool.name
        schema = tool.schema if tool.strict or not only_strict else ANY_PARAMETERS
        before, after = rules.text(*form.before[skip:], name, *form.between), rules.text(*form.after)
        if form.arguments is not None:
            rules.add(f"call_{number}: {before} {add_arguments(rules, form.arguments, schema, f'a{number}')} {after}")
            continue
        rules.add(f"call_{number}: {before} arguments_{number} {after}")
        rules.add(f"arguments_{number}: %json {json.dumps(spaced(schema))}")
    return " | ".join(f"call_{number}" for number in range(len(tools)))
