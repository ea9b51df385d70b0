"""The statements of a session: each knows its lines in a script, and runs by evaluating what those lines say.

So a saved file does exactly what was seen in the shell. A statement keeps no state of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from scripted.script.wait import Steps

Names = dict[str, Any]
"""The variables of a script: ``t``, handles by their rid, calls by their number."""


@dataclass(frozen=True)
class VerbCall:
    """A verb of ``t``, as an expression; what it returns is kept under ``name``, if there is one."""

    expression: str
    name: str | None = None
    rid: str | None = None

    def lines(self) -> list[str]:
        return [self.expression if self.name is None else f"{self.name} = {self.expression}"]

    def perform(self, names: Names) -> Steps:
        """Do it, and yield for each step of it."""
        value = value_of(self.expression, names)
        if self.name is not None:
            names[self.name] = value
        yield from ()


@dataclass(frozen=True)
class StepOn:
    count: int

    def lines(self) -> list[str]:
        return ["yield"] if self.count == 1 else [f"for _ in range({self.count}):", "    yield"]

    def perform(self, names: Names) -> Steps:
        del names
        for _ in range(self.count):
            yield


@dataclass(frozen=True)
class RunUntil:
    """Steps until an expression over ``t``, handles and calls holds."""

    expression: str

    def lines(self) -> list[str]:
        return [f"yield from {self._wait}"]

    def perform(self, names: Names) -> Steps:
        """Wait. The expression is asked at once, so that one that cannot be asked is found before anything moves."""
        value_of(self.expression, names)
        yield from value_of(self._wait, names)

    @property
    def _wait(self) -> str:
        return f"t.run_until(lambda: {self.expression})"


Statement = VerbCall | StepOn | RunUntil


def lines_of(statements: list[Statement]) -> Iterator[str]:
    for statement in statements:
        yield from statement.lines()


def value_of(expression: str, names: Names) -> Any:
    """What an expression of a script is worth now."""
    return eval(expression, names)  # noqa: S307 - it is the user's own script, in the user's own process
