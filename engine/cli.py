"""The ``engine`` command: parses flags, prints errors as sentences, and hands over to the layer that does the work.

Owns no default: flags come from the one definition of the settings, and a flag that is not given is not passed on.
"""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable
from typing import Annotated, Any

import typer
from pydantic.fields import FieldInfo

from engine.errors import ConfigError
from engine.launch.settings import ENVIRONMENT_PREFIX, ServerSettings, read_settings

__all__ = ["app", "main"]

EXIT_USAGE = 2
EXIT_INTERRUPTED = 130

app = typer.Typer(
    name="engine",
    help="Lockstep: an LLM serving engine with a scheduler that can be frozen, stepped and replayed.",
    no_args_is_help=True,
    # Plain text: boxes cut off the longer flags in a narrow terminal.
    rich_markup_mode=None,
    add_completion=False,
    pretty_exceptions_enable=False,
)


@app.callback()
def _commands() -> None:
    """Make ``serve`` a command of its own: typer would drop the name of an only command."""


def main() -> None:
    """Run the command line."""
    app()


def _serve(**flags: Any) -> None:
    """Serve a model over HTTP. With no arguments: the embedded model, which needs no download."""
    try:
        settings = read_settings(flags, os.environ)
    except ConfigError as exc:
        sys.stderr.write("".join(f"error: {line}\n" for line in str(exc).splitlines()))
        raise typer.Exit(EXIT_USAGE) from exc
    from engine.launch.supervisor import supervise  # --help and bad flags need none of it

    try:
        status = supervise(settings)
    except KeyboardInterrupt:  # Before the supervisor listens to signals there is nothing to take down.
        status = EXIT_INTERRUPTED
    raise typer.Exit(status)


def _with_flags(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command one flag a field of the settings."""
    parameters = [_flag(name, field) for name, field in ServerSettings.model_fields.items()]
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return command


def _flag(name: str, field: FieldInfo) -> inspect.Parameter:
    option = "--" + name.replace("_", "-")
    # The settings check types and ranges, with one wording for flags and environment; the command line parses booleans.
    kind = bool | None if field.annotation is bool else str | None
    default = "unset" if field.default is None else field.default
    info = typer.Option(
        f"{option}/--no-{option[2:]}" if field.annotation is bool else option,
        help=f"{field.description} (default: {default})" if default != "" else field.description,
        envvar=None,
        show_default=False,
        metavar=None if field.annotation is bool else "VALUE",
    )
    annotation = Annotated[kind, info]  # type: ignore[valid-type]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


app.command("serve", epilog=f"Every flag has an environment variable: {ENVIRONMENT_PREFIX}PP_SIZE=4 is --pp-size 4.")(
    _with_flags(_serve)
)
