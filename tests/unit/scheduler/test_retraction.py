"""Retraction: by lack of pages, by a higher priority, by a pause; the output is that of the undisturbed run."""

from __future__ import annotations

import pytest
from simulated_engine import SimulatedEngine, alone, generate, prompt

from engine.core.messages import ContinueGeneration, FinishReason, PauseGeneration, PauseMode, TokenOutput
from engine.core.scheduler import Place

TIGHT = {"page_size": 4, "max_total_tokens": 48, "chunked_prefill_size": 16}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_retracted_request_says_what_it_would_have_said(temperature: float) -> None:
    """B06: token for token, and it computes prompt and output again."""
    engine = SimulatedEngine(**TIGHT)
    messages = [generate(f"r{number}", prompt(12, number), 20, temperature=temperature, seed=7) for number in range(3)]
    assert engine.run(*messages) == [alone(message) for message in messages]
    assert engine.scheduler.stats().retractions > 0
    assert not engine.pipeline.corruptions


def test_latest_goes_first() -> None:
    engine = SimulatedEngine(**TIGHT)
    engine.step(*[generate(f"r{number}", prompt(12, number), 20) for number in range(3)])
    while not engine.scheduler.stats().retractions:
        engine.step(completions=1)
    assert [request.rid for request in engine.scheduler.books.waiting] == ["r2"]
    victim = engine.scheduler.find_request("r2")
    assert victim is not None
    assert (victim.lease, victim.planned_tokens, victim.in_flight) == (None, 0, 0)
    engine.drain()


def test_victim_that_was_planned_in_the_same_step_leaves_the_plan() -> None:
    """B07: a request is in one place; one that goes back to the queue is in no microbatch."""
    engine = SimulatedEngine(**TIGHT)
    engine.step(*[generate(f"r{number}", prompt(12, number), 20) for number in range(3)])
    for _ in range(60):
        before = engine.scheduler.stats().retractions
        result = engine.step(completions=1)
        if result.microbatch is not None and engine.scheduler.stats().retractions > before:
            queued = {request.rid for request in engine.scheduler.books.waiting}
            assert queued.isdisjoint(result.microbatch.rids)
    engine.drain()
    assert engine.scheduler.stats().retractions > 0


def test_higher_priority_preempts() -> None:
    """A request that was retracted goes on as if undisturbed (B06); policies and limits hold at every size (B17)."""
    engine = SimulatedEngine(schedule_policy="priority", priority_preemption=True, max_running_requests=1)
    low, high = generate("low", prompt(20), 9), generate("high", prompt(20, 1), 3, priority=5)
    engine.step(low)
    engine.step(completions=1)
    engine.step(high)
    engine.step(completions=1)
    assert engine.scheduler.find_request("low") in engine.scheduler.books.waiting
    engine.drain()
    assert [life.tokens for life in engine.lives] == [alone(low), alone(high)]
    assert engine.scheduler.stats().retractions == 1


def test_no_request_is_preempted_in_vain() -> None:
    """A prefix that victims share counts once: retracting both would still not make room."""
    engine = SimulatedEngine(
        page_size=4, max_total_tokens=64, schedule_policy="priority", priority_preemption=True, pp_size=2
    )
    engine.run(generate("seed", prompt(24)))
    sharing = [generate(rid, (*prompt(24), salt, salt), 6) for rid, salt in (("a", 1), ("b", 3))]
    engine.step(*sharing, generate("c", prompt(16, 9), 8, priority=7))
    while "c" not in engine.scheduler.books.running:
        engine.step(completions=1)
    engine.step(generate("high", prompt(44, 3), 2, priority=5))
    for _ in range(3):
        engine.step(completions=1)
    assert engine.scheduler.stats().retractions == 0
    engine.drain()
    assert all(life.finish_reason is FinishReason.LENGTH for life in engine.lives)


@pytest.mark.parametrize("mode", [PauseMode.RETRACT, PauseMode.IN_PLACE])
@pytest.mark.parametrize("landed", range(7))
def test_pause_at_any_moment_changes_no_output(mode: PauseMode, landed: int) -> None:
    """B06: partly prefilled, dispatched, running; with results in flight."""
    engine = SimulatedEngine(pp_size=4, chunked_prefill_size=32, page_size=4)
    messages = [generate(f"r{number}", prompt(70, number), 6) for number in range(2)]
    engine.step(*messages)
    for _ in range(landed):
        engine.step(completions=1)
    engine.step(PauseGeneration(call_id="pause", mode=mode))
    while engine.in_flight:
        assert engine.step(completions=1).microbatch is None
    assert engine.scheduler.books.is_quiescent is (mode is PauseMode.RETRACT)
    engine.drain(ContinueGeneration(call_id="go"))
    assert [life.tokens for life in engine.lives] == [alone(message) for message in messages]
    assert not engine.pipeline.corruptions


def test_continue_while_results_of_retracted_requests_are_in_flight() -> None:
    engine = SimulatedEngine(pp_size=4, chunked_prefill_size=32)
    engine.step(generate("r", prompt(70), 6))
    engine.step()
    engine.step(PauseGeneration(call_id="pause"))
    engine.step(ContinueGeneration(call_id="go"))
    request = engine.scheduler.find_request("r")
    assert request is not None
    assert request.place is Place.RETRACTING
    engine.drain()
    assert engine.life("r").tokens == alone(generate("r", prompt(70), 6))


def test_abort_of_a_request_on_its_way_back_to_the_queue() -> None:
    """Memory is freed once, however a request ends (B11)."""
    engine = SimulatedEngine(pp_size=4, chunked_prefill_size=32)
    engine.step(generate("r", prompt(70), 6))
    engine.step(PauseGeneration(call_id="pause"))
    engine.abort("r")
    assert engine.life("r").finish_reason is FinishReason.ABORT
    engine.step(completions=1)
    assert engine.scheduler.is_fully_idle


def test_pause_by_abort_ends_all_and_plans_nothing_until_continued() -> None:
    engine = SimulatedEngine(pp_size=2)
    engine.step(generate("r", prompt(30)))
    engine.step(PauseGeneration(call_id="pause", mode=PauseMode.ABORT))
    engine.step(generate("later", prompt(30)), completions=1)
    assert engine.life("r").finish_reason is FinishReason.ABORT
    assert engine.scheduler.books.is_quiescent
    engine.drain(ContinueGeneration(call_id="go"))
    assert len(engine.life("later").tokens) == 4


@pytest.mark.parametrize("cached", [0, 32])
def test_own_tokens_are_no_hits(cached: int) -> None:
    """C06: replies, handle and counters tell what was cached when the request was first admitted."""
    engine = SimulatedEngine(chunked_prefill_size=16)
    if cached:
        engine.run(generate("seed", prompt(cached), 1))
    engine.step(generate("r", prompt(90), 3), completions=1)
    engine.step(completions=1)
    engine.step(PauseGeneration(call_id="p", mode=PauseMode.RETRACT), completions=1)
    request = engine.scheduler.find_request("r")
    assert request is not None
    assert request.place is Place.WAITING
    before = len(engine.microbatches)
    replies = list(engine.step(ContinueGeneration(call_id="c")).replies)
    assert engine.microbatches[before].segments[0].start > cached, "it goes on from its own tokens"
    while not engine.life("r").ended:
        replies += engine.step(completions=1).replies
    assert {reply.cached_tokens for reply in replies if isinstance(reply, TokenOutput)} == {cached}
    assert request.cached_tokens == engine.scheduler.stats().cached_tokens == cached
