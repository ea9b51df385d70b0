"""A campaign: many runs over many targets in parallel processes, until all are done, one fails, or time is up.

Units of work are the same in every process, so a campaign finds the same with any number of jobs.
"""

from __future__ import annotations

import gc
import itertools
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from contextlib import ExitStack, contextmanager
from typing import Final

from lockstep.process_control import die_with_parent
from scripted.search.generated import generated_target
from scripted.search.ray_pool import ray_pool
from scripted.search.units import Coverage, Finding, SearchPlan, Unit, UnitResult, forget_targets, run_unit, strategy_of

# Without a reference, a context manager exits when it is collected.
_for_life: Final = ExitStack()
# Runs per unit of an endless strategy: about a fifth of a second of work.
_BATCH_RUNS: Final = 200
# One in this many generated targets runs without additions.
_ALONE_EVERY: Final = 3
_COLLECTED_EVERY_OBJECTS: Final = 20_000
# How many parts a complete strategy over one target is cut into, so that no process waits long.
_PARTS: Final = 4


class SearchReport:
    """The results of a campaign. ``findings`` has the first failure of each signature; ``failed`` counts runs."""

    def __init__(self) -> None:
        self.started = time.monotonic()
        self.schedules = 0
        self.failed = 0
        self.unreached = 0
        self.rejoined = 0
        self.cpu_s = 0.0
        self.seconds = 0.0
        self.coverage = Coverage()
        self.findings: dict[str, Finding] = {}
        self.by_target: dict[str, int] = {}
        self.complete = False

    @property
    def per_cpu_second(self) -> float:
        """Schedules per second and core."""
        return self.schedules / self.cpu_s if self.cpu_s else 0.0

    def add(self, result: UnitResult) -> None:
        self.schedules += result.schedules
        self.failed += result.failed
        self.unreached += result.unreached
        self.rejoined += result.rejoined
        self.cpu_s += result.cpu_s
        self.seconds = time.monotonic() - self.started
        self.coverage.merge(result.cells)
        self.by_target[result.target] = self.by_target.get(result.target, 0) + result.schedules
        for finding in result.findings:
            self.findings.setdefault(finding.failure.signature, finding)


