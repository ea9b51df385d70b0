"""Exhaust, release and evict, to the exact page, row and lock.

Goal: the pressure verbs leave exactly what they were asked to leave, and give back exactly what they took. Method: read
the pools before and after, with a request that has to wait in between. Origin: the core contracts of SGLang's scripted
runtime; D09. Mutants: locked-prefix-is-evicted, head-blocks-the-queue, newest-goes-first, pressure-evicts-everything,
rows-are-not-kept-back, kept-rows-count-as-owned.
"""

import pytest

from ci.register import register_cpu_ci, register_cuda_ci
from engine import EngineConfig
from scripted import BadCall, scripted

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


@scripted(ONE_STAGE)
def test_pages_go_up_and_down_to_what_is_asked(t):
    yield from t.warmup_radix([50] * (4 * PAGE))
    total = t.state.kv.total
    # Down, down to what no request owns, up, up into the cache, and up to everything.
    for pages, cached in ((10, 4), (0, 4), (7, 4), (total - 3, 3), (total, 0)):
        t.exhaust_kv(leave_pages=pages)
        assert (t.state.kv.free, t.state.kv.cached) == (pages, cached)
    t.exhaust_kv(leave_pages=total)
    assert t.state.kv.free == total
    yield


@scripted(ONE_STAGE)
def test_rows_go_up_and_down_to_what_is_asked(t):
    r = t.start_req(prompt_len=20, max_new_tokens=4)
    yield
    total = t.state.rows.total
    for rows in (5, 0, 2, total - 1, 1, total - 1):
        t.exhaust_rows(leave_rows=rows)
        assert t.state.rows.free == rows
    t.release_exhausted()
    assert t.state.rows.free == total - 1
    yield from t.run_until_finished(r)
    assert t.state.rows.free == total


@scripted(ONE_STAGE)
def test_locks_go_up_and_down_beside_a_reader(t):
    for seed in range(4):
        yield from t.warmup_radix([40 + seed] * (2 * PAGE))
    reader = t.start_req(prompt_ids=[40] * (2 * PAGE) + [1], max_new_tokens=6)
    yield from t.advance_to_decode_step(reader, 1)
    for unlocked in (1, 3, 0, 2, 3):
        t.exhaust_locks(leave_unlocked=unlocked)
        assert t.state.tree.nodes - t.state.tree.locked_nodes == unlocked
    t.exhaust_locks(leave_unlocked=0)
    with pytest.raises(BadCall, match=r"at most 3 now, .* nodes can be unlocked while requests own the rest; got 4"):
        t.exhaust_locks(leave_unlocked=4)
    t.release_exhausted()
    assert t.state.tree.nodes - t.state.tree.locked_nodes == 3
    yield from t.run_until_finished(reader)
    assert t.state.tree.locked_nodes == 0


@scripted(ONE_STAGE)
def test_a_node_that_is_locked_twice_can_be_unlocked(t):
    """A pinned leaf pins its parent as well, which then has two locks of one operator and none of a request."""
    yield from t.warmup_radix([40] * (4 * PAGE))
    yield from t.warmup_radix([40] * (2 * PAGE) + [41] * (2 * PAGE))
    assert t.state.tree.nodes == 3
    t.exhaust_locks(leave_unlocked=0)
    assert max(t.get_all_node_lock_refs().values()) == 3
    t.exhaust_locks(leave_unlocked=3)
    assert t.state.tree.locked_nodes == 0


@scripted(ONE_STAGE)
def test_what_cannot_be_left_is_refused_with_the_most_that_can(t):
    r = t.start_req(prompt_len=2 * PAGE, max_new_tokens=4)
    yield
    pages, rows = t.state.kv.total - 2, t.state.rows.total - 1
    with pytest.raises(BadCall, match=f"at most {pages} now"):
        t.exhaust_kv(leave_pages=pages + 1)
    with pytest.raises(BadCall, match=f"at most {rows} now"):
        t.exhaust_rows(leave_rows=rows + 1)
    t.exhaust_kv(leave_pages=3)
    t.exhaust_rows(leave_rows=3)
    with pytest.raises(BadCall, match=f"at most {pages} now"):
        t.exhaust_kv(leave_pages=pages + 1)
    with pytest.raises(BadCall, match=f"at most {rows} now"):
        t.exhaust_rows(leave_rows=rows + 1)
    t.exhaust_kv(leave_pages=pages)
    t.exhaust_rows(leave_rows=rows)
    yield from t.run_until_finished(r)
    assert t.state.kv.free + t.state.kv.cached == pages + 2


@scripted(ONE_STAGE)
def test_locks_of_the_operator_end_with_the_tree(t):
    yield from t.warmup_radix([40] * (2 * PAGE))
    t.exhaust_locks(leave_unlocked=0)
    t.flush_cache()
    yield
    assert t.state.tree.nodes == 0
    yield from t.warmup_radix([41] * (2 * PAGE))
    t.exhaust_locks(leave_unlocked=0)
    assert t.state.tree.locked_nodes == 1
    t.release_exhausted()
    assert t.evict() == 2
