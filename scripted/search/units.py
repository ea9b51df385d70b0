"""Plans of a search and its units of work; a unit finds the same in every process."""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Final

import msgspec
from rich.table import Table
from rich.text import Text

from scripted.core.adapters import DEFAULT_ADAPTER, adapter_named
from scripted.core.defects import Defect, all_fixed
from scripted.core.mutant import switched_on
from scripted.core.placed_action import Placed
from scripted.core.run import WINDOW, Cell
from scripted.core.schedule import Schedule
from scripted.search.execution import Failure
from scripted.search.strategies import Drawn, Strategy, StrategyName, strategy_named
from scripted.search.targets import Target, schedule_of, target_named

_NO_BREAK = "\N{NO-BREAK SPACE}"
# With the names of events beside it, a table is at most 100 columns wide.
_STATES_WIDTH_COLUMNS = 70
# How many failures one unit returns: a few of each promise, with different events added.
_FAILURES_LIMIT: Final = 64
_FAILURES_OF_A_PROMISE: Final = 8


class Coverage:
    """Counts over many runs how often each cell was reached."""

    def __init__(self) -> None:
        self.counts: Counter[Cell] = Counter()

    def add(self, cells: Iterable[Cell]) -> None:
        self.counts.update(cells)

    def merge(self, other: Iterable[tuple[Cell, int]]) -> None:
        for cell, count in other:
            self.counts[cell] += count

    def windows(self, names: Iterable[str]) -> dict[str, int]:
        """Return the number of runs in which each of these windows was open."""
        return {name: self.counts[Cell(WINDOW, name, "")] for name in names}

    def table(self) -> Table:
        """Format a row for each kind of event: the states that it met, the positions of the pipeline, and the total."""
        legend = "'running 2 (7)': met a running request 7 times in all, with the pipeline at 2 different positions"
        table = Table(title="what each event met", title_justify="left", caption=legend, caption_justify="left")
        table.add_column("event", no_wrap=True)
        table.add_column("states", overflow="fold", max_width=_STATES_WIDTH_COLUMNS)
        for kind in sorted({cell.kind for cell in self.counts} - {WINDOW}):
            table.add_row(kind, Text(", ".join(self._states_of(kind))))
        return table

    def _states_of(self, kind: str) -> list[str]:
        """Return the states, simple ones first, each as one word of the table."""
        states = sorted({cell.state for cell in self.counts if cell.kind == kind}, key=lambda s: (s.count("+"), s))
        return [self._cell_text(kind, state).replace(" ", _NO_BREAK) for state in states]

    def _cell_text(self, kind: str, state: str) -> str:
        found = [count for cell, count in self.counts.items() if cell.kind == kind and cell.state == state]
        return f"{state} {len(found)} ({sum(found)})"


class SearchPlan(msgspec.Struct, frozen=True, kw_only=True):
    """A search of ``targets`` of ``adapter``, as ``target_named`` reads them.

    ``schedules``, ``seconds`` and ``cpu_seconds`` of process time bound it. Without targets it generates them
    endlessly, starting with number ``generated_from``. ``events`` is how many events the exhaustive strategy adds at a
    time. ``ray`` is the address of a Ray cluster, 'local' to start one, None for local processes. ``fixed`` are known
    defects with whose fixes it runs.
    """

    targets: tuple[str, ...] = ()
    generated_from: int = 0
    strategy: StrategyName = StrategyName.EXHAUSTIVE
    seed: int = 0
    events: int = 1
    schedules: int | None = None
    seconds: float | None = None
    cpu_seconds: float | None = None
    jobs: int = 1
    ray: str | None = None
    mutant: str | None = None
    stop_at_first: bool = False
    adapter: str = DEFAULT_ADAPTER
    fixed: tuple[Defect, ...] = ()

    @contextmanager
    def switched_on(self) -> Iterator[None]:
        """Switch the mutant and the fixes on in this process while the context is open."""
        # An adapter makes its scheduler importable, so a worker process loads it before it edits the scheduler.
        adapter = adapter_named(self.adapter)
        with all_fixed(self.fixed), switched_on(adapter, self.mutant):
            yield


class Finding(msgspec.Struct, frozen=True):
    """A failure and its origin: the target, the additions and the mutant."""

    target: str
    extra: tuple[Placed, ...]
    failure: Failure
    adapter: str = DEFAULT_ADAPTER
    mutant: str | None = None

    @property
    def schedule(self) -> Schedule | None:
        """Return the target with its additions as one schedule; None for a script."""
        base = schedule_of(self.target, self.adapter)
        return None if base is None else base.with_placed(self.extra)


