"""Sleep and wake: an engine releases weights and KV, loses no request, and continues as before.

Goal: sleeping stages compute nothing, no KV survives a sleep, earlier requests start again from their first token or
end, new requests wait, and an engine without weights does not wake. Method: sleep in the middle of decoding, with
results held, beside a pause, an abort, a flush, an update and a death; the harness compares every output with a run
alone. Origin: vLLM issues 44483, 37131, 37357, 53934; Dynamo 8379. Mutants: sleep-overlooks-what-is-in-flight,
sleep-keeps-the-cache, wake-without-weights, requests-begin-in-a-sleep, wake-ends-the-pause, failed-wake-counts,
failed-sleep-drops-the-cache, wake-overlooks-the-next-sleep.
"""

import pytest
from thinned import thinned

from ci.register import register_cpu_ci, register_cuda_ci
from engine import EngineConfig
from scripted import scripted

register_cpu_ci(est_time=12, suite="base-cpu")
register_cuda_ci(est_time=60, stage="extra-b", runner_config="4-gpu")

PROMPT = list(range(32, 32 + 80))
OTHER = "embedded:7"
ONE_STAGE = EngineConfig(chunked_prefill_size=64, kv_sanitizer=True)
TWO_STAGES = EngineConfig(pp_size=2, pp_async_depth=1, chunked_prefill_size=64, kv_sanitizer=True)
IN_FLIGHT = "sleep is asked for while a microbatch is in flight"


def _done(t, call):
    yield from t.run_until(lambda: call.done)
    return call


@scripted(ONE_STAGE)
def test_a_sleep_drops_the_cache_and_requests_go_on_after_it(t):
    yield from _sleep_while_one_runs(t)


@scripted(TWO_STAGES)
def test_a_sleep_drops_the_cache_and_requests_go_on_after_it_on_two_stages(t):
    yield from _sleep_while_one_runs(t)


def _sleep_while_one_runs(t):
    yield from t.warmup_radix(PROMPT)
    runs = t.start_req(prompt_len=40, max_new_tokens=6, ignore_eos=True)
    yield from t.advance_to_decode_step(runs, 2)
    sleep = yield from _done(t, t.sleep())
    assert (sleep.status, sleep.text.split(",")[0]) == (200, "asleep (level=1)")
    assert t.state.kv.free == t.state.kv.total, "KV outlives the sleep"
    assert t.scheduler.stats().sleep_level == 1
    comes = t.start_req(prompt_ids=PROMPT, max_new_tokens=3)
    launched = t.forward_ct
    for _ in range(4):
        yield
    assert t.forward_ct == launched, "something was launched while the stages sleep"
    assert runs.status == comes.status == "waiting"
    wake = yield from _done(t, t.wake())
    assert (wake.status, wake.text) == (200, "awake")
    yield from t.run_until_all_finished([runs, comes])
    assert runs.retractions == 1
    assert comes.cached_tokens == 0, "it hit KV of before the sleep"


@scripted(TWO_STAGES, must_reach=[IN_FLIGHT])
def test_a_sleep_waits_for_what_is_in_flight(t):
    a = t.start_req(prompt_len=100, max_new_tokens=4, ignore_eos=True)
    yield from t.advance_to_decode_step(a, 1)
    t.hold_results()
    yield
    t.sometimes(IN_FLIGHT, bool(t.state.in_flight))
    flying = len(t.state.in_flight)
    sleep = t.sleep()
    flush = t.flush_cache()
    for _ in range(3):
        yield
    assert not sleep.done
    assert len(t.state.in_flight) == flying, "the stages were told to sleep over what they compute"
    assert flush.status == 400, "a flush got in between a sleep and its result"
    t.release_results()
    yield from _done(t, sleep)
    yield from _done(t, t.wake())
    yield from t.run_until_finished(a)


@scripted(ONE_STAGE)
def test_a_sleep_that_aborts_ends_what_lives(t):
    runs = t.start_req(prompt_len=40, max_new_tokens=8, ignore_eos=True)
    yield from t.advance_to_decode_step(runs, 2)
    sleep = t.sleep(mode="abort")
    yield from _done(t, sleep)
    assert runs.finish_reason == "abort"
    waits = t.start_req(prompt_len=20, max_new_tokens=2)
    yield
    assert waits.status == "waiting"
    t.abort(waits)
    yield
    assert waits.finish_reason == "abort", "an abort does not reach an engine that sleeps"
    flush = yield from _done(t, t.flush_cache())
    assert flush.status == 200
    assert (yield from _done(t, t.sleep())).status == 200
    first, second = t.wake(), t.wake()
    yield from _done(t, second)
    assert (first.status, second.status) == (200, 200)
    after = t.start_req(prompt_len=20, max_new_tokens=2)
    yield from t.run_until_finished(after)


