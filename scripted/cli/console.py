"""The commands' terminal, and code that several commands share."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import typer
from rich.console import Console

from lockstep.output_files import write_output
from scripted.core.installed import installed_adapters

if TYPE_CHECKING:
    from scripted.core.schedule import Schedule

STANDALONE_OPTION = typer.Option(help="with --to-script: a test of the scheduler's own classes, without Lockstep")
ADAPTER_OPTION = typer.Option(
    metavar="ADAPTER", help=f"a scheduler: {', '.join(installed_adapters())}, FILE.py with an ADAPTER, or MODULE:NAME"
)

FAILURES_OPTION = typer.Option(metavar="FILE", help="the file of kept findings, run first by the next search")

_PLAIN_WIDTH_COLUMNS = 160


def plain_console(width: int = _PLAIN_WIDTH_COLUMNS) -> Console:
    """Make a console for a terminal at its width, or for a file with lines of this width."""
    return Console(width=None if sys.stdout.isatty() else width, highlight=False, markup=False)


def save_test(
    console: Console,
    schedules: Iterable[Schedule],
    path: Path,
    *,
    name: str,
    mutant: str | None = None,
    standalone: bool = False,
) -> bool:
    """Write the first of these schedules that makes a test, and report the outcome; True if a file was written."""
    from scripted import api

    written = api.write_test(schedules, name=name, mutant=mutant, standalone=standalone)
    for line in written.said:
        console.print(f"  {line}", soft_wrap=True)
    if written.text is not None:
        write_output(path, written.text)
    console.print(f"  written as {path}" if written.text else f"  no test is written as {path}", soft_wrap=True)
    return written.text is not None
