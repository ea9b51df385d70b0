"""The commands of the search: ``scripted explore`` and ``scripted gallery find``.

Owns their words and their output: a bar while they search, then tables and findings.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Protocol, runtime_checkable

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from lockstep.output_files import require_writable, write_output
from scripted.cli.bound import bound
from scripted.cli.console import ADAPTER_OPTION, STANDALONE_OPTION, plain_console, save_test
from scripted.cli.replay import replay
from scripted.cli.stuck import stuck
from scripted.core.adapters import DEFAULT_ADAPTER
from scripted.core.phrases import plural
from scripted.core.refusals import ScriptDefinitionError
from scripted.search.failure_database import DEFAULT_FAILURES, FailureDatabase
from scripted.search.strategies import StrategyName

if TYPE_CHECKING:
    from scripted.search.campaign import SearchReport
    from scripted.search.units import Finding

EXIT_FAILED = 1
# Findings that are shrunk and shown; further ones are mostly the same failure again.
_SHOWN_FINDINGS = 5
_LONGEST_NAME = 30


@runtime_checkable
class ChecksVersions(Protocol):
    """An adapter of a scheduler that is installed apart from it."""

    def version_check(self) -> tuple[bool, str]:
        """Whether this adapter was tried with the installed version, and a sentence that says so."""
        ...


@runtime_checkable
class TakesClasses(Protocol):
    """An adapter of a scheduler, parts of which are classes of the user's."""

    @property
    def class_settings(self) -> Mapping[str, Callable[[str], Mapping[str, str]]]:
        """The flags, such as ``scheduler``, and functions that make settings of the class's name."""
        ...


def add_commands(app: typer.Typer, gallery: typer.Typer) -> None:
    """Mount the commands on ``scripted`` and on ``scripted gallery``."""
    app.command()(explore)
    app.command()(replay)
    app.command()(stuck)
    app.command()(bound)
    gallery.command("find")(find)


def explore(
    target: Annotated[
        str | None,
        typer.Argument(
            help="a workload, generated:N, a schedule, or FILE::NAME of a script or Schedule; default: generated ones"
        ),
    ] = None,
    corpus: Annotated[bool, typer.Option("--corpus", help="search the hand-written workloads")] = False,
    strategy: Annotated[
        StrategyName | None,
        typer.Option(help="what is added to a target", show_default="random for generated targets, else exhaustive"),
    ] = None,
    schedules: Annotated[int | None, typer.Option(min=1, help="stop after this many schedules")] = None,
    minutes: Annotated[float | None, typer.Option(help="stop after this many minutes, more than 0")] = None,
    seed: Annotated[int, typer.Option(help="of generated targets and random events")] = 0,
    events: Annotated[int, typer.Option(min=1, help="of exhaustive: events at a time, within two steps")] = 1,
    jobs: Annotated[int, typer.Option(min=1, help="processes")] = 1,
    ray: Annotated[
        str | None, typer.Option(metavar="ADDRESS", help="a Ray cluster's address, 'auto' or 'local'")
    ] = None,
    mutant: Annotated[str | None, typer.Option(metavar="NAME", help="switch a bug of the gallery on")] = None,
    to_script: Annotated[Path | None, typer.Option(metavar="FILE", help="write the first failure as a test")] = None,
    standalone: Annotated[bool, STANDALONE_OPTION] = False,
    failures: Annotated[
        Path, typer.Option(metavar="FILE", help="the file of kept failures, run first the next time")
    ] = DEFAULT_FAILURES,
    keep: Annotated[bool, typer.Option(help="keep failures, and run the kept ones first; never with a mutant")] = True,
    coverage: Annotated[bool, typer.Option(help="show which events met which states")] = True,
    adapter: Annotated[str, ADAPTER_OPTION] = DEFAULT_ADAPTER,
    scheduler: Annotated[
        str | None,
        typer.Option(metavar="MODULE:CLASS", help="a scheduler of yours, for an adapter that takes one"),
    ] = None,
    connector: Annotated[
        str | None, typer.Option(metavar="MODULE:CLASS", help="a KV connector of yours, for an adapter that takes one")
    ] = None,
    version_check: Annotated[
        bool, typer.Option("--version-check", help="only say whether the adapter was tested with the installed version")
    ] = False,
) -> None:
    """Search for schedules that break a scheduler. Findings are shrunk; the exit status is then 1."""
    from scripted import api

    if version_check:
        _check_version(adapter)
        return
    require_writable("--to-script", to_script)
    adapter = _with_classes(adapter, {"scheduler": scheduler, "connector": connector})
    console = plain_console()
    database = FailureDatabase(failures) if keep and mutant is None else None
    if target is not None:
        adapter = api.adapter_of(target, adapter)
    still = 0 if database is None else _replay_failures(console, database, adapter)
    with _shown_progress(console, schedules) as show:
        report = api.explore(
            target,
            adapter=adapter,
            corpus=corpus,
            strategy=strategy,
            schedules=schedules,
            minutes=minutes,
            seed=seed,
            events=events,
            jobs=jobs,
            ray=ray,
            mutant=mutant,
            watch=show,
        )
    if coverage and report.coverage.counts:
        console.print(report.coverage.table())
    console.print(_summary(report), soft_wrap=True)
    for finding in list(report.findings.values())[:_SHOWN_FINDINGS]:
        if _show_finding(console, finding, to_script, database, standalone):
            to_script = None
    if to_script is not None:
        why = "no failure shown makes a test" if report.findings else "there is no failure to write"
        console.print(f"{to_script} is not written: {why}", soft_wrap=True)
    console.print(_verdict(report, still), soft_wrap=True)
    if report.findings or still:
        raise typer.Exit(EXIT_FAILED)


