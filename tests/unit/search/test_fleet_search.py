"""Fleets of engines as one machine of the search: every action, the end of every run, and a bug of the links alone."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, Final

import pytest
from scripted_lockstep.fleet.adapter import ADAPTER, NAME
from scripted_lockstep.mutants import mutant_named

from engine.core.config import EngineConfig
from engine.core.routing.prefills import Prefills
from scripted.core.adapters import adapter_named
from scripted.core.errors import BadCall
from scripted.core.placed_action import Placed, parse_placed
from scripted.core.run import Run
from scripted.core.schedule import Schedule
from scripted.core.violation import Violation
from scripted.fleets.actions import DrainEngine, HoldTraffic, JoinEngine, KillEngine
from scripted.fleets.machine import FleetConfig, FleetMachine, FleetOracle
from scripted.search.execution import Prefixes, execute, record
from scripted.search.generated import generated_schedule
from scripted.search.strategies import extras_of

SMALL: Final = f"adapter={NAME} engines=p0,d0 page_size=4 chunked_prefill_size=16 max_total_tokens=128"
ONE: Final = f'{SMALL}; 1 begin on=d0 do="start a prompt=50 new=3"'
EXAMPLES: Final = [(kind, text) for kind in ADAPTER.actions for text in kind.examples]
# A prompt waits in a prefill engine while that gets other weights.
OUTDATED: Final = f'{ONE}; 1 at on=p0 do="sleep level=2"; 5 at on=p0 do="update"; 6 at on=p0 do="wake"'


@pytest.mark.parametrize("name", ADAPTER.workloads)
def test_a_workload_keeps_every_promise(name: str) -> None:
    assert execute(Schedule.parse(ADAPTER.workloads[name], of=NAME)).failure is None


@pytest.mark.parametrize(("kind", "text"), EXAMPLES)
def test_an_action_is_read_and_keeps_every_promise(kind: type, text: str) -> None:
    placed = parse_placed(f"3 {text}", ADAPTER.actions)
    assert type(placed.action) is kind
    assert parse_placed(str(placed), ADAPTER.actions) == placed
    assert execute(Schedule.parse(ONE).with_placed([placed])).failure is None


def test_a_schedule_is_its_text() -> None:
    schedule = Schedule.parse(ADAPTER.workloads["pair"], of=NAME)
    assert Schedule.parse(str(schedule)) == schedule
    assert schedule.config.names == ("p0", "p1", "d0", "d1")


def test_equal_schedules_make_equal_steps() -> None:
    schedule = Schedule.parse(f'{ONE}; 2 slow-link sender=p0 receiver=d0; 4 at on=d0 do="pause mode=retract"')
    one, other = (record(schedule)[1] for _ in range(2))
    assert [step.last for step in one] == [step.last for step in other]


def test_a_fleet_is_not_at_its_end_while_a_grammar_is_compiled() -> None:
    schedule = Schedule.parse(
        f'{SMALL}; 1 begin on=d0 do="start a prompt=3 new=4 regex=[a-c]{{5}}"; 1 kill-engine on=p0'
    )
    assert execute(schedule).failure is None


@pytest.mark.parametrize(
    "what",
    [
        "1 hold-link sender=p0 receiver=d0; 5 kill-engine on=d0",
        "1 hold-link sender=p0 receiver=d0 pages=True; 6 kill-engine on=p0",
        "3 cut-link sender=p0 receiver=d0; 4 heal-link sender=p0 receiver=d0",
    ],
)
def test_what_breaks_off_is_noticed_at_once(what: str) -> None:
    """Each side learns it with the connection, and no time limit has to pass."""
    outcome = execute(Schedule.parse(f"{ONE}; {what}"))
    assert outcome.failure is None
    assert "advance" not in {one.action.kind for one in outcome.implied}


def test_a_copy_of_all_machines_goes_on_as_the_fleet_would_have() -> None:
    """With what is added at each step, and with traffic on the links that is held, late or lost."""
    base = Schedule.parse(
        f"adapter={NAME} {ADAPTER.workloads['pair']}; 2 slow-link sender=p1 receiver=d0; 6 kill-engine on=p0"
    )
    prefixes = Prefixes(base.with_placed([]))
    added = [
        ADAPTER.at(on="d1", do="abort b"),
        HoldTraffic(sender="p1", receiver="d1", pages=True),
        KillEngine(on="d0", comes_back=True),
        ADAPTER.at(on="p1", do="update"),
    ]
    for step in range(1, prefixes.steps, 2):
        for action in added:
            extra = Placed(step, action)
            assert prefixes.execute(extra) == execute(base.with_placed([extra])), extra
    assert len(prefixes._copies) > 1


@pytest.mark.parametrize("number", range(12))
def test_a_generated_fleet_keeps_every_promise(number: int) -> None:
    assert execute(generated_schedule(number, NAME)).failure is None


def test_what_can_be_added_is_for_every_engine_and_link() -> None:
    extras = extras_of(Schedule.parse(ADAPTER.workloads["pair"], of=NAME))
    assert {one.on for one in extras if isinstance(one, KillEngine)} == {"p0", "p1", "d0", "d1"}
    assert {type(one) for one in extras} >= {
        kind for kind in ADAPTER.actions if kind.__name__ in ("At", "CutTraffic", "HoldTraffic")
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


@pytest.mark.parametrize("method", ["answered", "heard"])
def test_a_mirror_of_prefill_engines_that_is_wrong_in_the_end_is_found(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Prefills, method, lambda *_: None)
    failure = execute(Schedule.parse(ONE)).failure
    assert failure is not None
    assert "engine d0: nothing is on its way, but " in failure.text


def test_a_long_answer_over_many_stages_is_no_empty_step() -> None:
    """A fleet launches nothing itself: its steps counted as empty while results of its engines were on their way."""
    long = 'engines=p0,d0 pp_size=4; 1 begin on=d0 do="start a prompt=4 new=100 ignore_eos=True"'
    assert execute(Schedule.parse(long, of=NAME)).failure is None


@pytest.mark.parametrize("on", ["p0", "d0", "p1"])
def test_an_engine_may_drain_leave_and_join_in_every_step(on: str) -> None:
    base = Schedule.parse(ADAPTER.workloads["pair"], of=NAME)
    for step in range(1, 14, 3):
        turns = [Placed(step, DrainEngine(on=on)), Placed(step + 3, JoinEngine(on=on))]
        assert execute(base.with_placed(turns)).failure is None


def test_one_that_drains_is_gone_when_it_is_done_and_asked_for_nothing_more() -> None:
    seen: list[tuple[bool, int]] = []
    later = [f'{step} begin on=d0 do="start {rid} prompt=50 seed={step}"' for step, rid in ((16, "b"), (19, "c"))]
    schedule = Schedule.parse(
        f"{ONE}; 2 drain-engine on=p0; 17 join-engine on=p0; 18 advance seconds=2.0; {'; '.join(later)}"
    )

    def look(run: Run) -> None:
        counts = run.machine.engine("d0").prefills.counts
        seen.append((run.machine.engine("p0").is_dead, counts.asked))

    assert record(schedule, watch=look)[0].failure is None
    gone = [asked for is_dead, asked in seen if is_dead]
    assert gone == [1] * len(gone) != []
    assert seen[-1] == (False, 2)


def test_a_configuration_has_a_role_for_each_name() -> None:
    assert adapter_named(NAME).read_config({"engines": "p0,d0"}) == FleetConfig(EngineConfig(), ("p0", "d0"))
    with pytest.raises(BadCall, match=r"an engine of a fleet is called by its role, p\.\.\. \(prefill\), .* got 'x0'"):
        adapter_named(NAME).read_config({"engines": "x0,d0"})


# -- the fleet itself, with engines that a test describes --


def engine_of(complaint: str = "", **fields: Any) -> Any:
    """Return an engine that is quiet, unless it has a complaint at every question of its oracle."""

    def asked(_machine: object) -> None:
        if complaint:
            raise Violation(complaint)

    oracle = SimpleNamespace(at_rest=asked, at_end=asked, could_go_on=["a life"])
    run = SimpleNamespace(oracle=oracle, machine=None)
    return SimpleNamespace(name="p0", run=run, is_draining=True, is_quiet=True, check_quiet=lambda: None, **fields)


@pytest.mark.parametrize("question", [FleetOracle.at_rest, FleetOracle.at_end])
def test_every_engine_is_asked_at_rest_and_at_the_end(question: Callable[..., None]) -> None:
    oracle = FleetOracle(SimpleNamespace(living=[]))
    with pytest.raises(Violation, match="engine p0: pages are left"):
        question(oracle, SimpleNamespace(living=[engine_of("pages are left")]))


@pytest.mark.parametrize("is_moving", [True, False])
def test_who_could_go_on_is_asked_where_nothing_moves(is_moving: bool) -> None:
    machine = SimpleNamespace(living=[engine_of(), engine_of()], is_moving=is_moving)
    assert list(FleetOracle(machine).could_go_on) == ([] if is_moving else ["a life", "a life"])


@pytest.mark.parametrize("carries", [True, False])
def test_who_has_drained_leaves_when_nothing_is_on_its_way(carries: bool) -> None:
    gone: list[str] = []
    machine = object.__new__(FleetMachine)
    machine.fleet = SimpleNamespace(living=[engine_of()], carries=lambda _: carries, kill=gone.append)
    machine._let_go()
    assert gone == ([] if carries else ["p0"])


def test_who_has_drained_is_asked_before_it_leaves() -> None:
    gone: list[str] = []
    machine = object.__new__(FleetMachine)
    machine.fleet = SimpleNamespace(living=[engine_of("it holds pages")], carries=lambda _: False, kill=gone.append)
    with pytest.raises(Violation, match="it holds pages"):
        machine._let_go()
    assert gone == []


def test_who_drains_takes_no_request() -> None:
    """It gets no requests, so that it needs no run."""
    engine = engine_of(is_dead=False)
    engine.run = None
    ADAPTER.begin(on="p0", do="start a prompt=9").act(SimpleNamespace(machine=SimpleNamespace(engine=lambda _: engine)))


@pytest.mark.parametrize("comes_back", [True, False])
def test_who_is_killed_may_come_back(comes_back: bool) -> None:
    did: list[str] = []
    machine = SimpleNamespace(
        engine=lambda _: engine_of(is_dead=False),
        fleet=SimpleNamespace(kill=lambda name: did.append(f"kill {name}")),
        restart=lambda name: did.append(f"restart {name}"),
    )
    KillEngine(on="p0", comes_back=comes_back).act(SimpleNamespace(machine=machine))
    assert did == ["kill p0", *["restart p0"] * comes_back]
