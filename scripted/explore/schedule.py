"""A schedule: one engine configuration and the actions placed at its steps; with the pure core, a whole run.

Owns the one-line text that replays it. The same schedule gives the same run on any machine.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import msgspec

from engine.config import EngineConfig
from engine.limits import Limits, embedded_facts
from scripted.actions import Placed, parse_placed
from scripted.refusals import ScriptDefinitionError

__all__ = ["Schedule", "config_values", "limits_of"]

_SEPARATOR = ";"


class Schedule(msgspec.Struct, frozen=True):
    """``placed`` is in the order of steps; actions of one step apply in their order here."""

    config: EngineConfig
    placed: tuple[Placed, ...] = ()

    def __str__(self) -> str:
        config = " ".join(f"{name}={value}" for name, value in config_values(self.config).items())
        return f"{_SEPARATOR} ".join([config or "default", *map(str, self.placed)])

    @classmethod
    def parse(cls, text: str) -> Schedule:
        """The inverse of ``str(schedule)``. Raises ScriptDefinitionError or ConfigError for anything else."""
        if not text.strip():
            raise ScriptDefinitionError(
                "a schedule is not empty: its configuration, or 'default', and then its actions, as in "
                "'pp_size=4; 1 start a prompt=125 new=2; 4 flush'"
            )
        first, *clauses = text.strip().split(_SEPARATOR)
        config = EngineConfig(**_read_config(first))
        return cls(config).with_placed(parse_placed(clause) for clause in clauses if clause.strip())

    def with_placed(self, more: Iterable[Placed]) -> Schedule:
        """The same with more actions, each after those that its step already has."""
        return Schedule(self.config, tuple(sorted((*self.placed, *more), key=lambda placed: placed.step)))

    @property
    def last_step(self) -> int:
        """The step of the last action; 0 when there is none."""
        return self.placed[-1].step if self.placed else 0


def config_values(config: EngineConfig) -> dict[str, Any]:
    """The fields that are not at their default."""
    fields = type(config).model_fields
    return {name: value for name, value in config.model_dump().items() if value != fields[name].default}


@functools.lru_cache(maxsize=1024)
def limits_of(config: EngineConfig) -> Limits:
    """A configuration resolved against the embedded model, as in the sim tier."""
    return Limits.of(config, embedded_facts(config.model))


def _read_config(text: str) -> dict[str, str]:
    if text.strip() == "default":
        return {}
    pairs = [word.partition("=") for word in text.split()]
    for name, separator, _ in pairs:
        if not separator:
            raise ScriptDefinitionError(
                f"a schedule begins with its configuration as name=value words, or with 'default', got {name!r}"
            )
    return {name: value for name, _, value in pairs}
