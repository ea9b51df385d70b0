"""Profiles: begun and ended between two microbatches, one at a time, under load as well."""

from __future__ import annotations

from simulated_engine import SimulatedEngine, generate, prompt

from engine.core.messages import PauseGeneration, PipelineFailed, StartProfile, StopProfile
from engine.core.plan import ForwardMode

START = StartProfile(call_id="start", folder="/traces")


def test_a_profile_is_begun_and_ended_in_the_order_of_the_microbatches() -> None:
    """C06: requests go on meanwhile."""
    engine = SimulatedEngine(pp_size=2)
    engine.step(generate("r", prompt(20), new=6))
    engine.step(START, completions=1)
    engine.step(completions=1)
    engine.step(completions=1)
    assert engine.answers["start"].message == "profiling into /traces"
    engine.step(StopProfile(call_id="stop"))
    engine.drain()
    assert engine.answers["stop"].message == "wrote the profile into /traces"
    profiles = [one for one in engine.microbatches if one.mode is ForwardMode.PROFILE]
    assert [one.folder for one in profiles] == ["/traces", None]
    assert len(engine.life("r").tokens) == 6


def test_calls_out_of_order_are_refused() -> None:
    engine = SimulatedEngine()
    engine.step(StopProfile(call_id="early"))
    assert "no profile is running; POST /start_profile first" in engine.answers["early"].message
    engine.step(START)
    engine.step(StartProfile(call_id="meanwhile", folder="/other"))
    assert "another profile call is in progress" in engine.answers["meanwhile"].message
    engine.step(completions=1)
    engine.step(StartProfile(call_id="again", folder="/other"))
    assert "a profile is running into /traces; POST /stop_profile first" in engine.answers["again"].message
    assert [engine.answers[call].ok for call in ("early", "meanwhile", "start", "again")] == [False, False, True, False]


def test_it_waits_for_a_slot_and_not_for_a_pause() -> None:
    engine = SimulatedEngine()
    engine.step(generate("r", prompt(20)))
    engine.step(START)
    assert len(engine.microbatches) == 1
    engine.step(PauseGeneration(call_id="pause"), completions=1)
    assert engine.microbatches[-1].mode is ForwardMode.PROFILE
    engine.step(completions=1)
    assert engine.answers["start"].ok


def test_a_stage_that_dies_answers_the_call() -> None:
    """A dead or late stage ends every stream with an error (A06)."""
    engine = SimulatedEngine(pp_size=2)
    engine.step(START)
    engine.step(PipelineFailed(process="stage-1", cause="killed"))
    assert "the stage-1 process died" in engine.answers["start"].message
    engine.step(StartProfile(call_id="late", folder="/traces"))
    assert "the stage-1 process died" in engine.answers["late"].message
