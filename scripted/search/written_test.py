"""Writes a schedule as a pytest file, and runs the file before keeping it: red with the bug, green without it.

A test that is not both is replaced by a longer form, by a test of the schedule as it was found, or by the reason why
there is none. The adapter formats and runs its tests.
"""

from __future__ import annotations

import contextlib
import tempfile
import textwrap
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final, Protocol, runtime_checkable

import msgspec

from scripted.core.action import Action, rid_of, verbs_of
from scripted.core.errors import BadCall, RequestRefused
from scripted.core.machine import ConfigIn
from scripted.core.mutant import switched_on
from scripted.core.phrases import plural
from scripted.core.placed_action import Placed
from scripted.core.protocol import WrittenTest, violations_of
from scripted.core.refusals import ScriptDefinitionError
from scripted.core.schedule import Schedule
from scripted.core.verb import Code, Verb, variable_of
from scripted.report.failure import ScriptError, ScriptTimeout
from scripted.script.context import BaseContext
from scripted.script.handles import BaseRequest
from scripted.script.loader import load_test
from scripted.script.on_adapters import WritesScripts
from scripted.script.options import ScriptOptions
from scripted.script.wait import DEFAULT_BUDGET_STEPS
from scripted.search.execution import Failure, Outcome, execute

# A script of a schedule takes milliseconds; one that takes longer hangs.
_LIMIT_S: Final = 20.0
_WIDTH: Final = 116
_SHOWN_LINES: Final = 20
_INDENT: Final = "    "
_REHEARSAL: Final = ScriptOptions(oracle=False, must_step=False, is_busy=True)
# A script that raises one of these is wrong itself and shows nothing about the scheduler.
_FAULTS_OF_SCRIPTS: Final = ("BadCall", "UnknownName", "Departure", "RequestRefused", "NameError", "TypeError")


@runtime_checkable
class WritesTests(WritesScripts[ConfigIn], Protocol[ConfigIn]):
    """An adapter whose schedules can be written as scripts."""

    def settling(self, placed: Sequence[Placed], outcome: Outcome) -> Sequence[Placed]:
        """Return the actions that settled a schedule's run, and the ones that a script needs after a broken run."""
        ...


@runtime_checkable
class WritesStandaloneTests(Protocol):
    """An adapter that writes tests of the scheduler's own classes that do not need this project."""

    def standalone_test(self, schedules: Sequence[Schedule], *, name: str) -> WrittenTest:
        """Return a test of the first of these schedules that can be written as one."""
        ...


def test_writer(schedule: Schedule) -> WritesTests:
    """Return the schedule's adapter as a writer of tests. Raises ScriptDefinitionError if it writes none."""
    adapter = schedule.adapter
    if not isinstance(adapter, WritesTests):
        raise ScriptDefinitionError(
            f"the adapter {schedule.of} writes no tests; `scripted replay` repeats its schedule"
        )
    return adapter


class Line(msgspec.Struct, frozen=True):
    """An action as a line of a script. ``is_refused`` by the server; ``impossible``: why no script can do it."""

    step: int
    action: Action
    is_refused: bool = False
    impossible: str | None = None


class Draft(msgspec.Struct, frozen=True):
    """A test to be written: actions at their steps. Its docstring has ``schedule`` and ``failure``.

    The schedule ran for ``steps`` steps. A ``settled`` test runs as many and then flushes, if the scheduler knows a
    flush; with ``waits`` it runs until idle.
    """

    schedule: Schedule
    lines: tuple[Line, ...]
    failure: Failure | None = None
    mutant: str | None = None
    steps: int = 0
    settled: bool = False
    waits: bool = True


def write_test(
    schedules: Iterable[Schedule], *, name: str, mutant: str | None = None, standalone: bool = False
) -> WrittenTest:
    """Write a test of the first of these schedules that has a correct one.

    A schedule that fails, under ``mutant`` or on the unchanged scheduler, becomes a test that fails there and passes
    without the mutant. A schedule that does not fail becomes a test that passes. No mutant may be on. A ``standalone``
    test uses only the classes of the installed, unchanged scheduler.
    """
    if standalone:
        if mutant is not None:
            raise ScriptDefinitionError(
                f"a standalone test knows no mutant: leave --mutant {mutant} or --standalone out"
            )
        schedules = list(schedules)
        adapter = schedules[0].adapter
        if not isinstance(adapter, WritesStandaloneTests):
            raise ScriptDefinitionError(
                f"the adapter {schedules[0].of} writes no standalone tests; leave --standalone out"
            )
        return adapter.standalone_test(schedules, name=name)
    refused: list[str] = []
    for schedule in schedules:
        for form, draft in _drafts(schedule, mutant):
            text = script_text(draft, name=name)
            wrong = _what_is_wrong(text, name, draft)
            if wrong is None:
                return WrittenTest(text, (*refused, *_remarks_on(draft, mutant)))
            refused.append(f"not kept: {form}: {wrong}{_left_out(draft.lines)}")
    return WrittenTest(None, tuple(refused))


