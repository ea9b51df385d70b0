"""A campaign on a local Ray finds what it finds in one process; without Ray the error says what to install."""

from __future__ import annotations

import sys

import pytest

from scripted.core.refusals import ScriptDefinitionError
from scripted.search.campaign import Campaign, SearchReport
from scripted.search.strategies import StrategyName
from scripted.search.units import SearchPlan

TARGETS = ("chunked-alone", "warm-prefix")


def found(report: SearchReport) -> tuple[object, ...]:
    """What does not depend on which worker was done first."""
    return report.schedules, report.complete, report.by_target, set(report.findings), dict(report.coverage.counts)


def test_a_campaign_on_ray_is_the_campaign() -> None:
    """D10: the same schedules, coverage and findings, with a mutant switched on in every worker."""
    pytest.importorskip("ray", reason="Ray is an optional extra")
    plans = [
        SearchPlan(targets=TARGETS, mutant="flush-ignores-in-flight", jobs=2, ray=ray, strategy=StrategyName.EXHAUSTIVE)
        for ray in (None, "local")
    ]
    here, there = [Campaign(plan).run() for plan in plans]
    assert found(there) == found(here)
    assert there.findings


def test_without_ray_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(
        ScriptDefinitionError, match=r"needs Ray, which is not installed; install lockstep-engine\[ray\]"
    ):
        Campaign(SearchPlan(targets=TARGETS, ray="local")).run()


@pytest.mark.parametrize("address", ["127.0.0.1:1", "nonsense"])
def test_an_address_where_no_cluster_answers_is_refused_at_once(address: str) -> None:
    pytest.importorskip("ray", reason="Ray is an optional extra")
    with pytest.raises(ScriptDefinitionError, match=f"--ray must be .* a Ray cluster that answers, got '{address}'"):
        Campaign(SearchPlan(targets=TARGETS, ray=address)).run()
