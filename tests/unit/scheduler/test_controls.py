"""Calls that need more than a step: the order in which due ones are launched, and all their answers."""

from __future__ import annotations

from simulated_engine import SimulatedEngine, generate, prompt

from engine.core.messages import FlushCache, LoadLora, PipelineFailed, StartProfile, UnloadLora, UpdateWeights
from engine.core.plan import ForwardMode

UPDATE = UpdateWeights(call_id="update", model_path="embedded:1")
PROFILE = StartProfile(call_id="profile", folder="/traces")
LOAD = LoadLora(call_id="load", name="a", path="embedded-lora:1")


def test_what_is_due_together_is_launched_one_after_the_other() -> None:
    """An update is alone in the pipeline; a profile shares it with a LoRA, which comes once it has been read."""
    engine = SimulatedEngine(pp_size=2, max_loras=1)
    engine.step(LOAD, PROFILE, UPDATE)
    assert [one.mode for one in engine.microbatches] == [ForwardMode.UPDATE]
    engine.step()
    assert len(engine.microbatches) == 1
    engine.step(completions=1)
    engine.step()
    assert [one.mode for one in engine.microbatches] == [ForwardMode.UPDATE, ForwardMode.PROFILE]
    engine.step(completions=1)
    modes = [one.mode for one in engine.microbatches]
    assert modes == [ForwardMode.UPDATE, ForwardMode.PROFILE, ForwardMode.LORA]
    engine.drain()
    assert all(engine.answers[call].ok for call in ("load", "profile", "update"))


def test_the_earliest_deadline_of_the_calls_that_wait_is_the_schedulers() -> None:
    """A flush and an unload may wait at the same time; the gate wakes for the first."""
    engine = SimulatedEngine(lora="a=embedded-lora:1")
    scheduler = engine.scheduler
    engine.step(generate("r", prompt(20), new=9))
    assert scheduler.deadline is None
    engine.step(FlushCache(call_id="flush", timeout_s=5.0))
    assert scheduler.deadline == 5.0
    assert not scheduler.is_at_rest
    engine.drain()
    assert engine.answers["flush"].ok
    assert scheduler.deadline is None
    assert scheduler.is_at_rest


def test_a_death_answers_every_call() -> None:
    """A06: those that wait, the one whose message is in flight, and those that come later."""
    engine = SimulatedEngine(pp_size=2, lora="a=embedded-lora:1", max_loras=2)
    engine.step(LoadLora(call_id="load", name="b", path="embedded-lora:2"), PROFILE)
    engine.step(generate("r", prompt(20), new=9))
    engine.step(FlushCache(call_id="flush", timeout_s=60.0), UnloadLora(call_id="unload", name="a", timeout_s=60.0))
    engine.step(PipelineFailed(process="stage-1", cause="killed"))
    engine.step()
    answers = {call: engine.answers[call].ok for call in ("load", "profile", "flush")}
    assert answers == {"load": False, "profile": False, "flush": True}
    assert engine.step().microbatch is None
