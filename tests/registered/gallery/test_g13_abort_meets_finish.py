"""G13: an abort around the step whose completion finishes the request.

Goal: the one that comes first ends the request, and it is freed once. Method: the abort becomes visible one step before
the finishing result, and in its very step, after the result. Origin: mini-sglang pull request 111; B11. Mutant:
abort-and-finish-free-twice.
"""

import pytest

from ci.register import register_cpu_ci
from engine import EngineConfig
from scripted import scripted

register_cpu_ci(est_time=2, suite="base-cpu")

PP2 = EngineConfig(pp_size=2, pp_async_depth=1, chunked_prefill_size=64)
WINDOW = "the finishing result is due"


@pytest.mark.parametrize("steps_before", [1, 0])
@scripted(PP2, must_reach=[WINDOW])
def test_abort_around_the_finishing_step(t, steps_before):
    a = t.start_req(prompt_len=40, max_new_tokens=4)
    yield from t.advance_to_stage(a, "last_decode")
    due = t.state.in_flight[0].due_at_step
    yield from t.run_until(lambda: t.state.step + 1 + steps_before == due)
    t.sometimes(WINDOW, len(a.output_ids) == 3 and t.state.in_flight[0].rids == (a.rid,))
    abort = t.abort(a)
    yield from t.run_until(lambda: abort.done)
    assert abort.status == 200
    yield from t.run_until_idle()
    assert a.finish_reason == ("abort" if steps_before else "length")
    assert len(a.output_ids) == (3 if steps_before else 4)
    assert a.client.terminal_answers == 1
    assert t.state.kv.held == 0
    assert t.state.rows.free == t.state.rows.total
