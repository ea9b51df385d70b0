"""Pages leave for the host and come back by copy, and nothing is hit that is not known to be there.

Goal: a prompt whose pages were evicted is loaded and gives the same output, on one stage and on four; a copy that is in
flight, failed or belongs to old weights is no hit. Method: evict, let the next microbatch carry the copies, ask again;
hold the result of the one that carries them, fail it, update the weights in between. Origin: vLLM issue 45704 and pull
request 29870, SGLang issue 26792 and pull request 38316; B18. Mutants: write-back-comes-late, hit-of-a-copy-in-flight,
failed-copy-is-kept, update-forgets-the-host.
"""

from ci.register import register_cpu_ci
from engine import EngineConfig
from scripted import scripted

register_cpu_ci(est_time=9, suite="base-cpu")

SIZES = {"chunked_prefill_size": 64, "max_total_tokens": 512, "host_kv_tokens": 512, "kv_sanitizer": True}
ONE_STAGE = EngineConfig(**SIZES, pp_async_depth=1)
FOUR_STAGES = EngineConfig(**SIZES, pp_size=4, pp_async_depth=2)
LOADING = "pages of the prompt are loaded by a microbatch in flight"
WRITING = "pages of the prompt are on their way to the host"


def _evicted(t):
    """A prompt of five pages was computed and evicted; the next microbatch carries its pages to the host."""
    first = t.start_req(prompt_len=80, max_new_tokens=4)
    yield from t.run_until_finished(first)
    yield from t.run_until_idle()
    assert t.evict() == 5
    assert (t.state.host.held, t.state.host.cached) == (5, 0)
    return first


def _carried(t):
    carrier = t.start_req(prompt_len=20, prompt_seed=1, max_new_tokens=2)
    yield from t.run_until_finished(carrier)
    yield from t.run_until_idle()


def _round_trip(t):
    first = yield from _evicted(t)
    yield from _carried(t)
    assert (t.state.host.held, t.state.host.cached) == (0, 5)
    assert t.host_tokens(first.prompt_ids) == 64
    again = t.start_req(prompt_len=80, max_new_tokens=4)
    while not again.finished:
        t.sometimes(LOADING, any(flight.loaded_pages == 4 for flight in t.state.in_flight))
        yield
    assert again.output_ids == first.output_ids, "it says something else after it was loaded"
    assert again.cached_tokens == 64
    stats = t.engine_stats()
    assert (stats.host_hit_tokens, stats.host_pages_written, stats.host_pages_loaded) == (64, 5, 4)


@scripted(ONE_STAGE, must_reach=[LOADING])
def test_an_evicted_prompt_comes_back_by_copy(t):
    yield from _round_trip(t)


@scripted(FOUR_STAGES, must_reach=[LOADING])
def test_an_evicted_prompt_comes_back_by_copy_on_four_stages(t):
    yield from _round_trip(t)


@scripted(ONE_STAGE, must_reach=[WRITING])
def test_a_copy_in_flight_is_no_hit(t):
    first = yield from _evicted(t)
    t.hold_results()
    carrier = t.start_req(prompt_len=20, prompt_seed=1, max_new_tokens=2)
    yield from t.run_until(lambda: t.state.in_flight)
    t.sometimes(WRITING, t.state.in_flight[0].written_pages == 5)
    flush = t.flush_cache()
    again = t.start_req(prompt_len=80, max_new_tokens=4)
    yield
    assert flush.status == 400, "a flush does not see a copy in flight"
    yield
    t.release_results()
    yield from t.run_until_all_finished([carrier, again])
    assert again.cached_tokens == 0, "it hit a copy that was still in flight"
    assert again.output_ids == first.output_ids


@scripted(FOUR_STAGES, must_reach=[WRITING])
def test_a_copy_that_failed_is_no_hit(t):
    first = yield from _evicted(t)
    t.fail_next_step(2)
    carrier = t.start_req(prompt_len=20, prompt_seed=1, max_new_tokens=2)
    yield from t.run_until(lambda: t.state.in_flight)
    t.sometimes(WRITING, t.state.in_flight[0].written_pages == 5)
    yield from t.run_until_finished(carrier)
    assert carrier.finish_reason == "error"
    again = t.start_req(prompt_len=80, max_new_tokens=4)
    yield from t.run_until_finished(again)
    assert again.cached_tokens == 0, "it hit a copy that was never made"
    assert again.output_ids == first.output_ids
    assert t.state.host.free == t.state.host.total


@scripted(ONE_STAGE)
def test_an_update_drops_both_tiers(t):
    first = yield from _evicted(t)
    yield from _carried(t)
    update = t.update_weights("embedded:7")
    yield from t.run_until(lambda: update.done)
    assert update.status == 200, update.text
    again = t.start_req(prompt_len=80, max_new_tokens=4)
    yield from t.run_until_finished(again)
    assert again.cached_tokens == 0, "it hit KV of the old weights"
    assert again.output_ids != first.output_ids
    assert t.state.host.free == t.state.host.total
