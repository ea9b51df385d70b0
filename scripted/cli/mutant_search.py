"""``scripted gallery find``: how soon the search finds a mutant."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, TypeAlias

import typer

from lockstep.output_files import require_writable, write_output
from scripted.cli.console import ADAPTER_OPTION
from scripted.core.adapters import DEFAULT_ADAPTER
from scripted.core.refusals import ScriptDefinitionError
from scripted.search.strategies import StrategyName

EXIT_FAILED = 1

_Page: TypeAlias = Annotated[Path | None, typer.Option(metavar="FILE", help="write the gallery's table")]
_Generated: TypeAlias = Annotated[
    Path | None, typer.Option(metavar="FILE", help="search generated targets, and keep the measurements in this file")
]
_Strategies: TypeAlias = Annotated[
    list[str] | None, typer.Option(help="with --generated: a strategy, 'alone' or 'workloads'; can be repeated")
]
_Seconds: TypeAlias = Annotated[float | None, typer.Option(help="with --generated: seconds of process time per search")]
_Fresh: TypeAlias = Annotated[
    int,
    typer.Option(min=0, help="with --generated and --all: this many random edits of the source instead of the gallery"),
]


def find(
    name: Annotated[str | None, typer.Argument(metavar="NAME", help="a mutant of the gallery")] = None,
    everything: Annotated[bool, typer.Option("--all", help="every mutant")] = False,
    markdown: _Page = None,
    generated: _Generated = None,
    strategy: _Strategies = None,
    schedules: Annotated[int, typer.Option(min=1, help="with --generated: schedules per search")] = 10_000,
    cpu_seconds: _Seconds = None,
    seeds: Annotated[int, typer.Option(min=1, help="with --generated: searches per mutant")] = 10,
    fresh: _Fresh = 0,
    fresh_seed: Annotated[int, typer.Option(help="with --fresh: which edits are drawn")] = 27,
    adapter: Annotated[str, ADAPTER_OPTION] = DEFAULT_ADAPTER,
) -> None:
    """Search the workloads for a mutant. Print the schedule that finds it, the number of schedules and the CPU time.

    With --generated, search only generated targets; the search can be resumed, and --markdown then writes that table.
    """
    if (name is None) != everything:
        raise typer.BadParameter("give the name of one mutant, or --all; `scripted gallery list` shows them")
    require_writable("--markdown", markdown)
    if generated is None:
        _sweep(name, adapter, markdown)
        return
    require_writable("--generated", generated)
    names, told_of = _searched_for(name, adapter, fresh, fresh_seed)
    _measure(
        generated,
        (names, told_of),
        strategy or ["alone", StrategyName.RANDOM],
        bounds=(schedules, cpu_seconds, seeds),
        adapter=adapter,
        markdown=markdown,
    )


def _sweep(name: str | None, of: str, markdown: Path | None) -> None:
    """Sweep the workloads with one mutant on, or with each in turn."""
    from scripted.core.adapters import adapter_named
    from scripted.core.mutant import mutant_names_of
    from scripted.search.mutant_search import WritesGallery, find_mutant

    adapter = adapter_named(of)
    if not mutant_names_of(adapter):
        raise ScriptDefinitionError(f"{of} has no mutants to search for; docs/adapter_sdk.md says how to give it some")
    found = []
    for one in mutant_names_of(adapter) if name is None else [name]:
        found.append(find_mutant(one, of))
        typer.echo(found[-1])
    if markdown is not None:
        if not isinstance(adapter, WritesGallery):
            raise ScriptDefinitionError(f"the adapter {of} keeps no page of its mutants; leave --markdown out")
        adapter.write_mutants(markdown, found)
    missed, skipped = [one.mutant for one in found if one.is_missed], [one.mutant for one in found if one.misfit]
    said = f"found {len(found) - len(missed) - len(skipped)} of {len(found)}"
    said += f", not {', '.join(missed)}" if missed else ""
    typer.echo(said + (f", skipped {', '.join(skipped)}" if skipped else ""))
    if missed or len(skipped) == len(found):
        raise typer.Exit(EXIT_FAILED)


def _measure(
    file: Path,
    mutants: tuple[tuple[str, ...], Callable[[str], str] | None],
    strategies: list[str],
    *,
    bounds: tuple[int, float | None, int],
    adapter: str,
    markdown: Path | None,
) -> None:
    """Search generated targets for each mutant, resume from the file, and write the table."""
    from scripted.core.adapters import adapter_named
    from scripted.search.mutant_search import ALONE, CORPUS, DescribesMutants, measure, table_of

    there = [ALONE, CORPUS, *StrategyName]
    if strange := [one for one in strategies if one not in there]:
        raise typer.BadParameter(f"--strategy is one of {', '.join(there)}, got {strange[0]!r}")
    (names, told_of), (schedules, cpu_seconds, seeds) = mutants, bounds
    rows = measure(
        file,
        names,
        strategies,
        range(seeds),
        schedules=schedules,
        cpu_seconds=cpu_seconds,
        of=adapter,
        watch=lambda row: typer.echo(str(row)),
    )
    known = adapter_named(adapter)
    table = table_of(rows, names, told_of, known.about if isinstance(known, DescribesMutants) else None)
    typer.echo(table)
    if markdown is not None:
        above = markdown.read_text(encoding="utf-8").split("| bug |", maxsplit=1)[0] if markdown.exists() else ""
        write_output(markdown, above + table)


def _searched_for(
    name: str | None, of: str, fresh: int, fresh_seed: int
) -> tuple[tuple[str, ...], Callable[[str], str] | None]:
    """Return the mutants of a measurement and each mutant's text in its table."""
    from scripted.core.adapters import adapter_named
    from scripted.core.mutant import mutant_names_of
    from scripted.search.mutant_search import DrawsMutants, HasContracts, adapter_of

    adapter = adapter_named(of)
    if fresh:
        if not isinstance(adapter, DrawsMutants):
            raise ScriptDefinitionError(f"the adapter {of} draws no fresh mutants; leave --fresh out")
        drawn = adapter.fresh_mutants(fresh, fresh_seed)
        return tuple(drawn), drawn.__getitem__
    if name is not None:
        return (name,), None
    every = (*mutant_names_of(adapter), *(adapter.contract_names if isinstance(adapter, HasContracts) else ()))
    # Mutants that are searched for in a role's targets have their own table.
    return tuple(one for one in every if adapter_of(one, of) == of), None
