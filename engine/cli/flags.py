"""The flags of the settings: one for each field, and one for the configuration file.

``--help`` shows the common flags, ``--help-all`` all, in the groups below, each with its type or choices and its range.
Only given flags are passed on, because the settings own the defaults. Errors are sentences, with exit status 2.
"""

from __future__ import annotations

import inspect
import itertools
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import annotated_types
import typer
import typer.core
from pydantic import SecretStr
from pydantic.fields import FieldInfo

from engine.cli.foreign_flags import translated
from engine.core.config import ELSEWHERE
from engine.core.errors import ConfigError
from engine.process.settings import ServerSettings
from engine.process.settings_sources import TracedSettings, trace_settings, unread_variables
from lockstep.broken_rules import nearest
from lockstep.errors import UnwritableFileError, error_lines

EXIT_USAGE = 2
CONFIG_HELP = "file that sets fields: .toml, .yaml or .json"
# Flags that may be repeated, for fields with comma-separated values.
REPEATED = ("lora", "prefill_engines")

SettingsCommand = Callable[[TracedSettings], None]


def with_settings_flags(command: SettingsCommand) -> Callable[..., None]:
    """Make a command with one flag for each field of the settings, which it receives as one object."""

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
        _parameter("path", str | None, typer.Argument(metavar="MODEL", help="the same as --model", show_default=False)),
        _parameter("config", Path | None, typer.Option("--config", help=CONFIG_HELP, metavar="FILE")),
        *(_flag(name, field) for name, field in ServerSettings.model_fields.items()),
    ]
    run.__doc__ = command.__doc__
    run.__dict__["__signature__"] = inspect.Signature(parameters)
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run


@contextmanager
def refuse_bad_configuration() -> Iterator[None]:
    """Print each error on a line, and end the command."""
    try:
        yield
    except (ConfigError, UnwritableFileError) as exc:
        sys.stderr.write(error_lines("error", str(exc)))
        raise typer.Exit(EXIT_USAGE) from exc


def warn_of_unread_variables() -> None:
    """Warn about environment variables that look like settings but are not."""
    sys.stderr.write("".join(f"warning: {sentence}\n" for sentence in unread_variables(os.environ)))


def _parameter(name: str, kind: Any, info: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind, info])


def _flag(name: str, field: FieldInfo) -> inspect.Parameter:
    option = "--" + name.replace("_", "-")
    # The settings check types and ranges, with the same errors for flags and environment; only booleans are parsed
    # here.
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
    return _parameter(name, kind, info)


# The first field of each group, in the order of the settings' definition.
_BEGINS = {
    "model": "Model",
    "pp_size": "Pipeline",
    "chunked_prefill_size": "Scheduling",
    "page_size": "KV cache",
    "role": "Prefill and decode",
    "speculative_algorithm": "Speculation",
    "lora": "LoRA",
    "served_model_name": "Model",
    "placement": "Pipeline",
    "prefill_engines": "Prefill and decode",
    "host": "Server",
    "api_key": "Access",
    "log_level": "Logs and recordings",
    "gate": "Harnesses",
}


# The flags of ``--help``.
USUAL = {
    "path",
    "config",
    "model",
    "device",
    "dtype",
    "context_length",
    "pp_size",
    "max_running_requests",
    "max_total_tokens",
    "chunked_prefill_size",
    "lora",
    "served_model_name",
    "host",
    "port",
    "api_key",
    "log_level",
    "help",
}
HELP_ALL = "--help-all"


def _groups() -> dict[str, list[str]]:
    groups: dict[str, list[str]] = {"Model": ["path", "config"]}
    members = groups["Model"]
    for name in ServerSettings.model_fields:
        if name in _BEGINS:
            members = groups.setdefault(_BEGINS[name], [])
        members.append(name)
    return groups | {"Help": ["help"]}


