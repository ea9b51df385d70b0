"""Grammars of arguments in formats that are no JSON: one value after the other, each after its name.

Owns how a tool's schema becomes such rules. Values that can be nothing but texts are written as they are; of their
schemas the choices and the length are kept. All others are JSON of their own schema.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import msgspec

from engine.frontend.lark import LarkRules, spaced
from engine.frontend.tools.argument_values import is_text, properties_of

__all__ = ["ArgumentForm", "add_arguments"]

DEFINITIONS = ("$defs", "definitions")
ANY_KEY = "/[A-Za-z_][A-Za-z0-9_]*/"
LONGEST_BOUND = 10_000


class ArgumentForm(msgspec.Struct, frozen=True, kw_only=True):
    """How a family writes arguments, in pieces of which some are markers.

    An argument is ``before``, its name, ``between``, its value and ``after``; ``separator`` stands between two.
    ``raw``: a text has no quotes.
    """

    before: tuple[str, ...] = ()
    between: tuple[str, ...]
    after: tuple[str, ...] = ()
    separator: tuple[str, ...] = ()
    raw: bool


def add_arguments(rules: LarkRules, form: ArgumentForm, schema: Mapping[str, Any], name: str) -> str:
    """Add rules for the arguments of a tool, in the order of its schema; returns what stands for them."""
    properties = properties_of(schema)
    if not properties:
        return "" if schema.get("additionalProperties") is False else _add_any(rules, form, name)
    required = schema.get("required")
    required = required if isinstance(required, list) else []
    definitions = {key: schema[key] for key in DEFINITIONS if key in schema}
    count, separator = len(properties), rules.text(*form.separator)
    # Of each place two rules: before it no argument was written, or one was.
    for number, (key, described) in enumerate(properties.items()):
        one = f"{name}_{number}"
        value = _add_value(rules, form, definitions | described, f"{one}_value")
        rules.add(f"{one}: {rules.text(*form.before, key, *form.between)} {value}")
        last = number == count - 1
        more = "" if last else f"{name}_more_{number + 1}"
        skipped = " | " + ('""' if last else f"{name}_more_{number + 1}")
        rules.add(f"{name}_more_{number}: {separator} {one} {more}" + ("" if key in required else skipped))
        skipped = " | " + ('""' if last else f"{name}_from_{number + 1}")
        rules.add(f"{name}_from_{number}: {one} {more}" + ("" if key in required else skipped))
    return f"{name}_from_0"


def _add_any(rules: LarkRules, form: ArgumentForm, name: str) -> str:
    """Arguments of any names and values."""
    value = _add_value(rules, form, {"type": "string"} if form.raw else {}, f"{name}_value")
    rules.add(f"{name.upper()}_KEY: {ANY_KEY}")
    rules.add(f"{name}_one: {rules.text(*form.before)} {name.upper()}_KEY {rules.text(*form.between)} {value}")
    rules.add(f"{name}_any: ({name}_one ({rules.text(*form.separator)} {name}_one)*)?")
    return f"{name}_any"


def _add_value(rules: LarkRules, form: ArgumentForm, schema: Mapping[str, Any], name: str) -> str:
    """Add a rule for a value and what stands after it; returns the rule's name."""
    after = rules.text(*form.after)
    if not (form.raw and is_text(schema)):
        rules.add(f"{name}: {name}_json {after}")
        rules.add(f"{name}_json: %json {json.dumps(spaced(dict(schema)))}")
    elif "enum" in schema:
        choices = " | ".join(rules.text(choice) or '""' for choice in schema["enum"])
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
