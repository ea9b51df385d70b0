"""Weight updates: only when the engine is quiescent, ordered with the microbatches, and the old cache is gone."""

from __future__ import annotations

import pytest
from scripted_lockstep.machine import EngineMachine
from simulated_engine import SimulatedEngine, alone, generate, prompt

from engine.core.errors import IntegrityError
from engine.core.memory import KVMemory
from engine.core.messages import (
    Abort,
    ContinueGeneration,
    FlushCache,
    PauseGeneration,
    PauseMode,
    PipelineFailed,
    UpdateWeights,
)
from engine.core.plan import ForwardMode

UPDATE = UpdateWeights(call_id="update", model_path="embedded:7")
FLAGSHIP = {"pp_size": 4, "pp_async_depth": 2, "chunked_prefill_size": 64}


def warm_engine(**config: object) -> SimulatedEngine:
    """Idle, with a prefix in the cache."""
    engine = SimulatedEngine(**config)
    engine.run(generate("warm", prompt(64)))
    assert engine.scheduler.memory.pages.cached
    return engine


def test_an_update_drops_the_cache_and_changes_what_requests_say() -> None:
    """B15: the same prompt hits nothing of the old weights and says something else; the version counts."""
    engine = warm_engine()
    before = engine.life("warm").tokens
    engine.drain(UPDATE)
    assert engine.answers["update"].ok
    assert "version 1, flushed" in engine.answers["update"].message
    assert engine.scheduler.stats().weights_version == 1
    assert engine.scheduler.memory.pages.cached == 0
    assert engine.run(generate("again", prompt(64)))[0] != before
    assert engine.scheduler.stats().cached_tokens == 0


def test_back_to_the_configured_weights() -> None:
    engine = warm_engine()
    engine.drain(UPDATE)
    engine.drain(UpdateWeights(call_id="back"))
    assert engine.run(generate("again", prompt(64)))[0] == alone(generate("again", prompt(64)))
    assert engine.scheduler.stats().weights_version == 2


def test_mutant_that_keeps_the_cache_is_seen_in_the_kv(monkeypatch: pytest.MonkeyPatch) -> None:
    """B15: served KV of the old weights is another chain, so the pipeline notices."""
    engine = warm_engine()
    monkeypatch.setattr(KVMemory, "reset", lambda memory: None)
    engine.drain(UPDATE)
    engine.drain(generate("again", prompt(80)))
    assert any("are not one prefix" in corruption for corruption in engine.pipeline.corruptions)


def test_an_update_is_refused_while_a_last_chunk_is_in_flight() -> None:
    """B15: every queue is empty, and the result of a dispatched prompt is still to come."""
    engine = SimulatedEngine(**FLAGSHIP)
    engine.step(generate("r", prompt(125)))
    engine.step(completions=1)
    engine.step(UPDATE)
    answer = engine.answers["update"]
    assert not answer.ok
    assert "weight update refused: the engine is busy" in answer.message
    assert "in_flight=1" in answer.message
    engine.drain()
    assert engine.scheduler.stats().weights_version == 0


def test_nothing_is_launched_between_the_update_and_its_result() -> None:
    engine = warm_engine(**FLAGSHIP)
    engine.step(UPDATE, generate("r", prompt(64)))
    assert engine.microbatches[-1].mode is ForwardMode.UPDATE
    engine.step(generate("s", prompt(64, salt=1)))
    engine.step()
    assert engine.microbatches[-1].mode is ForwardMode.UPDATE
    engine.drain()
    assert engine.answers["update"].ok
    tokens = [engine.life(rid).tokens for rid in "rs"]
    assert all(len(said) == 4 for said in tokens)
    assert tokens[0] != alone(generate("r", prompt(64)))
    assert not engine.pipeline.corruptions


def test_a_flush_and_a_second_update_are_refused_meanwhile() -> None:
    engine = warm_engine()
    engine.step(UPDATE, FlushCache(call_id="at once"))
    engine.step(FlushCache(call_id="later"), UpdateWeights(call_id="second"))
    for call in ("at once", "later", "second"):
        assert "in_flight=1" in engine.answers[call].message
    engine.step(FlushCache(call_id="deferred", timeout_s=5.0))
    engine.drain()
    assert engine.answers["deferred"].ok


def test_one_call_at_a_time_waits_for_quiescence() -> None:
    engine = SimulatedEngine()
    engine.step(generate("r", prompt(20)))
    engine.step(UpdateWeights(call_id="update", timeout_s=5.0), FlushCache(call_id="flush", timeout_s=5.0))
    assert "another weight update waits" in engine.answers["flush"].message
    engine.drain()
    assert engine.answers["update"].ok


def test_a_deferred_update_gives_up_at_its_deadline() -> None:
    """A08: the deadline is the step's, and what it refuses changes nothing."""
    engine = SimulatedEngine()
    engine.step(generate("r", prompt(20)))
    engine.step(UpdateWeights(call_id="update", timeout_s=5.0))
    engine.now = 5.0
    engine.step()
    assert "still busy after 5.0 s" in engine.answers["update"].message
    engine.drain()
    assert engine.scheduler.stats().weights_version == 0


def test_a_pause_lets_an_update_through_and_its_requests_go_on() -> None:
    """A retracted request owns nothing: it goes on with the new weights from the tokens that it has."""
    engine = SimulatedEngine()
    engine.step(generate("r", prompt(20), new=6))
    engine.step(completions=1)
    engine.step(PauseGeneration(call_id="pause", mode=PauseMode.RETRACT))
    while engine.in_flight:
        engine.step(completions=1)
    engine.step(UPDATE)
    engine.step(completions=1)
    assert engine.answers["update"].ok
    engine.drain(ContinueGeneration(call_id="continue"))
    assert len(engine.life("r").tokens) == 6


def test_an_update_that_fails_keeps_cache_and_weights() -> None:
    engine = warm_engine()
    cached = engine.scheduler.memory.pages.cached
    engine.drain(UpdateWeights(call_id="update", model_path="/nowhere"))
    answer = engine.answers["update"]
    assert not answer.ok
    assert "got '/nowhere'; the weights are as they were" in answer.message
    assert engine.scheduler.memory.pages.cached == cached
    assert engine.run(generate("again", prompt(64)))[0] == engine.life("warm").tokens
    assert engine.scheduler.stats().cached_tokens > 0


def test_a_stage_that_dies_meanwhile_answers_the_call() -> None:
    """A06: no client waits for an answer that cannot come."""
    engine = warm_engine(pp_size=2)
    engine.step(UPDATE)
    engine.step(PipelineFailed(process="stage-1", cause="killed"))
    assert "the stage-1 process died: killed" in engine.answers["update"].message
    engine.step(UpdateWeights(call_id="late"))
    assert "the stage-1 process died" in engine.answers["late"].message


def test_aborts_meanwhile_meet_the_queue_only() -> None:
    engine = warm_engine()
    engine.step(UPDATE, generate("r", prompt(20)))
    engine.step(Abort(rid="r"))
    assert engine.life("r").ended
    engine.drain()
    assert engine.answers["update"].ok
    assert engine.scheduler.is_fully_idle


def test_start_over_is_refused_meanwhile() -> None:
    engine = warm_engine()
    engine.step(UPDATE)
    with pytest.raises(IntegrityError, match="in_flight=1"):
        EngineMachine(engine.scheduler.limits, digests=True, scheduler=engine.scheduler).start_over()
