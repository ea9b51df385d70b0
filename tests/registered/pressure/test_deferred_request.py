"""A request that does not fit yet is tried again and again.

Goal: while it waits it owns nothing: no page, no row, no lock on the prefix that it will use. Method: a cached prefix,
a pool with too few pages, ten steps of trying, then room. Origin: pypto serving; B04. Mutant:
deferred-request-keeps-its-lock.
"""

from ci.register import register_cpu_ci
from engine import EngineConfig
from scripted import scripted

register_cpu_ci(est_time=2, suite="base-cpu")

PAGE = 16
ONE_STAGE = EngineConfig(chunked_prefill_size=64)
WINDOW = "it waits for pages while its prefix is cached"


@scripted(ONE_STAGE, must_reach=[WINDOW])
def test_a_deferred_request_owns_nothing(t):
    prefix = list(range(40, 40 + 4 * PAGE))
    yield from t.warmup_radix(prefix)
    t.exhaust_kv(leave_pages=2)
    r = t.start_req(prompt_ids=[*prefix, *range(33, 33 + 4 * PAGE)], max_new_tokens=2)
    for _ in range(10):
        yield
        locks = set(t.get_all_node_lock_refs().values())
        assert locks == {0}, "a request that owns nothing holds a lock"
        t.sometimes(WINDOW, r.status == "waiting" and t.state.kv.cached == 4)
    assert r.kv_pages == 0
    assert t.state.rows.free == t.state.rows.total
    t.release_exhausted()
    yield from t.run_until_finished(r)
    assert r.cached_tokens == 4 * PAGE
