"""An action at one step of a schedule, and its text: ``STEP KIND [RID] [name=value ...]``."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

from scripted.core.action import Action
from scripted.core.clause_words import quoted, words_of_clause
from scripted.core.phrases import nearest
from scripted.core.refusals import ScriptDefinitionError


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
    kind, *words = words_of_clause(rest) or [""]
    kinds = {str(action.__struct_config__.tag): action for action in actions}
    values: dict[str, Any] = {}
    for word in words:
        name, separator, value = word.partition("=")
        values["rid" if not separator else name] = value if separator else name
    if kind not in kinds:
        guess = nearest(kind, kinds) or f"; the kinds are {', '.join(kinds)}"
        raise ScriptDefinitionError(
            f"a clause of a schedule must be of a kind that there is, got {text.strip()!r}{guess}"
        )
    try:
        placed = Placed(int(step), msgspec.convert(values, kinds[kind], strict=False))
    except (ValueError, msgspec.ValidationError) as exc:
        raise ScriptDefinitionError(
            f"a clause of a schedule is 'STEP KIND [RID] [name=value ...]', got {text.strip()!r} ({exc}); "
            f"write for instance '4 {kinds[kind].examples[-1]}'"
        ) from exc
    if placed.step < 1:
        raise ScriptDefinitionError(f"the steps of a schedule count from 1, got {text.strip()!r}")
    return placed
