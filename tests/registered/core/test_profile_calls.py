"""Profiles of the stages, begun and ended between two microbatches.

Goal: one at a time, each call answered with its result, in its own place of the pipeline; a pause does not hold it up;
what a script leaves is ended before the next one. Method: calls beside a running request. Origin: E04. Mutants:
two-profiles-at-once, a-pause-holds-profiles-up.
"""

from ci.register import register_cpu_ci
from engine import EngineConfig
from scripted import scripted

register_cpu_ci(est_time=4, suite="base-cpu")

PP2 = EngineConfig(pp_size=2, chunked_prefill_size=64)
WINDOW = "a profile's call is in flight beside a decode"


@scripted(PP2, tiers=("sim",), must_reach=[WINDOW])
def test_one_profile_at_a_time(t):
    r = t.start_req(prompt_len=20, max_new_tokens=12, ignore_eos=True)
    yield from t.advance_to_decode_step(r, 1)
    early = t.stop_profile()
    first = t.start_profile()
    yield
    assert (early.status, first.done) == (400, False)
    assert "no profile is running" in early.text
    second = t.start_profile()
    yield
    assert second.status == 400, "another profile call was open, and the second was not refused"
    assert "another profile call is in progress" in second.text
    t.sometimes(WINDOW, any(microbatch.mode == "profile" for microbatch in t.state.in_flight) or first.done)
    yield from t.run_until(lambda: first.done)
    assert first.status == 200
    assert "profiling into" in first.text
    again = t.start_profile()
    yield
    assert again.status == 400
    assert "POST /stop_profile first" in again.text
    end = t.stop_profile()
    yield from t.run_until(lambda: end.done)
    assert (end.status, "wrote the profile" in end.text) == (200, True)
    yield from t.run_until_finished(r)


@scripted(PP2, tiers=("sim",))
def test_a_pause_does_not_hold_a_profile_up(t):
    r = t.start_req(prompt_len=20, max_new_tokens=6)
    yield from t.advance_to_decode_step(r, 1)
    t.pause_generation("in_place")
    begin = t.start_profile()
    yield from t.run_until(lambda: begin.done)
    assert begin.status == 200
    assert not r.finished
    t.continue_generation()
    yield from t.run_until_finished(r)


@scripted(PP2, tiers=("sim",))
def test_a_profile_that_failed_in_a_stage_is_not_taken(t):
    begin = t.start_profile()
    t.kill_stage(1)
    yield
    assert begin.status == 400
    assert "stage-1" in begin.text


def takes_a_profile(t):
    r = t.start_req(prompt_len=20, max_new_tokens=4)
    begin = t.start_profile()
    yield from t.run_until(lambda: begin.done)
    again = t.start_profile()
    yield from t.run_until(lambda: again.done)
    end = t.stop_profile()
    yield from t.run_until(lambda: end.done)
    yield from t.run_until_finished(r)
    assert (begin.status, again.status, end.status) == (200, 400, 200)


def test_a_script_with_a_profile_has_one_digest(harness):
    """A server names the folder of a profile by date and by chance."""
    with harness(PP2) as engine:
        outcomes = [engine.run(takes_a_profile) for _ in range(2)]
    assert outcomes[0].digest == outcomes[1].digest
