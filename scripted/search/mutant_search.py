"""Measures how soon an adapter's search finds each of its mutants, without knowing the window or the workload.

It sweeps the workloads, or searches generated targets with each strategy, seed by seed. The latter's rows go into a
file of JSON lines, so that a measurement can be interrupted and continued.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final, Protocol, runtime_checkable

import msgspec

from lockstep.documents import DocumentError, document
from scripted.core.adapters import DEFAULT_ADAPTER, adapter_named
from scripted.core.edits import EditDoesNotFit
from scripted.core.mutant import switched_on
from scripted.core.refusals import HarnessError
from scripted.search.campaign import Campaign
from scripted.search.execution import execute, execute_recorded
from scripted.search.generated import first_of, generated_schedule, generated_target
from scripted.search.strategies import StrategyName
from scripted.search.units import Finding, SearchPlan

# The strategy without additions, and the sweep of the hand-written workloads, which has no seed.
ALONE: Final = "alone"
CORPUS: Final = "workloads"
# Ends the result of a mutant that no workload shows by itself.
ADDED: Final = "with one added event"
# A row keeps the beginning of a failure's text.
_MOST_CHARS: Final = 300


class Found(msgspec.Struct, frozen=True):
    """The result of one search for one mutant; without a ``finding`` the whole sweep passed.

    ``misfit`` says why nothing was searched: the installed scheduler lacks the code that the mutant edits.
    """

    mutant: str
    finding: Finding | None
    schedules: int
    cpu_s: float
    misfit: str = ""

    @property
    def is_missed(self) -> bool:
        """Return whether the search ran without finding the mutant."""
        return self.finding is None and not self.misfit

    def __str__(self) -> str:
        if self.misfit:
            return f"{self.mutant}: SKIPPED: {self.misfit}"
        if self.finding is None:
            return f"{self.mutant}: NOT FOUND in {self.schedules} schedules, {self.cpu_s:.2f} s"
        extra = "; ".join(map(str, self.finding.extra)) or "nothing"
        return (
            f"{self.mutant}: schedule {self.schedules}, {self.cpu_s:.2f} s of process time: {self.finding.target} with "
            f"{extra} added: {self.finding.failure}"
        )

    @property
    def result(self) -> str:
        """Format the result: the schedule that found it, the seconds of process time, and an added event."""
        if self.misfit:
            return "skipped: it does not fit the installed version"
        if self.finding is None:
            return f"not by a sweep ({self.schedules:,} schedules)"
        added = f" {ADDED}" if self.finding.extra else ""
        return f"schedule {self.schedules:,}, {self.cpu_s:.2f} s{added}"


@runtime_checkable
class HasRoles(Protocol):
    """An adapter with mutants that need the targets of another role of its scheduler."""

    def adapter_of(self, mutant: str) -> str:
        """Return the adapter whose targets are searched for this mutant. Raises ValueError for an unknown mutant."""
        ...


@runtime_checkable
class HasContracts(Protocol):
    """An adapter with invented mutants, each of which breaks a promise of its scheduler."""

    @property
    def contract_names(self) -> tuple[str, ...]: ...


@runtime_checkable
class DrawsMutants(Protocol):
    """An adapter that draws mutants at random."""

    def fresh_mutants(self, count: int, seed: int) -> Mapping[str, str]:
        """Return single edits of the scheduler for a seed: the change by name."""
        ...


@runtime_checkable
class DescribesMutants(Protocol):
    """An adapter that adds columns about its mutants to tables."""

    def about(self, mutant: str) -> Mapping[str, str]:
        """Return further columns for the mutant's line, by heading."""
        ...


@runtime_checkable
class WritesGallery(Protocol):
    """An adapter that keeps a page about its mutants."""

    def write_mutants(self, page: Path, found: Sequence[Found]) -> None:
        """Write into a Markdown page how soon the search found each mutant."""
        ...


def adapter_of(mutant: str, of: str) -> str:
    """Return the adapter whose targets a search for this mutant of ``of`` uses: the same, or one of another role."""
    adapter = adapter_named(of)
    return adapter.adapter_of(mutant) if isinstance(adapter, HasRoles) else of


def find_mutant(name: str, of: str = DEFAULT_ADAPTER) -> Found:
    """Sweep the adapter's workloads with a mutant on, from a cold start to the first failure.

    Raises ValueError for an unknown name.
    """
    of = adapter_of(name, of)
    if misfit := _misfit(name, of):
        return Found(name, None, 0, 0.0, misfit)
    started = time.process_time()
    plan = SearchPlan(targets=tuple(adapter_named(of).workloads), mutant=name, stop_at_first=True, adapter=of)
    report = Campaign(plan).run()
    finding = next(iter(report.findings.values()), None)
    return Found(name, finding, report.schedules, time.process_time() - started)


def _misfit(mutant: str, of: str) -> str:
    """Return why the installed scheduler does not fit a mutant; empty if it fits. Raises ValueError."""
    try:
        with switched_on(adapter_named(of), mutant):
            return ""
    except EditDoesNotFit as exc:
        return str(exc)


