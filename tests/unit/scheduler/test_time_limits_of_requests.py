"""Time limits in the scheduler: the deadline for the gate, ends at it, and no state of ended requests."""

from __future__ import annotations

import random

import msgspec
import pytest
from simulated_engine import SimulatedEngine, generate, prompt

from engine.core.messages import Abort, ContinueGeneration, FinishReason, Generate, PauseGeneration, PauseMode


def limited(rid: str, *, salt: int = 0, length: int = 20, new: int = 4, **limits: float) -> Generate:
    return msgspec.structs.replace(generate(rid, prompt(length, salt), new), **limits)


def reasons(engine: SimulatedEngine) -> dict[str, FinishReason | None]:
    return {life.message.rid: life.finish_reason for life in engine.lives}


def test_a_gate_is_told_the_earliest_deadline() -> None:
    """The earliest of all requests and of the waiting call."""
    engine = SimulatedEngine(max_running_requests=1)
    engine.now = 10.0
    assert engine.step(generate("a", prompt(20), 50)).deadline is None
    assert engine.step(limited("b", salt=1, timeout_s=9.0)).deadline == 19.0
    assert engine.step(limited("c", salt=2, timeout_s=9.0, waiting_timeout_s=3.0)).deadline == 13.0
    assert engine.step(Abort(rid="c")).deadline == 19.0
    assert engine.step(Abort(rid="b")).deadline is None


def test_a_start_ends_the_limit_on_waiting() -> None:
    engine = SimulatedEngine(pp_async_depth=1)
    assert engine.step(limited("a", waiting_timeout_s=3.0)).deadline is None
    assert engine.step(limited("b", salt=1, waiting_timeout_s=3.0, timeout_s=8.0)).deadline == 8.0


@pytest.mark.parametrize(("now", "ended"), [(1.999, False), (2.0, True), (2.001, True)])
def test_a_limit_is_over_when_the_time_has_reached_it(now: float, ended: bool) -> None:
    engine = SimulatedEngine()
    engine.step(limited("a", new=50, timeout_s=2.0))
    engine.now = now
    engine.step()
    assert (engine.life("a").finish_reason is FinishReason.TIMEOUT) is ended


def test_the_row_of_what_ended_is_there_for_the_next_in_the_same_step() -> None:
    engine = SimulatedEngine(max_running_requests=1)
    engine.step(limited("a", new=50, timeout_s=1.0))
    engine.step(PauseGeneration(call_id="p", mode=PauseMode.IN_PLACE), limited("b", salt=1, new=1), completions=1)
    engine.now = 1.0
    result = engine.step(ContinueGeneration(call_id="c"))
    assert reasons(engine)["a"] is FinishReason.TIMEOUT
    assert result.microbatch is not None
    assert result.microbatch.rids == ("b",)


def test_a_refused_request_has_no_deadline() -> None:
    engine = SimulatedEngine(max_running_requests=1, max_queued_requests=1)
    engine.step(generate("a", prompt(20), 50))
    engine.step(generate("b", prompt(20, 1)))
    assert engine.step(limited("c", salt=2, timeout_s=1.0)).deadline is None


def test_nothing_is_kept_of_many_that_came_and_went() -> None:
    """B05: every way to end removes the deadline, in any order."""
    engine = SimulatedEngine(waiting_timeout_s=30.0, max_running_requests=3)
    draw = random.Random(7)
    for number in range(120):
        limits = {"timeout_s": draw.choice([1.0, 5.0, 40.0])} if draw.random() < 0.6 else {}
        engine.step(limited(f"r{number}", salt=number, new=draw.randint(1, 6), **limits), completions=1)
        if draw.random() < 0.3:
            engine.step(Abort(rid=f"r{draw.randint(0, number)}"))
        engine.now += draw.choice([0.0, 0.5, 1.0])
    engine.drain()
    limits = engine.scheduler.features.time_limits
    assert limits.deadline is None
    assert [*limits.entries()] == []
    assert {FinishReason.TIMEOUT, FinishReason.LENGTH, FinishReason.ABORT} <= set(reasons(engine).values())
    assert engine.scheduler.counters.requests_timed_out == list(reasons(engine).values()).count(FinishReason.TIMEOUT)


def test_without_limits_there_is_nothing_to_look_at() -> None:
    engine = SimulatedEngine()
    limits = engine.scheduler.features.time_limits
    engine.step(generate("a", prompt(20)))
    request = engine.scheduler.find_request("a")
    assert request is not None
    limits.enter(request, engine.lives[0].message)
    assert limits.deadline is None
    limits.start(request)
    limits.end(request)
    assert limits.over(1e9) == []
