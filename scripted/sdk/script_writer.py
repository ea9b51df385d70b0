"""A schedule of a adapter of the SDK as a readable test: a pytest file with the schedule in its docstring."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

import msgspec

from scripted.core.named import adapter_named
from scripted.core.phrases import plural
from scripted.core.placed import Placed
from scripted.core.refusals import ScriptDefinitionError
from scripted.core.run import Run
from scripted.core.schedule import Schedule
from scripted.core.verb import Code, Verb, variable_of
from scripted.core.written import WrittenTest
from scripted.errors import ScriptError
from scripted.script.decorator import ScriptedTest
from scripted.script.loader import load_test
from scripted.sdk.messages import Add
from scripted.sdk.script.runner import run_script
from scripted.search.execution import Failure, execute, finish
from scripted.search.written_docstring import written_docstring

__all__ = ["script_text", "write_test"]

_WIDTH: Final = 116
# A script of a schedule takes milliseconds; one that needs longer hangs.
_LIMIT_S: Final = 20.0
_INDENT: Final = "    "
# The budget of a wait, unless a script says another one.
_BUDGET_STEPS: Final = 400
# Names that mean something else in @scripted(...).
_OPTIONS: Final = frozenset({"config", "adapter", "tiers", "timeout_s", "max_steps", "oracle", "must_reach"})


def write_test(schedules: Iterable[Schedule], *, name: str, mutant: str | None = None) -> WrittenTest:
    """A test of the first of these schedules that makes one which is right.

    A schedule that fails, under ``mutant`` or as the scheduler is, becomes a test that fails there with the same words
    and passes without the mutant. One that does not fail becomes a test that passes. No mutant may be on.
    """
    refused: list[str] = []
    for schedule in schedules:
        with schedule.adapter.switched_on(mutant):
            failure = execute(schedule).failure
            text = script_text(schedule, name=name, mutant=mutant if failure else None)
        wrong = _what_is_wrong(text, _name(name), failure, mutant)
        if wrong is None:
            return WrittenTest(text, (*refused, _remark(schedule, failure, mutant)))
        refused.append(f"not kept: {wrong}")
    return WrittenTest(None, tuple(refused))


def _remark(schedule: Schedule, failure: Failure | None, mutant: str | None) -> str:
    if failure is None:
        also = "" if mutant is None else f", with {mutant} too"
        return f"the schedule does not fail{also}; the test of it passes"
    where = "on the scheduler as it is" if mutant is None else f"with {mutant} and passes without it"
    return f"the test of {plural(len(schedule.placed), 'event')} fails {where}"


def _what_is_wrong(text: str, name: str, failure: Failure | None, mutant: str | None) -> str | None:
    """Why a test is not what it says; None for one that is."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "test_written.py"
        path.write_text(text, encoding="ascii")
        test = load_test(str(path), name)
        seen = _error_of(test, mutant)
        if failure is None:
            return None if seen is None else f"it fails, and the schedule does not: {seen}"
        where = "on the scheduler as it is" if mutant is None else f"with {mutant}"
        if seen is None:
            return f"it passes {where}"
        if not seen.startswith(f"{failure.type}: {failure.text}".removesuffix(": ")):
            return f"it fails {where} with other words than the schedule: {seen}"
        without = None if mutant is None else _error_of(test, None)
        return None if without is None else f"it fails without {mutant} too: {without}"


def _error_of(test: ScriptedTest, mutant: str | None) -> str | None:
    """How the test does not pass, in its own words."""
    options = msgspec.structs.replace(test.options, timeout_s=_LIMIT_S)
    try:
        run_script(adapter_named(test.adapter), test.script, {}, config=test.config, options=options, mutant=mutant)
    except ScriptError as exc:
        return exc.report.error
    return None


def script_text(schedule: Schedule, *, name: str, mutant: str | None = None) -> str:
    """A test of a schedule, as it runs now; ``mutant`` is named as what it fails with.

    Raises ScriptDefinitionError for a configuration that ``@scripted`` cannot say.
    """
    gate = Run(schedule, record=True)
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
            written_docstring(schedule, outcome.failure, mutant),
            "",
            "from scripted import scripted",
            "",
            "",
            _decorator(schedule),
            f"def {_name(name)}(t):",
            *(_INDENT + line for line in body),
            "",
        ]
    )


def _name(name: str) -> str:
    return f"test_{variable_of(name)}"


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


def _end(gate: Run, failure: Failure | None) -> Iterator[str]:
    """The steps after the last verb, which what has arrived needs one of."""
    yield "yield"
    if failure is not None and gate.is_winding_up:
        yield "# After a script nothing may wait for ever, and nothing may be left of what has ended."
        return
    more = {"max_steps": Code(str(2 * gate.step))} if gate.step > _BUDGET_STEPS else {}
    yield f"yield from {Verb('run_until_idle', **more)}"


def _decorator(schedule: Schedule) -> str:
    words = schedule.adapter.config_words(schedule.config)
    taken = sorted(_OPTIONS.intersection(words))
    if taken:
        raise ScriptDefinitionError(
            f"the setting {taken[0]!r} of {schedule.of} is an option of @scripted too, so no test can be written; "
            "call it something else in the adapter's configuration"
        )
    arguments = [f'adapter="{schedule.of}"', *(f"{name}={value!r}" for name, value in words.items())]
    text = f"@scripted({', '.join(arguments)})"
    if len(text) <= _WIDTH:
        return text
    return "\n".join(["@scripted(", *(f"{_INDENT}{argument}," for argument in arguments), ")"])
