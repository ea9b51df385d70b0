"""An action at one step of a schedule, and its text: ``STEP KIND [RID] [name=value ...]``."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final

import msgspec

from scripted.core.action import Action
from scripted.core.phrases import nearest
from scripted.core.refusals import ScriptDefinitionError

# Steps are run one by one, also those in which nothing happens.
MOST_STEPS: Final = 400_000
_QUOTE: Final = '"'
_NEEDS_QUOTES: Final = re.compile(r"[\s;]|^$")
_CLAUSE: Final = re.compile(r'(?:[^;"]|"[^"]*")*')
_WORD: Final = re.compile(r'(?:[^\s"]|"[^"]*")+')


def quoted(value: object) -> str:
    """Format a value for a clause, quoted if necessary. Raises ScriptDefinitionError for one with a double quote."""
    text = str(value)
    if _QUOTE in text:
        raise ScriptDefinitionError(
            f"a value with a double quote cannot be written in a schedule, got {text!r}; give the file another name"
        )
    return f"{_QUOTE}{text}{_QUOTE}" if _NEEDS_QUOTES.search(text) else text


def clauses_of(line: str) -> list[str]:
    """Split a schedule into clauses; the first is the configuration. Raises ScriptDefinitionError for an open quote."""
    if line.count(_QUOTE) % 2:
        raise ScriptDefinitionError(f"a double quote of a schedule is never closed in {line!r}; close it")
    clauses, at = [], 0
    while at <= len(line):
        found = _CLAUSE.match(line, at)
        assert found is not None, f"a clause may be empty, but none is at {at} of {line!r}"
        clauses.append(found.group())
        at = found.end() + 1
    return clauses


def words_of_clause(clause: str) -> list[str]:
    """Split one clause into words and remove their quotes."""
    return [word.replace(_QUOTE, "") for word in _WORD.findall(clause)]


class Placed(msgspec.Struct, frozen=True):
    """An action and its step, counted from 1. The step sees it after its completions, unless ``is_control``."""

    step: int
    action: Action

    def __str__(self) -> str:
        values = msgspec.to_builtins(self.action)
        rid = values.pop("rid", None)
        words = [str(self.step), values.pop("type")] + ([] if rid is None else [rid])
        return " ".join(words + [f"{name}={quoted(value)}" for name, value in values.items()])


def parse_placed(text: str, actions: Iterable[type[Action]]) -> Placed:
    """Parse a clause, the inverse of ``str(placed)``. Raises ScriptDefinitionError that names the clause."""
    step, _, rest = text.strip().partition(" ")
    action = parse_action(rest, actions, step)
    try:
        placed = Placed(int(step), action)
    except ValueError as exc:
        raise _bad_clause(step, rest, exc, type(action)) from exc
    if not 1 <= placed.step <= MOST_STEPS:
        raise ScriptDefinitionError(f"the steps of a schedule count from 1 to {MOST_STEPS}, got {text.strip()!r}")
    return placed


def parse_action(text: str, actions: Iterable[type[Action]], step: str = "") -> Action:
    """Parse the rest of a clause, after its ``step``, which only errors need. Raises ScriptDefinitionError."""
    kind, *words = words_of_clause(text) or [""]
    kinds = {str(action.__struct_config__.tag): action for action in actions}
    values: dict[str, str] = {}
    for word in words:
        name, separator, value = word.partition("=")
        values["rid" if not separator else name] = value if separator else name
    if kind not in kinds:
        guess = nearest(kind, kinds) or f"; the kinds are {', '.join(kinds)}"
        got = f"{step} {text}".strip()
        raise ScriptDefinitionError(f"a clause of a schedule must begin with a known kind, got {got!r}{guess}")
    try:
        return msgspec.convert(values, kinds[kind], strict=False)
    except (msgspec.ValidationError, ValueError) as exc:  # a byte of a command line may be no text
        raise _bad_clause(step, text, exc, kinds[kind]) from exc


def _bad_clause(step: str, text: str, exc: Exception, kind: type[Action]) -> ScriptDefinitionError:
    form, first = ("'STEP KIND", "4 ") if step else ("'KIND", "")
    return ScriptDefinitionError(
        f"a clause of a schedule is {form} [RID] [name=value ...]', got {f'{step} {text}'.strip()!r} ({exc}); "
        f"write for instance '{first}{kind.examples[0]}'"
    )
