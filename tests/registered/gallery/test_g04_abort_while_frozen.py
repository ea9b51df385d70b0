"""G04: an abort while the engine is paused in place.

Goal: an abort ends a request by itself; it needs no further decode step, which a paused engine never runs. Method: a
running request, pause (in_place), abort, and a flush that finds the engine idle although it is still paused. Origin:
miles pull request 1585; B11. Mutant: abort-waits-for-a-token.
"""

from ci.register import register_cpu_ci
from engine import EngineConfig
from scripted import scripted

register_cpu_ci(est_time=2, suite="base-cpu")

PP4 = EngineConfig(pp_size=4, pp_async_depth=2, chunked_prefill_size=64)
WINDOW = "paused in place with a running request and nothing in flight"


@scripted(PP4, must_reach=[WINDOW])
def test_abort_of_a_request_paused_in_place(t):
    a = t.start_req(prompt_len=40, max_new_tokens=30)
    yield from t.advance_to_decode_step(a, 2)
    t.pause_generation("in_place")
    yield
    yield from t.run_until(lambda: not t.state.in_flight)
    t.sometimes(WINDOW, t.state.running == (a.rid,) and t.state.paused == "in_place")
    t.abort(a)
    yield from t.run_until_finished(a, max_steps=PP4.depth + 1)
    assert a.finish_reason == "abort"
    flush = t.flush_cache()
    yield from t.run_until(lambda: flush.done)
    assert flush.status == 200, flush.text
    t.continue_generation()
    b = t.start_req(prompt_len=40, max_new_tokens=2)
    yield from t.run_until_finished(b)