def _with_classes(adapter: str, classes: Mapping[str, str | None]) -> str:
    """Name the variant of an adapter that has these classes of the user's. Raises ScriptDefinitionError."""
    given = {flag: found for flag, found in classes.items() if found is not None}
    if not given:
        return adapter
    from scripted.core.adapters import adapter_named, variant_name

    known = adapter_named(adapter)
    defaults: dict[str, str] = {}
    for flag, found in given.items():
        if not isinstance(known, TakesClasses) or flag not in known.class_settings:
            raise ScriptDefinitionError(f"the adapter {adapter} takes no --{flag}; leave it out")
        defaults |= known.class_settings[flag](found)
    return variant_name(adapter, defaults)


@contextmanager
def _shown_progress(console: Console, total: int | None) -> Iterator[Callable[[SearchReport], None]]:
    """A bar on a terminal for the length of a search, and what brings it up to date."""
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not sys.stdout.isatty()) as progress:
        task = progress.add_task("searching", total=total)

        def show(report: SearchReport) -> None:
            said = (
                f"{report.schedules} schedules, {report.per_cpu_second:.0f}/s a core, {len(report.findings)} failures"
            )
            progress.update(task, completed=report.schedules, description=said)

        yield show


def _replay_failures(console: Console, database: FailureDatabase, adapter: str) -> int:
    """Run the kept failures again; how many of them still fail."""
    for said in database.set_damaged_aside():
        console.print(said, soft_wrap=True)
    still = 0
    for replayed in database.replay(adapter):
        still += replayed.failure is not None
        said = f"STILL FAILS: {replayed.failure}" if replayed.failure else f"dropped a kept failure: {replayed.why}"
        console.print(f"{said}\n  scripted replay '{replayed.saved.schedule}'", soft_wrap=True)
    return still


def _summary(report: SearchReport) -> str:
    how = "complete" if report.complete else "stopped before the end"
    return (
        f"{report.schedules} schedules in {report.seconds:.1f} s ({report.cpu_s:.1f} s of process time, "
        f"{report.per_cpu_second:.0f} a second and core), {how}; {report.unreached} events met nothing to act on; "
        f"{report.rejoined} runs ended early as their target again; "
        f"{len(report.coverage.counts)} cells covered"
    )


def _verdict(report: SearchReport, still: int) -> str:
    kept = f"{plural(still, 'kept failure')} still there" if still else ""
    found = f"{plural(len(report.findings), 'kind')} of failure" if report.findings else ""
    if kept or found:
        return f"FAILED: {' and '.join(filter(None, (found, kept)))} in {plural(report.schedules, 'schedule')}"
    rest = "" if report.complete else "; more were left, so go on with more --schedules or --minutes"
    return f"passed: no failure in {plural(report.schedules, 'schedule')}{rest}"


def _show_finding(
    console: Console, finding: Finding, to_script: Path | None, database: FailureDatabase | None, standalone: bool
) -> bool:
    """Print a finding, shrunk, and keep it; True when it was written as a test."""
    from scripted import api

    console.print(f"\nFAILED on {finding.target}: {finding.failure}", soft_wrap=True)
    found = finding.schedule
    if found is None:
        added = "; ".join(map(str, finding.extra))
        by_itself = "it fails by itself, with nothing added: mend it with pytest first"
        console.print(f"  added to the script: {added}" if added else f"  {by_itself}", soft_wrap=True)
        if to_script is not None:
            console.print("  no test is written: add the verbs of these events to the script itself", soft_wrap=True)
        return False
    shrunk = api.shrink(finding)
    if not shrunk.fails:
        said = "it does not fail from its beginning: the machine is not deterministic, or its copies share something"
        console.print(f"  {said}", soft_wrap=True)
    elif database is not None:
        database.add(shrunk.schedule, finding.failure)
    said = f"shrunk to {len(shrunk.schedule.placed)} events in {shrunk.seconds:.2f} s ({shrunk.runs} runs):"
    flag = f" --mutant {finding.mutant}" if finding.mutant else ""
    console.print(f"  {said}\n  scripted replay '{shrunk.schedule}'{flag}", soft_wrap=True)
    if to_script is None:
        return False
    target = finding.target if len(finding.target) < _LONGEST_NAME else "schedule"
    name = f"{re.sub(r'[^a-z]+', '_', target.lower()).strip('_')}_breaks"
    return save_test(
        console, (shrunk.schedule, found), to_script, name=name, mutant=finding.mutant, standalone=standalone
    )


