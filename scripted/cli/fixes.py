"""``--fix-known``: run with the fixes of known defects applied, so that nothing hides behind them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import typer

from scripted.core.defects import DEFAULT_KNOWN, Defect, defects_of, fixable
from scripted.core.refusals import ScriptDefinitionError

FIX_KNOWN_OPTION = typer.Option(
    "--fix-known", help="apply the fixes of known defects, so that nothing hides behind them"
)


def known_of(adapter: str, project: Path = DEFAULT_KNOWN) -> tuple[Defect, ...]:
    """Return the known defects of an adapter, and of the machines that it consists of."""
    from scripted.core.adapters import adapter_named
    from scripted.search.kinds import HasParts

    whole = adapter_named(adapter)
    parts = defects_of(whole.part_adapter, project) if isinstance(whole, HasParts) else ()
    return (*defects_of(adapter, project), *parts)


def fixes_for(adapter: str, project: Path, excluded: Mapping[str, bool]) -> tuple[Defect, ...]:
    """Return the known defects to fix.

    ``excluded`` are the flags that run the scheduler as it is, and whether they are given. Raises
    ScriptDefinitionError for these, or if nothing can be fixed.
    """
    if given := [flag for flag, is_given in excluded.items() if is_given]:
        raise ScriptDefinitionError(
            f"--fix-known does not go with {given[0]}, which runs without the fixes; leave one out"
        )
    every = known_of(adapter, project)
    if not (found := fixable(every)):
        raise ScriptDefinitionError(
            f"none of the {len(every)} known defects of {adapter} has a fix that fits the installed version; leave "
            "--fix-known out"
        )
    return found
