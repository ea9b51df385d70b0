"""A failing schedule as a readable test: a pytest file with the schedule in its docstring."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from typing import Final

from engine.config import EngineConfig
from scripted.actions import Flush, StartRequest
from scripted.explore.execution import Failure, finish
from scripted.explore.schedule_gate import ScheduleGate
from scripted.subject.action import Action
from scripted.subject.placed import Placed
from scripted.subject.schedule import Schedule
from scripted.subject.verb import variable_of
from scripted.subjects.lockstep.configs import config_values

__all__ = ["script_text"]

_WIDTH: Final = 116
_SHOWN_LINES: Final = 20
_INDENT: Final = "    "


def script_text(schedule: Schedule, *, name: str, mutant: str | None = None) -> str:
    """A registered test of a schedule that fails; ``mutant`` is named as what it fails with."""
    gate = ScheduleGate(schedule)
    outcome = finish(gate)
    refused = {life.message.rid for life in gate.judge.checks.clients.lives if life.refused}
    # What settled the run is part of it; the flush that ends every run of the search is not.
    implied = [placed for placed in outcome.implied if not isinstance(placed.action, Flush)]
    writer = _Writer(schedule, refused)
    unreached = set(outcome.unreached)
    placed = [one for one in schedule.placed if not (one in unreached and one.action.is_strict)]
    body = "\n".join(writer.body([*placed, *implied]))
    return "\n".join(
        [
            _docstring(schedule, outcome.failure, mutant),
            "",
            writer.imports(),
            "",
            'register_cpu_ci(est_time=5, suite="base-cpu")',
            "",
            f"CONFIG = {_config_text(schedule.config)}",
            "",
            "",
            "@scripted(CONFIG)",
            f"def test_{variable_of(name)}(t):",
            body,
            "",
        ]
    )


class _Writer:
    """The lines of a script's body."""

    def __init__(self, schedule: Schedule, refused: set[str]) -> None:
        self._schedule = schedule
        self._refused = refused
        self._shares = False

    def imports(self) -> str:
        """What the body uses."""
        third = ["import pytest", ""] if self._refused else []
        names = "RequestRefused, scripted" if self._refused else "scripted"
        return "\n".join(
            [
                *third,
                "from ci.register import register_cpu_ci",
                "from engine import EngineConfig",
                f"from scripted import {names}",
                *(["from scripted.script.verbs import prompt_of"] if self._shares else []),
            ]
        )

    def body(self, placed: list[Placed]) -> Iterator[str]:
        """One line a verb, and the steps between them."""
        at = 1
        for one in placed:
            yield from self._steps(one.step - at)
            at = one.step
            yield from (_INDENT + line for line in self._verb(one.action))
        # First a step: what was sent last has arrived, but the engine has not seen it.
        yield f"{_INDENT}yield"
        yield f"{_INDENT}yield from t.run_until_idle()"

    def _steps(self, count: int) -> Iterator[str]:
        if not count:
            return
        if count == 1:
            yield f"{_INDENT}yield"
        else:
            yield f"{_INDENT}for _ in range({count}):"
            yield f"{_INDENT * 2}yield"

    def _verb(self, action: Action) -> list[str]:
        lines = [str(verb) for verb in action.verbs()]
        if not isinstance(action, StartRequest):
            return lines
        self._shares |= bool(action.shared)
        if action.rid in self._refused:
            return ["with pytest.raises(RequestRefused):", *(_INDENT + line for line in lines)]
        return [f"{action.variable} = {line}" for line in lines]


def _docstring(schedule: Schedule, failure: Failure | None, mutant: str | None) -> str:
    method = "Method: the events of the schedule at its steps, then to the end."
    if failure is None:
        lines = ['"""A schedule as a test.', "", "Goal: every promise is kept.", f"{method} Origin: scripted replay."]
    else:
        what = f"step {failure.step}: {failure.type}: {failure.text}"
        lines = ['"""Found by search: a schedule under which the engine broke a promise.', ""]
        lines += textwrap.wrap(f"Goal: this must not happen: {_ascii(what)}", _WIDTH)
        lines += [f"{method} Origin: scripted explore."]
    if mutant is not None:
        lines.append(f"Mutant: {mutant}.")
    command = f"scripted replay '{schedule}'"
    shown = textwrap.wrap(command, _WIDTH - 4, break_long_words=False)
    # One that is longer than this is read as the script below.
    lines += ["", *(_INDENT + line for line in shown), '"""'] if len(shown) <= _SHOWN_LINES else ['"""']
    return "\n".join(lines)


def _config_text(config: EngineConfig) -> str:
    values = ", ".join(f"{name}={value!r}" for name, value in config_values(config).items())
    text = f"EngineConfig({values})"
    return text if len(text) < _WIDTH - 10 else "EngineConfig(\n    " + values.replace(", ", ",\n    ") + ",\n)"


def _ascii(text: str) -> str:
    return text.encode("ascii", "replace").decode().replace("\\", "/").replace('"""', "'''")