@scripted(TWO_STAGES)
def test_without_weights_an_engine_wakes_only_after_an_update(t):
    before = t.start_req(prompt_ids=PROMPT, max_new_tokens=4)
    yield from t.run_until_finished(before)
    t.sleep(level=2)
    early = t.wake()
    yield from _done(t, early)
    assert early.status == 400
    assert "/update_weights_from_disk" in early.text
    yield from t.run_until(lambda: t.scheduler.stats().sleep_level == 2)
    assert (yield from _done(t, t.wake())).status == 400
    update = yield from _done(t, t.update_weights(OTHER))
    assert update.status == 200, update.text
    after = t.start_req(prompt_ids=PROMPT, max_new_tokens=4)
    for _ in range(3):
        yield
    assert after.status == "waiting", "the update has woken the engine"
    assert (yield from _done(t, t.wake())).status == 200
    yield from t.run_until_finished(after)
    assert after.output_ids != before.output_ids


@scripted(ONE_STAGE)
def test_a_pause_and_a_sleep_are_two_things(t):
    a = t.start_req(prompt_len=40, max_new_tokens=4, ignore_eos=True)
    yield from t.advance_to_decode_step(a, 1)
    t.pause_generation("in_place")
    yield
    assert a.status == "running"
    yield from _done(t, t.sleep())
    assert t.state.paused == "in_place"
    yield from _done(t, t.wake())
    yield
    assert (a.status, t.state.paused) == ("waiting", "in_place"), "the wake has ended the pause"
    t.continue_generation()
    yield
    yield from _done(t, t.sleep())
    t.pause_generation("retract")
    yield
    yield from _done(t, t.wake())
    yield
    assert a.status == "waiting"
    t.continue_generation()
    yield from t.run_until_finished(a)


@pytest.mark.parametrize("level", [1, 2])
@pytest.mark.parametrize("stage", thinned([0, 1], one_in=2))
@scripted(TWO_STAGES)
def test_a_sleep_that_a_stage_fails_leaves_all_as_it_was(t, stage, level):
    """The other stage has weights and KV too: memory is given back by all stages or by none."""
    first = t.start_req(prompt_ids=PROMPT, max_new_tokens=2, ignore_eos=True)
    yield from t.run_until_finished(first)
    live = t.start_req(prompt_len=40, max_new_tokens=8, ignore_eos=True)
    yield from t.advance_to_decode_step(live, 1)
    cached = t.engine_stats().pages_cached
    t.hold_results()
    sleep = t.sleep(level=level)
    yield
    t.release_results()
    t.fail_next_step(stage)
    yield from _done(t, sleep)
    assert sleep.status == 400
    assert f"stage {stage}" in sleep.text
    assert t.engine_stats().sleep_level == 0
    assert t.engine_stats().pages_cached >= cached, "a sleep that has failed took the cache"
    again = t.start_req(prompt_ids=PROMPT, max_new_tokens=2, ignore_eos=True)
    yield from t.run_until_all_finished([live, again])
    assert again.cached_tokens == 64, "a sleep that has failed took the cache"


@scripted(TWO_STAGES)
def test_a_wake_that_a_stage_fails_leaves_all_asleep(t):
    a = t.start_req(prompt_len=40, max_new_tokens=3, ignore_eos=True)
    yield from t.advance_to_decode_step(a, 1)
    yield from _done(t, t.sleep())
    t.fail_next_step(1)
    wake = yield from _done(t, t.wake())
    assert wake.status == 400
    assert "stage 1" in wake.text
    yield
    assert (a.status, t.scheduler.stats().sleep_level) == ("waiting", 1)
    assert (yield from _done(t, t.wake())).status == 200
    yield from t.run_until_finished(a)


@scripted(TWO_STAGES)
def test_calls_during_a_sleep_are_carried_out_in_their_order(t):
    a = t.start_req(prompt_len=40, max_new_tokens=3, ignore_eos=True)
    yield from t.advance_to_decode_step(a, 1)
    calls = [t.sleep(), t.wake(), t.sleep(), t.wake()]
    yield from t.run_until_finished(a)
    assert [call.status for call in calls] == [200] * 4
    assert [call.text.split(" ")[0].rstrip(",") for call in calls] == ["asleep", "awake", "asleep", "awake"]


@scripted(TWO_STAGES)
def test_a_request_runs_out_of_time_while_the_engine_sleeps(t):
    yield from _done(t, t.sleep())
    a = t.start_req(prompt_len=20, max_new_tokens=3, timeout_s=2.0)
    yield
    assert a.status == "waiting"
    t.clock.advance(2.0)
    yield
    assert a.finish_reason == "timeout"
    yield from _done(t, t.wake())


@scripted(TWO_STAGES)
def test_a_death_while_asleep_ends_what_waits_and_refuses_the_wake(t):
    yield from _done(t, t.sleep())
    a = t.start_req(prompt_len=20, max_new_tokens=3)
    yield
    assert a.status == "waiting"
    t.kill_stage(0)
    yield from t.run_until(lambda: a.finished)
    assert a.finish_reason == "error"
