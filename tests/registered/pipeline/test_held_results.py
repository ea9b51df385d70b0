"""Results held and released by a script.

Goal: held results keep a window open as long as the script needs; released one by one they arrive in launch order; a
stalled stage holds all of them. Method: hold, look at the state for many steps, release. Origin: the harness's own
contract; D09, B12. Mutants: flush-ignores-in-flight, one-token-late.
"""

from ci.register import register_cpu_ci, register_cuda_ci
from engine import EngineConfig
from scripted import scripted

register_cpu_ci(est_time=2, suite="base-cpu")
register_cuda_ci(est_time=40, stage="extra-b", runner_config="4-gpu")

CHUNK = 64
PP4 = EngineConfig(pp_size=4, pp_async_depth=2, chunked_prefill_size=CHUNK)
WINDOW = "the window has been open for twenty steps"


@scripted(PP4, must_reach=[WINDOW])
def test_a_window_is_held_open(t):
    t.hold_results()
    r = t.start_req(prompt_len=2 * CHUNK - 3, max_new_tokens=3)
    for _ in range(20):
        yield
    t.sometimes(WINDOW, t.state.queues_clear and len(t.state.in_flight) == 2)
    flush = t.flush_cache()
    yield
    assert flush.status == 400
    assert "in_flight=2" in flush.text
    t.release_results(1)
    yield
    assert len(t.state.in_flight) == 1
    assert r.output_ids == ()
    t.release_results(1)
    yield
    assert len(r.output_ids) == 1
    t.release_results()
    yield from t.run_until_finished(r)


@scripted(PP4)
def test_a_stalled_stage_holds_everything(t):
    r = t.start_req(prompt_len=40, max_new_tokens=4)
    yield from t.advance_to_decode_step(r, 1)
    t.stall_stage(2)
    said = r.output_ids
    for _ in range(2 * PP4.depth):
        yield
    assert r.output_ids == said
    assert len(t.state.in_flight) == 1
    t.resume_stage(2)
    yield from t.run_until_finished(r)
    assert len(r.output_ids) == 4
