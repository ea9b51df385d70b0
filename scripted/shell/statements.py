"""The statements of a session: each has its lines of script, and runs by evaluating them.

A saved file therefore does exactly what the shell did. A statement has no state.
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
    """A call of a verb of ``t``, as an expression; its result is assigned to ``name`` if there is one."""

    expression: str
    name: str | None = None
    rid: str | None = None

    def lines(self) -> list[str]:
        return [self.expression if self.name is None else f"{self.name} = {self.expression}"]

    def perform(self, names: Names) -> Steps:
        """Run the statement; yields for each of its steps."""
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
        """Wait. Evaluates the expression once before the first step, so that a wrong one changes nothing."""
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
    """Evaluate an expression of a script."""
    return eval(expression, names)  # noqa: S307 - the user's own script, in the user's own process
