"""States: a digest is equal for a copy, different for any difference, and absent for unreadable state."""

from __future__ import annotations

import itertools
from collections import deque
from typing import Any

import pytest
from scripted_lockstep.actions import Evict, KillStage, Press
from scripted_lockstep.run_forks import COPIER, STATES
from thinned import thinned

from scripted.core.action import Action
from scripted.core.adapters import adapter_named
from scripted.core.common_actions import HoldResults
from scripted.core.forks import Frozen
from scripted.core.placed_action import Placed
from scripted.core.run import Run
from scripted.core.schedule import Schedule
from scripted.core.states import StateReader, UnreadableState
from scripted.search import units
from scripted.search.campaign import Campaign
from scripted.search.execution import Prefixes, execute, record
from scripted.search.strategies import Exhaustive, StrategyName, extras_of
from scripted.search.targets import target_named, workload_named
from scripted.search.units import SearchPlan


class Thing:
    def __init__(self, **values: Any) -> None:
        vars(self).update(values)


def digest(value: Any) -> bytes:
    return StateReader({Thing: ("count",)}).digest(value)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (Thing(a=1, b=[2]), Thing(b=[2], a=1)),
        (Thing(count=1), Thing(count=2)),
        ({3, 1, 2}, {1, 2, 3}),
        ([deque([Thing()])], [deque([Thing()])]),
    ],
)
def test_equal_states_have_one_digest(one: Any, other: Any) -> None:
    assert digest(one) == digest(other)


SHARED = Thing()


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (Thing(a=1), Thing(a=2)),
        (Thing(a=1), Thing(b=1)),
        ([-1], [-2]),
        ([1, 2], [2, 1]),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
        ([SHARED, SHARED], [SHARED, Thing()]),
        (Thing(a=Thing(b=1)), Thing(a=Thing(b=2))),
        (lambda one=SHARED: one, None),
    ],
)
def test_different_states_have_two(one: Any, other: Any) -> None:
    assert digest(one) != digest(other)


def test_what_cannot_be_read_is_named() -> None:
    with pytest.raises(UnreadableState, match="generator"):
        digest([(one for one in "ab")])


def test_a_copy_has_the_state_of_its_original_until_one_of_them_goes_on() -> None:
    gate = Run(workload_named("warm-prefix"))
    gate.next_step(None)

    def state(run: Run) -> bytes:
        return STATES.digest(run.machine, run.device, run.oracle, *run.own_state)

    other = Frozen(gate, COPIER).thaw()
    assert state(other) == state(gate)
    other.machine.scheduler.memory.pages.allocate(1)
    assert state(other) != state(gate)


@pytest.mark.parametrize("name", thinned(["twins", "warm-prefix", "full-pages"], one_in=3))
def test_a_run_that_becomes_its_target_again_ends_there_and_says_the_same(name: str) -> None:
    """B15: a refused flush and an abort of nobody leave nothing behind."""
    prefixes = Prefixes(workload_named(name))
    sweep = list(Exhaustive().additions(name, prefixes.base, prefixes.steps))
    for extra in itertools.islice(sweep, 0, None, 3):
        before = prefixes.rejoined
        outcome = prefixes.execute(*extra)
        if prefixes.rejoined > before:
            assert outcome == execute(prefixes.base.with_placed(extra)), extra
    assert len(sweep) / 30 < prefixes.rejoined < len(sweep) / 3


# The action that shows the same where another one is left out of a sweep, and how many steps later; none for nothing.
STANDS_FOR: dict[Action, list[tuple[Action, int]]] = {
    Evict(): [],
    Evict(pages=1): [(Evict(), 0)],
    Press(unlocked=0): [],
    KillStage(late=True): [(KillStage(), 0)],
    HoldResults(): [(HoldResults(), 1)],
}


def test_a_sweep_leaves_out_what_shows_nothing_of_its_own() -> None:
    """B15: each action is left out where it changes nothing, or the same as another, and nowhere else."""
    base = workload_named("twins")
    prefixes = Prefixes(base)

    def plans(*placed: Placed) -> list[Any]:
        _, records = record(base.with_placed(placed))
        return [one.microbatch for one in records if one.microbatch is not None]

    everywhere = [Placed(step, action) for step in range(1, prefixes.steps + 1) for action in extras_of(base)]
    sweep = Exhaustive().additions("x", base, prefixes.steps, is_distinct=prefixes.is_distinct)
    swept = {placed for (placed,) in sweep}
    left_out = [placed for placed in everywhere if placed not in swept]
    assert {placed.action for placed in left_out} == STANDS_FOR.keys()
    assert {placed.action for placed in swept} >= STANDS_FOR.keys()
    for placed in left_out[::3]:
        others = [Placed(placed.step + later, action) for action, later in STANDS_FOR[placed.action]]
        assert plans(placed) == plans(*others), placed


def test_an_adapter_reads_the_same_state_of_a_run_that_was_thawed_twice() -> None:
    prefixes = Prefixes(workload_named("twins"))
    adapter = adapter_named("lockstep")
    one, two = (tuple(adapter.digests(prefixes._before(5))) for _ in range(2))
    assert one == two
    assert None not in one


def test_a_campaign_prepares_a_target_once(monkeypatch: pytest.MonkeyPatch) -> None:
    prepared: list[str] = []

    def counted(name: str, adapter: str, *, is_copied: bool) -> Any:
        prepared.append(name)
        return target_named(name, adapter, is_copied=is_copied)

    monkeypatch.setattr(units, "target_named", counted)
    plan = SearchPlan(targets=("one-row", "twins"), strategy=StrategyName.RANDOM, schedules=450)
    assert Campaign(plan).run().schedules == 450
    assert sorted(prepared) == ["one-row", "twins"]


def test_runs_are_copied_where_they_have_walked_as_far_as_a_copy_costs() -> None:
    """A target of which few runs begin late is copied once."""
    prefixes = Prefixes(workload_named("warm-prefix"))
    assert list(prefixes._copies) == [1]
    late = prefixes.steps - 1
    events = Schedule.parse(
        f"default; {late} abort a; {late} hold; {late} flush; {late} evict; {late} abort-all"
    ).placed
    outcomes = [prefixes.execute(event) for event in events * 4]
    assert len(prefixes._copies) > 1
    assert outcomes == [execute(prefixes.base.with_placed([event])) for event in events * 4]