class Unit(msgspec.Struct, frozen=True):
    """Every ``parts``-th run of a target from number ``first`` on, at most ``count`` runs and none after ``until``.

    ``until`` is in seconds of the wall clock, which all processes share. Without parts, the unit is the target without
    additions; with ``alone_first``, that is its first run.
    """

    target: str
    first: int = 0
    parts: int = 0
    count: int | None = None
    until: float | None = None
    alone_first: bool = False


class UnitResult(msgspec.Struct, frozen=True):
    """The results of one unit. ``rejoined`` counts runs that became their target again; ``cpu_s`` is process time.

    ``findings`` are some of its ``failed`` runs: a few of each promise, with different events added.
    """

    target: str
    schedules: int
    failed: int
    unreached: int
    rejoined: int
    cells: tuple[tuple[Cell, int], ...]
    findings: tuple[Finding, ...]
    cpu_s: float


def strategy_of(plan: SearchPlan) -> Strategy:
    return strategy_named(plan.strategy, plan.seed, plan.events)


# A prepared target serves all of a campaign's units in one process. It holds about a megabyte.
_PREPARED_LIMIT: Final = 512
_prepared: dict[tuple[str, str, str | None], Target] = {}


def forget_targets() -> None:
    """Forget the prepared targets: a target's file may have changed since the last campaign."""
    _prepared.clear()


def _prepared_target(name: str, plan: SearchPlan, *, is_copied: bool) -> Target:
    key = name, plan.adapter, plan.mutant
    if key not in _prepared:
        if len(_prepared) >= _PREPARED_LIMIT:
            del _prepared[next(iter(_prepared))]
        _prepared[key] = target_named(name, plan.adapter, is_copied=is_copied)
    return _prepared[key]


class _Failures:
    """Collects a unit's failures: a few of each promise, with different events added."""

    def __init__(self, unit: Unit, plan: SearchPlan) -> None:
        self._unit = unit
        self._plan = plan
        self._of_a_promise = Counter[str]()
        self.count = 0
        self.kept: dict[tuple[str, tuple[str, ...]], Finding] = {}

    def add(self, extra: tuple[Placed, ...], failure: Failure) -> None:
        self.count += 1
        key = failure.signature, tuple(sorted(placed.action.kind for placed in extra))
        of_it = self._of_a_promise[failure.signature]
        if key not in self.kept and of_it < _FAILURES_OF_A_PROMISE and len(self.kept) < _FAILURES_LIMIT:
            self._of_a_promise[failure.signature] += 1
            self.kept[key] = Finding(self._unit.target, extra, failure, self._plan.adapter, self._plan.mutant)


def run_unit(unit: Unit, plan: SearchPlan) -> UnitResult:
    """Run one unit of a campaign in this process, with the plan's mutant switched on."""
    started, counted = time.process_time(), Coverage()
    strategy = strategy_of(plan)
    # For a single run, a copy costs more than it saves.
    target = _prepared_target(unit.target, plan, is_copied=unit.count != 1)
    rejoined = target.rejoined
    failures = _Failures(unit, plan)
    schedules = unreached = 0
    for added in _additions(unit, strategy, target):
        if isinstance(added, Drawn):
            outcome = target.execute_drawn(added)
            extra = added.placed
        else:
            outcome, extra = target.execute(*added) if added else target.outcome, added
        schedules += 1
        unreached += len(outcome.unreached)
        counted.add(outcome.cells)
        if outcome.failure is not None:
            failures.add(extra, outcome.failure)
            if plan.stop_at_first or outcome.failure.hangs:
                break
        if unit.until is not None and time.time() >= unit.until:
            break
    return UnitResult(
        unit.target,
        schedules,
        failures.count,
        unreached,
        target.rejoined - rejoined,
        tuple(counted.counts.items()),
        tuple(failures.kept.values()),
        time.process_time() - started,
    )


def _additions(unit: Unit, strategy: Strategy, target: Target) -> Iterator[tuple[Placed, ...] | Drawn]:
    if not unit.parts:
        return iter([()])
    additions = strategy.additions(
        unit.target, target.base, target.steps, first=unit.first, is_distinct=target.is_distinct
    )
    if unit.alone_first:
        return itertools.islice(itertools.chain([()], additions), unit.count)
    return itertools.islice(additions, 0, None if unit.count is None else unit.count * unit.parts, unit.parts)