def _check_version(adapter: str) -> None:
    from scripted.core.adapters import adapter_named

    of = adapter_named(adapter)
    if not isinstance(of, ChecksVersions):
        raise ScriptDefinitionError(f"the adapter {adapter} has no versions to check: it comes along with its adapter")
    tried, said = of.version_check()
    typer.echo(said)
    if not tried:
        raise typer.Exit(EXIT_FAILED)


def _searched_for(
    name: str | None, of: str, fresh: int, fresh_seed: int
) -> tuple[tuple[str, ...], Callable[[str], str] | None]:
    """The mutants of a measurement, and what its table says of each."""
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
    # What is searched for in the targets of a role has a table of its own.
    return tuple(one for one in every if adapter_of(one, of) == of), None


def find(
    name: Annotated[str | None, typer.Argument(metavar="NAME", help="a mutant of the gallery")] = None,
    everything: Annotated[bool, typer.Option("--all", help="all of them")] = False,
    markdown: Annotated[Path | None, typer.Option(metavar="FILE", help="write the gallery's table")] = None,
    generated: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="search generated targets, and keep the measurements in this file"),
    ] = None,
    strategy: Annotated[
        list[str] | None, typer.Option(help="with --generated: a strategy, 'alone' or 'workloads'; can be repeated")
    ] = None,
    schedules: Annotated[int, typer.Option(min=1, help="with --generated: schedules of one search")] = 10_000,
    cpu_seconds: Annotated[
        float | None, typer.Option(help="with --generated: seconds of process time of one search")
    ] = None,
    seeds: Annotated[int, typer.Option(min=1, help="with --generated: searches for each mutant")] = 10,
    fresh: Annotated[
        int,
        typer.Option(
            min=0, help="with --generated and --all: this many random edits of the source instead of the gallery"
        ),
    ] = 0,
    fresh_seed: Annotated[int, typer.Option(help="with --fresh: which edits are drawn")] = 27,
    adapter: Annotated[str, ADAPTER_OPTION] = DEFAULT_ADAPTER,
) -> None:
    """Search for a mutant in the workloads. Says which schedule shows it, after how many, in how much process time.

    With --generated it searches generated targets only and can be resumed; --markdown then writes that table.
    """
    if (name is None) != everything:
        raise typer.BadParameter("give the name of one mutant, or --all; `scripted gallery list` shows them")
    require_writable("--markdown", markdown)
    from scripted.core.adapters import adapter_named
    from scripted.core.mutant import mutant_names_of
    from scripted.search.mutant_search import (
        ALONE,
        CORPUS,
        DescribesMutants,
        WritesGallery,
        find_mutant,
        measure,
        table_of,
    )  # fmt: skip

    known = adapter_named(adapter)
    if generated is not None:
        require_writable("--generated", generated)
        there = [ALONE, CORPUS, *StrategyName]
        strategies: list[str] = strategy or [ALONE, StrategyName.RANDOM]
        if strange := [one for one in strategies if one not in there]:
            raise typer.BadParameter(f"--strategy is one of {', '.join(there)}, got {strange[0]!r}")
        names, told_of = _searched_for(name, adapter, fresh, fresh_seed)
        rows = measure(
            generated,
            names,
            strategies,
            range(seeds),
            schedules=schedules,
            cpu_seconds=cpu_seconds,
            of=adapter,
            watch=lambda row: typer.echo(str(row)),
        )
        table = table_of(rows, names, told_of, known.about if isinstance(known, DescribesMutants) else None)
        typer.echo(table)
        if markdown is not None:
            above = markdown.read_text(encoding="utf-8").split("| bug |", maxsplit=1)[0] if markdown.exists() else ""
            write_output(markdown, above + table)
        return
    if not mutant_names_of(known):
        raise ScriptDefinitionError(
            f"{adapter} has no mutants to search for; docs/your_scheduler.md says how to give it some"
        )
    found = []
    for one in mutant_names_of(known) if name is None else [name]:
        found.append(find_mutant(one, adapter))
        typer.echo(found[-1])
    if markdown is not None:
        if not isinstance(known, WritesGallery):
            raise ScriptDefinitionError(f"the adapter {adapter} keeps no page of its mutants; leave --markdown out")
        known.write_mutants(markdown, found)
    missed, skipped = [one.mutant for one in found if one.is_missed], [one.mutant for one in found if one.misfit]
    said = f"found {len(found) - len(missed) - len(skipped)} of {len(found)}"
    said += f", not {', '.join(missed)}" if missed else ""
    typer.echo(said + (f", skipped {', '.join(skipped)}" if skipped else ""))
    if missed or len(skipped) == len(found):
        raise typer.Exit(EXIT_FAILED)
