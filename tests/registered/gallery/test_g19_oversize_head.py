"""G19: a request at the head of the queue that does not fit.

Goal: a request that can never fit is refused with its numbers; one that does not fit yet is overtaken, but a bounded
number of times. Method: fifty pages; a request for 63; one for 38 while 21 are held, with small ones after it. Origin:
vLLM issue 35541 and pypto serving; our own search, for the second in line; B09, B10. Mutants: head-blocks-the-queue,
head-is-passed-over-for-ever, only-the-head-is-passed-over, what-never-fits-is-admitted.
"""

from ci.register import register_cpu_ci
from engine import EngineConfig
from engine.core.scheduler.policy import OVERTAKEN_LIMIT_REQUESTS
from scripted import RequestRefused, scripted

register_cpu_ci(est_time=2, suite="base-cpu")

FIFTY_PAGES = EngineConfig(chunked_prefill_size=64, max_total_tokens=50 * 16)
TEN_PAGES = EngineConfig(pp_async_depth=1, page_size=4, max_total_tokens=40)
WINDOW = "the head of the queue does not fit while another one runs"


@scripted(FIFTY_PAGES)
def test_a_request_that_can_never_fit_is_refused(t):
    refused = None
    try:
        t.start_req(prompt_len=1000, max_new_tokens=8)
    except RequestRefused as exc:
        refused = exc
    assert refused is not None, "63 pages were taken on in a cache of 50"
    assert refused.status == 400
    assert "needs 63 pages" in refused.body
    assert "has 50" in refused.body
    b = t.start_req(prompt_len=10, max_new_tokens=2)
    yield from t.run_until_finished(b)
    assert t.engine_stats().waiting == 0


@scripted(FIFTY_PAGES, must_reach=[WINDOW])
def test_small_requests_get_past_one_that_does_not_fit(t):
    holder = t.start_req(prompt_len=320, max_new_tokens=12)
    yield from t.advance_to_decode_step(holder, 1)
    large = t.start_req(prompt_len=600, prompt_seed=1, max_new_tokens=2)
    small = t.start_req(prompt_len=10, prompt_seed=2, max_new_tokens=2)
    for _ in range(5):
        yield
    t.sometimes(WINDOW, large.status == "waiting" and not holder.finished)
    assert small.finished, "no request got past the one that does not fit"
    yield from t.run_until_all_finished([holder, large])
    assert large.finish_reason == "length"


@scripted(FIFTY_PAGES, must_reach=[WINDOW])
def test_passing_over_has_a_bound(t):
    holder = t.start_req(prompt_len=320, max_new_tokens=40)
    yield from t.advance_to_decode_step(holder, 1)
    large = t.start_req(prompt_len=600, prompt_seed=1, max_new_tokens=2)
    small = [t.start_req(prompt_len=10, prompt_seed=2, max_new_tokens=1) for _ in range(24)]
    yield from t.run_until(lambda: len(holder.output_ids) >= 30)
    t.sometimes(WINDOW, large.status == "waiting" and not holder.finished)
    past = sum(request.finished for request in small)
    assert past == OVERTAKEN_LIMIT_REQUESTS, f"{past} requests got past it, the bound is {OVERTAKEN_LIMIT_REQUESTS}"
    yield from t.run_until_finished(large)
    yield from t.run_until_all_finished(small)


@scripted(TEN_PAGES, must_reach=[WINDOW])
def test_the_second_in_line_has_the_bound_too(t):
    first = t.start_req(prompt_len=1, max_new_tokens=9)
    yield
    large = t.start_req(prompt_len=9, prompt_seed=1, max_new_tokens=1)
    t.exhaust_kv(1)
    small = [t.start_req(prompt_len=1, prompt_seed=2, max_new_tokens=1) for _ in range(20)]
    for _ in range(80):
        yield
    t.sometimes(WINDOW, large.status == "waiting" and first.status == "waiting" and first.req.retractions > 0)
    past = sum(request.finished for request in small)
    assert past == OVERTAKEN_LIMIT_REQUESTS, f"{past} requests got past it, the bound is {OVERTAKEN_LIMIT_REQUESTS}"
    t.release_exhausted()
    yield from t.run_until_all_finished([first, large, *small])
