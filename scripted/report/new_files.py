"""Writes test files, rendered from a template, and never overwrites an existing file."""

from __future__ import annotations

import shlex
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from scripted.core.refusals import ScriptDefinitionError


def command_of(path: Path) -> str:
    """Return the command that runs a test file in the sim tier."""
    return f"pytest {shlex.quote(str(path))} --tier sim"


def render_source(template: Path, **values: object) -> str:
    """Render Python source from a template; a name missing in ``values`` is an error."""
    environment = Environment(
        loader=FileSystemLoader(template.parent),
        autoescape=False,  # noqa: S701 - the output is Python, where an escaped quote would be a syntax error
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    return environment.get_template(template.name).render(**values)


def write_new(path: Path, text: str) -> None:
    """Write a new file. Raises ScriptDefinitionError if it exists."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except FileExistsError as exc:
        raise ScriptDefinitionError(
            f"{path.parent} is not a folder, so {path.name} cannot be made in it; name another one"
        ) from exc
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError as exc:
        raise ScriptDefinitionError(f"{path} is there already; choose another name") from exc
