"""G25: a hundred requests come and go.

Goal: a finished request leaves nothing behind: no entry in the registry, no row, no page, no lock. Method: a hundred
requests with every kind of end, on one engine. Origin: pypto serving; B05. Mutant: finished-requests-stay-registered.
"""

from ci.register import register_cpu_ci
from engine import EngineConfig
from scripted import scripted

register_cpu_ci(est_time=2, suite="base-cpu")

ONE_STAGE = EngineConfig(chunked_prefill_size=64)


@scripted(ONE_STAGE)
def test_a_hundred_requests_leave_the_registry(t):
    for wave in range(10):
        requests = [t.start_req(prompt_len=12 + i, prompt_seed=i % 3, max_new_tokens=2) for i in range(10)]
        if wave % 3 == 1:
            yield
            t.abort(requests[wave])
        yield from t.run_until_all_finished(requests)
    yield from t.run_until_idle()
    left = t.list_active_reqs()
    assert not left, f"{len(left)} requests are still registered"
    stats = t.engine_stats()
    assert stats.requests_started == 100
    assert stats.requests_finished + stats.requests_aborted == 100
    assert stats.requests_aborted == 3
    assert stats.rows_free == stats.rows_total
    assert stats.pages_held == 0
