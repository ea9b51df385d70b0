"""Pause in its three modes, and continue.

Goal: ``retract`` parks requests in the queue without memory, ``in_place`` freezes them where they are, ``abort`` ends
them; nothing is launched until ``continue``; the output is that of the undisturbed run. Method: pause in the middle of
decoding and of a split prompt, on one and on four stages. Origin: the core contracts of SGLang's scripted runtime; C06.
Mutants: pause-does-not-stop-launches, lock-refs-are-not-released, continue-needs-a-pause.
"""

from ci.register import register_cpu_ci, register_cuda_ci
from engine import EngineConfig
from scripted import scripted

register_cpu_ci(est_time=4, suite="base-cpu")
register_cuda_ci(est_time=40, stage="extra-b", runner_config="4-gpu")

CHUNK = 64
ONE_STAGE = EngineConfig(chunked_prefill_size=CHUNK)
PP4 = EngineConfig(pp_size=4, pp_async_depth=2, chunked_prefill_size=CHUNK)
WINDOW = "one request runs, one is partly prefilled"


@scripted(PP4)
def test_pause_in_place_freezes_and_resumes(t):
    r = t.start_req(prompt_len=40, max_new_tokens=8)
    yield from t.advance_to_decode_step(r, 2)
    t.pause_generation("in_place")
    yield
    launched = t.forward_ct
    for _ in range(2 * PP4.depth):
        yield
    assert t.forward_ct == launched, "a microbatch was launched while paused"
    assert r.rid in t.state.running
    assert r.kv_pages > 0
    assert t.state.paused == "in_place"
    said = r.output_ids
    t.continue_generation()
    yield from t.run_until_finished(r)
    assert r.output_ids[: len(said)] == said
    assert r.retractions == 0


@scripted(PP4, must_reach=[WINDOW])
def test_pause_retract_parks_and_resumes(t):
    runs = t.start_req(prompt_len=40, max_new_tokens=8)
    yield from t.advance_to_decode_step(runs, 2)
    prefills = t.start_req(prompt_len=6 * CHUNK - 3, prompt_seed=1, max_new_tokens=3)
    yield from t.advance_to_nth_chunk(prefills, 2)
    t.sometimes(WINDOW, runs.rid in t.state.running and prefills.is_chunking)
    t.pause_generation("retract")
    yield
    yield from t.run_until(lambda: not t.state.in_flight, max_steps=PP4.depth + 1)
    assert t.state.waiting == (runs.rid, prefills.rid)
    assert t.state.kv.held == 0
    assert t.state.rows.free == t.state.rows.total
    assert runs.kv_pages == prefills.kv_pages == 0
    assert t.state.is_quiescent
    assert not t.is_fully_idle
    t.continue_generation()
    yield from t.run_until_all_finished([runs, prefills])
    assert runs.retractions == prefills.retractions == 1


@scripted(PP4)
def test_pause_abort_ends_everything(t):
    runs = t.start_req(prompt_len=40, max_new_tokens=8)
    yield from t.advance_to_decode_step(runs, 2)
    prefills = t.start_req(prompt_len=6 * CHUNK - 3, prompt_seed=1, max_new_tokens=3)
    waits = t.start_req(prompt_len=6 * CHUNK - 3, prompt_seed=2, max_new_tokens=3)
    yield from t.advance_to_nth_chunk(prefills, 2)
    t.pause_generation("abort")
    yield
    assert {r.finish_reason for r in (runs, prefills, waits)} == {"abort"}
    yield from t.run_until_idle()
    assert t.state.paused == "abort"
    after = t.start_req(prompt_len=40, max_new_tokens=2)
    yield
    assert after.status == "waiting"
    t.continue_generation()
    yield from t.run_until_finished(after)
    assert after.finish_reason == "length"


@scripted(ONE_STAGE)
def test_continue_without_a_pause_changes_nothing(t):
    r = t.start_req(prompt_len=40, max_new_tokens=4)
    yield
    call = t.continue_generation()
    yield from t.run_until_finished(r)
    assert call.status == 200
    assert t.state.paused is None


@scripted(ONE_STAGE)
def test_the_last_pause_counts(t):
    r = t.start_req(prompt_len=40, max_new_tokens=4)
    yield from t.advance_to_decode_step(r, 1)
    t.pause_generation("in_place")
    yield
    yield
    assert r.status == "running"
    t.pause_generation("retract")
    yield
    assert r.status == "waiting"
    assert t.state.paused == "retract"
    t.continue_generation()
    yield from t.run_until_finished(r)
