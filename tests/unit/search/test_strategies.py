"""Every strategy of the search passes on the healthy engine: what it finds there would be a false alarm."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from typing import cast

import pytest
from base_workloads import WORKLOADS
from thinned import thinned

from scripted.core.action import Action
from scripted.core.common_actions import ReleaseResults
from scripted.core.placed_action import Placed
from scripted.core.run import Cell
from scripted.core.schedule import Schedule
from scripted.search.campaign import Campaign
from scripted.search.execution import Prefixes, execute
from scripted.search.strategies import Drawn, Exhaustive, Meets, Pct, RandomEvents, StrategyName, Surw, Swarm, extras_of
from scripted.search.targets import target_named
from scripted.search.units import SearchPlan

# Small, and each with another part of the planner at its limit.
TIGHT = ("full-pages", "full-pages-deep", "priorities", "mixed-turns", "one-row", "deferred-flush")
PAIRS_EVERY = 1201


@pytest.mark.parametrize(
    "strategy", thinned([one for one in StrategyName if one is not StrategyName.EXHAUSTIVE], one_in=2)
)
def test_a_strategy_finds_nothing_on_the_engine(strategy: StrategyName) -> None:
    """No event in flight breaks a promise of the engine (B15)."""
    report = Campaign(SearchPlan(targets=TIGHT, strategy=strategy, schedules=80)).run()
    assert report.schedules >= 80
    assert not report.findings


@pytest.mark.parametrize("name", thinned(TIGHT, one_in=2))
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
    """It was once not noted, so that the next turn looked unfair."""
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


def _anything(action: Action) -> Cell:
    return Cell(action.kind, "", "")


def _placed(drawn: Drawn, meets: Meets = _anything) -> tuple[Placed, ...]:
    for step in drawn.steps:
        drawn.come(step, meets)
    return drawn.placed


def test_priorities_of_pct_change_so_that_an_actor_acts_after_results() -> None:
    """Without a change the pipeline, which always has a result to return, would be the last to act in every run."""
    runs = [list(Pct(0)._turns(random.Random(seed), [2, 2], 8)) for seed in range(40)]
    assert any(actor != -1 and before == -1 for turns in runs for before, actor in itertools.pairwise(turns))


def test_a_run_of_swarm_leaves_kinds_out() -> None:
    base = WORKLOADS["full-rows"]
    runs = [_placed(drawn) for drawn in itertools.islice(Swarm(1).additions("full-rows", base, 200), 300)]
    without = [extra for extra in runs if len(extra) > 8 and len({one.action.kind for one in extra}) < 7]
    assert len(without) > 15
    assert len({one.action.kind for extra in runs for one in extra}) == len(
        {action.kind for action in (*extras_of(base), *base.adapter.undoing)}
    )


def test_random_events_mostly_have_something_to_act_on_and_one_run_in_eight_ends_the_engine() -> None:
    """Most events chosen before a run would meet nothing, because earlier ones change its state."""
    prefixes = Prefixes(WORKLOADS["full-rows"])
    drawn = list(itertools.islice(RandomEvents(1).additions("full-rows", prefixes.base, prefixes.steps), 200))
    unreached = sum(len(prefixes.execute_drawn(one).unreached) for one in drawn)
    placed = [one.placed for one in drawn]
    assert unreached < 0.15 * sum(map(len, placed))
    assert 0 < sum(any(one.action.is_fatal for one in extra) for extra in placed) < 200 / 8
    blind = [
        _placed(one)
        for one in itertools.islice(RandomEvents(1).additions("full-rows", WORKLOADS["full-rows"], prefixes.steps), 50)
    ]
    assert sum(len(prefixes.execute(*extra).unreached) for extra in blind) > 0.3 * sum(map(len, blind))


@pytest.mark.parametrize("target", thinned([*TIGHT, "generated:3", "generated:27", "generated:31"], one_in=2))
def test_a_run_whose_events_are_chosen_on_the_way_is_that_of_its_schedule(target: str) -> None:
    """Findings are reported, shrunk and kept as schedules."""
    prefixes = cast(Prefixes, target_named(target))
    for drawn in itertools.islice(Swarm(4).additions(target, prefixes.base, prefixes.steps), 12):
        outcome = prefixes.execute_drawn(drawn)
        assert [one.step for one in drawn.placed] == drawn.steps
        assert outcome == execute(prefixes.base.with_placed(drawn.placed))
