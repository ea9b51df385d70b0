"""``scripted explore``: the options of a search, and its report.

The report's first three lines say what was run, what was found and what to do next. New kinds of failure are printed as
they are found; known ones are counted.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple, Protocol, TypeAlias, runtime_checkable

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from lockstep.output_files import require_writable, write_output
from scripted.cli.bound import bound
from scripted.cli.console import ADAPTER_OPTION, FAILURES_OPTION, STANDALONE_OPTION, plain_console, save_test
from scripted.cli.fixes import FIX_KNOWN_OPTION, fixes_for
from scripted.cli.mutant_search import find
from scripted.cli.reach import reach, server_lines
from scripted.cli.replay import replay
from scripted.cli.report import report
from scripted.cli.stuck import stuck
from scripted.core.adapters import DEFAULT_ADAPTER
from scripted.core.defects import DEFAULT_KNOWN, Defect, all_fixed, defects_of
from scripted.core.phrases import nearest, plural
from scripted.core.protocol import windows_of
from scripted.core.refusals import ScriptDefinitionError
from scripted.search.failure_database import DEFAULT_FAILURES, FailureDatabase
from scripted.search.strategies import StrategyName

if TYPE_CHECKING:
    from scripted.search.campaign import SearchReport
    from scripted.search.kinds import Kind, Sorter

EXIT_FAILED = 1
# Stands for all windows.
_ALL = "all"
# The most kinds that are listed. All are kept, and `scripted findings` lists them.
_LISTED_KINDS = 20
_LONGEST_NAME = 30
_SHOWN_CHARS = 100
_LONGEST_LINE = 2_000

_Target: TypeAlias = Annotated[
    str | None,
    typer.Argument(
        help="a workload, generated:N, a schedule, or FILE::NAME of a script or Schedule; default: generated ones"
    ),
]
_Strategy: TypeAlias = Annotated[
    StrategyName | None,
    typer.Option(help="how events are added to a target", show_default="random for generated targets, else exhaustive"),
]
_Ray: TypeAlias = Annotated[
    str | None, typer.Option(metavar="ADDRESS", help="run on a Ray cluster: its address, 'auto' or 'local'")
]
_Against: TypeAlias = Annotated[
    str | None,
    typer.Option(
        metavar="CHECKOUT|COMMIT", help="report only what the scheduler of this folder or commit does not fail"
    ),
]
_Known: TypeAlias = Annotated[
    Path, typer.Option(metavar="FILE", help="the project's known findings, which do not fail a search")
]
_Markdown: TypeAlias = Annotated[
    Path | None, typer.Option(metavar="FILE", help="write the new kinds of failure, if any, as Markdown for a comment")
]
_Keep: TypeAlias = Annotated[
    bool, typer.Option(help="keep findings, and run kept ones first; off with a mutant or --fix-known")
]
_Scheduler: TypeAlias = Annotated[
    str | None, typer.Option(metavar="MODULE:CLASS", help="your own scheduler class, if the adapter takes one")
]
_Connector: TypeAlias = Annotated[
    str | None, typer.Option(metavar="MODULE:CLASS", help="your own KV connector class, if the adapter takes one")
]
_Check: TypeAlias = Annotated[
    bool, typer.Option("--version-check", help="only report whether the adapter was tested with the installed version")
]
_Corpus: TypeAlias = Annotated[bool, typer.Option("--corpus", help="search the hand-written workloads")]
_Schedules: TypeAlias = Annotated[int | None, typer.Option(min=1, help="stop after this many schedules")]
_Minutes: TypeAlias = Annotated[float | None, typer.Option(help="stop after this many minutes, more than 0")]
_Seed: TypeAlias = Annotated[int, typer.Option(help="seed of generated targets and random events")]
_Events: TypeAlias = Annotated[
    int, typer.Option(min=1, help="with exhaustive: events added at a time, within two steps")
]
_Jobs: TypeAlias = Annotated[int, typer.Option(min=1, help="number of processes")]
_Mutant: TypeAlias = Annotated[str | None, typer.Option(metavar="NAME", help="switch on a bug of the gallery")]
_FixKnown: TypeAlias = Annotated[bool, FIX_KNOWN_OPTION]
_StopAtFirst: TypeAlias = Annotated[bool, typer.Option("--stop-at-first", help="stop at the first new kind of failure")]
_ToScript: TypeAlias = Annotated[Path | None, typer.Option(metavar="FILE", help="write the first failure as a test")]
_Standalone: TypeAlias = Annotated[bool, STANDALONE_OPTION]
_Failures: TypeAlias = Annotated[Path, FAILURES_OPTION]
_Coverage: TypeAlias = Annotated[bool, typer.Option(help="show which events met which states")]
_MustReach: TypeAlias = Annotated[
    list[str] | None,
    typer.Option(metavar="WINDOW", help="fail unless some run reached this window, or 'all'; can be repeated"),
]
_Adapter: TypeAlias = Annotated[str, ADAPTER_OPTION]


@runtime_checkable
class ChecksVersions(Protocol):
    """An adapter whose scheduler is installed separately."""

    def version_check(self) -> tuple[bool, str]:
        """Return whether this adapter was tested with the installed version, and a sentence that says so."""
        ...


@runtime_checkable
class TakesClasses(Protocol):
    """An adapter whose scheduler takes the user's own classes."""

    @property
    def class_settings(self) -> Mapping[str, Callable[[str], Mapping[str, str]]]:
        """Return the flags, such as ``scheduler``, each with the function that turns a class's name into settings."""
        ...


