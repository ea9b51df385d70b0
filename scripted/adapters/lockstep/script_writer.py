"""A schedule as a readable test: the text of a pytest file with the schedule in its docstring. Runs nothing."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import msgspec

from engine.config import EngineConfig
from scripted.adapters.lockstep.actions import StartRequest
from scripted.adapters.lockstep.configs import config_values
from scripted.adapters.lockstep.rehearsal import Line
from scripted.core.schedule import Schedule
from scripted.core.verb import variable_of
from scripted.new_files import has_suites
from scripted.script.waits import DEFAULT_BUDGET_STEPS
from scripted.search.execution import Failure
from scripted.search.written_docstring import written_docstring

__all__ = ["Draft", "script_text", "test_name"]

_WIDTH: Final = 116
_INDENT: Final = "    "


class Draft(msgspec.Struct, frozen=True):
    """What a test is to do: the actions at their steps, and ``steps`` steps at least; ``settled`` ends with a flush.

    ``schedule`` and ``failure`` are what its docstring says.
    """

    schedule: Schedule
    lines: tuple[Line, ...]
    failure: Failure | None
    mutant: str | None
    steps: int = 0
    settled: bool = False


def script_text(draft: Draft, *, name: str) -> str:
    """The draft as a file of one registered test. What no script can do is left out."""
    writer = _Writer()
    body = "\n".join(writer.body(draft))
    return "\n".join(
        [
            written_docstring(draft.schedule, draft.failure, draft.mutant),
            "",
            writer.imports(),
            "",
            *(['register_cpu_ci(est_time=5, suite="base-cpu")', ""] if has_suites() else []),
            f"CONFIG = {_config_text(draft.schedule.config)}",
            "",
            "",
            "@scripted(CONFIG)",
            f"def {test_name(name)}(t):",
            body,
            "",
        ]
    )


def test_name(name: str) -> str:
    """What the test of this name is called in its file."""
    return f"test_{variable_of(name)}"


class _Writer:
    """The lines of a script's body."""

    def __init__(self) -> None:
        self._shares = self._is_refused = False

    def imports(self) -> str:
        """What the body uses."""
        third = ["import pytest", ""] if self._is_refused else []
        names = "RequestRefused, scripted" if self._is_refused else "scripted"
        return "\n".join(
            [
                *third,
                *(["from ci.register import register_cpu_ci"] if has_suites() else []),
                "from engine import EngineConfig",
                f"from scripted import {names}",
                *(["from scripted.script.verbs import prompt_of"] if self._shares else []),
            ]
        )

    def body(self, draft: Draft) -> Iterator[str]:
        """One line a verb, and the steps between them."""
        at = 1
        for line in draft.lines:
            if line.impossible is not None:
                continue
            yield from self._steps(line.step - at)
            at = line.step
            yield from (_INDENT + text for text in self._verb(line))
        # At least a step: what was sent last has arrived, but the engine has not seen it.
        yield from self._steps(max(1, draft.steps - at))
        if draft.settled:
            yield f"{_INDENT}t.flush_cache()"
            yield from self._steps(2)
        budget = f"max_steps={draft.steps}" if draft.steps > DEFAULT_BUDGET_STEPS else ""
        yield f"{_INDENT}yield from t.run_until_idle({budget})"

    def _steps(self, count: int) -> Iterator[str]:
        if not count:
            return
        if count == 1:
            yield f"{_INDENT}yield"
        else:
            yield f"{_INDENT}for _ in range({count}):"
            yield f"{_INDENT * 2}yield"

    def _verb(self, line: Line) -> list[str]:
        action = line.action
        lines = [str(verb) for verb in action.verbs()]
        self._shares |= isinstance(action, StartRequest) and bool(action.shared)
        if line.is_refused:
            self._is_refused = True
            return ["with pytest.raises(RequestRefused):", *(_INDENT + text for text in lines)]
        return [f"{action.variable} = {text}" for text in lines] if isinstance(action, StartRequest) else lines


def _config_text(config: EngineConfig) -> str:
    values = ", ".join(f"{name}={value!r}" for name, value in config_values(config).items())
    text = f"EngineConfig({values})"
    return text if len(text) < _WIDTH - 10 else "EngineConfig(\n    " + values.replace(", ", ",\n    ") + ",\n)"
