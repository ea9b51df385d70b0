"""G07: the weights are updated, and the KV of the old ones must never be served again.

Goal: an update drops the prefix cache, is refused while a last chunk is in flight and every queue is empty, and changes
nothing when a stage cannot do it. Method: a cached prefix, an update, the same prompt; an update in the window; a stage
that fails the update. Origin: LMDeploy issue 4917, NeMo-RL pull request 4018; B15. Mutants: update-keeps-the-cache,
update-answered-as-launched, flush-ignores-in-flight.
"""

from ci.register import register_cpu_ci, register_cuda_ci
from engine import EngineConfig
from scripted import scripted

register_cpu_ci(est_time=9, suite="base-cpu")
register_cuda_ci(est_time=60, stage="extra-b", runner_config="4-gpu")

CHUNK = 64
PROMPT = list(range(32, 32 + 80))
OTHER = "embedded:7"
ONE_STAGE = EngineConfig(chunked_prefill_size=CHUNK, kv_sanitizer=True)
FOUR_STAGES = EngineConfig(pp_size=4, pp_async_depth=2, chunked_prefill_size=CHUNK, kv_sanitizer=True)
WINDOW = "every queue is empty, a last chunk is in flight"


@scripted(ONE_STAGE)
def test_an_update_leaves_no_prefix_of_the_old_weights(t):
    yield from _update_between_two_of_the_same(t)


@scripted(FOUR_STAGES)
def test_an_update_leaves_no_prefix_of_the_old_weights_on_four_stages(t):
    yield from _update_between_two_of_the_same(t)


def _update_between_two_of_the_same(t):
    yield from t.warmup_radix(PROMPT)
    before = t.start_req(prompt_ids=PROMPT, max_new_tokens=6)
    yield from t.run_until_finished(before)
    assert before.cached_tokens == 64
    yield from t.run_until_idle()
    update = t.update_weights(OTHER)
    yield from t.run_until(lambda: update.done)
    assert update.status == 200, update.text
    assert t.state.kv.free == t.state.kv.total, "KV of the old weights is still cached"
    assert t.state.tree.nodes == 0
    after = t.start_req(prompt_ids=PROMPT, max_new_tokens=6)
    yield from t.run_until_finished(after)
    assert after.cached_tokens == 0
    assert after.output_ids != before.output_ids, "the new weights say what the old ones said"
    assert t.scheduler.stats().weights_version == 1


@scripted(FOUR_STAGES, must_reach=[WINDOW])
def test_an_update_is_refused_while_a_last_chunk_is_in_flight(t):
    r = t.start_req(prompt_len=125, max_new_tokens=2)
    yield from t.run_until(lambda: not t.state.waiting and t.state.chunked is None and t.state.in_flight)
    t.sometimes(WINDOW, not t.state.running and r.status == "running")
    update = t.update_weights(OTHER)
    yield
    assert update.done, "the update was not refused"
    assert update.status == 400
    assert "in_flight=" in update.text
    yield from t.run_until_finished(r)
    assert len(r.output_ids) == 2
    assert t.scheduler.stats().weights_version == 0


@scripted(FOUR_STAGES)
def test_what_comes_meanwhile_waits_and_is_computed_with_the_new_weights(t):
    before = t.start_req(prompt_ids=PROMPT, max_new_tokens=4)
    yield from t.run_until_finished(before)
    yield from t.run_until_idle()
    t.hold_results()
    update = t.update_weights(OTHER)
    yield
    after = t.start_req(prompt_ids=PROMPT, max_new_tokens=4)
    flush = t.flush_cache()
    yield
    yield
    assert not update.done
    assert after.status == "waiting"
    assert flush.status == 400, "a flush got in between the update and its result"
    assert len(t.state.in_flight) == 1
    t.release_results()
    yield from t.run_until_finished(after)
    assert update.status == 200
    assert after.output_ids != before.output_ids


@scripted(FOUR_STAGES)
def test_an_update_that_a_stage_fails_changes_nothing(t):
    yield from t.warmup_radix(PROMPT)
    t.fail_next_step(2)
    update = t.update_weights(OTHER)
    yield from t.run_until(lambda: update.done)
    assert update.status == 400, "the update is said to have succeeded"
    assert "the weights are as they were" in update.text
    again = t.start_req(prompt_ids=PROMPT, max_new_tokens=4)
    yield from t.run_until_finished(again)
    assert again.cached_tokens == 64
    better = t.update_weights(OTHER, timeout_s=5)
    yield from t.run_until(lambda: better.done)
    assert better.status == 200, better.text


@scripted(ONE_STAGE)
def test_an_update_from_nowhere_is_refused_with_the_path(t):
    update = t.update_weights("/nowhere/at/all")
    yield from t.run_until(lambda: update.done)
    assert update.status == 400
    assert "/nowhere/at/all" in update.text
    assert t.scheduler.stats().weights_version == 0


@scripted(ONE_STAGE)
def test_a_paused_engine_takes_an_update_and_goes_on(t):
    r = t.start_req(prompt_ids=PROMPT, max_new_tokens=8, ignore_eos=True)
    yield from t.advance_to_decode_step(r, 2)
    t.pause_generation("retract")
    yield from t.run_until(lambda: not t.state.in_flight)
    update = t.update_weights(OTHER)
    yield from t.run_until(lambda: update.done)
    assert update.status == 200, update.text
    t.continue_generation()
    yield from t.run_until_finished(r)
    assert len(r.output_ids) == 8
    starts = [s.start for record in t.history if record.microbatch for s in record.microbatch.segments if s.sampling]
    assert starts == [0, 0], "it went on from KV of the old weights"
