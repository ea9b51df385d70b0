"""Flags of the settings: one for each field of the one definition, and the file that may set them too.

Owns no default: a flag that is not given is not passed on. Errors are printed as sentences, with exit status 2.
"""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic.fields import FieldInfo

from engine.cli.flag_groups import kind_of, range_of
from engine.errors import ConfigError
from engine.settings import ServerSettings
from engine.settings_sources import TracedSettings, trace_settings, unread_variables
from lockstep.errors import UnwritableFileError

EXIT_USAGE = 2
# Flags that may be given several times, for fields whose values are separated by commas.
REPEATED = ("lora", "prefill_engines")

SettingsCommand = Callable[[TracedSettings], None]


def with_settings_flags(command: SettingsCommand) -> Callable[..., None]:
    """A command with one flag a field of the settings, which is given the settings that result."""

    def run(path: str | None, config: Path | None, **flags: Any) -> None:
        if path is not None:
            if flags["model"] not in (None, path):
                sys.stderr.write(
                    f"error: model must be given once, got {path} and --model {flags['model']}; drop one\n"
                )
                raise typer.Exit(EXIT_USAGE)
            flags["model"] = path
        flags |= {name: ",".join(flags[name]) for name in REPEATED if flags[name]}
        with refuse_bad_configuration():
            traced = trace_settings(flags, os.environ, config)
        warn_of_unread_variables()
        command(traced)

    parameters = [
        _model_argument(),
        _config_flag(),
        *(_flag(name, field) for name, field in ServerSettings.model_fields.items()),
    ]
    run.__doc__ = command.__doc__
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run


@contextmanager
def refuse_bad_configuration() -> Iterator[None]:
    """Print what is wrong, a line each, and end the command."""
    try:
        yield
    except (ConfigError, UnwritableFileError) as exc:
        sys.stderr.write("".join(f"error: {line}\n" for line in str(exc).splitlines()))
        raise typer.Exit(EXIT_USAGE) from exc


def warn_of_unread_variables() -> None:
    """Say which variables of the environment look like settings and are none."""
    sys.stderr.write("".join(f"warning: {sentence}\n" for sentence in unread_variables(os.environ)))


def _model_argument() -> inspect.Parameter:
    info = typer.Argument(metavar="MODEL", help="the same as --model", show_default=False)
    return inspect.Parameter(
        "path", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[str | None, info]
    )


def _config_flag() -> inspect.Parameter:
    info = typer.Option("--config", help="file that sets fields, by its ending toml, yaml or json", metavar="FILE")
    annotation = Annotated[Path | None, info]
    return inspect.Parameter("config", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def _flag(name: str, field: FieldInfo) -> inspect.Parameter:
    option = "--" + name.replace("_", "-")
    # The settings check types and ranges, with one wording for flags and environment; the command line parses booleans.
    kind: Any = bool | None if field.annotation is bool else str | None
    if name in REPEATED:
        kind = list[str] | None
    default = "unset" if field.default is None else str(field.default)
    if field.annotation is bool:
        default = "on" if field.default else "off"
    notes = [note for note in (range_of(field), f"default: {default}" if default != "" else "") if note]
    info = typer.Option(
        f"{option}/--no-{option[2:]}" if field.annotation is bool else option,
        help=f"{field.description} ({'; '.join(notes)})" if notes else field.description,
        envvar=None,
        show_default=False,
        metavar=kind_of(field) or None,
    )
    annotation = Annotated[kind, info]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)
