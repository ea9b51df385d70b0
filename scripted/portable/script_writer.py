"""A schedule of a portable subject as a readable test: a pytest file with the schedule in its docstring."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from typing import Final

from scripted.explore.execution import Failure, finish
from scripted.explore.schedule_gate import ScheduleGate
from scripted.portable.messages import Add
from scripted.refusals import ScriptDefinitionError
from scripted.subject.placed import Placed
from scripted.subject.schedule import Schedule
from scripted.subject.verb import Code, Verb, variable_of

__all__ = ["script_text"]

_WIDTH: Final = 116
_SHOWN_LINES: Final = 20
_INDENT: Final = "    "
# The budget of a wait, unless a script says another one.
_BUDGET_STEPS: Final = 400
# Names that mean something else in @scripted(...).
_OPTIONS: Final = frozenset({"config", "subject", "tiers", "timeout_s", "max_steps", "oracle", "must_reach"})


def script_text(schedule: Schedule, *, name: str, mutant: str | None = None) -> str:
    """A test of a schedule, as pytest runs it; ``mutant`` is named as what it fails with.

    Raises ScriptDefinitionError for a configuration that ``@scripted`` cannot say.
    """
    gate = ScheduleGate(schedule, record=True)
    outcome = finish(gate)
    # A start under a name that was alive did nothing, and a script refuses it.
    begun = {
        (step, event.rid)
        for step, record in enumerate(gate.records or (), 1)
        for event in record.step.events
        if isinstance(event, Add)
    }
    placed = [one for one in schedule.placed if _did_something(one, begun, outcome.steps)]
    body = [*_body([*placed, *outcome.implied]), *_end(gate, outcome.failure)]
    return "\n".join(
        [
            _docstring(schedule, outcome.failure, mutant),
            "",
            "from scripted import scripted",
            "",
            "",
            _decorator(schedule),
            f"def test_{variable_of(name)}(t):",
            *(_INDENT + line for line in body),
            "",
        ]
    )


def _did_something(placed: Placed, begun: set[tuple[int, str]], steps: int) -> bool:
    action = placed.action
    return not action.is_start or placed.step > steps or (placed.step, getattr(action, "rid", "")) in begun


def _body(placed: list[Placed]) -> Iterator[str]:
    """One line a verb, and the steps between them."""
    at = 1
    for one in placed:
        yield from _steps(one.step - at)
        at = one.step
        yield from map(str, one.action.verbs())


def _steps(count: int) -> Iterator[str]:
    if count == 1:
        yield "yield"
    elif count:
        yield f"for _ in range({count}):"
        yield f"{_INDENT}yield"


def _end(gate: ScheduleGate, failure: Failure | None) -> Iterator[str]:
    """The steps after the last verb, which what has arrived needs one of."""
    yield "yield"
    if failure is not None and gate.is_winding_up:
        yield "# After a script nothing may wait for ever, and nothing may be left of what has ended."
        return
    more = {"max_steps": Code(str(2 * gate.step))} if gate.step > _BUDGET_STEPS else {}
    yield f"yield from {Verb('run_until_idle', **more)}"


def _decorator(schedule: Schedule) -> str:
    words = schedule.subject.config_words(schedule.config)
    taken = sorted(_OPTIONS.intersection(words))
    if taken:
        raise ScriptDefinitionError(
            f"the setting {taken[0]!r} of {schedule.of} is an option of @scripted too, so no test can be written; "
            "call it something else in the adapter's configuration"
        )
    arguments = [f'subject="{schedule.of}"', *(f"{name}={value!r}" for name, value in words.items())]
    text = f"@scripted({', '.join(arguments)})"
    if len(text) <= _WIDTH:
        return text
    return "\n".join(["@scripted(", *(f"{_INDENT}{argument}," for argument in arguments), ")"])


def _docstring(schedule: Schedule, failure: Failure | None, mutant: str | None) -> str:
    method = "Method: the events of the schedule at its steps, then to the end."
    if failure is None:
        lines = ['"""A schedule as a test.', "", "Goal: every promise is kept.", f"{method} Origin: scripted replay."]
    else:
        what = f"step {failure.step}: {failure.type}: {failure.text}"
        lines = ['"""Found by search: a schedule under which the scheduler broke a promise.', ""]
        lines += textwrap.wrap(f"Goal: this must not happen: {_ascii(what)}", _WIDTH)
        lines += [f"{method} Origin: scripted explore."]
    if mutant is not None:
        lines.append(f"Mutant: {mutant}.")
    shown = textwrap.wrap(f"scripted replay '{schedule}'", _WIDTH - 4, break_long_words=False, break_on_hyphens=False)
    # One that is longer than this is read as the script below.
    lines += ["", *(_INDENT + line for line in shown), '"""'] if len(shown) <= _SHOWN_LINES else ['"""']
    return "\n".join(lines)


def _ascii(text: str) -> str:
    return text.encode("ascii", "replace").decode().replace("\\", "/").replace('"""', "'''")
