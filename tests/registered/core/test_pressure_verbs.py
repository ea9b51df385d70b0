"""Exhaust, release and evict, to the exact page, row and lock.

Goal: the pressure verbs leave exactly what they were asked to leave, and give back exactly what they took. Method: read
the pools before and after, with a request that has to wait in between. Origin: the core contracts of SGLang's scripted
runtime; D09. Mutants: locked-prefix-is-evicted, head-blocks-the-queue, newest-goes-first, pressure-evicts-everything,
rows-are-not-kept-back.
"""

from ci.register import register_cpu_ci, register_cuda_ci
from engine import EngineConfig
from scripted import scripted

register_cpu_ci(est_time=2, suite="base-cpu")
register_cuda_ci(est_time=30, stage="base-b", runner_config="1-gpu-small")

PAGE = 16
ONE_STAGE = EngineConfig(chunked_prefill_size=64)
WINDOW = "a request waits for what is kept from it"


@scripted(ONE_STAGE, must_reach=[WINDOW])
def test_pages_are_exhausted_and_released(t):
    t.exhaust_kv(leave_pages=3)
    assert t.state.kv.free == 3
    r = t.start_req(prompt_len=4 * PAGE, max_new_tokens=2)
    small = t.start_req(prompt_len=PAGE, prompt_seed=1, max_new_tokens=2)
    for _ in range(6):
        yield
    t.sometimes(WINDOW, r.status == "waiting")
    assert small.finished
    t.release_exhausted()
    yield from t.run_until_finished(r)
    assert t.state.kv.free + t.state.kv.cached == t.state.kv.total


@scripted(ONE_STAGE, must_reach=[WINDOW])
def test_rows_are_exhausted_and_released(t):
    t.exhaust_rows(leave_rows=1)
    assert t.state.rows.free == 1
    first = t.start_req(prompt_len=10, max_new_tokens=4)
    second = t.start_req(prompt_len=10, prompt_seed=1, max_new_tokens=4)
    yield
    t.sometimes(WINDOW, first.status == "running" and second.status == "waiting")
    yield from t.run_until_finished(first)
    assert second.output_ids == ()
    t.exhaust_rows(leave_rows=0)
    yield from t.run_until_finished(second)
    t.release_exhausted()
    assert t.state.rows.free == t.state.rows.total


@scripted(ONE_STAGE)
def test_locks_are_exhausted_and_released(t):
    for seed in range(4):
        yield from t.warmup_radix([40 + seed] * (2 * PAGE))
    assert t.state.tree.nodes == 4
    t.exhaust_locks(leave_unlocked=1)
    assert t.state.tree.locked_nodes == 3
    assert t.evict() == 2
    assert t.state.tree.nodes == 3
    t.release_exhausted()
    assert t.state.tree.locked_nodes == 0
    assert t.evict(pages=1) == 1
    assert t.state.kv.cached == 5
    assert t.evict() == 5
    assert t.state.kv.free == t.state.kv.total
    yield


@scripted(ONE_STAGE)
def test_exhausting_evicts_only_what_it_must(t):
    yield from t.warmup_radix([50] * (4 * PAGE))
    total = t.state.kv.total
    t.exhaust_kv(leave_pages=10)
    assert (t.state.kv.free, t.state.kv.cached) == (10, 4)
    t.release_exhausted()
    assert (t.state.kv.free, t.state.kv.cached) == (total - 4, 4)
    yield
