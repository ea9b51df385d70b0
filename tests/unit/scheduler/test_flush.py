"""Flushes: only when nothing is in flight and no request owns memory, however empty the queues look."""

from __future__ import annotations

import pytest
from scripted_lockstep.machine import EngineMachine
from simulated_engine import SimulatedEngine, generate, prompt

from engine.core.audit import audit
from engine.core.errors import IntegrityError
from engine.core.messages import Abort, ContinueGeneration, FlushCache, PauseGeneration, PauseMode
from engine.core.scheduler import Books

FLAGSHIP = {"pp_size": 4, "pp_async_depth": 2, "chunked_prefill_size": 64}


def engine_in_the_window() -> SimulatedEngine:
    """Every queue is empty, and the last chunk's result is in flight."""
    engine = SimulatedEngine(**FLAGSHIP)
    engine.step(generate("r", prompt(125)))
    engine.step(completions=1)
    books = engine.scheduler.books
    assert not books.waiting
    assert books.chunked is None
    assert not books.running
    assert [launched.microbatch.segments[0].start for launched in books.in_flight] == [64]
    return engine


def test_flush_in_the_window_is_refused_and_the_request_completes() -> None:
    """B15: the idle check includes dispatched work."""
    engine = engine_in_the_window()
    engine.step(FlushCache(call_id="flush"))
    assert not engine.answers["flush"].ok
    assert "in_flight=1" in engine.answers["flush"].message
    engine.drain()
    assert len(engine.life("r").tokens) == 4


def test_mutant_without_the_in_flight_condition_dies_of_the_original_signature(monkeypatch: pytest.MonkeyPatch) -> None:
    """B15: the same flush, with the one condition switched off, corrupts the tree and the next result shows it."""
    engine = engine_in_the_window()
    monkeypatch.setattr(Books, "nothing_in_flight", property(lambda books: True))
    scheduler = engine.scheduler
    flushed = scheduler.step((FlushCache(call_id="flush"),), 0.0)
    assert flushed.replies[0].ok
    completion = engine.pipeline.next_completion(0)
    assert completion is not None
    with pytest.raises(IntegrityError, match="This request holds the node from another tree"):
        scheduler.step((completion,), 0.0)


def test_the_audit_sees_the_mutant_before_the_result_does(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_in_the_window()
    monkeypatch.setattr(Books, "nothing_in_flight", property(lambda books: True))
    engine.scheduler.step((FlushCache(call_id="flush"),), 0.0)
    with pytest.raises(IntegrityError, match="from another tree"):
        audit(engine.scheduler)


def test_flush_when_idle_empties_the_tree() -> None:
    engine = SimulatedEngine()
    engine.run(generate("r", prompt(100)))
    assert engine.scheduler.memory.pages.cached == 6
    engine.step(FlushCache(call_id="flush"))
    assert engine.answers["flush"].ok
    pages = engine.scheduler.memory.pages
    assert (pages.cached, pages.free) == (0, pages.total)


def test_requests_that_wait_and_own_nothing_do_not_refuse_a_flush() -> None:
    engine = SimulatedEngine()
    engine.step(PauseGeneration(call_id="pause", mode=PauseMode.RETRACT))
    engine.step(generate("r", prompt(30)), FlushCache(call_id="flush"))
    assert engine.answers["flush"].ok
    assert engine.scheduler.books.is_quiescent
    assert not engine.scheduler.is_fully_idle
    engine.drain(ContinueGeneration(call_id="go"))
    assert len(engine.life("r").tokens) == 4


def test_deferred_flush_waits_until_the_engine_is_quiescent() -> None:
    engine = engine_in_the_window()
    result = engine.step(FlushCache(call_id="later", timeout_s=9.0))
    assert result.deadline == 9.0
    assert "later" not in engine.answers
    engine.step(FlushCache(call_id="second", timeout_s=9.0))
    assert "another flush waits" in engine.answers["second"].message
    engine.drain()
    assert engine.answers["later"].ok
    assert engine.last is not None
    assert engine.last.deadline is None
    assert engine.scheduler.memory.pages.cached == 0


def test_deferred_flush_gives_up_at_its_deadline() -> None:
    """A08: exactly there, and not a moment before."""
    engine = engine_in_the_window()
    engine.step(FlushCache(call_id="later", timeout_s=9.0))
    engine.now = 9.0 - 2**-40
    engine.step()
    assert "later" not in engine.answers
    engine.now = 9.0
    engine.step()
    assert not engine.answers["later"].ok
    assert "after 9.0 s" in engine.answers["later"].message


def test_deferred_flush_whose_engine_gets_idle_at_its_deadline_is_done() -> None:
    """A08: the step that is given the last result at the deadline flushes."""
    engine = engine_in_the_window()
    engine.step(FlushCache(call_id="later", timeout_s=9.0), Abort(rid="r"))
    engine.now = 9.0
    engine.step(completions=1)
    assert engine.answers["later"].ok


def test_deferred_flush_comes_with_the_abort_of_the_last_request() -> None:
    """B11, B15: memory of an aborted request that is in flight counts until its result is back."""
    engine = engine_in_the_window()
    engine.step(FlushCache(call_id="later", timeout_s=9.0), Abort(rid="r"))
    assert "later" not in engine.answers
    engine.step(completions=1)
    assert engine.answers["later"].ok
    assert engine.scheduler.is_fully_idle


def test_start_over_is_refused_while_busy() -> None:
    """B15: every destructive operation asks the one idle predicate."""
    engine = engine_in_the_window()
    with pytest.raises(IntegrityError, match="in_flight=1"):
        EngineMachine(engine.scheduler.limits, digests=True, scheduler=engine.scheduler).start_over()
    engine.drain()
    EngineMachine(engine.scheduler.limits, digests=True, scheduler=engine.scheduler).start_over()
    assert engine.scheduler.step_number == 0
    assert engine.scheduler.memory.pages.cached == 0


def test_a_flush_says_how_much_it_dropped() -> None:
    """Every destruction of KV first checks what is in flight (B15)."""
    engine = SimulatedEngine(page_size=16)
    engine.run(generate("r", prompt(40), 1))
    engine.step(FlushCache(call_id="flush"))
    assert engine.answers["flush"].message == "flushed 2 cached pages"
