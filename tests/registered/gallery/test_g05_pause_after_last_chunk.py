"""G05: a pause in the steps around the last chunk's result, when nothing runs yet.

Goal: pause (retract) takes a request back wherever its last chunk is, and no request slips into the running set while
the engine is paused. Method: pause 0 to depth steps after the last chunk's launch, twice as often as there are rows,
so that a leak of one row each would stop the engine. Origin: SGLang issue 20272 and the leak of its first fix. Mutant:
pause-overlooks-the-dispatched.
"""

import pytest

from ci.register import register_cpu_ci
from engine import EngineConfig
from scripted import scripted

register_cpu_ci(est_time=3, suite="base-cpu")

CHUNK = 64
TWO_ROWS = EngineConfig(pp_size=2, pp_async_depth=1, chunked_prefill_size=CHUNK, max_running_requests=2)
WINDOW = "everything is in flight or just back"


@pytest.mark.parametrize("steps_after", [0, 1, 2, 3])
@scripted(TWO_ROWS, must_reach=[WINDOW])
def test_pause_around_the_last_chunk(t, steps_after):
    for i in range(4):
        r = t.start_req(prompt_len=2 * CHUNK - 3, prompt_seed=i, max_new_tokens=3)
        yield from t.advance_to_stage(r, "last_chunk")
        for _ in range(steps_after):
            yield
        t.sometimes(WINDOW, t.state.queues_clear or len(r.output_ids) == 1)
        t.pause_generation("retract")
        yield
        yield from t.run_until(lambda: not t.state.in_flight)
        assert not t.state.running, "a paused request slipped into the running set"
        assert t.state.rows.free == t.state.rows.total
        assert t.state.waiting == (r.rid,)
        t.continue_generation()
        yield from t.run_until_finished(r)
        assert r.retractions == 1
        assert r.finish_reason == "length"