def add_commands(app: typer.Typer, gallery: typer.Typer) -> None:
    """Mount the commands on ``scripted`` and on ``scripted gallery``."""
    app.command()(explore)
    app.command()(replay)
    app.command()(stuck)
    app.command()(bound)
    app.command()(reach)
    app.command()(report)
    gallery.command("find")(find)


def explore(
    target: _Target = None,
    corpus: _Corpus = False,
    strategy: _Strategy = None,
    schedules: _Schedules = None,
    minutes: _Minutes = None,
    seed: _Seed = 0,
    events: _Events = 1,
    jobs: _Jobs = 1,
    ray: _Ray = None,
    mutant: _Mutant = None,
    against: _Against = None,
    fix_known: _FixKnown = False,
    stop_at_first: _StopAtFirst = False,
    to_script: _ToScript = None,
    standalone: _Standalone = False,
    markdown: _Markdown = None,
    failures: _Failures = DEFAULT_FAILURES,
    known: _Known = DEFAULT_KNOWN,
    keep: _Keep = True,
    coverage: _Coverage = False,
    must_reach: _MustReach = None,
    adapter: _Adapter = DEFAULT_ADAPTER,
    scheduler: _Scheduler = None,
    connector: _Connector = None,
    version_check: _Check = False,
) -> None:
    """Search for schedules that break a scheduler.

    New kinds of failure are shrunk, and make the exit status 1. Known ones, from the adapter's table and the project's
    file, are only counted.
    """
    from scripted import api

    if version_check:
        _check_version(adapter)
        return
    require_writable("--to-script", to_script)
    require_writable("--markdown", markdown)
    adapter = _with_classes(adapter, {"scheduler": scheduler, "connector": connector})
    adapter = adapter if target is None else api.adapter_of(target, adapter)
    windows = _Windows.of(target, adapter, wanted=must_reach or [])
    excluded = {"--against": against is not None, "--to-script": to_script is not None, "--mutant": mutant is not None}
    fixed = fixes_for(adapter, known, excluded) if fix_known else ()
    database = FailureDatabase(failures) if keep and mutant is None and not fix_known else None
    shown = _Shown(plain_console(), database, to_script, standalone)
    sorting = _sorting(shown, against, adapter, known if mutant is None else None, fixed)
    with sorting as sorter, _shown_progress(shown.console, schedules) as watch:
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
            stop_at_first=stop_at_first,
            watch=watch,
            sorter=sorter,
            fixed=fixed,
        )
    _tell_unfixed(shown.console, sorter, fixed)
    _tell(shown, report, sorter, windows, adapter=adapter, against=against, coverage=coverage, markdown=markdown)


