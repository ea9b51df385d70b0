"""Every strategy of the search passes on the healthy engine: what it finds there would be a false alarm."""

from __future__ import annotations

import itertools
from collections import Counter

import msgspec
import pytest
from base_workloads import WORKLOADS

from scripted.core.common_actions import ReleaseResults
from scripted.core.placed import Placed
from scripted.core.schedule import Schedule
from scripted.search.campaign import Campaign
from scripted.search.execution import Prefixes, execute
from scripted.search.extras import extras_of
from scripted.search.strategies import Exhaustive, Feedback, RandomEvents, StrategyName, Surw, Swarm
from scripted.search.units import SearchPlan

# Small, and each with another part of the planner at its limit.
TIGHT = ("full-pages", "full-pages-deep", "priorities", "mixed-turns", "one-row", "deferred-flush")
PAIRS_EVERY = 599


@pytest.mark.parametrize("strategy", [one for one in StrategyName if one is not StrategyName.EXHAUSTIVE])
def test_a_strategy_finds_nothing_on_the_engine(strategy: StrategyName) -> None:
    """B15."""
    report = Campaign(SearchPlan(targets=TIGHT, strategy=strategy, schedules=150)).run()
    assert report.schedules >= 150
    assert not report.findings


@pytest.mark.parametrize("name", TIGHT)
def test_pairs_find_nothing_on_the_engine(name: str) -> None:
    """Two events, sampled over the whole workload."""
    prefixes = Prefixes(WORKLOADS[name])
    additions = Exhaustive(2).additions(name, prefixes.base, prefixes.steps)
    for extra in itertools.islice(additions, 7, None, PAIRS_EVERY):
        assert prefixes.execute(*extra).failure is None, extra


FALSE_ALARM = (
    "pp_size=2 page_size=4 max_total_tokens=44; 1 start a prompt=1 new=4; 1 start b prompt=11 new=3 seed=1; "
    "1 start extra prompt=12; 1 start c prompt=8 new=3 seed=2"
)


def test_a_decode_in_a_step_that_sends_a_request_back_is_a_turn() -> None:
    """It was not noted once, so that the next turn looked unfair."""
    assert execute(Schedule.parse(FALSE_ALARM)).failure is None


def test_surw_makes_every_order_of_its_events_equally_likely() -> None:
    """Two events of one actor among six steps: 15 orders, each about as often as the others."""
    base, seen = WORKLOADS["twins"], Counter[tuple[int, ...]]()
    for extra in itertools.islice(Surw(3).additions("twins", base, 6), 30_000):
        steps = tuple(placed.step for placed in extra[1:] if not isinstance(placed.action, ReleaseResults))
        if len(steps) == 2:
            seen[steps] += 1
    assert len(seen) == 15
    assert max(seen.values()) < 1.4 * min(seen.values())


def test_a_run_of_swarm_leaves_kinds_out() -> None:
    base = WORKLOADS["full-rows"]
    runs = list(itertools.islice(Swarm(1).additions("full-rows", base, 200), 300))
    without = [extra for extra in runs if len(extra) > 8 and len({one.action.kind for one in extra}) < 7]
    assert len(without) > 15
    assert len({one.action.kind for extra in runs for one in extra}) == len(
        {action.kind for action in (*extras_of(base), *base.adapter.undoing)}
    )


def test_feedback_goes_on_from_what_was_new() -> None:
    """A run that reached a state keeps what led there, and the next ones add to it."""
    base, strategy = WORKLOADS["chunked-alone"], Feedback(5)
    additions = strategy.additions("chunked-alone", base, 12)
    first = next(additions)
    strategy.learn(first, [(7, "new")])
    kept = {placed for placed in first if placed.step < 7}
    runs = list(itertools.islice(additions, 200))
    assert kept
    assert sum(kept <= set(extra) for extra in runs) > 50
    strategy.learn(runs[0], [(3, "new")])
    assert len(strategy._corpus) == 1


def test_feedback_begins_with_the_runs_of_swarm() -> None:
    """So of a target with a few runs, such as a generated one, both find the same."""
    arguments = "chunked-alone", WORKLOADS["chunked-alone"], 20
    swarm, feedback = Swarm(5).additions(*arguments), Feedback(5)
    for added, expected in itertools.islice(zip(feedback.additions(*arguments), swarm, strict=True), 8):
        assert added == expected
        feedback.learn(added, [(1, added)])


def test_a_feedback_campaign_is_the_same_in_any_number_of_processes() -> None:
    plan = SearchPlan(targets=("one-row", "twins"), strategy=StrategyName.FEEDBACK, schedules=130, seed=2)
    one, two = (Campaign(msgspec.structs.replace(plan, jobs=jobs)).run() for jobs in (1, 2))
    assert one.coverage.counts == two.coverage.counts
    assert one.schedules == two.schedules == 130


def test_random_events_mostly_have_something_to_act_on_and_one_run_in_eight_ends_the_engine() -> None:
    """Of events at any step of a workload most would meet nothing, and of what comes after a death all."""
    prefixes = Prefixes(WORKLOADS["full-rows"])
    additions = RandomEvents(1).additions("full-rows", prefixes.base, prefixes.steps, acting=prefixes.acting)
    runs = list(itertools.islice(additions, 400))
    fatal = sum(any(placed.action.is_fatal for placed in extra) for extra in runs)
    assert 0 < fatal < 400 / 8
    met = [
        placed.action in prefixes.acting[placed.step - 1]
        for extra in runs
        for placed in extra[:1]
        if placed.step <= prefixes.steps
    ]
    assert sum(met) > 0.8 * len(met)
    blind = [
        placed.action in prefixes.acting[placed.step - 1]
        for extra in itertools.islice(RandomEvents(1).additions("full-rows", prefixes.base, prefixes.steps), 400)
        for placed in extra[:1]
        if placed.step <= prefixes.steps
    ]
    assert sum(blind) < 0.8 * len(blind)


def test_what_would_act_on_nothing_in_a_target_is_known_before_it_is_added() -> None:
    prefixes = Prefixes(WORKLOADS["twins"])
    assert len(prefixes.acting) == prefixes.steps
    for step, acting in enumerate(prefixes.acting, 1):
        for action in extras_of(prefixes.base):
            outcome = prefixes.execute(Placed(step, action))
            assert (Placed(step, action) in outcome.unreached) is (action not in acting), (step, action)
