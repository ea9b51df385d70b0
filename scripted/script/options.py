"""The options of a script's run: budgets, checks, records. They travel with the script to its engine."""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from scripted.core.refusals import ScriptDefinitionError

DEFAULT_TIMEOUT_S = 120.0
DEFAULT_MAX_STEPS = 10_000
# A forward pass of a test model takes milliseconds, as does every answer of the front end.
DEFAULT_RESULT_TIMEOUT_S = 10.0


class ScriptOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The options of a script's run.

    ``max_steps`` and ``timeout_s`` bound it. ``oracle`` compares the output of finished greedy requests with the same
    request run alone. ``check_every_step`` audits the engine after each step instead of only at the end. ``must_reach``
    lists windows that ``t.sometimes`` has to see. ``must_step`` refuses a script that ends without a step,
    ``must_assert`` one in which no assertion ran. ``record`` returns every step with the result, for a trace. A process
    that must answer at once and is silent for ``result_timeout_s`` counts as hung. A script that ``is_busy`` computes
    all the time, so its process gets the time again if it was stopped or starved.
    """

    timeout_s: float = DEFAULT_TIMEOUT_S
    is_busy: bool = False
    max_steps: int = DEFAULT_MAX_STEPS
    oracle: bool = True
    check_every_step: bool = True
    must_reach: tuple[str, ...] = ()
    must_step: bool = False
    must_assert: bool = False
    record: bool = False
    replay: str = ""
    result_timeout_s: float = DEFAULT_RESULT_TIMEOUT_S

    def __post_init__(self) -> None:
        """Refuse values of a wrong type that would be mistaken for something else."""
        names = windows_of(self.must_reach)
        if len(set(names)) != len(names):
            raise ScriptDefinitionError(f"must_reach names each window once, got {list(names)}")
        for name, seconds in (("timeout_s", self.timeout_s), ("result_timeout_s", self.result_timeout_s)):
            if not _is_number(seconds) or not 0 < seconds < math.inf:
                raise ScriptDefinitionError(f"{name} must be a number of seconds > 0, got {seconds!r}")
        if not isinstance(self.max_steps, int) or isinstance(self.max_steps, bool) or self.max_steps < 1:
            raise ScriptDefinitionError(f"max_steps must be a whole number, max_steps >= 1, got {self.max_steps!r}")
        if not isinstance(self.oracle, bool):
            raise ScriptDefinitionError(f"oracle must be True or False, got {self.oracle!r}")


def windows_of(names: Sequence[str]) -> tuple[str, ...]:
    """Return the window names. Raises ScriptDefinitionError for a string, and for names that are empty or not text."""
    given = tuple(names)
    if isinstance(names, str) or not all(isinstance(name, str) and name for name in given):
        remedy = f"; write must_reach=[{names!r}]" if isinstance(names, str) and names else ""
        raise ScriptDefinitionError(f"must_reach is a list of non-empty names, got {names!r}{remedy}")
    return given


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
