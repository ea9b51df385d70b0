"""``scripted stuck``: which requests are stuck, what each waits for, and which request holds it."""

from __future__ import annotations

from typing import Annotated

import typer

from scripted.cli.console import plain_console

EXIT_STANDS = 1


def stuck(
    where: Annotated[
        str,
        typer.Argument(
            metavar="RECORDING|URL|FOLDER",
            help="a recording, the URL of a running engine, or the LOCKSTEP_RECORD of a vLLM or SGLang server",
        ),
    ],
) -> None:
    """Show which requests are stuck, and what each waits for.

    Also show since which step, who holds the resource, and the root cause. A running server is asked for its last steps
    and goes on serving. The exit status is 1 if a request is stuck.
    """
    from scripted.reruns import stands_in

    path, stands, lines = stands_in(where)
    console = plain_console()
    for line in lines:
        console.print(line, soft_wrap=True)
    console.print(f"from {path}; `scripted replay {path}` runs it again", soft_wrap=True)
    if stands:
        raise typer.Exit(EXIT_STANDS)
