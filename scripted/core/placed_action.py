"""An action at one step of a schedule, and its text: ``STEP KIND [RID] [name=value ...]``."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final

import msgspec

from scripted.core.action import Action
from scripted.core.phrases import nearest
from scripted.core.refusals import ScriptDefinitionError

_QUOTE: Final = '"'
_NEEDS_QUOTES: Final = re.compile(r"[\s;]|^$")
_CLAUSE: Final = re.compile(r'(?:[^;"]|"[^"]*")*')
_WORD: Final = re.compile(r'(?:[^\s"]|"[^"]*")+')


def quoted(value: object) -> str:
    """A value as a line has it. Raises ScriptDefinitionError for one that no line can have."""
    text = str(value)
    if _QUOTE in text:
        raise ScriptDefinitionError(
            f"a value with a double quote cannot be written in a schedule, got {text!r}; give the file another name"
        )
    return f"{_QUOTE}{text}{_QUOTE}" if _NEEDS_QUOTES.search(text) else text


def clauses_of(line: str) -> list[str]:
    """The clauses, the first of which is the configuration. Raises ScriptDefinitionError for quotes without an end."""
    if line.count(_QUOTE) % 2:
        raise ScriptDefinitionError(f"a double quote of a schedule has no second one in {line!r}; close it")
    clauses, at = [], 0
    while at <= len(line):
        found = _CLAUSE.match(line, at)
        assert found is not None, f"a clause may be empty, but none is at {at} of {line!r}"
        clauses.append(found.group())
        at = found.end() + 1
    return clauses


def words_of_clause(clause: str) -> list[str]:
    """The words of one clause, without the quotes around what is in them."""
    return [word.replace(_QUOTE, "") for word in _WORD.findall(clause)]


class Placed(msgspec.Struct, frozen=True):
    """An action and the step, from 1 on, that sees it, after the completions of that step."""

    step: int
    action: Action

    def __str__(self) -> str:
        values = msgspec.to_builtins(self.action)
        rid = values.pop("rid", None)
        words = [str(self.step), values.pop("type")] + ([] if rid is None else [rid])
        return " ".join(words + [f"{name}={quoted(value)}" for name, value in values.items()])


def parse_placed(text: str, actions: Iterable[type[Action]]) -> Placed:
    """The inverse of ``str(placed)``, among these actions. Raises ScriptDefinitionError that names the clause."""
    step, _, rest = text.strip().partition(" ")
    action = parse_action(rest, actions, step)
    try:
        placed = Placed(int(step), action)
    except ValueError as exc:
        raise _bad_clause(step, rest, exc, type(action)) from exc
    if placed.step < 1:
        raise ScriptDefinitionError(f"the steps of a schedule count from 1, got {text.strip()!r}")
    return placed


def parse_action(text: str, actions: Iterable[type[Action]], step: str = "") -> Action:
    """What a clause says after its ``step``, which errors name with it. Raises ScriptDefinitionError."""
    kind, *words = words_of_clause(text) or [""]
    kinds = {str(action.__struct_config__.tag): action for action in actions}
    values: dict[str, str] = {}
    for word in words:
        name, separator, value = word.partition("=")
        values["rid" if not separator else name] = value if separator else name
    if kind not in kinds:
        guess = nearest(kind, kinds) or f"; the kinds are {', '.join(kinds)}"
        got = f"{step} {text}".strip()
        raise ScriptDefinitionError(f"a clause of a schedule must be of a kind that there is, got {got!r}{guess}")
    try:
        return msgspec.convert(values, kinds[kind], strict=False)
    except msgspec.ValidationError as exc:
        raise _bad_clause(step, text, exc, kinds[kind]) from exc


def _bad_clause(step: str, text: str, exc: Exception, kind: type[Action]) -> ScriptDefinitionError:
    form, first = ("'STEP KIND", "4 ") if step else ("'KIND", "")
    return ScriptDefinitionError(
        f"a clause of a schedule is {form} [RID] [name=value ...]', got {f'{step} {text}'.strip()!r} ({exc}); "
        f"write for instance '{first}{kind.examples[0]}'"
    )