class TimedSearch(msgspec.Struct, frozen=True, omit_defaults=True):
    """One search for one mutant with one seed, of at most ``bound`` schedules; ``target`` showed the failure.

    ``cpu_s`` is process time in seconds, at most ``cpu_bound_s``. ``misfit`` says why nothing was searched;
    ``equivalent`` why nothing can be found, as judged by a reader of the mutant. A search that ended with a
    HarnessError found nothing.
    """

    mutant: str
    strategy: str
    seed: int
    bound: int
    schedules: int = 0
    cpu_s: float = 0.0
    target: str = ""
    failure: str = ""
    misfit: str = ""
    cpu_bound_s: float | None = None
    equivalent: str = ""

    @property
    def is_found(self) -> bool:
        return bool(self.target)

    def __str__(self) -> str:
        what = f"{self.mutant}, {self.strategy}, seed {self.seed}"
        if self.misfit:
            return f"{what}: SKIPPED: {self.misfit}"
        if not self.is_found:
            return f"{what}: NOT FOUND in {self.schedules} schedules, {self.cpu_s:.2f} s"
        return f"{what}: schedule {self.schedules}, {self.cpu_s:.2f} s: {self.target}: {self.failure}"

    def stands_for(self, other: TimedSearch) -> bool:
        """Return whether a search with the other's bounds is superfluous: this one succeeded, or would end no later."""
        if (self.mutant, self.strategy, self.seed) != (other.mutant, other.strategy, other.seed):
            return False
        if self.misfit or self.equivalent or (self.is_found and self.schedules <= other.bound):
            return True
        bound_s = other.cpu_bound_s
        had_time = self.cpu_bound_s is None or (bound_s is not None and bound_s <= self.cpu_bound_s)
        return self.bound >= other.bound and had_time


def measured_in(file: Path) -> list[TimedSearch]:
    """Return the rows of a file, except a truncated line; none if there is no file."""
    rows = []
    for line in file.read_bytes().splitlines() if file.exists() else ():
        try:
            rows.append(document(line, TimedSearch))
        except DocumentError:
            continue
    return rows


def measure(
    file: Path,
    mutants: Sequence[str],
    strategies: Sequence[str],
    seeds: Iterable[int],
    *,
    schedules: int,
    cpu_seconds: float | None = None,
    of: str = DEFAULT_ADAPTER,
    watch: Callable[[TimedSearch], None] = lambda _: None,
) -> list[TimedSearch]:
    """Search for each mutant with each strategy and seed, seeds outermost; skip searches that the file already has."""
    rows = measured_in(file)
    for seed, strategy, mutant in itertools.product(seeds, strategies, mutants):
        wanted = TimedSearch(mutant, strategy, 0 if strategy == CORPUS else seed, schedules, cpu_bound_s=cpu_seconds)
        if not any(row.stands_for(wanted) for row in rows):
            rows.append(_search(wanted, adapter_of(mutant, of)))
            with file.open("ab") as lines:
                lines.write(msgspec.json.encode(rows[-1]) + b"\n")
            watch(rows[-1])
    return rows


def _search(wanted: TimedSearch, of: str) -> TimedSearch:
    """Return the row with the search's result."""
    if misfit := _misfit(wanted.mutant, of):
        return msgspec.structs.replace(wanted, misfit=misfit)
    started = time.process_time()
    plan = SearchPlan(
        generated_from=first_of(wanted.seed),
        seed=wanted.seed,
        schedules=wanted.bound,
        cpu_seconds=wanted.cpu_bound_s,
        mutant=wanted.mutant,
        stop_at_first=True,
        adapter=of,
    )
    done, target, failure = 0, "", ""
    try:
        if wanted.strategy == ALONE:
            done, target, failure = _alone(plan)
        elif wanted.strategy == CORPUS:
            found = find_mutant(wanted.mutant, of)
            done, finding = found.schedules, found.finding
            target, failure = (finding.target, str(finding.failure)) if finding else ("", "")
        else:
            done, target, failure = _campaign(msgspec.structs.replace(plan, strategy=StrategyName(wanted.strategy)))
    except HarnessError as exc:
        failure = f"HarnessError: {exc}"
    except Exception as exc:  # noqa: BLE001 - outside of any step: some mutants keep the scheduler from being made
        return msgspec.structs.replace(wanted, misfit=f"there is no run with it: {type(exc).__name__}: {exc}")
    spent = round(time.process_time() - started, 3)
    said = failure if len(failure) <= _MOST_CHARS else f"{failure[:_MOST_CHARS]}..."
    return msgspec.structs.replace(wanted, schedules=done, cpu_s=spent, target=target, failure=said)


