"""How soon an adapter's search finds each of its mutants, unaided: it knows neither the window nor the workload."""

from __future__ import annotations

import time

import msgspec

from scripted.core.mutant import MutantDoesNotFit
from scripted.core.named import OWN, adapter_named
from scripted.search.campaign import Campaign
from scripted.search.units import Finding, SearchPlan


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


def adapter_of(mutant: str, of: str) -> str:
    """The adapter in whose targets a mutant of ``of`` is searched for: its own, or one of another role."""
    found = getattr(adapter_named(of), "adapter_of", None)
    return of if found is None else str(found(mutant))


def find_mutant(name: str, of: str = OWN) -> Found:
    """Sweep the adapter's workloads with a mutant on, from a cold start, up to the first failure.

    Raises ValueError for an unknown name.
    """
    of = adapter_of(name, of)
    adapter = adapter_named(of)
    try:
        with adapter.switched_on(name):
            pass
    except MutantDoesNotFit as exc:
        return Found(name, None, 0, 0.0, str(exc))
    started = time.process_time()
    plan = SearchPlan(targets=tuple(adapter.workloads), mutant=name, stop_at_first=True, adapter=of)
    report = Campaign(plan).run()
    finding = next(iter(report.findings.values()), None)
    return Found(name, finding, report.schedules, time.process_time() - started)