def _tell_unfixed(console: Console, sorter: Sorter, fixed: Sequence[Defect]) -> None:
    """Print which defects were fixed, and how many of the new kinds the scheduler shows without the fixes too."""
    from scripted.search.shrinking import way_to_fail

    if not fixed:
        return
    console.print(
        f"\nfixed  {plural(len(fixed), 'known defect')}: {', '.join(one.id for one in fixed)}", soft_wrap=True
    )
    schedules = [kind.schedule for kind in sorter.new if kind.schedule is not None]
    failing = [one for one in schedules if way_to_fail(one, None)[1] is not None]
    if schedules:
        console.print(
            f"alone  {len(failing)} of {plural(len(schedules), 'new kind')} also without the fixes; replay the others "
            "with --fix-known",
            soft_wrap=True,
        )


def _tell(
    shown: _Shown,
    report: SearchReport,
    sorter: Sorter,
    windows: _Windows,
    *,
    adapter: str,
    against: str | None,
    coverage: bool,
    markdown: Path | None,
) -> None:
    """Print the report, and write the requested files. Raises Exit for a failure or a missed window."""
    console = shown.console
    _print_report(console, report, sorter, adapter=adapter, against=against)
    if coverage and report.coverage.counts:
        console.print(report.coverage.table())
    if markdown is not None and sorter.new:
        write_output(markdown, _comment(sorter, adapter, against))
    shown.keep_counts(sorter.kinds)
    shown.write_test()
    missed = windows.print(console, report)
    console.print(_verdict(report, sorter), soft_wrap=True)
    if missed or any(kind.defect is None for kind in sorter.kinds):
        raise typer.Exit(EXIT_FAILED)


class _Windows(NamedTuple):
    """The windows whose runs a search counts, and those that it must reach."""

    watched: tuple[str, ...]
    wanted: tuple[str, ...]

    @classmethod
    def of(cls, target: str | None, adapter: str, *, wanted: Sequence[str]) -> _Windows:
        """Return the windows of a search. Raises ScriptDefinitionError for a wanted window that is not watched."""
        from scripted.core.adapters import adapter_named
        from scripted.search.targets import schedule_of

        if target is not None and schedule_of(target, adapter) is None:
            if wanted:
                raise ScriptDefinitionError(
                    f"--must-reach needs schedules, got the script {target}; name windows in its own must_reach"
                )
            return cls((), ())
        known = windows_of(adapter_named(adapter))
        for name in wanted:
            if name != _ALL and name not in known:
                there = ", ".join(map(repr, known)) or "none; SchedulerAdapter(windows=) declares them"
                raise ScriptDefinitionError(
                    f"{adapter} declares no window {name!r}{nearest(name, known)}; it has {there}"
                )
        return cls(known, known if _ALL in wanted else tuple(wanted))

    def print(self, console: Console, report: SearchReport) -> bool:
        """Print in how many runs each watched window was open; return whether a wanted window never was."""
        reached = report.coverage.windows(self.watched)
        if not reached:
            return False
        never = [name for name, runs in reached.items() if not runs]
        said = ", ".join(f"{name} in {runs}" for name, runs in reached.items() if runs) or "none"
        console.print(f"open   {said}, of {plural(report.schedules, 'schedule')}", soft_wrap=True)
        missed = set(never) & set(self.wanted)
        if never:
            fails = "; --must-reach fails the search" if missed else ""
            console.print(f"never  {', '.join(never)}: bugs there stay hidden{fails}", soft_wrap=True)
        return bool(missed)


