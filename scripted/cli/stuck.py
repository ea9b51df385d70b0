"""``scripted stuck``: which requests are stuck, what each waits for, and which request holds it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from scripted.cli.console import plain_console
from scripted.core.refusals import ScriptDefinitionError

EXIT_STANDS = 1


def stuck(
    where: Annotated[
        str, typer.Argument(metavar="RECORDING|FOLDER", help="a recording, or the LOCKSTEP_RECORD of a running server")
    ],
) -> None:
    """Show which requests are stuck, and what each waits for.

    Also show since which step, who holds the resource, and the root cause. A running server is asked for its ring and
    goes on serving. The exit status is 1 if a request is stuck.
    """
    from scripted.reruns import stands_in

    if "://" in where:
        raise ScriptDefinitionError(
            f"scripted stuck takes a recording, or the folder that LOCKSTEP_RECORD names for a running server, got the "
            f"URL {where!r}; give the folder"
        )
    path, stands, lines = stands_in(Path(where))
    console = plain_console()
    for line in lines:
        console.print(line, soft_wrap=True)
    console.print(f"from {path}; `scripted replay {path}` runs it again", soft_wrap=True)
    if stands:
        raise typer.Exit(EXIT_STANDS)
