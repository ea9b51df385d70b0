"""A schedule: a configuration of an adapter, and actions placed at steps. It determines a whole run.

Owns the one-line text of schedules. Equal schedules give equal runs on any computer.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, Generic

import msgspec

from scripted.core.adapters import DEFAULT_ADAPTER, adapter_named
from scripted.core.machine import ConfigT
from scripted.core.placed_action import Placed, clauses_of, parse_placed, quoted, words_of_clause
from scripted.core.protocol import Adapter
from scripted.core.refusals import ScriptDefinitionError

_SEPARATOR: Final = ";"
_ADAPTER: Final = "adapter"
_DEFAULT: Final = "default"


class Schedule(msgspec.Struct, Generic[ConfigT], frozen=True):
    """``placed`` is sorted by step; actions of one step apply in order. ``of`` is the name of ``config``'s adapter."""

    config: ConfigT
    placed: tuple[Placed, ...] = ()
    of: str = DEFAULT_ADAPTER

    def __str__(self) -> str:
        words = [] if self.of == DEFAULT_ADAPTER else [f"{_ADAPTER}={self.of}"]
        words += [f"{name}={quoted(value)}" for name, value in self.adapter.config_words(self.config).items()]
        return f"{_SEPARATOR} ".join([" ".join(words) or _DEFAULT, *map(str, self.placed)])

    @classmethod
    def parse(cls, text: str, *, of: str = DEFAULT_ADAPTER) -> Schedule:
        """Parse a schedule, the inverse of ``str(schedule)``; ``of`` is the adapter of a text that names none.

        Raises ScriptDefinitionError, or the adapter's error for a bad configuration.
        """
        if not text.strip():
            raise ScriptDefinitionError(
                "a schedule must not be empty; write its configuration, or 'default', and then its actions, as in "
                "'pp_size=4; 1 start a prompt=125 new=2; 4 flush'"
            )
        first, *clauses = clauses_of(text.strip())
        words = _read_config(first)
        adapter = adapter_named(words.pop(_ADAPTER, of))
        placed = [parse_placed(clause, adapter.actions) for clause in clauses if clause.strip()]
        return cls(adapter.read_config(words), (), adapter.name).with_placed(placed)

    @property
    def adapter(self) -> Adapter:
        return adapter_named(self.of)

    def with_config(self, config: ConfigT) -> Schedule[ConfigT]:
        """Return the schedule with another configuration of the same adapter."""
        return Schedule(config, self.placed, self.of)

    def with_placed(self, more: Iterable[Placed]) -> Schedule[ConfigT]:
        """Return the schedule with more actions, each after the actions that its step already has."""
        return Schedule(self.config, tuple(sorted((*self.placed, *more), key=lambda placed: placed.step)), self.of)

    def of_placed(self, placed: Iterable[Placed]) -> Schedule[ConfigT]:
        return Schedule(self.config, tuple(placed), self.of)

    @property
    def last_step(self) -> int:
        """The step of the last action; 0 when there is none."""
        return self.placed[-1].step if self.placed else 0


def settings_in(text: str) -> dict[str, str]:
    """Return the settings that a schedule's text begins with, by name. Raises ScriptDefinitionError."""
    return _read_config(clauses_of(text.strip())[0])


def _read_config(text: str) -> dict[str, str]:
    if text.strip() == _DEFAULT:
        return {}
    pairs = [word.partition("=") for word in words_of_clause(text)]
    for name, separator, _ in pairs:
        if not separator and name != _DEFAULT:
            raise ScriptDefinitionError(
                f"a schedule begins with its configuration as name=value words, or with 'default', got {name!r}"
            )
    return {name: value for name, separator, value in pairs if separator}
