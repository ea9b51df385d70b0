"""Every strategy of the search passes on the healthy engine: what it finds there would be a false alarm."""

from __future__ import annotations

import itertools

import pytest

from scripted.adapters.lockstep.schedules import WORKLOADS
from scripted.core.schedule import Schedule
from scripted.search.campaign import Campaign
from scripted.search.execution import Prefixes, execute
from scripted.search.strategies import Pairs, StrategyName
from scripted.search.units import SearchPlan

# Small, and each with another part of the planner at its limit.
TIGHT = ("full-pages", "full-pages-deep", "priorities", "mixed-turns", "one-row", "deferred-flush")
PAIRS_EVERY = 199


@pytest.mark.parametrize("strategy", [one for one in StrategyName if one is not StrategyName.EXHAUSTIVE])
def test_a_strategy_finds_nothing_on_the_engine(strategy: StrategyName) -> None:
    """B15."""
    report = Campaign(SearchPlan(targets=TIGHT, strategy=strategy, schedules=1500)).run()
    assert report.schedules >= 1500
    assert not report.findings


@pytest.mark.parametrize("name", TIGHT)
def test_pairs_find_nothing_on_the_engine(name: str) -> None:
    """Two events, sampled over the whole workload."""
    prefixes = Prefixes(WORKLOADS[name])
    additions = Pairs().additions(name, prefixes.base, prefixes.steps)
    for extra in itertools.islice(additions, 7, None, PAIRS_EVERY):
        assert prefixes.execute(*extra).failure is None, extra


FALSE_ALARM = (
    "pp_size=2 page_size=4 max_total_tokens=44; 1 start a prompt=1 new=4; 1 start b prompt=11 new=3 seed=1; "
    "1 start extra prompt=12; 1 start c prompt=8 new=3 seed=2"
)


def test_a_decode_in_a_step_that_sends_a_request_back_is_a_turn() -> None:
    """It was not noted once, so that the next turn looked unfair."""
    assert execute(Schedule.parse(FALSE_ALARM)).failure is None
