"""A broken promise and an exception of a step are findings. Everything else is an error of the harness."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from scripted_lockstep.mutants import mutant_named

from engine.core.memory import KVMemory
from engine.core.memory.radix import RadixTree
from engine.core.scheduler import Scheduler
from scripted.core.adapters import adapter_named
from scripted.core.refusals import HarnessError
from scripted.core.schedule import Schedule
from scripted.sdk import Capabilities, Limits, SchedulerAdapter, Stepped
from scripted.sdk.oracle import SdkOracle
from scripted.search import execution
from scripted.search.execution import Prefixes, execute, record
from scripted.search.shrinking import shrink
from scripted.search.targets import workload_named

HERE = f"{__name__}:ADAPTER"


class Config(msgspec.Struct, frozen=True):
    raises_in_step: bool = False
    raises_in_counts: bool = False
    sleeps: bool = False
    says_again: int = -1


class Machine:
    """Refuses every request; raises on demand."""

    depth = 1

    def __init__(self, config: Config) -> None:
        self._config = config
        self._steps = 0

    def step(self, events, now):
        self._steps += 1
        if self._config.raises_in_step:
            raise KeyError("block 7")
        if self._config.says_again >= 0:
            return Stepped(again=self._steps < self._config.says_again)
        return Stepped(again=not self._config.sleeps)

    @property
    def is_idle(self):
        return True

    def counts(self):
        if self._config.raises_in_counts and self._steps:
            raise IndexError("no such count")
        return {"steps": 0}


ADAPTER = SchedulerAdapter(
    "nothing",
    config=Config,
    machine=Machine,
    limits=lambda _: Limits(block_size=4, blocks=8, batch_tokens=8, batch_requests=2, context_tokens=32),
    can=lambda _: Capabilities(flush=False),
)


def schedule(words: str) -> Schedule:
    return Schedule.parse(f"adapter={HERE} {words}; 1 start a prompt=3")


def test_what_a_step_raises_is_a_finding() -> None:
    failure = execute(schedule("raises_in_step=True")).failure
    assert failure is not None
    assert (failure.type, failure.text, failure.step) == ("KeyError", "'block 7'", 1)


def test_what_anything_else_raises_is_an_error_of_the_harness() -> None:
    """A machine whose counts cannot be read says nothing about its scheduler."""
    with pytest.raises(HarnessError) as caught:
        execute(schedule("raises_in_counts=True"))
    assert "failed with IndexError: no such count" in str(caught.value)
    assert "says nothing about the scheduler" in str(caught.value)
    assert isinstance(caught.value.__cause__, IndexError)


def test_what_the_schedulers_own_code_raises_is_a_finding_whoever_calls_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A check looks at the scheduler, and what it holds is such that its own code cannot read it."""
    monkeypatch.setattr(ADAPTER, "packages", (__name__.partition(".")[0],))
    failure = execute(schedule("raises_in_counts=True")).failure
    assert failure is not None
    assert (failure.type, failure.text) == ("IndexError", "no such count")
    assert failure.place.endswith("in counts")


def test_an_error_of_the_judge_is_no_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise AttributeError("a check is wrong")

    monkeypatch.setattr(SdkOracle, "after_step", broken)
    with pytest.raises(HarnessError, match="judging a step 1 failed with AttributeError"):
        execute(schedule(""))


def test_a_machine_that_says_again_forever_is_told_so_at_once() -> None:
    failure = execute(schedule("")).failure
    assert failure is not None
    assert failure.text == (
        "a step says again, but 256 more in a row were given nothing and did nothing, and each of them says again: "
        "a server would spin; steps=0"
    )
    assert failure.step < 300


def test_a_machine_may_say_again_for_as_long_as_it_has_work_inside() -> None:
    """Its steps show no effect, but they end."""
    failure = execute(schedule("says_again=200")).failure
    assert failure is not None
    assert failure.text == "nothing happens any more, but something waits forever: a (waiting)"


def test_a_request_that_nothing_serves_waits_forever() -> None:
    failure = execute(schedule("sleeps=True")).failure
    assert failure is not None
    assert failure.text == "nothing happens any more, but something waits forever: a (waiting)"


def test_what_is_judged_between_two_steps_failed_in_the_last_one_that_ran() -> None:
    """A report named the step in composition, which never ran; its table marked the one before."""
    outcome, records = record(schedule("sleeps=True"))
    assert outcome.failure is not None
    assert outcome.failure.step == len(records)


def test_without_a_copier_every_schedule_starts_at_its_beginning() -> None:
    """The same outcomes, one step at a time."""
    prefixes = Prefixes(schedule("sleeps=True"))
    assert prefixes.steps >= 1
    (abort,) = Schedule.parse(f"adapter={HERE}; 1 abort a").placed
    assert prefixes.execute(abort).failure == execute(prefixes.base.with_placed([abort])).failure


def test_shrinking_keeps_to_the_same_failure() -> None:
    long = Schedule.parse(f"adapter={HERE} sleeps=True; 1 start a prompt=30; 2 start b prompt=20; 3 hold; 4 release")
    assert str(shrink(long).schedule) == f"adapter={HERE} sleeps=True; 1 start a prompt=1 new=1"


def test_the_engine_is_a_adapter_like_any_other() -> None:
    own = adapter_named("lockstep")
    base = workload_named("twins")
    assert base.adapter is own
    assert execute(base).failure is None


def test_what_only_a_recorded_run_checks_is_a_finding() -> None:
    """A base is run twice; the second time it is recorded, and its engine restored from a checkpoint."""
    with mutant_named("most-recently-used-goes-first").switched_on():
        failure = Prefixes(workload_named("names-with-a-common-prefix")).outcome.failure
    assert failure is not None
    assert "was used longest ago, but is not evicted" in failure.text


LOOPS = {
    "in an abort": (Scheduler, "_on_abort", "in a step"),
    "in a plan": (Scheduler, "_launch", "in a step"),
    "in a flush": (KVMemory, "reset", "in a step"),
    "in what a check asks": (RadixTree, "nodes", "judging a step"),
    "in a new scheduler": (Scheduler, "__init__", "making or copying a run"),
}


@pytest.mark.parametrize("name", LOOPS)
def test_what_loops_forever_in_the_engine_is_a_finding(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A06: a search ended with an error of the harness when a check had called the code that did not return."""
    owner, method, doing = LOOPS[name]
    scope: dict[str, Any] = {"__name__": "engine.loop"}
    exec("def loop(*args, **kwargs):\n    while True: pass", scope)
    base = workload_named("twins")
    monkeypatch.setattr(execution, "RUN_TIMEOUT_S", 0.4)
    monkeypatch.setattr(owner, method, scope["loop"])
    (abort,) = Schedule.parse("default; 2 abort a").placed
    failure = execute(base.with_placed([abort])).failure
    assert failure is not None
    assert failure.hangs
    assert failure.text == f"does not return from loop: it was there after 0.4 s, {doing}"
    assert failure.place == "<string>:2, in loop"
