"""``engine serve``: from settings to a supervised server, and its exit status. ``engine config``: the settings in force
and the origin of each. Keys are masked.
"""

from __future__ import annotations

import sys
from typing import Final

import typer
from rich.console import Console
from rich.table import Column, Table

from engine.process.settings_sources import TracedSettings
from lockstep.interruption import EXIT_INTERRUPTED

PLAIN_WIDTH_COLUMNS: Final = 1000


def serve(traced: TracedSettings) -> None:
    """Serve a model over HTTP. With no arguments: the embedded model, which needs no download."""
    from engine.server.launch.supervisor import supervise  # slow imports, which --help and wrong flags do not need

    try:
        status = supervise(traced.settings)
    except KeyboardInterrupt:  # Before the supervisor handles signals there is nothing to shut down.
        status = EXIT_INTERRUPTED
    raise typer.Exit(status)


def show_configuration(traced: TracedSettings) -> None:
    """Print the settings of `engine serve` and their origins. Starts nothing."""
    values = traced.settings.model_dump(mode="json")
    # Names are never cut, because the reader will type them.
    table = Table(Column("field", no_wrap=True, min_width=max(map(len, values))), box=None)
    for title in ("value", "from"):
        table.add_column(title, overflow="fold")
    table.header_style = "bold"
    for name, origin in traced.origins.items():
        value = values[name]
        shown = "unset" if value is None or value == "" else str(value)
        # Dim the defaults, so that set values stand out.
        table.add_row(name, shown, origin, style="" if origin != "default" else "dim")
    # One line for each field in a pipe; a terminal folds long ones.
    console = Console(width=None if sys.stdout.isatty() else PLAIN_WIDTH_COLUMNS)
    console.print(table)