def _campaign(plan: SearchPlan) -> tuple[int, str, str]:
    """Search up to the first failure that needs the mutant."""
    done = 0
    while True:
        report = Campaign(plan).run()
        done += report.schedules
        finding = next(iter(report.findings.values()), None)
        if finding is None:
            return done, "", ""
        schedule = finding.schedule
        healthy = None if schedule is None else execute(schedule).failure
        if healthy is None or healthy.signature != finding.failure.signature:
            return done, finding.target, str(finding.failure)
        assert plan.schedules is not None
        left = plan.schedules - report.schedules
        time_left = None if plan.cpu_seconds is None else plan.cpu_seconds - report.cpu_s
        if left <= 0 or (time_left is not None and time_left <= 0):
            return done, "", ""
        number = int(finding.target.rpartition(":")[2])
        plan = msgspec.structs.replace(plan, generated_from=number + 1, schedules=left, cpu_seconds=time_left)


def _alone(plan: SearchPlan) -> tuple[int, str, str]:
    assert plan.schedules is not None
    until = None if plan.cpu_seconds is None else time.process_time() + plan.cpu_seconds
    with switched_on(adapter_named(plan.adapter), plan.mutant):
        for count in range(plan.schedules):
            if until is not None and time.process_time() >= until:
                return count, "", ""
            number = plan.generated_from + count
            failure = execute_recorded(generated_schedule(number, plan.adapter)).failure
            if failure is not None:
                return count + 1, generated_target(number), str(failure)
    return plan.schedules, "", ""


def table_of(
    rows: Sequence[TimedSearch],
    mutants: Iterable[str],
    said: Callable[[str], str] | None = None,
    about: Callable[[str], Mapping[str, str]] | None = None,
) -> str:
    """Format the table as Markdown: the sums, then a line for each mutant with its words from ``said``.

    A line starts with the columns from ``about``, by heading. Seeds that were not searched do not count, nor do mutants
    judged to be equivalent, which come last.
    """
    judged = {row.mutant: row.equivalent for row in rows if row.equivalent}
    every = tuple(mutants)
    names = tuple(name for name in every if name not in judged)
    rows = [row for row in rows if row.mutant in names and not row.misfit]
    order = {strategy: number for number, strategy in enumerate((CORPUS, ALONE, *StrategyName))}
    strategies = sorted({row.strategy for row in rows}, key=lambda name: order.get(name, len(order)))
    cells = {(name, strategy): _last(rows, name, strategy) for name in names for strategy in strategies}
    heads = [f"{'hand-written workloads' if strategy == CORPUS else strategy}" for strategy in strategies]
    sums = [_sum([cells[name, strategy] for name in names]) for strategy in strategies]
    first = {name: about(name) for name in names} if about is not None else {}
    own = list(next(iter(first.values()), {}))
    lines = [f"| bug | {' | '.join((*own, *heads))} |", "| --- " * (len(own) + len(heads) + 1) + "|"]
    lines.append(f"| **all {len(names)}** | {' | '.join((*[''] * len(own), *sums))} |")
    for name in names:
        row = [*first.get(name, {}).values(), *[_cell(cells[name, strategy]) for strategy in strategies]]
        lines.append(f"| {_named(name, said)} | {' | '.join(row)} |")
    lines += [f"| {_named(name, said)} | equivalent: {judged[name]} |" for name in every if name in judged]
    return "\n".join(lines) + "\n"


def _named(name: str, said: Callable[[str], str] | None) -> str:
    return f"`{name}`" if said is None else f"`{name}`: `{said(name)}`".replace("|", "\\|")


def _last(rows: Sequence[TimedSearch], mutant: str, strategy: str) -> list[TimedSearch]:
    of_seed: Mapping[int, TimedSearch] = {
        row.seed: row for row in rows if (row.mutant, row.strategy) == (mutant, strategy)
    }
    return list(of_seed.values())


def _cell(rows: Sequence[TimedSearch]) -> str:
    """Return in how many searches a mutant was found, and the medians of the schedules and seconds that it took."""
    if not rows:
        return "not searched"
    found = [row for row in rows if row.is_found]
    if not found and any(row.failure for row in rows):
        return "an error of the harness"
    if not found:
        return f"0 of {len(rows)} in {max(row.schedules for row in rows):,}"
    median = statistics.median(row.schedules for row in found)
    seconds = statistics.median(row.cpu_s for row in found)
    return f"{len(found)} of {len(rows)}, {median:,.0f}, {seconds:.2f} s"


def _sum(cells: Sequence[Sequence[TimedSearch]]) -> str:
    """Format the mutants found by any seed, the searches that found theirs, and the median of medians."""
    searched = [rows for rows in cells if rows]
    found = [[row for row in rows if row.is_found] for rows in searched]
    medians = [statistics.median(row.schedules for row in rows) for rows in found if rows]
    if not medians:
        return f"**0 of {len(searched)}**"
    share, total = 100 * len(medians) // len(searched), sum(map(len, searched))
    of_all = f", {sum(map(len, found))} of {total} searches" if total > len(searched) else ""
    return f"**{len(medians)} of {len(searched)} ({share} %){of_all}, median {statistics.median(medians):,.0f}**"