@contextmanager
def _sorting(
    shown: _Shown, against: str | None, adapter: str, known: Path | None, fixed: Sequence[Defect]
) -> Iterator[Sorter]:
    """Make the sorter of a search; it recognizes the ``known`` defects and the kept findings, unless None."""
    from scripted.search.kinds import Sorter
    from scripted.search.other_tree import other_tree

    with nullcontext() if against is None else other_tree(against, adapter) as tree:
        sorter = Sorter(on_new=shown.show, against=tree)
        if known is not None:
            with all_fixed(fixed):
                _know(shown.console, sorter, shown.database, known, adapter, fixed={one.id for one in fixed})
        yield sorter


def _know(
    console: Console,
    sorter: Sorter,
    database: FailureDatabase | None,
    known: Path,
    adapter: str,
    *,
    fixed: Collection[str],
) -> None:
    """Run known defects that are not fixed and kept findings, so that the search recognizes them."""
    from scripted.core.adapters import adapter_named
    from scripted.search.kinds import HasParts

    for defect in defects_of(adapter, known):
        if defect.id not in fixed:
            sorter.add_known(defect, adapter)
    whole = adapter_named(adapter)
    if isinstance(whole, HasParts):
        for defect in defects_of(whole.part_adapter, known):
            if defect.id not in fixed:
                sorter.add_known_of_part(defect, whole)
    if database is None:
        return
    for said in database.set_damaged_aside():
        console.print(said, soft_wrap=True)
    for replayed in database.replay(adapter):
        if replayed.failure is None:
            said = f"dropped a kept failure: {replayed.why}"
            console.print(f"{said}\n  scripted replay '{replayed.saved.schedule}'", soft_wrap=True)
            continue
        if any(kind.defect is not None and str(kind.schedule) == replayed.saved.schedule for kind in sorter.kinds):
            continue  # the project has accepted it in the meantime
        console.print(f"STILL FAILS: {replayed.failure}\n  scripted replay '{replayed.saved.schedule}'", soft_wrap=True)
        sorter.add_kept(replayed.saved, replayed.failure)


