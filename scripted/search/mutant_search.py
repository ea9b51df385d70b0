"""How soon an adapter's search finds each of its mutants, unaided: it knows neither the window nor the workload.

In a sweep of the workloads, or from generated targets alone with each strategy, seed by seed. Of the latter every row
is kept in a file of JSON lines, so that the measurement can be stopped and gone on with.
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
from scripted.core.mutant import MutantDoesNotFit, switched_on
from scripted.core.refusals import HarnessError
from scripted.search.campaign import Campaign
from scripted.search.execution import execute, execute_recorded
from scripted.search.generated import first_of, generated_schedule, generated_target
from scripted.search.strategies import StrategyName
from scripted.search.units import Finding, SearchPlan

# Nothing is added to the targets; and the sweep of the workloads that are written by hand, which has no seed.
ALONE: Final = "alone"
CORPUS: Final = "workloads"
# Of a failure a row keeps the beginning.
_MOST_CHARS: Final = 300


class Found(msgspec.Struct, frozen=True):
    """One search for one mutant; ``finding`` None means that the whole sweep passed with it.

    ``misfit`` says why nothing was searched, where the scheduler that is installed has no place for the mutant.
    """

    mutant: str
    finding: Finding | None
    schedules: int
    cpu_s: float
    misfit: str = ""

    @property
    def is_missed(self) -> bool:
        """The search ran and did not find it."""
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
        """In a word or two: after which schedule and how many seconds of process time."""
        if self.misfit:
            return "skipped: it does not fit the installed version"
        if self.finding is None:
            return f"not by a sweep ({self.schedules:,} schedules)"
        return f"schedule {self.schedules:,}, {self.cpu_s:.2f} s"


@runtime_checkable
class HasRoles(Protocol):
    """An adapter some of whose mutants are searched for in the targets of another role of its scheduler."""

    def adapter_of(self, mutant: str) -> str:
        """The adapter in whose targets this mutant is searched for. Raises ValueError for an unknown one."""
        ...


@runtime_checkable
class HasContracts(Protocol):
    """An adapter with mutants that no engine had: each breaks a promise of this scheduler."""

    @property
    def contract_names(self) -> tuple[str, ...]: ...


@runtime_checkable
class DrawsMutants(Protocol):
    """An adapter that draws mutants at random."""

    def fresh_mutants(self, count: int, seed: int) -> Mapping[str, str]:
        """Single edits of the scheduler, the same for the same seed; what each changes, by name."""
        ...


@runtime_checkable
class DescribesMutants(Protocol):
    """An adapter that says more of its mutants in tables."""

    def about(self, mutant: str) -> Mapping[str, str]:
        """Further columns of the mutant's line, by their heads."""
        ...


@runtime_checkable
class WritesGallery(Protocol):
    """An adapter that keeps a page of its mutants."""

    def write_mutants(self, page: Path, found: Sequence[Found]) -> None:
        """Write into a Markdown page how soon the search found each mutant."""
        ...


def adapter_of(mutant: str, of: str) -> str:
    """The adapter in whose targets a mutant of ``of`` is searched for: its own, or one of another role."""
    adapter = adapter_named(of)
    return adapter.adapter_of(mutant) if isinstance(adapter, HasRoles) else of


def find_mutant(name: str, of: str = DEFAULT_ADAPTER) -> Found:
    """Sweep the adapter's workloads with a mutant on, from a cold start, up to the first failure.

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
    """Why the scheduler that is installed has no place for a mutant; empty where it has. Raises ValueError."""
    try:
        with switched_on(adapter_named(of), mutant):
            return ""
    except MutantDoesNotFit as exc:
        return str(exc)


class TimedSearch(msgspec.Struct, frozen=True, omit_defaults=True):
    """One search for one mutant with one seed, of at most ``bound`` schedules; ``target`` is what showed it.

    ``cpu_s`` are seconds of process time, ``cpu_bound_s`` how many there may be. ``misfit`` says why nothing was
    searched; ``equivalent`` why nothing can be found, as a reader of the mutant judged. A search that ended with a
    HarnessError has found nothing.
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
        """Whether a search with the other's bounds need not be run again: it found it, or would end no later."""
        if (self.mutant, self.strategy, self.seed) != (other.mutant, other.strategy, other.seed):
            return False
        if self.misfit or self.equivalent or (self.is_found and self.schedules <= other.bound):
            return True
        bound_s = other.cpu_bound_s
        had_time = self.cpu_bound_s is None or (bound_s is not None and bound_s <= self.cpu_bound_s)
        return self.bound >= other.bound and had_time


def measured_in(file: Path) -> list[TimedSearch]:
    """The rows of a file; none where there is no file. A line that was cut off by a kill is left out."""
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
    """Search for each mutant with each strategy and seed, seeds outside; what the file has is not searched again."""
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
    """The row with what came of it."""
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
    except Exception as exc:  # noqa: BLE001 - outside of every step: with some mutants no scheduler can be made
        return msgspec.structs.replace(wanted, misfit=f"there is no run with it: {type(exc).__name__}: {exc}")
    spent = round(time.process_time() - started, 3)
    said = failure if len(failure) <= _MOST_CHARS else f"{failure[:_MOST_CHARS]}..."
    return msgspec.structs.replace(wanted, schedules=done, cpu_s=spent, target=target, failure=said)


def _campaign(plan: SearchPlan) -> tuple[int, str, str]:
    """Up to the first failure that the scheduler does not have without the mutant too."""
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
    """The table as Markdown: under the sums a line for each mutant, with what is ``said`` of it.

    What a mutant is ``about`` are the first columns of its line, by their heads.
    A seed that was not searched does not count, nor does a mutant that was judged to be equivalent; those come last.
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
    found = [row for row in rows if row.is_found]
    if not rows:
        return "not searched"
    if not found and any(row.failure for row in rows):
        return "an error of the harness"
    if not found:
        return f"0 of {len(rows)} in {max(row.schedules for row in rows):,}"
    median = statistics.median(row.schedules for row in found)
    seconds = statistics.median(row.cpu_s for row in found)
    return f"{len(found)} of {len(rows)}, {median:,.0f}, {seconds:.2f} s"


def _sum(cells: Sequence[Sequence[TimedSearch]]) -> str:
    """Mutants that any seed found, of those that were searched; searches that found theirs; the median of medians."""
    searched = [rows for rows in cells if rows]
    found = [[row for row in rows if row.is_found] for rows in searched]
    medians = [statistics.median(row.schedules for row in rows) for rows in found if rows]
    if not medians:
        return f"**0 of {len(searched)}**"
    share, total = 100 * len(medians) // len(searched), sum(map(len, searched))
    of_all = f", {sum(map(len, found))} of {total} searches" if total > len(searched) else ""
    return f"**{len(medians)} of {len(searched)} ({share} %){of_all}, median {statistics.median(medians):,.0f}**"
