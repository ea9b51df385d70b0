"""A schedule as a test that was run before it is kept: red with the bug, green without it.

A test that is not both is written in a longer form, or of the schedule as it was found, or not at all, with the reason.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

import msgspec

from scripted.adapters.lockstep.actions import Flush, Pause, Press, Relieve, Resume, ResumeStage, StallStage
from scripted.adapters.lockstep.bugs.mutants import switched_on
from scripted.adapters.lockstep.rehearsal import Line, rehearse
from scripted.adapters.lockstep.script_writer import Draft, script_text, test_name
from scripted.adapters.lockstep.sim.runner import ScriptedSim
from scripted.core.action import Action
from scripted.core.common_actions import HoldResults, ReleaseResults
from scripted.core.phrases import plural
from scripted.core.placed import Placed
from scripted.core.schedule import Schedule
from scripted.core.written import WrittenTest
from scripted.errors import ScriptError, ScriptTimeout
from scripted.script.loader import load_test
from scripted.search.execution import Outcome, execute

__all__ = ["write_test"]

# A script of a schedule takes milliseconds; one that needs longer hangs.
_LIMIT_S: Final = 20.0
# A script that is left by one of these is wrong itself; it shows nothing of the engine.
_FAULTS_OF_SCRIPTS: Final = ("BadCall", "UnknownName", "Departure", "RequestRefused", "NameError", "TypeError")


def write_test(schedules: Iterable[Schedule], *, name: str, mutant: str | None = None) -> WrittenTest:
    """A test of the first of these schedules that makes one which is right.

    A schedule that fails, under ``mutant`` or as the engine is, becomes a test that fails there and passes on the
    engine without the mutant. One that does not fail becomes a test that passes. No mutant may be on.
    """
    refused: list[str] = []
    for schedule in schedules:
        for form, draft in _drafts(schedule, mutant):
            text = script_text(draft, name=name)
            wrong = _what_is_wrong(text, test_name(name), draft)
            if wrong is None:
                return WrittenTest(text, (*_remarks(refused), *_remarks_on(draft, mutant)))
            refused.append(f"{form}: {wrong}{_left_out(draft.lines)}")
    return WrittenTest(None, _remarks(refused))


def _drafts(schedule: Schedule, mutant: str | None) -> Iterator[tuple[str, Draft]]:
    """The forms of a test, the shortest first; each is made when the one before it was of no use."""
    with switched_on(mutant):
        failing = execute(schedule)
    shown = mutant if failing.failure is not None else None
    healthy = failing if shown is None else execute(schedule)
    seen: set[tuple[Line, ...]] = set()
    for settled_by in (healthy, failing):
        lines = tuple(rehearse(schedule.config, [*schedule.placed, *_settling(schedule, settled_by)]))
        if lines in seen:
            continue
        seen.add(lines)
        draft = Draft(schedule, lines, failing.failure, shown)
        yield "a test of its events", draft
        steps = max(healthy.steps, failing.steps)
        yield "one of all its steps", msgspec.structs.replace(draft, steps=steps, settled=True)


def _settling(schedule: Schedule, outcome: Outcome) -> list[Placed]:
    """What ended the run of a schedule, and what a run that broke off has left to be ended."""
    # The flush that ends every run of the search is not part of the schedule.
    implied = [placed for placed in outcome.implied if not isinstance(placed.action, Flush)]
    open_ends: dict[type[Action], Action] = {}
    for placed in (*schedule.placed, *implied):
        action = placed.action
        if isinstance(action, StallStage):
            open_ends[ResumeStage] = ResumeStage(stage=action.stage)
        elif isinstance(action, HoldResults):
            open_ends[ReleaseResults] = ReleaseResults()
        elif isinstance(action, Press):
            open_ends[Relieve] = Relieve()
        elif isinstance(action, Pause):
            open_ends[Resume] = Resume()
        elif not (isinstance(action, ReleaseResults) and action.count is not None):
            open_ends.pop(type(action), None)
    return implied + [Placed(outcome.steps + 1, action) for action in open_ends.values()]


def _what_is_wrong(text: str, name: str, draft: Draft) -> str | None:
    """Why a test is not what it says; None for one that is."""
    with_bug = _error_of(text, name, draft.mutant)
    if draft.failure is None:
        return None if with_bug is None else f"it fails, and the schedule does not: {with_bug.report.headline}"
    where = "as the engine is" if draft.mutant is None else f"with {draft.mutant}"
    if with_bug is None:
        return f"it passes {where}"
    if draft.mutant is not None:
        without = _error_of(text, name, None)
        return None if without is None else f"it fails without {draft.mutant} too: {without.report.headline}"
    if isinstance(with_bug, ScriptTimeout) or with_bug.report.error.startswith(_FAULTS_OF_SCRIPTS):
        return f"it fails {where} for a reason of its own: {with_bug.report.headline}"
    return None


def _error_of(text: str, name: str, mutant: str | None) -> ScriptError | None:
    """How the test does not pass in the sim tier."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "test_written.py"
        path.write_text(text, encoding="ascii")
        test = load_test(str(path), name)
        options = msgspec.structs.replace(test.options, timeout_s=_LIMIT_S)
        try:
            ScriptedSim(test.config, mutant=mutant).run(test.script, options=options)
        except ScriptError as exc:
            return exc
    return None


def _remarks_on(draft: Draft, mutant: str | None) -> tuple[str, ...]:
    left_out = _left_out(draft.lines)
    said = [f"it does without what no script can do{left_out}"] if left_out else []
    if draft.failure is None:
        also = "" if mutant is None else f", with {mutant} too"
        said.append(f"the schedule does not fail{also}; the test of it passes")
    else:
        test = f"the test of {plural(len(draft.lines), 'event')} fails"
        without = "on the engine as it is" if mutant is None else f"with {mutant} and passes without it"
        said.append(f"{test} {without}")
    return tuple(said)


def _remarks(refused: list[str]) -> tuple[str, ...]:
    return tuple(f"not kept: {one}" for one in refused)


def _left_out(lines: Iterable[Line]) -> str:
    texts = [f"{Placed(line.step, line.action)} ({line.impossible})" for line in lines if line.impossible is not None]
    return f"; left out: {'; '.join(texts)}" if texts else ""