GROUPS = _groups()
_GROUP_OF = {name: group for group, names in GROUPS.items() for name in names}
_KINDS: dict[Any, str] = {int: "INTEGER", float: "NUMBER", str: "TEXT", SecretStr: "KEY", bool: ""}


class GroupedCommand(typer.core.TyperCommand):
    # Untyped, because the classes of contexts, formatters and errors depend on the version of typer.
    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Accept flags of other engines. Never suggest a flag that means something other than the unknown one."""
        ctx.meta[HELP_ALL] = HELP_ALL in args
        try:
            ours = ["--help"] if HELP_ALL in args else translated(args)
            self._require_values(ctx, ours)
            return super().parse_args(ctx, ours)
        except typer.BadParameter:
            raise
        except Exception as exc:
            named = getattr(exc, "option_name", None)
            if isinstance(named, str) and hasattr(exc, "possibilities"):
                field = named.removeprefix("--").replace("-", "_")
                flags = [flag for one in self.get_params(ctx) for flag in (*one.opts, *one.secondary_opts)]
                known = [flag.removeprefix("--").replace("-", "_") for flag in flags]
                near = None if field in ELSEWHERE else nearest(field, known)
                remedy = "" if near else f"; {ELSEWHERE.get(field, f'{HELP_ALL} shows all flags')}"
                exc.__dict__ |= {
                    "possibilities": [] if near is None else [f"--{near.replace('_', '-')}"],
                    "message": f"No such option: {named}{remedy}",
                }
            raise

    def _require_values(self, ctx: Any, args: list[str]) -> None:
        """Raise typer.BadParameter for a flag without a value, because the next flag would become its value."""
        flags = {flag: one for one in self.get_params(ctx) for flag in (*one.opts, *one.secondary_opts)}
        for flag, value in itertools.pairwise([*args, ""]):
            needs = flag in flags and flag.startswith("--") and not getattr(flags[flag], "is_flag", False)
            if needs and value.partition("=")[0] in flags:
                raise typer.BadParameter(f"{flag} must have a value, got the flag {value}; put the value between them")

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write a section for each group that has options."""
        sections: dict[str, list[tuple[str, str]]] = {group: [] for group in GROUPS}
        for parameter in self.get_params(ctx):
            shown = parameter.get_help_record(ctx)
            if shown is not None and (ctx.meta[HELP_ALL] or parameter.name in USUAL):
                sections[_GROUP_OF[parameter.name or ""]].append(shown)
        sections["Help"].append((HELP_ALL, "Show all flags and exit."))
        for group, rows in sections.items():
            if rows:
                with formatter.section(group):
                    formatter.write_dl(rows)


def kind_of(field: FieldInfo) -> str:
    """Return the placeholder of a flag's value: its choices, or its type."""
    kind = _without_none(field.annotation)
    if get_origin(kind) is Literal:
        return "|".join(map(str, get_args(kind)))
    return _KINDS[kind]


def range_of(field: FieldInfo) -> str:
    """Return a field's range, such as '1 to 64' or '>= 1'; empty without a bound."""
    bounds = {type(bound): bound for bound in field.metadata}
    low, above = bounds.get(annotated_types.Ge), bounds.get(annotated_types.Gt)
    high, below = bounds.get(annotated_types.Le), bounds.get(annotated_types.Lt)
    if low is not None and high is not None:
        return f"{low.ge} to {high.le}"
    parts = []
    if low is not None:
        parts.append(f">= {low.ge}")
    elif above is not None:
        parts.append(f"> {above.gt}")
    if high is not None:
        parts.append(f"<= {high.le}")
    elif below is not None:
        parts.append(f"< {below.lt}")
    return " and ".join(parts)


def _without_none(annotation: Any) -> Any:
    """Return the type of a field's value when it is set."""
    if get_origin(annotation) not in (Union, UnionType):
        return annotation
    (kind,) = (part for part in get_args(annotation) if part is not NoneType)
    return kind
