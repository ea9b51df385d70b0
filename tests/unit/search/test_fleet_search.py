"""Fleets of engines as one machine of the search: every action, the end of every run, and a bug of the links alone."""

from __future__ import annotations

from typing import Final

import pytest

from engine.config import EngineConfig
from scripted.adapters.lockstep.bugs import mutant_named
from scripted.adapters.lockstep.fleets.actions import FLEET_ACTIONS, NAME, KillEngine
from scripted.adapters.lockstep.fleets.adapter import ADAPTER
from scripted.adapters.lockstep.fleets.config import FleetConfig
from scripted.core.named import adapter_named
from scripted.core.placed import Placed, parse_placed
from scripted.core.schedule import Schedule
from scripted.errors import BadCall
from scripted.search.execution import execute, record
from scripted.search.extras import extras_of
from scripted.search.generated import generated_schedule

SMALL: Final = f"adapter={NAME} engines=p0,d0 page_size=4 chunked_prefill_size=16 max_total_tokens=128"
ONE: Final = f'{SMALL}; 1 begin on=d0 do="start a prompt=50 new=3"'
EXAMPLES: Final = [(kind, text) for kind in FLEET_ACTIONS for text in kind.examples]
# A prompt waits in a prefill engine while that gets other weights.
OUTDATED: Final = f'{ONE}; 1 at on=p0 do="sleep level=2"; 5 at on=p0 do="update"; 6 at on=p0 do="wake"'


@pytest.mark.parametrize("name", ADAPTER.workloads)
def test_a_workload_keeps_every_promise(name: str) -> None:
    assert execute(Schedule.parse(ADAPTER.workloads[name], of=NAME)).failure is None


@pytest.mark.parametrize(("kind", "text"), EXAMPLES)
def test_an_action_is_read_and_keeps_every_promise(kind: type, text: str) -> None:
    placed = parse_placed(f"3 {text}", FLEET_ACTIONS)
    assert type(placed.action) is kind
    assert parse_placed(str(placed), FLEET_ACTIONS) == placed
    assert execute(Schedule.parse(ONE).with_placed([placed])).failure is None


def test_a_schedule_is_its_text() -> None:
    schedule = Schedule.parse(ADAPTER.workloads["pair"], of=NAME)
    assert Schedule.parse(str(schedule)) == schedule
    assert schedule.config.names == ("p0", "p1", "d0", "d1")


def test_equal_schedules_make_equal_steps() -> None:
    schedule = Schedule.parse(f'{ONE}; 2 slow-link sender=p0 receiver=d0; 4 at on=d0 do="pause mode=retract"')
    one, other = (record(schedule)[1] for _ in range(2))
    assert [step.last for step in one] == [step.last for step in other]


@pytest.mark.parametrize("number", range(12))
def test_a_generated_fleet_keeps_every_promise(number: int) -> None:
    assert execute(generated_schedule(number, NAME)).failure is None


def test_what_can_be_added_is_for_every_engine_and_link() -> None:
    extras = extras_of(Schedule.parse(ADAPTER.workloads["pair"], of=NAME))
    assert {one.on for one in extras if isinstance(one, KillEngine)} == {"p0", "p1", "d0", "d1"}
    assert {type(one) for one in extras} >= {
        kind for kind in FLEET_ACTIONS if kind.__name__ in ("At", "CutTraffic", "HoldTraffic")
    }


@pytest.mark.parametrize("step", range(1, 12))
@pytest.mark.parametrize("on", ["p0", "d0"])
def test_an_engine_may_die_in_every_step(step: int, on: str) -> None:
    schedule = Schedule.parse(ADAPTER.workloads["several"], of=NAME)
    for comes_back in (False, True):
        assert execute(schedule.with_placed([Placed(step, KillEngine(on=on, comes_back=comes_back))])).failure is None


def test_a_bug_of_one_engine_is_found_and_names_the_engine() -> None:
    schedule = Schedule.parse(OUTDATED)
    assert execute(schedule).failure is None
    with mutant_named("an-update-leaves-what-waits-to-be-sent").switched_on():
        failure = execute(schedule).failure
    assert failure is not None
    assert failure.text.startswith("engine p0: ")


def test_a_configuration_has_a_role_for_each_name() -> None:
    assert adapter_named(NAME).read_config({"engines": "p0,d0"}) == FleetConfig(EngineConfig(), ("p0", "d0"))
    with pytest.raises(BadCall, match=r"an engine of a fleet is called p\.\.\., d\.\.\. or e\.\.\., .* got 'x0'"):
        adapter_named(NAME).read_config({"engines": "x0,d0"})
