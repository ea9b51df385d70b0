"""G02: a flush while everything waits, retracted.

Goal: after a pause (retract) the queue holds 64 requests that own no memory, and ``/flush_cache`` succeeds. Method:
eight rows, all taken, the rest waiting; pause, flush, continue, run to the end. Origin: SGLang pull request 31962;
B15. Mutant: flush-refused-by-the-queue.
"""

from ci.register import register_cpu_ci
from engine import EngineConfig
from scripted import scripted

register_cpu_ci(est_time=3, suite="base-cpu")

EIGHT_ROWS = EngineConfig(chunked_prefill_size=64, max_running_requests=8)
WINDOW = "eight requests run, the rest waits"


@scripted(EIGHT_ROWS, must_reach=[WINDOW])
def test_flush_while_all_wait_retracted(t):
    requests = [t.start_req(prompt_len=20, prompt_seed=i % 4, max_new_tokens=4) for i in range(64)]
    yield from t.run_until(lambda: len(t.state.running) == 8)
    t.sometimes(WINDOW, len(t.state.waiting) == 56)
    t.pause_generation("retract")
    yield from t.run_until(lambda: len(t.state.waiting) == 64 and not t.state.in_flight)
    flush = t.flush_cache()
    yield from t.run_until(lambda: flush.done)
    assert flush.status == 200, flush.text
    assert t.state.kv.free == t.state.kv.total
    t.continue_generation()
    yield from t.run_until_all_finished(requests)
    assert {r.finish_reason for r in requests} == {"length"}
    assert max(r.retractions for r in requests) == 1
