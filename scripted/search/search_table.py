"""How good the search is: of each mutant how soon each strategy finds it from generated targets alone, seed by seed.

Every row that is measured is kept in a file of JSON lines, so that the measurement can be stopped and gone on with.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final

import msgspec

from scripted.core.mutant import MutantDoesNotFit
from scripted.core.named import OWN, adapter_named
from scripted.core.refusals import HarnessError
from scripted.search.campaign import Campaign
from scripted.search.execution import execute, execute_recorded
from scripted.search.generated import first_of, generated_schedule, generated_target
from scripted.search.mutant_search import adapter_of, find_mutant
from scripted.search.strategies import StrategyName
from scripted.search.units import SearchPlan

# Nothing is added to the targets; and the sweep of the workloads that are written by hand, which has no seed.
ALONE: Final = "alone"
CORPUS: Final = "workloads"
# Of a failure a row keeps the beginning.
_MOST_CHARS: Final = 300


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

    def stands_for(self, mutant: str, strategy: str, seed: int, bound: int, cpu_bound_s: float | None) -> bool:
        """Whether a search with these bounds need not be run again: it found it, or would end no later."""
        if (self.mutant, self.strategy, self.seed) != (mutant, strategy, seed):
            return False
        if self.misfit or self.equivalent or (self.is_found and self.schedules <= bound):
            return True
        had_time = self.cpu_bound_s is None or (cpu_bound_s is not None and cpu_bound_s <= self.cpu_bound_s)
        return self.bound >= bound and had_time


def measured_in(file: Path) -> list[TimedSearch]:
    """The rows of a file; none where there is no file. A line that was cut off by a kill is left out."""
    rows = []
    for line in file.read_bytes().splitlines() if file.exists() else ():
        try:
            rows.append(msgspec.json.decode(line, type=TimedSearch))
        except msgspec.DecodeError:
            continue
    return rows


def measure(
    file: Path,
    mutants: Iterable[str],
    strategies: Iterable[str],
    seeds: Iterable[int],
    *,
    schedules: int,
    cpu_seconds: float | None = None,
    of: str = OWN,
    watch: Callable[[TimedSearch], None] = lambda _: None,
) -> list[TimedSearch]:
    """Search for each mutant with each strategy and seed, seeds outside; what the file has is not searched again."""
    rows = measured_in(file)
    mutants, strategies = tuple(mutants), tuple(strategies)
    for seed in seeds:
        for strategy in strategies:
            for mutant in mutants:
                own = 0 if strategy == CORPUS else seed
                if any(row.stands_for(mutant, strategy, own, schedules, cpu_seconds) for row in rows):
                    continue
                rows.append(_search(mutant, strategy, own, schedules, cpu_seconds, of))
                with file.open("ab") as lines:
                    lines.write(msgspec.json.encode(rows[-1]) + b"\n")
                watch(rows[-1])
    return rows


def _search(mutant: str, strategy: str, seed: int, bound: int, cpu_bound_s: float | None, of: str) -> TimedSearch:
    row = TimedSearch(mutant, strategy, seed, bound, cpu_bound_s=cpu_bound_s)
    of = adapter_of(mutant, of)
    try:
        with adapter_named(of).switched_on(mutant):
            pass
    except MutantDoesNotFit as exc:
        return msgspec.structs.replace(row, misfit=str(exc))
    started = time.process_time()
    plan = SearchPlan(
        generated_from=first_of(seed),
        seed=seed,
        schedules=bound,
        cpu_seconds=cpu_bound_s,
        mutant=mutant,
        stop_at_first=True,
        adapter=of,
    )
    done, target, failure = 0, "", ""
    try:
        if strategy == ALONE:
            done, target, failure = _alone(plan)
        elif strategy == CORPUS:
            found = find_mutant(mutant, of)
            done, finding = found.schedules, found.finding
            target, failure = (finding.target, str(finding.failure)) if finding else ("", "")
        else:
            done, target, failure = _campaign(msgspec.structs.replace(plan, strategy=StrategyName(strategy)))
    except HarnessError as exc:
        failure = f"HarnessError: {exc}"
    except Exception as exc:  # noqa: BLE001 - outside of every step: with some mutants no scheduler can be made
        return msgspec.structs.replace(row, misfit=f"there is no run with it: {type(exc).__name__}: {exc}")
    spent = round(time.process_time() - started, 3)
    said = failure if len(failure) <= _MOST_CHARS else f"{failure[:_MOST_CHARS]}..."
    return msgspec.structs.replace(row, schedules=done, cpu_s=spent, target=target, failure=said)


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
    with adapter_named(plan.adapter).switched_on(plan.mutant):
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
