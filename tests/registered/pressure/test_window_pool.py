"""The window pool at its limits: allocation, release, and the part of a prefix that is still hit.

Goal: a request takes, shares, leaves and loses the pages of the window pool that the rules of a step say; every step is
compared with them. Method: the embedded model with a window of 64 tokens, pages of 16 and pools of 7 to
12 window pages; preemption, shared prefixes that are left in turn, prefixes that lost their window pages, both pools
too small at once. Origin: B18, the sliding-window leaks of SGLang. Mutants: lost-window-page-is-not-replaced,
evicted-pages-keep-their-window-pages, window-pages-are-counted-but-not-evicted,
first-to-leave-gives-window-pages-back, last-two-tokens-are-never-hit.
"""

import pytest
from thinned import thinned

from ci.register import register_cpu_ci
from engine import EngineConfig
from scripted import scripted

register_cpu_ci(est_time=8, suite="base-cpu")

PAGE = 16
WINDOW = {"model": "embedded-window", "chunked_prefill_size": PAGE}
TWELVE = EngineConfig(**WINDOW, max_window_tokens=12 * PAGE)
SEVEN = EngineConfig(**WINDOW, max_window_tokens=7 * PAGE)
URGENT = {**WINDOW, "schedule_policy": "priority", "priority_preemption": True}
TWO_SMALL_POOLS = EngineConfig(**WINDOW, max_total_tokens=10 * PAGE, max_window_tokens=8 * PAGE)
BY_PREFIX = EngineConfig(**WINDOW, schedule_policy="lpm", max_running_requests=1, max_window_tokens=7 * PAGE)


@pytest.mark.parametrize("pages", thinned(range(8, 13), one_in=2))
@scripted(EngineConfig(**URGENT, max_window_tokens=12 * PAGE), must_reach=["the urgent one runs"])
def test_an_urgent_request_gets_window_pages(t, pages):
    """It retracts the other request only if both do not fit."""
    t.exhaust_window(leave_pages=pages)
    a = t.start_req(prompt_len=70, max_new_tokens=6)
    yield from t.advance_to_decode_step(a, 1)
    b = t.start_req(prompt_len=75, prompt_seed=1, max_new_tokens=3, priority=1)
    yield from t.run_until_finished(b)
    t.sometimes("the urgent one runs", b.finish_reason == "length")
    retracted = t.scheduler.counters.retractions
    assert retracted == (1 if pages < 11 else 0), f"{retracted} were sent back for {pages} window pages"
    yield from t.run_until_finished(a)
    t.release_exhausted()


@scripted(TWELVE)
def test_a_shared_prefix_is_left_in_turn(t):
    first = t.start_req(prompt_len=100, max_new_tokens=1)
    yield from t.run_until_finished(first)
    cached = t.state.window.cached
    long = t.start_req(prompt_len=100, max_new_tokens=14)
    short = t.start_req(prompt_len=100, max_new_tokens=3)
    gone = t.start_req(prompt_len=100, max_new_tokens=8)
    yield from t.advance_to_decode_step(gone, 2)
    t.abort(gone.rid)
    yield from t.run_until_all_finished([long, short, gone])
    assert {r.cached_tokens for r in (long, short, gone)} == {96}
    assert t.state.window.cached == cached + 1, "the page that the first one's output and theirs filled is new"
    assert t.state.window.free == t.state.window.total - t.state.window.cached


@pytest.mark.parametrize("tokens", thinned([49, 60, 75, 90], one_in=3))
@scripted(SEVEN, must_reach=["a part of the prefix is hit"])
def test_a_prefix_that_lost_window_pages_is_computed_again(t, tokens):
    """An idle prefix loses its end first, and recomputed pages replace the lost ones."""
    first = t.start_req(prompt_len=100, max_new_tokens=2)
    yield from t.run_until_finished(first)
    other = t.start_req(prompt_len=tokens, prompt_seed=1, max_new_tokens=2)
    yield from t.run_until_finished(other)
    again = t.start_req(prompt_len=100, max_new_tokens=2)
    yield from t.run_until_finished(again)
    t.sometimes("a part of the prefix is hit", again.cached_tokens < 96)
    assert again.output_ids == first.output_ids
    full = t.start_req(prompt_len=100, max_new_tokens=2)
    yield from t.run_until_finished(full)
    assert full.cached_tokens == 96
    assert t.state.window.free + t.state.window.cached == t.state.window.total


@pytest.mark.parametrize(("tokens", "hit"), [(97, 96), (96, 80), (98, 96)])
@scripted(TWELVE)
def test_every_token_but_the_last_can_be_hit(t, tokens, hit):
    first = t.start_req(prompt_len=tokens, max_new_tokens=1)
    yield from t.run_until_finished(first)
    again = t.start_req(prompt_len=tokens, max_new_tokens=1)
    yield from t.run_until_finished(again)
    assert again.cached_tokens == hit


@scripted(TWO_SMALL_POOLS, must_reach=["pages were evicted"])
def test_a_page_that_is_evicted_leaves_no_window_page(t):
    for seed in (0, 1, 2, 0):
        r = t.start_req(prompt_len=70 - seed, prompt_seed=seed, max_new_tokens=2)
        yield from t.run_until_finished(r)
        t.sometimes("pages were evicted", t.state.kv.free < 2)
    long = t.start_req(prompt_len=40, prompt_seed=4, max_new_tokens=60)
    beside = t.start_req(prompt_len=30, prompt_seed=5, max_new_tokens=12)
    yield from t.run_until_all_finished([long, beside])
    assert t.evict() == t.state.kv.total - t.state.kv.free or t.state.kv.cached == 0
    assert t.state.window.free == t.state.window.total, "without a cached page no window page is cached"
    yield


@scripted(SEVEN, must_reach=["one gave way"])
def test_a_decode_without_a_window_page_has_one_give_way(t):
    requests = [t.start_req(prompt_len=40 + i, prompt_seed=i, max_new_tokens=30) for i in range(2)]
    yield from t.run_until_all_finished(requests)
    t.sometimes("one gave way", t.scheduler.counters.retractions > 0)
    assert {r.finish_reason for r in requests} == {"length"}


@scripted(BY_PREFIX)
def test_the_longest_prefix_is_what_can_be_used_of_it(t):
    for seed in (0, 1):
        r = t.start_req(prompt_len=70, prompt_seed=seed, max_new_tokens=1)
        yield from t.run_until_finished(r)
    occupied = t.start_req(prompt_len=8, prompt_seed=9, max_new_tokens=2)
    yield
    lost = t.start_req(prompt_len=70, max_new_tokens=1)
    kept = t.start_req(prompt_len=70, prompt_seed=1, max_new_tokens=1)
    yield from t.run_until_finished(kept)
    assert occupied.finished
    assert not lost.finished, "it arrived first, but of its prefix less can be used"
    assert kept.cached_tokens == 64
    yield from t.run_until_finished(lost)


@scripted(TWELVE)
def test_window_pages_are_left_to_any_number_beside_requests(t):
    idle = t.start_req(prompt_len=60, max_new_tokens=1)
    yield from t.run_until_finished(idle)
    r = t.start_req(prompt_len=40, prompt_seed=1, max_new_tokens=20)
    yield from t.advance_to_decode_step(r, 1)
    for free in (8, 5, 7, 2, 1, 6, 3):
        t.exhaust_window(leave_pages=free)
        assert t.state.window.free == free
        yield
    t.release_exhausted()
    yield from t.run_until_finished(r)
    assert t.state.window.free + t.state.window.cached == t.state.window.total
