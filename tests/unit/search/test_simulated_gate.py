"""The simulated gate: the same run as a script's, step by step; forks are the run that they were taken from."""

from __future__ import annotations

import itertools
import re
from collections.abc import Generator
from typing import Any

import msgspec
import pytest
from base_workloads import WORKLOADS
from scripted_lockstep.actions import (
    FailGrammar,
    FailStage,
    Flush,
    HoldGrammars,
    KillStage,
    Press,
    StartRequest,
    WakeServing,
)
from scripted_lockstep.run_forks import COPIER
from scripted_lockstep.space.workloads import FLAGSHIP
from scripted_lockstep.tiers.sim.runner import EngineSim
from thinned import thinned

from engine.core.scheduler import StepRecord
from scripted.core.forks import Frozen
from scripted.core.placed_action import Placed
from scripted.core.run import WINDOW, Cell, Run
from scripted.core.schedule import Schedule
from scripted.script.options import ScriptOptions
from scripted.search.execution import Prefixes, execute, record
from scripted.search.strategies import Exhaustive
from scripted.search.targets import target_named, workload_named
from scripted.search.written_test import write_test

# Of every workload's sweep, one run in this many is enough to see a fork that differs.
SAMPLE_EVERY = 97
# Forks are the same for all workloads: every second one has its turn here.
FORKED = list(WORKLOADS)[::5]
# A wake may wait behind a sleep that waits itself.
LASTING = (Press, HoldGrammars, FailGrammar, FailStage, WakeServing)


@pytest.mark.parametrize("name", thinned(WORKLOADS, one_in=3))
def test_every_workload_keeps_every_promise(name: str) -> None:
    """B01, B02, B06, B11: budget, one terminal reply, balanced books, tokens as alone, after every step."""
    outcome = execute(WORKLOADS[name])
    assert outcome.failure is None
    # What lasts, or is for what comes later, may find nothing yet.
    assert [one for one in outcome.unreached if not isinstance(one.action, LASTING)] == []


@pytest.mark.parametrize("name", thinned(FORKED, one_in=4))
def test_a_fork_is_the_run_from_the_beginning(name: str) -> None:
    prefixes = Prefixes(WORKLOADS[name])
    additions = itertools.islice(Exhaustive().additions(name, prefixes.base, prefixes.steps), 3, None, SAMPLE_EVERY)
    for extra in additions:
        assert prefixes.execute(*extra) == execute(prefixes.base.with_placed(extra))


def test_the_sweep_of_the_flagship_passes_on_the_engine() -> None:
    """B15: no event at any step of the flagship workload breaks a promise."""
    prefixes = Prefixes(workload_named(FLAGSHIP))
    for extra in Exhaustive().additions(FLAGSHIP, prefixes.base, prefixes.steps):
        assert prefixes.execute(*extra).failure is None, extra


def test_a_fork_shares_nothing_that_changes() -> None:
    gate = Run(workload_named("warm-prefix"), record=False)
    gate.next_step(None)
    other = Frozen(gate, COPIER).thaw()
    assert other.machine.scheduler is not gate.machine.scheduler
    assert other.machine.scheduler.planner._books is other.machine.scheduler.books
    assert other.oracle.account is not gate.oracle.account
    other.machine.scheduler.memory.pages.allocate(3)
    assert gate.machine.scheduler.memory.pages.held == 0


def test_events_that_meet_nothing_are_counted() -> None:
    outcome = execute(Schedule.parse("default; 1 start a prompt=3; 1 abort missing; 2 release; 3 continue; 40 kill"))
    assert outcome.failure is None
    assert [str(placed) for placed in outcome.unreached] == ["1 abort missing", "2 release", "3 continue", "40 kill"]


def test_what_a_schedule_leaves_open_is_settled() -> None:
    outcome = execute(Schedule.parse("default; 1 start a prompt=3; 2 pause; 2 hold; 4 flush timeout_s=9.0"))
    assert outcome.failure is None
    assert [str(placed).split()[1] for placed in outcome.implied] == ["release", "continue", "flush"]


def test_cells_say_what_an_event_met() -> None:
    met, *others = execute(workload_named(FLAGSHIP).with_placed([Placed(4, Flush())])).cells
    assert met == Cell("flush", "dispatched", "last chunk")
    assert others == [Cell(WINDOW, "results are in flight and no queue holds a request", "")]


@pytest.mark.parametrize(
    "name",
    [
        "chunked-alone",
        "warm-prefix",
        "full-pages",
        "priorities",
        "paused-mid-prompt",
        "late-results",
        "weight-update",
        "failed-update",
        "pressed",
    ],
)
def test_the_same_steps_as_a_script(name: str) -> None:
    """A schedule as a script in the sim tier does in each step what the simulated gate does: events, plans, replies."""
    schedule = WORKLOADS[name]
    _, records = record(schedule)
    options = ScriptOptions(record=True, oracle=False)
    success = EngineSim(schedule.config).run(script_of(schedule), options=options)
    assert [seen(one) for one in success.records] == [seen(one) for one in records[: len(success.records)]]
    assert len(success.records) >= schedule.last_step


def seen(record: StepRecord) -> StepRecord:
    """A step without names of calls and without the digest, which tells a default from the same value given."""
    nameless = [re.sub(r"call_id='[^']*'", "", repr(one)) for one in (*record.events, *record.replies)]
    return msgspec.structs.replace(record, events=tuple(nameless), replies=(), digest="")


def script_of(schedule: Schedule) -> Any:
    """The written test's body, as a generator function."""
    text = write_test([schedule], name="it").text
    assert text is not None
    source = text.replace("@scripted(CONFIG)\n", "").replace("register_cpu_ci(est", "dict(est")
    namespace: dict[str, Any] = {}
    exec(source, namespace)
    script = namespace["test_it"]

    def run(t: Any) -> Generator[None, None, None]:
        yield from script(t)

    return run


def test_a_registered_script_is_a_bench() -> None:
    target = target_named(
        "tests/registered/pipeline/test_flush_in_flight.py::test_flush_while_chunk_results_are_in_flight"
    )
    assert target.outcome.failure is None
    assert any(isinstance(placed.action, StartRequest) for placed in target.base.placed)
    for step in range(1, target.steps + 1, 4):
        assert target.execute(Placed(step, Flush())).failure is None
        assert target.execute(Placed(step, KillStage())).failure is None
