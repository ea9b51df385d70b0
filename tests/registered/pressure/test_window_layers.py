"""Window layers: a page is freed once, when it leaves the window, and is not read afterwards.

Goal: a request runs through a window pool shorter than itself, parked or not, and its output equals a run alone.
Method: the embedded model with a window of 64 tokens, a window pool of nine pages, chunks of 64; pauses at five points
of a request's life. Origin: B18, the sliding-window leaks of SGLang. Mutants: window-pages-go-too-early,
window-pages-are-kept, prefix-without-its-window-is-used, window-pages-are-not-kept-back,
kept-window-pages-count-as-owned.
"""

import pytest
from thinned import thinned

from ci.register import register_cpu_ci
from engine import EngineConfig
from scripted import scripted

register_cpu_ci(est_time=8, suite="base-cpu")

PAGE = 16
CHUNK = 64
WINDOW = {"model": "embedded-window", "chunked_prefill_size": CHUNK, "kv_sanitizer": True}
SMALL = EngineConfig(**WINDOW, max_window_tokens=9 * PAGE)
SMALL_PP4 = EngineConfig(**WINDOW, max_window_tokens=9 * PAGE, pp_size=4, pp_async_depth=2)
UNCACHED = EngineConfig(**WINDOW, radix_cache=False)
LONG = 5 * CHUNK + 7


@scripted(SMALL)
def test_a_request_longer_than_the_window_pool_runs(t):
    yield from _run_long(t)


@scripted(SMALL_PP4)
def test_a_request_longer_than_the_window_pool_runs_on_four_stages(t):
    yield from _run_long(t)


@pytest.mark.parametrize("mode", ["in_place", "retract", "abort"])
@pytest.mark.parametrize("steps", thinned(range(1, 6), one_in=2))
@scripted(SMALL_PP4)
def test_a_parked_request_neither_leaks_nor_frees_twice(t, mode, steps):
    """The books are audited after each step, the window pool included."""
    r = t.start_req(prompt_len=LONG, max_new_tokens=4)
    for _ in range(steps):
        yield
    t.pause_generation(mode)
    for _ in range(8):
        yield
    t.continue_generation()
    yield from t.run_until_finished(r)
    again = t.start_req(prompt_len=LONG, max_new_tokens=4)
    yield from t.run_until_finished(again)
    assert again.finish_reason == "length", again.error
    if mode != "abort":
        assert r.output_ids == again.output_ids


@scripted(UNCACHED)
def test_window_pages_stay_while_they_are_seen(t):
    alone = t.start_req(prompt_len=60, max_new_tokens=5)
    yield from t.run_until_finished(alone)
    r = t.start_req(prompt_len=60, max_new_tokens=5)
    yield from t.advance_to_decode_step(r, 1)
    other = t.start_req(prompt_len=CHUNK, prompt_seed=1, max_new_tokens=1)
    yield from t.run_until_finished(other)
    yield from t.run_until_finished(r)
    assert r.output_ids == alone.output_ids, "a window page was another request's"


@scripted(SMALL)
def test_a_prefix_is_used_as_far_as_its_window_is_there(t):
    first = t.start_req(prompt_len=8 * PAGE + 3, max_new_tokens=4)
    yield from t.run_until_finished(first)
    other = t.start_req(prompt_len=8 * PAGE, prompt_seed=1, max_new_tokens=2)
    yield from t.run_until_finished(other)
    again = t.start_req(prompt_len=8 * PAGE + 3, max_new_tokens=4)
    yield from t.run_until_finished(again)
    assert again.output_ids == first.output_ids, "a prefix was used without its window"


@scripted(SMALL, must_reach=["a request waits for window pages"])
def test_window_pages_are_exhausted_and_released(t):
    t.exhaust_window(leave_pages=1)
    assert t.state.window.free == 1
    assert t.state.kv.free == t.state.kv.total, "the other layers have all their pages"
    r = t.start_req(prompt_len=4 * PAGE, max_new_tokens=2)
    small = t.start_req(prompt_len=PAGE - 4, prompt_seed=1, max_new_tokens=2)
    yield from t.run_until_finished(small)
    t.sometimes("a request waits for window pages", r.status == "waiting")
    t.release_exhausted()
    assert t.state.window.reserved == 0
    yield from t.run_until_finished(r)
    assert t.state.window.free + t.state.window.cached == t.state.window.total


@scripted(SMALL)
def test_window_pages_go_up_and_down_to_what_is_asked(t):
    yield from t.warmup_radix([50] * (4 * PAGE))
    total, cached = t.state.window.total, t.state.window.cached
    assert cached > 0
    # Down, down to what no request owns, up, up into the cache, and up to everything.
    for free in (2, 0, total - cached, total - 1, total):
        t.exhaust_window(leave_pages=free)
        assert (t.state.window.free, t.state.window.cached) == (free, min(cached, total - free))
    yield


@scripted(SMALL, must_reach=["it cannot go on"])
def test_a_running_request_survives_that_the_window_pool_is_exhausted(t):
    r = t.start_req(prompt_len=PAGE, max_new_tokens=3 * PAGE)
    yield from t.advance_to_decode_step(r, 2)
    t.exhaust_window(leave_pages=0)
    for _ in range(3 * PAGE):
        yield
    t.sometimes("it cannot go on", not r.finished)
    t.release_exhausted()
    yield from t.run_until_finished(r)
    assert r.finish_reason == "length"


def _run_long(t):
    r = t.start_req(prompt_len=LONG, max_new_tokens=40)
    yield from t.run_until_finished(r)
    assert r.finish_reason == "length", r.error
    assert len(r.output_ids) == 40
