"""``scripted findings``: the kept findings of a project, by number.

Lists, shows, shrinks and forgets them, and moves one to the file of known findings that a project commits.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Final

import msgspec
import typer

from scripted.cli.console import FAILURES_OPTION, plain_console
from scripted.core.defects import DEFAULT_KNOWN, Defect, Upstream, add_known
from scripted.core.phrases import plural
from scripted.core.schedule import Schedule
from scripted.search.failure_database import DEFAULT_FAILURES, FailureDatabase, SavedFailure

_SHOWN_CHARS: Final = 100
_TITLE_CHARS: Final = 160
_SHRINK_S: Final = 60.0

findings_app = typer.Typer(rich_markup_mode=None, help="List, rerun, shrink and accept kept findings.")
_Number = Annotated[int, typer.Argument(metavar="N", help="the finding's number, as `scripted findings` lists it")]
_Failures = Annotated[Path, FAILURES_OPTION]


@findings_app.callback(invoke_without_command=True)
def findings(context: typer.Context, failures: _Failures = DEFAULT_FAILURES) -> None:
    """List the kept findings, one per line, if no command is given."""
    if context.invoked_subcommand is not None:
        return
    console, saved = plain_console(), FailureDatabase(failures).read()
    for one in saved:
        text = " ".join(one.text.split())[:_SHOWN_CHARS]
        console.print(f"{one.number:>4}  {one.adapter}, seen {plural(one.seen, 'time')}: {text}", soft_wrap=True)
    console.print(f"{plural(len(saved), 'finding')} in {failures}", soft_wrap=True)


@findings_app.command("show")
def show(number: _Number, failures: _Failures = DEFAULT_FAILURES) -> None:
    """Run a finding again, with its last steps as a table. The exit status is 1 while it fails."""
    from scripted.cli.replay import replay

    saved = FailureDatabase(failures).numbered(number)
    console = plain_console()
    console.print(f"finding {number} of {saved.adapter}, seen {plural(saved.seen, 'time')}", soft_wrap=True)
    console.print(f"  {saved.text}", soft_wrap=True)
    if saved.decision:
        console.print(f"  decided wrongly at {saved.decision}", soft_wrap=True)
    console.print(f"  scripted replay '{saved.schedule}'", soft_wrap=True)
    replay(saved.schedule, adapter=saved.adapter)


@findings_app.command("shrink")
def shrink(
    number: _Number,
    seconds: Annotated[float, typer.Option(min=0.1, help="how long at most")] = _SHRINK_S,
    failures: _Failures = DEFAULT_FAILURES,
) -> None:
    """Shrink a finding further, with more time than a search has."""
    from scripted.search import shrinking

    database = FailureDatabase(failures)
    saved = database.numbered(number)
    shrunk = shrinking.shrink(Schedule.parse(saved.schedule, of=saved.adapter), saved.signature, budget_s=seconds)
    console = plain_console()
    if not shrunk.fails:
        console.print(f"finding {number} no longer fails: scripted findings forget {number}", soft_wrap=True)
        return
    database.replace(msgspec.structs.replace(saved, schedule=str(shrunk.schedule)))
    minimal = "no single event can be left out" if shrunk.is_minimal else "the time was over; give more --seconds"
    events = plural(len(shrunk.schedule.placed), "event")
    console.print(f"shrunk to {events} in {shrunk.seconds:.2f} s ({shrunk.runs} runs): {minimal}", soft_wrap=True)
    console.print(f"  scripted replay '{shrunk.schedule}'", soft_wrap=True)


@findings_app.command("forget")
def forget(number: _Number, failures: _Failures = DEFAULT_FAILURES) -> None:
    """Drop a finding. A search that meets it again keeps it under a new number."""
    gone = FailureDatabase(failures).forget(number)
    plain_console().print(f"forgotten: finding {number}\n  scripted replay '{gone.schedule}'", soft_wrap=True)


@findings_app.command("known")
def known(
    number: _Number,
    because: Annotated[str, typer.Option(metavar="TEXT", help="why the project tolerates it")],
    upstream: Annotated[str, typer.Option(metavar="ID", help="the issue or pull request about it")] = "",
    file: Annotated[Path, typer.Option(metavar="FILE", help="the file to commit")] = DEFAULT_KNOWN,
    failures: _Failures = DEFAULT_FAILURES,
) -> None:
    """Accept a finding: move it to the file of known defects. The project commits that file."""
    database = FailureDatabase(failures)
    saved = database.numbered(number)
    defect = _known(saved, upstream, because)
    add_known(file, defect)
    database.forget(number)
    plain_console().print(f"{file} lists it as {defect.id} now; commit this file", soft_wrap=True)


def _known(saved: SavedFailure, upstream: str, because: str) -> Defect:
    schedule = str(Schedule.parse(saved.schedule, of=saved.adapter))
    named = schedule if schedule.startswith("adapter=") else f"adapter={saved.adapter} {schedule}"
    of = re.sub(r"[^a-z0-9]+", "-", saved.adapter.lower()).strip("-")
    return Defect(
        id=f"{of}-{upstream or saved.number}",
        title=" ".join(saved.text.split())[:_TITLE_CHARS],
        schedules=(named,),
        upstream=(Upstream(upstream),) if upstream else (),
        because=because,
    )