class _Shown:
    """Prints and keeps each new kind as it is found, and writes the first kind that makes a test."""

    def __init__(
        self, console: Console, database: FailureDatabase | None, to_script: Path | None, standalone: bool
    ) -> None:
        self.console = console
        self.database = database
        self._to_script = to_script
        self._standalone = standalone
        self._count = 0
        self._unwritten: list[Kind] = []

    def show(self, kind: Kind) -> None:
        self._count += 1
        if self.database is not None and kind.schedule is not None and kind.is_replayed:
            kind.number = self.database.add(kind.schedule, kind.failure, kind.decision).number
        if self._count > _LISTED_KINDS:
            return
        finding, shrunk = kind.finding, kind.shrunk
        named = f"FAILED on {finding.target}: {finding.failure}"
        self._print(f"\n{named if len(named) < _LONGEST_LINE else named[:_LONGEST_LINE] + '...'}")
        if shrunk is None or kind.schedule is None:
            added = "; ".join(map(str, finding.extra))
            by_itself = "it fails by itself, with nothing added: fix it with pytest first"
            self._print(f"  added to the script: {added}" if added else f"  {by_itself}")
            if self._to_script is not None:
                self._print("  no test is written: add the verbs of these events to the script itself")
            return
        if not shrunk.fails:
            self._print(
                "  it does not fail from its beginning: the machine is not deterministic, or its copies share something"
            )
        events, flag = len(kind.schedule.placed), f" --mutant {finding.mutant}" if finding.mutant else ""
        self._print(f"  shrunk to {events} events in {shrunk.seconds:.2f} s ({shrunk.runs} runs):")
        self._print(f"  scripted replay '{kind.schedule}'{flag}")
        for line in server_lines(kind.schedule):
            self._print(f"  {line}")
        if kind.decision:
            self._print(f"  decided wrongly at {kind.decision}")
        if kind.number:
            self._print(f"  kept as finding {kind.number}")
        self._unwritten.append(kind)

    def keep_counts(self, kinds: Iterable[Kind]) -> None:
        """Keep how often each finding was seen; its first sighting was counted when it was kept."""
        if self.database is not None:
            self.database.add_seen({kind.number: kind.seen - kind.is_new for kind in kinds if kind.number})

    def write_test(self) -> None:
        """Write the first kind that makes a test, if one was requested; its mutant is off by now."""
        if self._to_script is None:
            return
        for kind in self._unwritten:
            found = kind.finding.schedule
            assert kind.schedule is not None, "it was shrunk"
            assert found is not None, "only schedules are shrunk"
            target = kind.finding.target if len(kind.finding.target) < _LONGEST_NAME else "schedule"
            name = f"{re.sub(r'[^a-z]+', '_', target.lower()).strip('_')}_breaks"
            mutant, schedules = kind.finding.mutant, (kind.schedule, found)
            if save_test(
                self.console, schedules, self._to_script, name=name, mutant=mutant, standalone=self._standalone
            ):
                return
        why = "no failure shown makes a test" if self._count else "there is no new failure to write"
        self._print(f"{self._to_script} is not written: {why}")

    def _print(self, line: str) -> None:
        self.console.print(line, soft_wrap=True)


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
    """Show a progress bar on a terminal during a search; yields the function that updates it."""
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not sys.stdout.isatty()) as progress:
        task = progress.add_task("searching", total=total)

        def show(report: SearchReport) -> None:
            said = f"{report.schedules} schedules, {report.per_cpu_second:.0f}/s a core, {report.failed} of them failed"
            progress.update(task, completed=report.schedules, description=said)

        yield show


def _print_report(console: Console, report: SearchReport, sorter: Sorter, *, adapter: str, against: str | None) -> None:
    """Print what was run, what was found and what to do next, a line each; then a line for each kind."""
    console.print(f"\nran    {_summary(report, adapter)}", soft_wrap=True)
    console.print(f"found  {_found(report, sorter, against)}", soft_wrap=True)
    console.print(f"next   {_next(report, sorter)}", soft_wrap=True)
    ordered = sorted(sorter.kinds, key=lambda kind: (kind.defect is not None, kind.is_old, -kind.seen))
    listed = [kind for kind in ordered if kind.defect is None or kind.seen]
    for kind in listed[:_LISTED_KINDS]:
        console.print(f"  {line_of(kind)}", soft_wrap=True)
    if len(listed) > _LISTED_KINDS:
        console.print(f"  and {len(listed) - _LISTED_KINDS} more: `scripted findings` lists all", soft_wrap=True)
    if sorter.gone:
        gone = ", ".join(defect.id for defect in sorter.gone)
        console.print(f"  known, but none of their schedules fails here: {gone}", soft_wrap=True)


def line_of(kind: Kind) -> str:
    """Describe a kind in one line: its number, whether it is known, the broken promise, its events and settings."""
    seen = f"seen {plural(kind.seen, 'time')}"
    if kind.defect is not None:
        return f"known  {kind.defect.id}: {kind.defect.title or kind.failure.text[:_SHOWN_CHARS]}, {seen}"
    number = f"{kind.number:>3}" if kind.number else "  -"
    text = " ".join(kind.failure.text.split())[:_SHOWN_CHARS]
    needs = ", ".join((*kind.events, *kind.settings))
    return f"{number}  {'kept' if kind.is_old else 'new'}, {seen}: {kind.failure.type}: {text} [{needs}]"


