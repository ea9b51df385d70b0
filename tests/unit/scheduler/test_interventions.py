"""Operator events: applied at once between two steps, counted as the first events of the next, and replayable."""

from __future__ import annotations

import pytest
from simulated_engine import SimulatedEngine, generate, limits_of, prompt

from engine.core.messages import ReleasePressure, SetPressure
from engine.core.scheduler import Scheduler


def test_intervention_holds_at_once_and_counts_in_the_next_step() -> None:
    """D09, D10: the digest of a step that was given it as an event is the same."""
    ahead, plain = Scheduler(limits_of()), Scheduler(limits_of())
    event = SetPressure(leave_pages=2)
    ahead.pressure.intervene(event)
    assert ahead.memory.pages.free == 2
    assert ahead.step_number == 0
    ahead.step([event], 0.0)
    plain.step([event], 0.0)
    assert ahead.digests.digest == plain.digests.digest != Scheduler(limits_of()).digests.digest
    assert ahead.memory.pages.free == plain.memory.pages.free == 2


def test_next_step_must_begin_with_it() -> None:
    scheduler = Scheduler(limits_of())
    scheduler.pressure.intervene(SetPressure(leave_pages=2))
    with pytest.raises(AssertionError, match="must begin with it"):
        scheduler.step([], 0.0)


def test_it_is_applied_once() -> None:
    scheduler = Scheduler(limits_of())
    event = SetPressure(leave_rows=1)
    scheduler.pressure.intervene(event)
    scheduler.pressure.intervene(ReleasePressure())
    scheduler.step([event, ReleasePressure()], 0.0)
    assert scheduler.memory.rows.free == scheduler.memory.rows.total


def test_request_waits_under_pressure_and_runs_after_it() -> None:
    """A prompt that is cached whole computes one token, and who waits holds no page (B04).

    Scripts hold and release what a scheduler meets (D09).
    """
    engine = SimulatedEngine()
    engine.step(SetPressure(leave_rows=0))
    engine.step(generate("r", prompt(20)))
    assert len(engine.scheduler.books.waiting) == 1
    assert engine.scheduler.stats().pages_held == 0
    engine.drain(ReleasePressure())
    assert engine.life("r").finish_reason == "length"


def test_running_request_is_retracted_and_comes_back_with_the_same_output() -> None:
    """A prompt that is cached whole computes one token, and who waits holds no page (B04).

    Scripts hold and release what a scheduler meets (D09).
    """
    engine, calm = SimulatedEngine(page_size=4), SimulatedEngine(page_size=4)
    message = generate("r", prompt(20), new=12)
    engine.step(message)
    engine.step(completions=1)
    engine.step(SetPressure(leave_pages=0))
    for _ in range(8):
        engine.step(completions=1)
    assert engine.scheduler.counters.retractions == 1
    engine.drain(ReleasePressure())
    assert engine.life("r").tokens == calm.run(message)[0]
