"""A campaign on a local Ray finds what it finds in one process.

Goal: the same schedules, coverage and findings, with a mutant switched on in every worker. Method: one campaign in
processes and one on Ray. Origin: D10. Mutant: flush-ignores-in-flight, which both must find.
"""

from __future__ import annotations

from ci.register import register_cpu_ci
from scripted.search.campaign import Campaign, SearchReport
from scripted.search.strategies import StrategyName
from scripted.search.units import SearchPlan

register_cpu_ci(est_time=20, suite="ray-cpu")

TARGETS = ("chunked-alone", "warm-prefix")


def found(report: SearchReport) -> tuple[object, ...]:
    """Return the parts of a report that do not depend on the order of the workers."""
    return report.schedules, report.complete, report.by_target, set(report.findings), dict(report.coverage.counts)


def test_a_campaign_on_ray_is_the_campaign() -> None:
    """D10: the same schedules, coverage and findings, with a mutant switched on in every worker."""
    plans = [
        SearchPlan(targets=TARGETS, mutant="flush-ignores-in-flight", jobs=2, ray=ray, strategy=StrategyName.EXHAUSTIVE)
        for ray in (None, "local")
    ]
    here, there = [Campaign(plan).run() for plan in plans]
    assert found(there) == found(here)
    assert there.findings