def _drafts(schedule: Schedule, mutant: str | None) -> Iterator[tuple[str, Draft]]:
    """Yield the forms of a test lazily, shortest first: each replaces the previous one."""
    with switched_on(schedule.adapter, mutant):
        failing = execute(schedule)
    shown = mutant if failing.failure is not None else None
    healthy = failing if shown is None else execute(schedule)
    seen: set[tuple[Line, ...]] = set()
    for settled_by in (healthy, failing):
        lines = tuple(rehearse(schedule, settled_by))
        if lines in seen:
            continue
        seen.add(lines)
        steps = max(healthy.steps, failing.steps)
        draft = Draft(schedule, lines, failing.failure, shown, steps)
        yield "a test of its events", draft
        yield "one of all its steps", msgspec.structs.replace(draft, settled=True)
        yield "without waits", msgspec.structs.replace(draft, waits=False)


# -- actions that a script can do --


def rehearse(schedule: Schedule, outcome: Outcome) -> list[Line]:
    """Perform a schedule and its settling actions as a script; as in the search, control comes first in each step.

    Actions after the step in which the scheduler breaks count as possible.
    """
    writer = test_writer(schedule)
    placed = [*schedule.placed, *writer.settling(schedule.placed, outcome)]
    ordered = sorted(placed, key=lambda one: (one.step, not one.action.is_control))
    lines: list[Line] = []

    def script(t: BaseContext) -> Generator[None, None, None]:
        handles: dict[str, BaseRequest] = {}
        step = 1
        for one in ordered:
            while step < one.step:
                step += 1
                yield
            lines.append(_performed(t, one, handles))
        yield

    with contextlib.suppress(ScriptError):
        writer.run_script(script, {}, config=schedule.config, options=_REHEARSAL, mutant=None)
    return lines + [Line(one.step, one.action) for one in ordered[len(lines) :]]


def _performed(t: BaseContext, placed: Placed, handles: dict[str, BaseRequest]) -> Line:
    action = placed.action.with_handles(handles)
    try:
        for verb in action.verbs():
            value = _with_handles(verb, handles).perform(t)
            if action.is_start:
                handles[variable_of(value.rid)] = value
    except RequestRefused:
        return Line(placed.step, action, is_refused=True)
    except BadCall as exc:
        return Line(placed.step, action, impossible=str(exc))
    return Line(placed.step, action)


def _with_handles(verb: Verb, handles: dict[str, BaseRequest]) -> Verb:
    """Return the call with handles in place of their names. Raises BadCall for a missing handle."""
    arguments = [_with_handle(verb, argument, handles) for argument in verb.arguments]
    keywords = {name: _with_handle(verb, argument, handles) for name, argument in verb.keywords.items()}
    return Verb(verb.name, *arguments, **keywords)


def _with_handle(verb: Verb, argument: object, handles: Mapping[str, BaseRequest]) -> object:
    if not isinstance(argument, Code) or argument.value is not None:
        return argument
    if argument.text not in handles:
        raise BadCall(f"{verb.name}() takes a request that was started, and {argument.text} was not")
    return handles[argument.text]


# -- the text --


def script_text(draft: Draft, *, name: str) -> str:
    """Format the draft as a file with one test, without actions that no script can do.

    Raises ScriptDefinitionError for a configuration that the adapter's tests cannot express.
    """
    body = "\n".join(_body(draft))
    refused = "pytest.raises(RequestRefused)" in body
    head = test_writer(draft.schedule).test_head(draft.schedule.config, body)
    imports = [*head.imports, f"from scripted import {'RequestRefused, ' if refused else ''}scripted", *head.more]
    parts = [_docstring(draft), *(["import pytest\n"] if refused else []), *imports, *head.before, "", ""]
    return "\n".join([*parts, head.decorator, f"def {_name(name)}(t):", body, ""])


def _name(name: str) -> str:
    return f"test_{variable_of(name)}"


def _docstring(draft: Draft) -> str:
    """Format the docstring in ASCII, with its quotes, without a schedule that is too long to read."""
    method, failure = "Method: the events of the schedule at its steps, then to the end.", draft.failure
    if failure is None:
        lines = ['"""A schedule as a test.', "", "Goal: every promise is kept.", f"{method} Origin: scripted replay."]
    else:
        what = f"step {failure.step}: {failure.type}: {failure.text}".encode("ascii", "replace").decode()
        goal = f"Goal: this must not happen: {what}".replace("\\", "/").replace('"""', "'''")
        lines = ['"""Found by search: a schedule under which the scheduler broke a promise.', ""]
        lines += [*textwrap.wrap(goal, _WIDTH), f"{method} Origin: scripted explore."]
    if draft.mutant is not None:
        lines.append(f"Mutant: {draft.mutant}.")
    command = f"scripted replay '{draft.schedule}'"
    shown = textwrap.wrap(command, _WIDTH - 4, break_long_words=False, break_on_hyphens=False)
    lines += ["", *(_INDENT + line for line in shown)] if len(shown) <= _SHOWN_LINES else []
    return "\n".join([*lines, '"""', ""])


