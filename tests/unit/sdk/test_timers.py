"""Time: a machine says when it wants the next step, for a batching delay or a poll, and after what time it acts itself.

Goal: such a request waits for nothing else, and not forever; a lost wake-up and busy polling have names; a search lets
time pass. Method: the example's scheduler behind a delay of 0.15 s, or with a longest wait, in schedules and searches.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from scripted.core.adapters import adapter_named
from scripted.core.refusals import ScriptDefinitionError
from scripted.core.run import Run
from scripted.core.schedule import Schedule
from scripted.core.violation import Violation
from scripted.sdk import Add
from scripted.search.campaign import Campaign
from scripted.search.units import Finding, SearchPlan

HEALTHY = "examples/your_scheduler/fixed.py"
DELAY_S = 0.15
LINE = "default; 1 start a prompt=5 new=3; 3 start b prompt=6 seed=1"
# A scheduler that refuses a request that has waited for two seconds.
IMPATIENT = """
from msgspec.structs import replace
from fixed import FixedMachine, adapter_of
from scripted.sdk import Add, Capabilities, Copier, Limits, Refused, SchedulerAdapter
from adapter import Config

class Impatient(FixedMachine):
    def __init__(self, config):
        super().__init__(config)
        self.due, self.begun = {}, set()

    def step(self, events, now):
        requests = self.scheduler.requests
        late = [rid for rid in requests if now >= self.due[rid] and self.is_kept_waiting(rid)]
        for rid in late:
            self.scheduler.abort(rid)
        self.due.update({event.rid: now + 2.0 for event in events if isinstance(event, Add)})
        stepped = super().step(events, now)
        self.due = {rid: due for rid, due in self.due.items() if rid in requests}
        self.begun &= set(requests)
        waits = [due for rid, due in self.due.items() if rid not in self.begun]
        refused = tuple(Refused(rid=rid, reason="late") for rid in late)
        return replace(stepped, replies=(*refused, *stepped.replies), deadline=min(waits, default=None))

    def is_kept_waiting(self, rid):
        return WORDS

    def _launch(self, batch):
        self.begun |= {work.request.id for work in batch}
        return super()._launch(batch)

def limits(config):
    sizes = {"batch_tokens": config.batch_tokens, "batch_requests": config.batch_requests, "depth": 2}
    tokens = config.blocks * config.block_size
    return Limits(block_size=config.block_size, blocks=config.blocks, context_tokens=tokens, time_limits=TIMES, **sizes)

ADAPTER = SchedulerAdapter("impatient", config=Config, machine=Impatient, limits=limits,
                           can=lambda _: Capabilities(), copier=Copier())
