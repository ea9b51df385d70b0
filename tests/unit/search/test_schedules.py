"""Schedules as text: what is written is what is read, and what cannot be read says why."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from base_workloads import WORKLOADS
from scripted_lockstep.actions import Evict, Flush, KillStage, PauseServing, Press, Relieve, StartRequest, Update

from engine.core.errors import ConfigError
from engine.core.messages import PauseMode
from scripted.core.common_actions import ReleaseResults
from scripted.core.placed_action import Placed
from scripted.core.refusals import ScriptDefinitionError
from scripted.core.run import Cell
from scripted.core.schedule import Schedule
from scripted.search.strategies import Drawn, Exhaustive, Pct, RandomEvents, Surw, Swarm, extras_of
from scripted.search.targets import workload_named
from scripted.search.units import Unit, _additions


@pytest.mark.parametrize("name", WORKLOADS)
def test_every_workload_survives_its_own_text(name: str) -> None:
    schedule = WORKLOADS[name]
    assert Schedule.parse(str(schedule)) == schedule


def test_every_kind_of_event_survives_its_own_text() -> None:
    base = workload_named("paused-with-a-queue")
    extras = [Placed(step, action) for step, action in enumerate(extras_of(base), start=1)]
    schedule = base.with_placed([*extras, Placed(3, ReleaseResults(count=2))])
    assert Schedule.parse(str(schedule)) == schedule


def test_actions_are_written_as_a_person_would() -> None:
    assert str(Placed(4, Flush())) == "4 flush"
    assert str(Placed(1, StartRequest(rid="a", prompt=125, new=3))) == "1 start a prompt=125 new=3"
    assert str(Placed(2, PauseServing(mode=PauseMode.ABORT))) == "2 pause mode=abort"
    assert Flush(timeout_s=1.0).kind == "flush-later"
    assert (str(Placed(5, Press(pages=1))), Press(pages=1).kind) == ("5 pressure pages=1", "pressure-pages")
    assert (str(Placed(5, Update(seed=3))), Update(timeout_s=1.0).kind) == ("5 update seed=3", "update-later")
    assert [str(Placed(6, action)) for action in (Relieve(), Evict(pages=2))] == ["6 relieve", "6 evict pages=2"]


def test_actions_of_one_step_keep_their_order() -> None:
    schedule = Schedule.parse("default; 2 flush; 1 start a prompt=3; 2 abort a")
    assert [str(placed) for placed in schedule.placed] == ["1 start a prompt=3", "2 flush", "2 abort a"]
    assert schedule.last_step == 2


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("default; 4 fly", "'4 fly'"),
        ("default; soon flush", "'soon flush'"),
        ("default; 0 flush", "count from 1"),
        # The harness made them until its own deadline, and the scheduler was blamed.
        ("default; 400001 flush", "count from 1 to 400000"),
        ("default; 1 start a prompt=1048577", "<= 1048576"),
        ("default; 1 start a prompt=3 n=129", "<= 128"),
        ("default; 1 start a prompt=3 top_logprobs=21", "<= 20"),
        ("default; 1 advance seconds=-1", ">= 0"),
        # A byte of a command line that is no text.
        ("default; 1 start a prompt=\udcff", "surrogates not allowed"),
        ("default; 1 start a", "missing required field `prompt`"),
        ("default; 1 flush timeout=3", "unknown field `timeout`"),
        ("pp_size; 1 flush", "name=value"),
    ],
)
def test_a_bad_schedule_says_what_it_should_be(text: str, said: str) -> None:
    with pytest.raises(ScriptDefinitionError, match=said):
        Schedule.parse(text)


def test_a_bad_configuration_is_the_engines_own_error() -> None:
    with pytest.raises(ConfigError, match="pp_size"):
        Schedule.parse("pp_size=0; 1 flush")


def test_an_unknown_workload_names_the_known_ones() -> None:
    with pytest.raises(ScriptDefinitionError, match="chunked-alone"):
        workload_named("chunked")


def test_a_sweep_is_every_kind_at_every_step() -> None:
    base = workload_named("twins")
    additions = list(Exhaustive().additions("twins", base, 5))
    every = [KillStage(), *(one for one in extras_of(base) if one != KillStage())]
    assert additions == [(Placed(step, action),) for step in range(1, 6) for action in every]
    assert list(Exhaustive().additions("twins", base, 5, first=7)) == additions[7:]


def test_a_sweep_of_two_events_is_every_pair_in_its_window() -> None:
    base = workload_named("chunked-alone")
    pairs = list(Exhaustive(2, window_steps=1).additions("x", base, 3))
    assert {(one.step, other.step) for one, other in pairs} == {(1, 1), (1, 2), (2, 2), (2, 3), (3, 3), (3, 4)}
    assert len(set(pairs)) == len(pairs) == 6 * len(extras_of(base)) ** 2


def _placed(added: tuple[Placed, ...] | Drawn) -> tuple[Placed, ...]:
    """Return the events of a drawn addition, as if each had something to act on."""
    if isinstance(added, Drawn):
        for step in added.steps:
            added.come(step, lambda action: Cell(action.kind, "", ""))
        return added.placed
    return added


SEEDED: tuple[type[RandomEvents | Pct | Surw], ...] = (RandomEvents, Swarm, Pct, Surw)


@pytest.mark.parametrize("strategy", SEEDED)
def test_strategies_with_a_seed_depend_on_it_alone(strategy: type[RandomEvents | Pct | Surw]) -> None:
    base = workload_named("full-rows")

    def drawn(seed: int, first: int) -> list[tuple[Placed, ...]]:
        additions: Iterator[Any] = strategy(seed).additions("full-rows", base, 20, first=first)
        return [_placed(next(additions)) for _ in range(5)]

    assert drawn(1, 0) == drawn(1, 0)
    assert drawn(1, 0)[2:] == drawn(1, 2)[:3]
    assert drawn(1, 0) != drawn(2, 0)
    assert all(one.step <= other.step for run in drawn(1, 0) for one, other in itertools.pairwise(run))


def test_the_parts_of_a_sweep_are_apart_and_together_all_of_it() -> None:
    """A strategy begins at the first run of a part, which takes every third from there on."""
    sweep: Any = SimpleNamespace(additions=lambda *_, first, is_distinct: range(first, 12))
    target: Any = SimpleNamespace(base=None, steps=4, is_distinct=None)
    parts = [list(_additions(Unit("t", first, 3), sweep, target)) for first in range(3)]
    assert sorted(itertools.chain.from_iterable(parts)) == list(range(12))
    assert list(_additions(Unit("t", 1, 3, 2), sweep, target)) == [1, 4]