def _comment(sorter: Sorter, adapter: str, against: str | None) -> str:
    """Return the new kinds as Markdown. A scheduler's texts go into code spans, where they make no link or mention."""
    there = f"; `{against}` fails in none of these ways" if against else ""
    found = f"found {plural(len(sorter.new), 'kind')} of failure{there}"
    lines = [f"### `scripted explore --adapter {adapter}` {found}", ""]
    for kind in sorter.new[:_LISTED_KINDS]:
        text = " ".join(str(kind.failure).split())[:_SHOWN_CHARS].replace("`", "'")
        lines += [f"- `{text}`"]
        if kind.schedule is not None:
            lines += ["", "  ```console", f"  $ scripted replay '{kind.schedule}'", "  ```", ""]
    if len(sorter.new) > _LISTED_KINDS:
        lines.append(f"- and {len(sorter.new) - _LISTED_KINDS} more: the job's artifact has them")
    return "\n".join([*lines, ""])


def _summary(report: SearchReport, adapter: str) -> str:
    how = "complete" if report.complete else "stopped before the end"
    return (
        f"{report.schedules} schedules of {adapter} in {report.seconds:.1f} s ({report.cpu_s:.1f} s of process time, "
        f"{report.per_cpu_second:.0f} a second and core), {how}; {report.unreached} events met nothing to act on; "
        f"{report.rejoined} runs ended early as their target again; "
        f"{len(report.coverage.counts)} cells covered"
    )


def _found(report: SearchReport, sorter: Sorter, against: str | None) -> str:
    old = [kind for kind in sorter.kinds if kind.defect is None and kind.is_old]
    known = {kind.defect.id for kind in sorter.kinds if kind.defect is not None and kind.seen}
    parts = [f"{plural(len(sorter.new), 'new kind')} of failure"]
    parts += [f"{plural(len(old), 'kept one')} still there"] if old else []
    parts += [f"{plural(len(known), 'known one')}"] if known else []
    parts += [f"{plural(len(sorter.gone), 'known one')} not there any more"] if sorter.gone else []
    parts += [f"{plural(sorter.in_both, 'failure')} that {against} has too"] if sorter.in_both else []
    parts += [f"{plural(sorter.unsorted, 'failure')} not sorted for lack of time"] if sorter.unsorted else []
    return f"{', '.join(parts)}; {report.failed} of the schedules failed"


def _next(report: SearchReport, sorter: Sorter) -> str:
    kept = [kind.number for kind in sorter.kinds if kind.number]
    if kept:
        number = next((kind.number for kind in sorter.new if kind.number), kept[0])
        return (
            f"scripted findings show {number}; fix it, or accept it: "
            f'scripted findings known {number} --upstream ID --because "..."'
        )
    if sorter.new:
        return "replay a schedule above: with a mutant or --no-keep nothing is kept"
    if not report.complete:
        return "nothing to fix; search longer with --minutes or --schedules, or elsewhere with --seed"
    return "nothing to fix; search further with --strategy random, or with generated targets"


def _verdict(report: SearchReport, sorter: Sorter) -> str:
    old = sum(kind.is_old and kind.defect is None for kind in sorter.kinds)
    kept = f"{plural(old, 'kept failure')} still there" if old else ""
    found = f"{plural(len(sorter.new), 'kind')} of failure" if sorter.new else ""
    if kept or found:
        return f"FAILED: {' and '.join(filter(None, (found, kept)))} in {plural(report.schedules, 'schedule')}"
    new = "new " if report.failed else ""
    rest = "" if report.complete else "; more were left, so go on with more --schedules or --minutes"
    return f"passed: no {new}failure in {plural(report.schedules, 'schedule')}{rest}"


def _check_version(adapter: str) -> None:
    from scripted.core.adapters import adapter_named

    of = adapter_named(adapter)
    if not isinstance(of, ChecksVersions):
        raise ScriptDefinitionError(f"the adapter {adapter} has no versions to check: its scheduler comes with it")
    tried, said = of.version_check()
    typer.echo(said)
    if not tried:
        raise typer.Exit(EXIT_FAILED)