"""


def _delayed(*, sets_timer: bool = True, is_timer: bool = True, polls: bool = False) -> Any:
    """Return the adapter of a machine that collects requests for a while before it computes the first batch."""
    adapter_named(HEALTHY)
    fixed = sys.modules["fixed"]

    class Delayed(fixed.FixedMachine):  # type: ignore[misc, name-defined]
        due: float | None = None

        def step(self, events: Any, now: float) -> Any:
            if self.is_idle and any(isinstance(event, Add) for event in events):
                self.due = now + DELAY_S
            if polls and self.due is not None:
                self.due = max(self.due, now + DELAY_S)
            if self.due is None or (now >= self.due and not polls):
                self.due = None
                return super().step(events, now)
            schedule, self.scheduler.schedule = self.scheduler.schedule, list
            stepped = super().step(events, now)
            self.scheduler.schedule = schedule
            return replace(stepped, deadline=self.due if sets_timer else None, is_timer=is_timer)

    return fixed.adapter_of("delayed", Delayed)


def _run(adapter: Any) -> Run:
    schedule = Schedule.parse(LINE, of=HEALTHY)
    run = Run(schedule, parts=adapter.new_parts(schedule.config, record=False))
    adapter.drive(run)
    return run


def test_requests_wait_for_a_timer_and_no_longer() -> None:
    run = _run(_delayed())
    assert [life.end for life in run.oracle.account.lives] == ["length", "length"]
    assert run.clock.now() == pytest.approx(DELAY_S)


def test_a_deadline_that_only_ends_requests_excuses_nobody() -> None:
    with pytest.raises(Violation, match="something waits forever: a"):
        _run(_delayed(is_timer=False))


def test_a_lost_wake_up_is_named() -> None:
    """It requests no step; a step after another event would find the delay over."""
    adapter = _delayed(sets_timer=False)
    with pytest.raises(Violation, match="something waits forever: a"):
        _run(adapter)


def test_a_step_that_nobody_asked_for_is_named_as_a_lost_wake_up() -> None:
    adapter_named(HEALTHY)
    fixed = sys.modules["fixed"]

    class Sleeps(fixed.FixedMachine):  # type: ignore[misc, name-defined]
        """Takes a request without a launch, and requests no step in which to launch it."""

        def step(self, events: Any, now: float) -> Any:
            if not any(isinstance(event, Add) for event in events):
                return super().step(events, now)
            schedule, self.scheduler.schedule = self.scheduler.schedule, list
            stepped = super().step(events, now)
            self.scheduler.schedule = schedule
            return replace(stepped, again=False)

    with pytest.raises(Violation, match="a wake-up is lost: a step without any event does something"):
        _run(fixed.adapter_of("sleeps", Sleeps))


def test_a_scheduler_that_asks_for_step_after_step_spins() -> None:
    adapter_named(HEALTHY)
    fixed = sys.modules["fixed"]

    class Spins(fixed.FixedMachine):  # type: ignore[misc, name-defined]
        def step(self, events: Any, now: float) -> Any:
            return replace(super().step(events, now), again=True)

    with pytest.raises(Violation, match=r"256 more in a row were given nothing .* a server would spin"):
        _run(fixed.adapter_of("spins", Spins))


def test_busy_polling_has_a_bound_and_a_name() -> None:
    with pytest.raises(Violation, match="busy polling: 64 wake-ups by a timer in a row were given nothing"):
        _run(_delayed(polls=True))


def test_a_script_advances_the_clock_to_the_timer(monkeypatch: pytest.MonkeyPatch) -> None:
    adapter = _delayed()
    monkeypatch.setattr("scripted.core.adapters._in_module", lambda _: adapter)

    def script(t: Any) -> Any:
        r = t.start_req(prompt_len=5, max_new_tokens=2)
        for _ in range(5):
            yield
        assert r.status == "waiting"
        t.clock.advance(DELAY_S)
        yield from t.run_until_finished(r)
        assert t.clock.now() == pytest.approx(DELAY_S)

    with adapter.start_sim(adapter.read_config({}), mutant=None) as sim:
        sim.run(script)


@pytest.fixture
def impatient(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Collection[Finding]]:
    """Returns the findings of a short search on a scheduler that refuses a late request if these ``words`` hold."""
    monkeypatch.syspath_prepend(str(Path(HEALTHY).resolve().parent))

    def search(words: str, times: str = "(2.0,)") -> Collection[Finding]:
        path = tmp_path / f"impatient_{len(list(tmp_path.iterdir()))}.py"
        path.write_text(IMPATIENT.replace("WORDS", words).replace("TIMES", times), encoding="utf-8")
        return Campaign(SearchPlan(adapter=str(path), schedules=200, stop_at_first=True)).run().findings.values()

    return search


def test_a_search_lets_the_time_pass_after_which_a_scheduler_acts(
    impatient: Callable[..., Collection[Finding]],
) -> None:
    """One that looks at running requests too refuses them; without the declaration no time passes while one runs."""
    assert not impatient("rid not in self.begun")
    (found,) = impatient("True")
    assert "is refused (late) after it had begun" in found.failure.text
    assert "advance seconds=" in str(found.schedule)
    assert not impatient("True", times="()")


@pytest.mark.parametrize("times", ["(0.0,)", "(2.0, -1)", "('2',)"])
def test_a_limit_of_time_is_above_zero(impatient: Callable[..., Collection[Finding]], times: str) -> None:
    with pytest.raises(ScriptDefinitionError, match="the limit time_limits has numbers of seconds above 0, got"):
        impatient("True", times=times)