def _body(draft: Draft) -> Iterator[str]:
    """Yield one line per verb, and the steps between them."""
    yield f"{_INDENT}t.smoke()  # every promise is judged in each step; nothing else is asserted here"
    at = 1
    for line in draft.lines:
        if line.impossible is None:
            yield from _steps(line.step - at)
            at = line.step
            yield from (_INDENT + text for text in _verb(line))
    # At least one step: the last message has arrived, but the scheduler has not seen it.
    yield from _steps(max(1, draft.steps - at) if draft.settled else 1)
    if draft.settled and any("flush_cache" in verbs_of(action) for action in draft.schedule.adapter.actions):
        yield f"{_INDENT}t.flush_cache()"
        yield from _steps(2)
    if draft.waits:
        budget = f"max_steps={2 * draft.steps}" if draft.steps > DEFAULT_BUDGET_STEPS else ""
        yield f"{_INDENT}yield from t.run_until_idle({budget})"
    else:
        yield f"{_INDENT}# After a script nothing may wait forever, and ended requests leave nothing behind."


def _steps(count: int) -> Iterator[str]:
    if count == 1:
        yield f"{_INDENT}yield"
    elif count:
        yield f"{_INDENT}for _ in range({count}):"
        yield f"{_INDENT * 2}yield"


def _verb(line: Line) -> list[str]:
    lines = [str(verb) for verb in line.action.verbs()]
    if line.is_refused:
        return ["with pytest.raises(RequestRefused):", *(_INDENT + text for text in lines)]
    return [f"{variable_of(rid_of(line.action) or '')} = {text}" for text in lines] if line.action.is_start else lines


# -- the verdict --


def _what_is_wrong(text: str, name: str, draft: Draft) -> str | None:
    """Return why a test is not red with the bug and green without it; None if it is both."""
    with_bug = _error_of(text, name, draft, draft.mutant)
    failure = draft.failure
    if failure is None:
        return None if with_bug is None else f"it fails, but the schedule does not: {with_bug.report.headline}"
    where = "on the scheduler as it is" if draft.mutant is None else f"with {draft.mutant}"
    if with_bug is None:
        return f"it passes {where}"
    seen = with_bug.report.headline
    is_alike = with_bug.report.error.startswith(f"{failure.type}: {failure.text}".removesuffix(": "))
    # Without audits, an adapter raises the same in a script as in a schedule.
    if not is_alike and not violations_of(draft.schedule.adapter):
        return f"it fails {where} with another text than the schedule: {seen}"
    if draft.mutant is not None:
        without = _error_of(text, name, draft, None)
        return None if without is None else f"it fails without {draft.mutant} too: {without.report.headline}"
    is_own_fault = isinstance(with_bug, ScriptTimeout) or with_bug.report.error.startswith(_FAULTS_OF_SCRIPTS)
    return f"it fails {where} for another reason: {seen}" if is_own_fault and not is_alike else None


def _error_of(text: str, name: str, draft: Draft, mutant: str | None) -> ScriptError | None:
    """Return how a test fails or hangs; None if it passes."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "test_written.py"
        path.write_text(text, encoding="ascii")
        test = load_test(str(path), _name(name))
        options = msgspec.structs.replace(test.options, timeout_s=_LIMIT_S, is_busy=True)
        try:
            test_writer(draft.schedule).run_script(test.script, {}, config=test.config, options=options, mutant=mutant)
        except ScriptError as exc:
            return exc
    return None


def _remarks_on(draft: Draft, mutant: str | None) -> Iterator[str]:
    left_out = _left_out(draft.lines)
    if left_out:
        yield f"it omits actions that no script can do{left_out}"
    if draft.failure is None:
        also = "" if mutant is None else f", with {mutant} too"
        yield f"the schedule does not fail{also}; the test of it passes"
    else:
        where = "on the scheduler as it is" if mutant is None else f"with {mutant} and passes without it"
        yield f"the test of {plural(len(draft.lines), 'event')} fails {where}"


def _left_out(lines: Sequence[Line]) -> str:
    texts = [f"{Placed(line.step, line.action)} ({line.impossible})" for line in lines if line.impossible is not None]
    return f"; left out: {'; '.join(texts)}" if texts else ""
