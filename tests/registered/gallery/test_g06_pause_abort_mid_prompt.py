"""G06: pause (abort) in the middle of a split prompt.

Goal: a half-prefilled request ends with a reason and gives its row and pages back while the engine is paused. Method:
chunk 2 of 4, pause (abort), count rows and pages, continue. Origin: sglang-jax pull request 984; B11. Mutant:
pause-abort-keeps-half-a-prompt.
"""

from ci.register import register_cpu_ci
from engine import EngineConfig
from scripted import scripted

register_cpu_ci(est_time=2, suite="base-cpu")

CHUNK = 64
PP4 = EngineConfig(pp_size=4, pp_async_depth=2, chunked_prefill_size=CHUNK)
WINDOW = "two of four chunks are launched"


@scripted(PP4, must_reach=[WINDOW])
def test_pause_abort_of_a_half_prefilled_request(t):
    a = t.start_req(prompt_len=4 * CHUNK - 3, max_new_tokens=4)
    yield from t.advance_to_nth_chunk(a, 2)
    t.sometimes(WINDOW, a.is_chunking and a.remaining_prompt_tokens == 2 * CHUNK - 3)
    t.pause_generation("abort")
    yield from t.run_until_finished(a)
    assert a.finish_reason == "abort"
    yield from t.run_until_idle()
    assert t.state.rows.free == t.state.rows.total, "a half-prefilled request kept its row"
    assert t.state.kv.held == 0
    assert t.state.paused == "abort"
    t.continue_generation()
    b = t.start_req(prompt_len=4 * CHUNK - 3, max_new_tokens=4)
    yield from t.run_until_finished(b)
    assert b.finish_reason == "length"
