"""A hundred requests with pauses, aborts and pressure: nothing drifts.

Goal: after each wave the engine is idle and every account is exactly where it was. Method: ten waves of ten requests,
each with another disturbance, in a small pool. Origin: the drift test of SGLang's scripted runtime; B05, B11. Mutant:
lock-refs-are-not-released.
"""

from ci.register import register_cpu_ci
from engine import EngineConfig
from scripted import scripted

register_cpu_ci(est_time=2, suite="base-cpu")

SMALL_POOL = EngineConfig(pp_size=2, pp_async_depth=1, chunked_prefill_size=64, max_total_tokens=40 * 16)
RETRACTED = "a wave was retracted"


@scripted(SMALL_POOL, must_reach=[RETRACTED])
def test_nothing_drifts_over_a_hundred_requests(t):
    retract, abort, all_of_them, pressure = range(4)
    for wave in range(10):
        requests = [
            t.start_req(prompt_len=20 + 30 * (i % 4), prompt_seed=i % 4, max_new_tokens=3 + i % 3) for i in range(10)
        ]
        for _ in range(3 + wave):
            yield
        kind = wave % 5
        if kind == retract:
            t.pause_generation("retract")
            yield
            t.continue_generation()
        elif kind == abort:
            t.abort(requests[5])
            t.disconnect(requests[9])
        elif kind == all_of_them:
            t.abort_all()
        elif kind == pressure:
            t.exhaust_kv(leave_pages=0)
            for _ in range(10):
                yield
            t.release_exhausted()
        yield from t.run_until_all_finished(requests)
        yield from t.run_until_idle()
        t.sometimes(RETRACTED, any(r.retractions for r in requests))
        _check_accounts(t)
    assert t.engine_stats().requests_started == 100


def _check_accounts(t):
    state = t.state
    assert state.kv.held == 0
    assert state.kv.free + state.kv.cached == state.kv.total
    assert state.rows.free == state.rows.total
    assert state.tree.locked_nodes == 0
    assert not t.list_active_reqs()
