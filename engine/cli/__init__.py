"""The ``engine`` command: one module for each command, which calls the layer that does the work."""

from __future__ import annotations

import errno
import sys
from typing import Annotated

import typer

from engine import __version__
from engine.cli.bench.command import bench_app
from engine.cli.flags import GroupedCommand, with_settings_flags
from engine.cli.route import route
from engine.cli.serve import serve, show_configuration
from engine.cli.stage import stage
from engine.process.settings_sources import CONFIG_VARIABLE, ENVIRONMENT_PREFIX
from lockstep.errors import error_lines
from lockstep.output_files import print_every_character, told_of
from lockstep.usage_errors import command_app

__all__ = ["app", "main"]

EXIT_FAILED = 1
EPILOG = (
    f"Every flag has an environment variable: {ENVIRONMENT_PREFIX}PP_SIZE=4 is --pp-size 4, and a field of the same "
    f"name in the file that --config or {CONFIG_VARIABLE} names. "
    "Flags win over the environment, which wins over the file."
)

app = command_app(
    "engine", "Lockstep: an LLM serving engine with a scheduler that can be frozen, stepped and replayed."
)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"engine {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    _version: Annotated[
        bool, typer.Option("--version", help="print the version", is_eager=True, callback=_show_version)
    ] = False,
) -> None:
    """Lockstep: an LLM serving engine with a scheduler that can be frozen, stepped and replayed."""


app.command("serve", epilog=EPILOG, cls=GroupedCommand)(with_settings_flags(serve))
app.command("config", epilog=EPILOG, cls=GroupedCommand)(with_settings_flags(show_configuration))
app.command("route")(route)
app.command("stage")(stage)
app.add_typer(bench_app, name="bench")


def main() -> None:
    """Run the command line. A full disk gives one line on stderr and exit status 1."""
    print_every_character()
    try:
        app()
    except OSError as exc:
        if exc.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        sys.stderr.write(error_lines("error", told_of(exc)))
        raise SystemExit(EXIT_FAILED) from exc
