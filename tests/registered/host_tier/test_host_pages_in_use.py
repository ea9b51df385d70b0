"""Pages of a copy stay in place until the copy is back, regardless of its request.

Goal: pages in use by a copy are never evicted from the host; an abort or a retraction during a load gives everything
back, and the output equals a run alone. Method: hosts of a few pages, evictions while pages are loaded or written, an
abort and a pause while the load is in flight. Origin: SGLang pull requests 27631, 28468 and 9874; B18. Mutants:
host-page-evicted-under-a-load, host-page-evicted-under-a-write, load-of-one-that-left-keeps-its-pages.
"""

from ci.register import register_cpu_ci
from engine import EngineConfig
from scripted import scripted

register_cpu_ci(est_time=6, suite="base-cpu")

SIZES = {"chunked_prefill_size": 64, "max_total_tokens": 256, "pp_async_depth": 1, "kv_sanitizer": True}
SIX_PAGES = EngineConfig(**SIZES, host_kv_tokens=96)
TWO_PAGES = EngineConfig(**SIZES, host_kv_tokens=32)
FULL = "room on the host is made while pages are loaded from it"
HELD = "pages are evicted while all of the host is being written"
LOADING = "the load is in flight"


def _on_the_host(t, *, pages):
    """A prompt of this many pages was computed, evicted and copied to the host."""
    first = t.start_req(prompt_len=16 * pages, max_new_tokens=4)
    yield from t.run_until_finished(first)
    yield from t.run_until_idle()
    t.evict()
    carrier = t.start_req(prompt_len=20, prompt_seed=1, max_new_tokens=1)
    yield from t.run_until_finished(carrier)
    assert t.state.host.cached == pages
    return first


def _protects_nothing(t):
    protected = [page for page in t.scheduler.memory.host.kept.values() if page.readers]
    assert not protected, f"host pages are protected for no copy: {protected}"


@scripted(SIX_PAGES, must_reach=[FULL])
def test_what_is_evicted_for_a_load_does_not_take_its_source(t):
    first = yield from _on_the_host(t, pages=5)
    other = t.start_req(prompt_len=236, prompt_seed=2, max_new_tokens=2)
    yield from t.run_until_finished(other)
    yield from t.run_until_idle()
    free = t.state.kv.free
    again = t.start_req(prompt_len=80, max_new_tokens=4)
    yield from t.run_until(lambda: t.state.in_flight)
    flight = t.state.in_flight[0]
    t.sometimes(FULL, free < 4 == flight.loaded_pages and flight.written_pages > 1)
    yield from t.run_until_finished(again)
    assert again.cached_tokens == 64
    assert again.output_ids == first.output_ids, "it was given what had taken the place of its pages"


@scripted(TWO_PAGES, must_reach=[HELD])
def test_a_page_on_its_way_keeps_its_place(t):
    for seed in (0, 2):
        r = t.start_req(prompt_len=40, prompt_seed=seed, max_new_tokens=2)
        yield from t.run_until_finished(r)
    yield from t.run_until_idle()
    t.evict(pages=2)
    t.hold_results()
    carriers = [t.start_req(prompt_len=20, prompt_seed=3, max_new_tokens=2)]
    yield from t.run_until(lambda: t.state.in_flight)
    t.evict(pages=2)
    t.sometimes(HELD, t.state.in_flight[0].written_pages == 2 and t.state.host.held == 2)
    carriers.append(t.start_req(prompt_len=20, prompt_seed=4, max_new_tokens=2))
    yield
    t.release_results()
    yield from t.run_until_all_finished(carriers)
    again = t.start_req(prompt_len=40, max_new_tokens=2)
    yield from t.run_until_finished(again)
    assert again.cached_tokens == 32, "a page that was on its way to the host has lost its place"


@scripted(SIX_PAGES, must_reach=[LOADING])
def test_an_abort_in_the_middle_of_a_load_protects_nothing_forever(t):
    first = yield from _on_the_host(t, pages=5)
    t.hold_results()
    gone = t.start_req(prompt_len=80, max_new_tokens=4)
    yield from t.run_until(lambda: t.state.in_flight)
    t.sometimes(LOADING, t.state.in_flight[0].loaded_pages == 4)
    t.abort(gone)
    flush = t.flush_cache()
    yield
    assert t.state.kv.held >= 5, "pages that a load in flight writes are given back"
    assert flush.status == 400, "a flush does not see a load in flight"
    t.release_results()
    yield from t.run_until_idle()
    assert t.state.kv.held == 0
    _protects_nothing(t)
    again = t.start_req(prompt_len=80, max_new_tokens=4)
    yield from t.run_until_finished(again)
    assert (again.cached_tokens, again.output_ids) == (64, first.output_ids)


@scripted(SIX_PAGES, must_reach=[LOADING])
def test_a_retraction_in_the_middle_of_a_load_loads_again(t):
    first = yield from _on_the_host(t, pages=5)
    t.hold_results()
    again = t.start_req(prompt_len=80, max_new_tokens=4)
    yield from t.run_until(lambda: t.state.in_flight)
    t.sometimes(LOADING, t.state.in_flight[0].loaded_pages == 4)
    t.pause_generation("retract")
    yield
    t.release_results()
    yield from t.run_until(lambda: again.status == "waiting")
    _protects_nothing(t)
    t.continue_generation()
    yield from t.run_until_finished(again)
    assert (again.cached_tokens, again.output_ids) == (64, first.output_ids)
    assert t.engine_stats().host_pages_loaded == 4 + 5
    assert t.engine_stats().host_hit_tokens == 64, "what a request finds again after a retraction is no hit"
