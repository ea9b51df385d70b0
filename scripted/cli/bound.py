"""``scripted bound``: all orders of a few events, as a number and a claim, or as a table on a page."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from lockstep.output_files import require_writable, write_output
from scripted.cli.console import ADAPTER_OPTION, plain_console
from scripted.core.adapters import DEFAULT_ADAPTER
from scripted.core.refusals import ScriptDefinitionError

if TYPE_CHECKING:
    from scripted.search.bounded import Bounded

EXIT_FAILED = 1
_SECONDS_PER_MINUTE: Final = 60.0
_HEAD: Final = "| configuration and events | steps | in one step | schedules | states | a promise is broken |"
_COLUMNS: Final = _HEAD.count("|") - 1


def bound(
    events: Annotated[
        str | None,
        typer.Argument(metavar="SCHEDULE", help="a configuration and actions; the steps written there are ignored"),
    ] = None,
    depth: Annotated[int, typer.Option(min=1, help="number of steps at which an action may happen")] = 6,
    together: Annotated[int, typer.Option(min=1, help="most actions in one step, in any order")] = 2,
    minutes: Annotated[float | None, typer.Option(help="stop after this many minutes, without a claim")] = None,
    mutant: Annotated[str | None, typer.Option(metavar="NAME", help="switch on a bug of the gallery")] = None,
    page: Annotated[
        Path | None, typer.Option(metavar="FILE", help="check each row of a page's table and update its numbers")
    ] = None,
    adapter: Annotated[str, ADAPTER_OPTION] = DEFAULT_ADAPTER,
) -> None:
    """Check a few actions at every step and in every order.

    No state is visited twice. The exit status is 1 if a promise is broken or the search is stopped.
    """
    if (events is None) == (page is None):
        raise typer.BadParameter("give a schedule or --page FILE, one of the two")
    if page is None:
        assert events is not None, "one of the two is given"
        checked = [_check(events, depth, together, minutes, mutant, adapter)]
    else:
        require_writable("--page", page)
        above, rows = _rows_of(page)
        checked = [_check(line, int(steps), int(most), minutes, mutant, adapter) for line, steps, most in rows]
        lines = [_row(*row, one) for row, one in zip(rows, checked, strict=True)]
        write_output(page, above + "\n".join([_HEAD, "|" + " --- |" * _COLUMNS, *lines]) + "\n")
    if not all(one.complete for one in checked):
        raise typer.Exit(EXIT_FAILED)


def _check(line: str, depth: int, together: int, minutes: float | None, mutant: str | None, adapter: str) -> Bounded:
    from scripted.core.mutant import switched_on
    from scripted.core.schedule import Schedule
    from scripted.search.bounded import check_all_orders

    schedule = Schedule.parse(line, of=adapter)
    seconds = None if minutes is None else minutes * _SECONDS_PER_MINUTE
    with switched_on(schedule.adapter, mutant):
        checked = check_all_orders(schedule, depth=depth, together=together, seconds=seconds)
    console, flag = plain_console(), f" --mutant {mutant}" if mutant else ""
    console.print(f"{checked} ({checked.seconds:.1f} s)", soft_wrap=True)
    if checked.schedule is not None:
        console.print(f"  scripted replay '{checked.schedule}'{flag}", soft_wrap=True)
    return checked


def _rows_of(page: Path) -> tuple[str, list[tuple[str, str, str]]]:
    """Return the text above the table, and the first three cells of each row. Raises ScriptDefinitionError."""
    above, head, table = page.read_text(encoding="utf-8").partition(_HEAD)
    if not head:
        raise ScriptDefinitionError(f"--page takes a page with the table {_HEAD!r}, and {page} has none")
    rows = []
    for line in table.splitlines()[2:]:
        cells = [cell.strip() for cell in line.strip().removeprefix("|").removesuffix("|").split("|")]
        if len(cells) != _COLUMNS or not cells[1].isdecimal() or not cells[2].isdecimal():
            raise ScriptDefinitionError(
                f"a row of {page} has {_COLUMNS} cells, the second and the third of them numbers, got {line!r}"
            )
        rows.append((cells[0].strip("`"), cells[1], cells[2]))
    return above, rows


def _row(line: str, steps: str, most: str, checked: Bounded) -> str:
    how = "stopped before the end" if checked.failure is None else str(checked.failure).replace("|", "/")
    verdict = "by none" if checked.complete else how
    return f"| `{line}` | {steps} | {most} | {checked.schedules:,} | {checked.states:,} | {verdict} |"
