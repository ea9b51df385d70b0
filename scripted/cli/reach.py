"""``scripted reach``: the settings under which a schedule fails, how often random work fails, and who can cause it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from scripted.cli.console import ADAPTER_OPTION, FAILURES_OPTION, plain_console
from scripted.core.adapters import DEFAULT_ADAPTER
from scripted.search.failure_database import DEFAULT_FAILURES

if TYPE_CHECKING:
    from scripted.core.schedule import Schedule
    from scripted.search.reach import MeasuredReach

_WORKLOADS = 200
FailingSchedule = Annotated[
    str, typer.Argument(metavar="SCHEDULE|N", help="a failing schedule, as one line, or the number of a finding")
]


def reach(
    schedule: FailingSchedule,
    workloads: Annotated[
        int, typer.Option(min=0, help="how many random workloads to run with these settings")
    ] = _WORKLOADS,
    adapter: Annotated[str, ADAPTER_OPTION] = DEFAULT_ADAPTER,
    failures: Annotated[Path, FAILURES_OPTION] = DEFAULT_FAILURES,
) -> None:
    """Measure how common a failure is, and who can cause it."""
    from scripted.search.reach import reach_of

    show_reach(plain_console(), reach_of(named_schedule(schedule, adapter, failures), workloads=workloads))


def named_schedule(text: str, adapter: str, failures: Path) -> Schedule:
    """Parse a schedule, or return that of the finding whose number is given.

    Raises ScriptDefinitionError for a text that is neither.
    """
    from scripted.core.schedule import Schedule
    from scripted.search.failure_database import FailureDatabase

    if text.isascii() and text.isdecimal():
        saved = FailureDatabase(failures).numbered(int(text))
        return Schedule.parse(saved.schedule, of=saved.adapter)
    return Schedule.parse(text, of=adapter)


def show_reach(console: Console, found: MeasuredReach) -> None:
    for line in lines_of(found):
        console.print(line, soft_wrap=True)


def lines_of(found: MeasuredReach) -> list[str]:
    """Format a reach as lines of text."""
    unusual = ", ".join(f"{name}={value}" for name, value in found.unusual.items()) or "none"
    lines = [f"scripted replay '{found.schedule}'", *server_lines(found.schedule), f"unusual settings: {unusual}"]
    lines += [f"  {neighbour}" for neighbour in found.neighbours]
    if found.workloads:
        lines.append(f"of {found.workloads} random workloads with these settings {found.failed} fail")
    return [*lines, f"who can cause it: {found.who}"]


def server_lines(schedule: Schedule) -> list[str]:
    """Return a server's command line for a schedule's settings, and the settings that are not its defaults."""
    from scripted.search.reach import server_of

    command = server_of(schedule).command(schedule.config)
    if command is None:
        return []
    lines = [f"a server with these settings: {command.line}"]
    lines += [f"  not the default: {', '.join(command.changed)}"] if command.changed else []
    return lines + ([f"  no flag: {', '.join(command.beside)}"] if command.beside else [])
