"""How soon a subject's search finds each of its mutants, unaided: it knows neither the window nor the workload."""

from __future__ import annotations

import time

import msgspec

from scripted.explore.campaign import Campaign
from scripted.explore.units import Finding, SearchPlan
from scripted.subject.named import OWN, subject_named

__all__ = ["Found", "find_mutant"]


class Found(msgspec.Struct, frozen=True):
    """One search for one mutant; ``finding`` None means that the whole sweep passed with it."""

    mutant: str
    finding: Finding | None
    schedules: int
    cpu_s: float

    @property
    def result(self) -> str:
        """In a word or two: after which schedule and how many seconds of process time."""
        if self.finding is None:
            return f"not by a sweep ({self.schedules:,} schedules)"
        return f"schedule {self.schedules:,}, {self.cpu_s:.2f} s"


def find_mutant(name: str, of: str = OWN) -> Found:
    """Sweep the subject's workloads with a mutant on, from a cold start, up to the first failure.

    Raises ValueError for an unknown name.
    """
    subject = subject_named(of)
    with subject.switched_on(name):
        pass
    started = time.process_time()
    plan = SearchPlan(targets=tuple(subject.workloads), mutant=name, stop_at_first=True, subject=of)
    report = Campaign(plan).run()
    finding = next(iter(report.findings.values()), None)
    return Found(name, finding, report.schedules, time.process_time() - started)
