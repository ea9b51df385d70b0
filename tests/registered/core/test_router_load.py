"""The load for a router: running and waiting requests, unlaunched prompt tokens, pages.

Goal: exact after every step: what is cached now is not pending, what is launched is not pending, and no retraction or
abort makes a count drift. Method: requests in every place, with the numbers worked out by hand. Origin: SGLang pull
requests 22480, 27174 and 35248, vLLM pull request 38025. Mutants: load-counts-what-is-cached,
load-counts-what-is-launched, load-keeps-the-first-hit.
"""

from ci.register import register_cpu_ci
from engine import EngineConfig
from scripted import scripted

register_cpu_ci(est_time=8, suite="base-cpu")

PAGE = 16
ONE_ROW = EngineConfig(max_running_requests=1, chunked_prefill_size=64)
PP2 = EngineConfig(pp_size=2, chunked_prefill_size=32)
SMALL_POOL = EngineConfig(pp_size=2, page_size=4, chunked_prefill_size=16, max_total_tokens=44)
CHUNKED = "a prompt is split, and a part of it is in flight"
SENT_BACK = "a request waits again"
PREFIX = tuple(range(40, 40 + 4 * PAGE))


@scripted(PP2, must_reach=[CHUNKED])
def test_what_is_launched_is_not_pending(t):
    assert (t.state.load.running, t.state.load.waiting, t.state.load.pending_prefill_tokens) == (0, 0, 0)
    r = t.start_req(prompt_len=100, max_new_tokens=3)
    assert (t.state.load.running, t.state.load.waiting, t.state.load.pending_prefill_tokens) == (0, 1, 100)
    yield
    t.sometimes(CHUNKED, r.is_chunking and bool(t.state.in_flight))
    assert t.state.load.pending_prefill_tokens == 68, "what is launched is still to be launched"
    assert (t.state.load.running, t.state.load.waiting) == (1, 0)
    yield from t.advance_to_stage(r, "last_chunk")
    assert t.state.load.pending_prefill_tokens == 0
    assert t.state.load.running == 1, "a request in flight is in no count"
    yield from t.run_until_finished(r)
    assert t.state.load.running == 0


@scripted(ONE_ROW)
def test_what_is_cached_is_not_pending(t):
    yield from t.warmup_radix(PREFIX)
    a = t.start_req(prompt_len=20, max_new_tokens=6)
    yield from t.advance_to_decode_step(a, 1)
    b = t.start_req(prompt_ids=[*PREFIX, *range(33, 40)], max_new_tokens=2)
    assert t.state.load.pending_prefill_tokens == 7
    yield
    assert t.state.load.pending_prefill_tokens == 7, "a cached prefix counts as work"
    t.evict()
    yield
    assert t.state.load.pending_prefill_tokens == 4 * PAGE + 7, "a prefix that is gone counts as cached"
    t.abort(b)
    yield
    assert t.state.load.pending_prefill_tokens == 0
    assert t.state.load.waiting == 0
    yield from t.run_until_idle()


@scripted(ONE_ROW)
def test_what_must_be_computed_for_its_logprobs_is_pending(t):
    yield from t.warmup_radix(PREFIX)
    a = t.start_req(prompt_len=20, max_new_tokens=6)
    yield from t.advance_to_decode_step(a, 1)
    prompt = [*PREFIX, *range(33, 40)]
    b = t.start_req(prompt_ids=prompt, max_new_tokens=2, return_logprob=True, logprob_start_len=2 * PAGE)
    assert t.state.load.pending_prefill_tokens == 2 * PAGE + 7
    yield
    assert t.state.load.pending_prefill_tokens == 2 * PAGE + 7, "a cached prefix counts as work"
    yield from t.run_until_all_finished([a, b])


@scripted(ONE_ROW)
def test_what_was_computed_meanwhile_is_not_pending(t):
    a = t.start_req(prompt_ids=[*PREFIX, 33], max_new_tokens=4)
    b = t.start_req(prompt_ids=[*PREFIX, 34], max_new_tokens=2)
    yield
    assert t.state.load.pending_prefill_tokens == 1 + len(PREFIX) + 1
    yield from t.advance_to_decode_step(a, 1)
    assert b.status == "waiting"
    assert t.state.load.pending_prefill_tokens == 1, "the hit of its arrival counts, not that of now"
    yield from t.run_until_all_finished([a, b])


@scripted(SMALL_POOL, must_reach=[SENT_BACK])
def test_a_retraction_makes_no_count_drift(t):
    a = t.start_req(prompt_len=13, max_new_tokens=10)
    b = t.start_req(prompt_len=12, prompt_seed=1, max_new_tokens=10)
    c = t.start_req(prompt_len=9, prompt_seed=2, max_new_tokens=6)
    yield from t.run_until(lambda: any(one.retractions for one in (a, b, c)))
    (back,) = [one for one in (a, b, c) if one.retractions]
    t.sometimes(SENT_BACK, back.status == "waiting")
    cached = t.scheduler.memory.cached_tokens(back.req.ids)
    assert t.state.load.pending_prefill_tokens == len(back.prompt_ids) + len(back.output_ids) - cached
    assert (t.state.load.running, t.state.load.waiting) == (2, 1)
    yield from t.run_until_all_finished([a, b, c])
    load = t.state.load
    assert (load.running, load.waiting, load.pending_prefill_tokens) == (0, 0, 0)
    assert load.free_pages == t.state.kv.free
    assert load.total_pages == t.state.kv.total == 11
