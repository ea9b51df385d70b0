"""Waits on an idle engine: one that can never hold ends at once, and one that counts steps runs them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from engine import EngineConfig
from scripted import ScriptedSim, ScriptFailed


def starts_between_the_questions(t):
    started = []
    for _ in t.run_until(lambda: any(r.finished for r in started)):
        if t.state.step == 4:
            started.append(t.start_req(prompt_len=5, max_new_tokens=1))
        yield
    assert started


def counts_its_questions(t):
    asked = 0

    def holds():
        nonlocal asked
        asked += 1
        return asked > 6

    yield from t.run_until(holds)


def waits_for_a_step(t):
    yield from t.run_until(lambda: t.state.step == 7)


def waits_for_a_history(t):
    yield from t.run_until(lambda: len(t.history) == 9)


def asks_a_function(t):
    asked = []

    def holds():
        asked.append(1)
        return len(asked) > 3

    yield from t.run_until(lambda: holds())


@pytest.mark.parametrize(
    ("script", "steps"),
    [
        (starts_between_the_questions, 6),
        (counts_its_questions, 6),
        (waits_for_a_step, 7),
        (waits_for_a_history, 9),
        (asks_a_function, 3),
    ],
)
def test_a_wait_that_can_hold_on_an_idle_engine_goes_on(script: Callable[..., Any], steps: int) -> None:
    with ScriptedSim.start(EngineConfig()) as sim:
        assert sim.run(script).steps == steps


def waits_for_nothing(t):
    yield from t.run_until(lambda: False)


def test_a_wait_that_cannot_hold_on_an_idle_engine_ends_at_once() -> None:
    """D02: not after its 400 steps."""
    with ScriptedSim.start(EngineConfig()) as sim, pytest.raises(ScriptFailed) as caught:
        sim.run(waits_for_nothing)
    report = caught.value.report
    assert "never held: the engine is fully idle, so no further step can change anything" in report.error
    assert report.log is not None
    assert len(report.log.steps) == 1


def holds_a_link(t):
    fleet = t.engines("p0", "d0")
    fleet.hold("d0", "p0")
    r = fleet["d0"].start_req(prompt_len=64)
    yield from fleet["d0"].run_until_finished(r, max_steps=20)


def holds_the_results_of_another_engine(t):
    fleet = t.engines("p0", "d0")
    fleet["p0"].hold_results()
    r = fleet["d0"].start_req(prompt_len=64)
    yield from t.run_until(lambda: r.finished, max_steps=20)


@pytest.mark.parametrize(
    ("script", "cause"),
    [
        (holds_a_link, r"the link from d0 to p0 is held, until fleet.release('d0', 'p0')"),
        (holds_the_results_of_another_engine, "engine p0, whose t is fleet['p0']: results are held, 1 microbatches"),
    ],
)
def test_what_a_fleet_holds_is_named(script: Callable[..., Any], cause: str) -> None:
    """D02: with the verb that releases it."""
    with ScriptedSim.start(EngineConfig()) as sim, pytest.raises(ScriptFailed) as caught:
        sim.run(script)
    assert cause in caught.value.report.error
    assert "no further step can change" not in caught.value.report.error
