"""``scripted report``: a finding as a bug report in the form that the scheduler's project asks for."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lockstep.output_files import require_writable, write_output
from scripted.cli.console import ADAPTER_OPTION, FAILURES_OPTION, plain_console
from scripted.cli.reach import FailingSchedule, lines_of, named_schedule, server_lines
from scripted.core.adapters import DEFAULT_ADAPTER
from scripted.core.refusals import ScriptDefinitionError
from scripted.search.failure_database import DEFAULT_FAILURES

if TYPE_CHECKING:
    from scripted.core.schedule import Schedule
    from scripted.report.issue import Issue
    from scripted.report.rerun import Rerun
    from scripted.search.reach import MeasuredReach

_SHOWN_STEPS = 12
_WIDTH_COLUMNS = 110
_WORKLOADS = 200


def report(
    schedule: FailingSchedule,
    markdown: Annotated[Path | None, typer.Option(metavar="FILE", help="write the report to FILE")] = None,
    workloads: Annotated[
        int, typer.Option(min=0, help="how many random workloads to run with these settings")
    ] = _WORKLOADS,
    adapter: Annotated[str, ADAPTER_OPTION] = DEFAULT_ADAPTER,
    failures: Annotated[Path, FAILURES_OPTION] = DEFAULT_FAILURES,
) -> None:
    """Write a failing schedule as a bug report for its project."""
    from scripted.report.issue import PLAIN_FORM
    from scripted.search.reach import reach_of, server_of

    require_writable("--markdown", markdown)
    read = named_schedule(schedule, adapter, failures)
    found = reach_of(read, workloads=workloads)
    text = issue_of(found).text(server_of(read).issue_form or PLAIN_FORM)
    if markdown is None:
        plain_console().print(text, soft_wrap=True)
    else:
        write_output(markdown, text)


def issue_of(found: MeasuredReach) -> Issue:
    """Make the report on a failing schedule from its reach, its steps and its standalone test."""
    from scripted import api
    from scripted.report.issue import Issue, IssuePart, environment_of

    run = api.replay(found.schedule)
    assert run.error is not None, "a schedule with a reach fails"
    return Issue(
        title=run.error.partition("\n")[0],
        parts={
            IssuePart.ENVIRONMENT: environment_of(found.schedule.adapter.packages),
            IssuePart.FLAGS: "\n".join(server_lines(found.schedule)),
            IssuePart.HAPPENS: _steps_of(run),
            IssuePart.EXPECTED: _expected(found),
            IssuePart.CAUSE: f"The exception is raised at {run.where}." if run.where else "",
            IssuePart.SCRIPT: _script_of(found.schedule),
            IssuePart.AFFECTED: "\n".join(
                f"- {line.strip()}" for line in lines_of(found) if line.startswith(_AFFECTED)
            ),
        },
    )


# The lines of a reach that say who is affected.
_AFFECTED = ("unusual", "  ", "of ", "who ")


def _expected(found: MeasuredReach) -> str:
    if found.ends_engine:
        return "The scheduler plans these requests, or refuses one of them, and goes on: no step raises an exception."
    return "The opposite of the line above, in any order of these events."


def _steps_of(run: Rerun) -> str:
    from scripted.report.issue import fenced
    from scripted.report.table import render_text, step_table

    return fenced(render_text(step_table(run.log, last=_SHOWN_STEPS), _WIDTH_COLUMNS) + f"\n{run.error}")


def _script_of(schedule: Schedule) -> str:
    """Return a test of the scheduler's own classes, or the command that replays the schedule."""
    from scripted import api
    from scripted.report.issue import fenced

    command = fenced(f"scripted replay '{schedule}'")
    try:
        written = api.write_test(schedule, name="report", standalone=True)
    except ScriptDefinitionError:
        return command
    return command if written.text is None else fenced(written.text, "python")