class Campaign:
    """One search. Calls ``watch`` with every finished unit, and ``sort`` with every failure that the unit returns.

    Asks ``is_enough`` between units whether to stop.
    """

    def __init__(
        self,
        plan: SearchPlan,
        watch: Callable[[SearchReport], None] = lambda _: None,
        *,
        sort: Callable[[Finding], None] = lambda _: None,
        is_enough: Callable[[], bool] = lambda: False,
    ) -> None:
        self._plan = plan
        self._watch = watch
        self._sort = sort
        self._is_enough = is_enough
        self._report = SearchReport()

    def run(self) -> SearchReport:
        """Search until no unit is left. The mutant is on in this process too, because it sorts the failures."""
        forget_targets()
        units = self._units()
        with self._plan.switched_on():
            if self._plan.ray is not None:
                ended = self._run_on_ray(units, self._plan.ray)
            else:
                ended = self._run_here(units) if self._plan.jobs == 1 else self._run_in_processes(units)
        self._report.complete = ended and strategy_of(self._plan).complete
        self._report.seconds = time.monotonic() - self._report.started
        return self._report

    def _units(self) -> Iterator[Unit]:
        """Yield the targets without additions first, then small units of all targets."""
        plan = self._plan
        until = None if plan.seconds is None else time.time() + plan.seconds
        if not plan.targets:
            yield from self._generated(until)
            return
        targets = plan.targets[: plan.schedules]
        yield from (Unit(target) for target in targets)
        left = None if plan.schedules is None else plan.schedules - len(targets)
        if strategy_of(plan).complete:
            yield from self._parts(targets, left, until)
            return
        for batch in itertools.count():
            for target in targets:
                count = _BATCH_RUNS if left is None else min(_BATCH_RUNS, left)
                if not count:
                    return
                left = None if left is None else left - count
                yield Unit(target, batch * _BATCH_RUNS, 1, count, until)

    def _generated(self, until: float | None) -> Iterator[Unit]:
        """Yield one run of each target: a new target finds more than further runs of an old one.

        A third of the targets run without additions. Under a complete strategy all do, followed by all their other
        runs.
        """
        complete, left = strategy_of(self._plan).complete, self._plan.schedules
        for number in itertools.count(self._plan.generated_from):
            alone_first = complete or not number % _ALONE_EVERY
            yield Unit(generated_target(number), 0, 1, left if complete else 1, until, alone_first=alone_first)
            if left is not None and not complete:
                left -= 1
                if not left:
                    return

    def _parts(self, targets: tuple[str, ...], left: int | None, until: float | None) -> Iterator[Unit]:
        """Yield the parts of a complete strategy. A single process gets all remaining schedules, several get shares."""
        alone = self._plan.jobs == 1 and self._plan.ray is None
        parts = 1 if alone else _PARTS
        units = len(targets) * parts
        for number, (target, part) in enumerate(itertools.product(targets, range(parts))):
            if left is None:
                count = None
            elif alone:
                count = max(0, left - (self._report.schedules - len(targets)))
            else:
                count = left // units + (number < left % units)
            if count != 0:
                yield Unit(target, part, parts, count, until)

    def _run_here(self, units: Iterator[Unit]) -> bool:
        with _rare_collections():
            for unit in units:
                if self._is_over():
                    return False
                self._take(run_unit(unit, self._plan))
        return not self._is_over()

    def _run_in_processes(self, units: Iterator[Unit]) -> bool:
        # Spawned: forking a process with threads, such as a progress bar's, may hang.
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(self._plan.jobs, context, _begin, (self._plan, os.getpid())) as pool:
            try:
                return self._run_in(units, lambda unit: self._submitted(pool, unit), self._plan.jobs)
            finally:
                pool.shutdown(wait=True, cancel_futures=True)

    def _submitted(self, pool: ProcessPoolExecutor, unit: Unit) -> Future[UnitResult]:
        """Submit a unit; the first one starts the workers, which ignore Ctrl-C and end with the pool."""
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            return pool.submit(run_unit, unit, self._plan)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def _run_on_ray(self, units: Iterator[Unit], address: str) -> bool:
        with ray_pool(address, self._plan.jobs) as pool:
            return self._run_in(units, lambda unit: pool.submit(unit, self._plan), pool.cores)

    def _run_in(self, units: Iterator[Unit], submit: Callable[[Unit], Future[UnitResult]], workers: int) -> bool:
        """Keep every worker busy, with one more unit queued per worker."""
        pending: set[Future[UnitResult]] = set()
        for unit in units:
            pending.add(submit(unit))
            if len(pending) > 2 * workers:
                pending = self._take_done(pending)
            if self._is_over():
                break
        while pending and not self._is_over():
            pending = self._take_done(pending)
        return not self._is_over()

    def _take_done(self, pending: set[Future[UnitResult]]) -> set[Future[UnitResult]]:
        done, rest = wait(pending, return_when=FIRST_COMPLETED)
        for future in done:
            self._take(future.result())
        return rest

    def _take(self, result: UnitResult) -> None:
        self._report.add(result)
        for finding in result.findings:
            self._sort(finding)
        self._watch(self._report)

    def _is_over(self) -> bool:
        plan, report = self._plan, self._report
        return (
            (plan.schedules is not None and report.schedules >= plan.schedules)
            or (plan.seconds is not None and time.monotonic() - report.started >= plan.seconds)
            or (plan.cpu_seconds is not None and report.cpu_s >= plan.cpu_seconds)
            or (plan.stop_at_first and bool(report.findings))
            or self._is_enough()
            or any(finding.failure.hangs for finding in report.findings.values())
        )


@contextmanager
def _rare_collections() -> Iterator[None]:
    """Collect garbage less often: a run makes many objects and hardly any cycles, and the default costs 5 %."""
    before = gc.get_threshold()
    gc.set_threshold(_COLLECTED_EVERY_OBJECTS, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)


def _begin(plan: SearchPlan, parent: int) -> None:
    """Initialize a worker process, which ends with its parent: it has both ends of its own queues."""
    die_with_parent(parent, signal.SIGKILL)
    _for_life.enter_context(_rare_collections())
    _for_life.enter_context(plan.switched_on())
