"""Asynchronous scheduling: a decode is launched before the token before it is known.

Goal: clients and the cache see the same as without it. A token computed after a stop is dropped, and its page is kept
until then; requests whose sampling depends on their last token are not planned ahead; nothing is retracted for a decode
planned ahead, which can itself be preempted and retracted. Method: one stage with two microbatches in flight; stops,
aborts, pauses, flushes, failures and retractions while the second one is in flight. Origin: vLLM issues 27878, 26292,
29379 and 49674, vLLM pull requests 29542, 45357, 48245 and 47900, SGLang issues 14972, 24590 and 34112, SGLang pull
requests 13713 and 18803; B06, B12, C01. Mutants: a-stop-frees-what-went-ahead, a-token-too-many-is-cached,
an-output-is-not-cached, a-token-too-many-counts, ahead-of-the-last-token, more-than-one-goes-ahead, nothing-goes-ahead,
ahead-of-a-penalty, ahead-of-a-grammar, ahead-of-the-urgent, the-wrong-one-gives-way,
retraction-forgets-what-went-ahead, abort-ignores-in-flight.
"""

from ci.register import register_cpu_ci
from engine import EngineConfig
from scripted import scripted

register_cpu_ci(est_time=8, suite="base-cpu")

AHEAD = EngineConfig(async_scheduling=True, page_size=4, chunked_prefill_size=16, kv_sanitizer=True)
DEEP = EngineConfig(async_scheduling=True, pp_async_depth=3, mixed_chunk=True, page_size=4, chunked_prefill_size=16)
SMALL = EngineConfig(async_scheduling=True, page_size=4, chunked_prefill_size=16, max_total_tokens=48)
URGENT = EngineConfig(
    async_scheduling=True, schedule_policy="priority", priority_preemption=True, max_running_requests=2, page_size=4
)

WENT_AHEAD = "a decode was planned ahead"
TOO_MANY = "it has stopped, and one decode of it is in flight"
ALONE_IN_FLIGHT = "all queues are clear, but a token too many is in flight"
TWO = "two decodes of it are in flight"
WAITS = "the one that is to give way is in flight"
FULL = "all rows are taken, and a request that may preempt waits"


def _is_ahead(t, *requests):
    """Return whether all of these were planned ahead in a microbatch in flight."""
    ahead = {rid for microbatch in t.state.in_flight for rid in microbatch.ahead}
    return {request.rid for request in requests} <= ahead


def _in_flight(t, request):
    return sum(request.rid in microbatch.rids for microbatch in t.state.in_flight)


def _stopping(t, prompt_len, place):
    """Start a request that stops at its token number ``place``, or before it if that token came earlier."""
    first = t.start_req(prompt_len=prompt_len, max_new_tokens=place)
    yield from t.run_until_finished(first)
    yield from t.run_until_idle()
    t.evict()
    stop = first.output_ids[-1]
    again = t.start_req(prompt_len=prompt_len, max_new_tokens=place + 20, stop_token_ids=(stop,))
    return again, first.output_ids[: first.output_ids.index(stop) + 1]


@scripted(AHEAD, must_reach=[WENT_AHEAD])
def test_two_requests_say_what_they_say_alone(t):
    a = t.start_req(prompt_len=10, max_new_tokens=12, return_logprob=True)
    b = t.start_req(prompt_len=9, prompt_seed=1, max_new_tokens=9, temperature=1.0, seed=7)
    while not (a.finished and b.finished):
        yield
        t.sometimes(WENT_AHEAD, _is_ahead(t, a, b))
    assert (len(a.output_ids), len(b.output_ids)) == (12, 9)
    assert len(a.logprobs) == 12


@scripted(DEEP, must_reach=[WENT_AHEAD])
def test_at_most_one_decode_goes_ahead_beside_prompts(t):
    a = t.start_req(prompt_len=10, max_new_tokens=16)
    yield from t.advance_to_decode_step(a, 2)
    b = t.start_req(prompt_len=60, prompt_seed=1, max_new_tokens=4)
    while not (a.finished and b.finished):
        yield
        assert _in_flight(t, a) <= 2
        t.sometimes(WENT_AHEAD, _is_ahead(t, a) and b.is_chunking)
    assert (len(a.output_ids), len(b.output_ids)) == (16, 4)


@scripted(AHEAD, must_reach=[TOO_MANY])
def test_a_stop_is_the_last_token(t):
    a, said = yield from _stopping(t, 10, 4)
    before = t.engine_stats().generated_tokens
    yield from t.run_until(lambda: a.finished)
    t.sometimes(TOO_MANY, _in_flight(t, a) == 1)
    yield from t.run_until_idle()
    assert (a.finish_reason, a.output_ids, a.client.token_ids) == ("stop", said, said)
    generated = t.engine_stats().generated_tokens - before
    assert generated == len(said), f"{generated} tokens were generated, its client has {len(said)}"


@scripted(AHEAD, must_reach=[TOO_MANY])
def test_pages_are_kept_until_the_token_too_many_is_back(t):
    a, _ = yield from _stopping(t, 10, 4)
    yield from t.run_until(lambda: a.finished)
    t.sometimes(TOO_MANY, _in_flight(t, a) == 1)
    t.hold_results()
    assert a.kv_pages, "it owns no memory while a decode of it is in flight"
    held, rows = t.state.kv.held, t.state.rows.free
    b = t.start_req(prompt_len=20, prompt_seed=1, max_new_tokens=2)
    yield
    assert b.status == "running"
    assert (t.state.kv.held, t.state.rows.free) >= (held, rows - 1)
    t.release_results()
    yield from t.run_until_finished(b)
    assert t.state.kv.held == 0


@scripted(AHEAD, must_reach=[TOO_MANY])
def test_what_is_cached_ends_before_the_token_that_stopped(t):
    # Prompt and output fill whole pages, the last token of which is the one that stops.
    for prompt_len in (8, 9, 10, 11):
        a, said = yield from _stopping(t, prompt_len, 5)
        cached = t.state.kv.cached
        yield from t.run_until(lambda a=a: a.finished)
        t.sometimes(TOO_MANY, _in_flight(t, a) == 1)
        yield from t.run_until_idle()
        pages = (prompt_len + len(said) - 1) // AHEAD.page_size
        assert t.state.kv.cached - cached == pages, f"{t.state.kv.cached - cached} pages are cached, not {pages}"
        t.evict()


@scripted(AHEAD, must_reach=[ALONE_IN_FLIGHT])
def test_a_flush_waits_for_the_token_too_many(t):
    a, _ = yield from _stopping(t, 10, 4)
    yield from t.run_until(lambda: a.finished)
    t.sometimes(ALONE_IN_FLIGHT, t.state.queues_clear and _in_flight(t, a) == 1)
    t.hold_results()
    flush, later = t.flush_cache(), t.flush_cache(timeout_s=5)
    yield from t.run_until(lambda: flush.done)
    assert flush.status == 400
    assert not later.done
    t.release_results()
    yield from t.run_until(lambda: later.done)
    assert later.status == 200
    assert t.state.kv.free == t.state.kv.total


@scripted(AHEAD)
def test_nothing_is_planned_ahead_of_the_last_token(t):
    before = t.forward_ct
    a = t.start_req(prompt_len=10, max_new_tokens=6, ignore_eos=True)
    yield from t.run_until_finished(a)
    yield from t.run_until_idle()
    assert len(a.output_ids) == 6
    assert t.forward_ct - before == 6, f"{t.forward_ct - before} microbatches for 6 tokens"


@scripted(AHEAD, must_reach=[WENT_AHEAD])
def test_what_looks_back_waits_for_its_token(t):
    b = t.start_req(prompt_len=9, prompt_seed=1, max_new_tokens=9)
    counts = t.start_req(prompt_len=10, max_new_tokens=8, frequency_penalty=0.5, ignore_eos=True)
    bound = t.start_req(prompt_len=12, prompt_seed=2, regex="[a-c]{7}", max_new_tokens=12)
    while not (b.finished and counts.finished and bound.finished):
        yield
        t.sometimes(WENT_AHEAD, _is_ahead(t, b))
        for request in (counts, bound):
            assert not _is_ahead(t, request), f"{request.rid} is planned ahead"
    assert (len(counts.output_ids), len(b.output_ids)) == (8, 9)


@scripted(AHEAD, must_reach=[TWO])
def test_an_abort_waits_for_both(t):
    a = t.start_req(prompt_len=10, max_new_tokens=16, ignore_eos=True)
    yield from t.advance_to_decode_step(a, 2)
    t.hold_results()
    t.sometimes(TWO, _in_flight(t, a) == 2)
    said = a.output_ids
    t.abort(a)
    yield
    assert (a.finish_reason, a.output_ids) == ("abort", said)
    t.release_results(1)
    yield
    assert a.kv_pages
    assert not t.state.is_quiescent
    t.release_results()
    yield from t.run_until_idle()
    assert (a.kv_pages, a.output_ids) == (0, said)


@scripted(AHEAD, must_reach=[TWO])
def test_a_retraction_waits_for_both(t):
    a = t.start_req(prompt_len=10, max_new_tokens=16, ignore_eos=True)
    yield from t.advance_to_decode_step(a, 2)
    t.hold_results()
    t.sometimes(TWO, _in_flight(t, a) == 2)
    t.pause_generation("retract")
    yield
    for left in (1, 0):
        t.release_results(1)
        yield from t.run_until(lambda left=left: len(t.state.in_flight) == left)
        assert (a.status == "waiting") == (left == 0), f"it is {a.status} with {left} decodes in flight"
    # Both tokens are sent: they are the next ones in any case.
    assert len(a.output_ids) == 4
    t.release_results()
    t.continue_generation()
    yield from t.run_until_finished(a)
    assert (a.retractions, len(a.output_ids)) == (1, 16)


@scripted(AHEAD, must_reach=[TWO])
def test_a_failure_ends_what_went_ahead_of_it(t):
    a = t.start_req(prompt_len=10, max_new_tokens=16, ignore_eos=True)
    yield from t.advance_to_decode_step(a, 2)
    t.hold_results()
    t.fail_next_step(0)
    yield
    t.release_results(1)
    yield from t.run_until(lambda: _in_flight(t, a) == 2)
    t.sometimes(TWO, _is_ahead(t, a))
    t.release_results()
    yield from t.run_until_idle()
    assert a.finish_reason == "error"
    b = t.start_req(prompt_len=10, max_new_tokens=6)
    yield from t.run_until_finished(b)
    assert b.finish_reason == "length"


@scripted(URGENT, must_reach=[FULL])
def test_the_urgent_preempt_what_went_ahead(t):
    slow = [t.start_req(prompt_len=12, prompt_seed=i, max_new_tokens=30, ignore_eos=True) for i in range(2)]
    yield from t.advance_to_decode_step(slow[1], 3)
    assert _is_ahead(t, *slow)
    urgent = t.start_req(prompt_len=12, prompt_seed=2, max_new_tokens=2, priority=1)
    t.sometimes(FULL, t.state.rows.free == 0)
    for _ in range(8):
        yield
    assert urgent.status != "waiting", "the urgent request still waits for those that are planned ahead"
    yield from t.run_until_all_finished([urgent, *slow])
    assert sum(request.retractions for request in slow) == 1


@scripted(SMALL, must_reach=[WAITS])
def test_the_latest_gives_way_when_it_is_back(t):
    a = t.start_req(prompt_len=13, max_new_tokens=14, ignore_eos=True)
    b = t.start_req(prompt_len=12, prompt_seed=1, max_new_tokens=14, ignore_eos=True)
    yield from t.advance_to_decode_step(b, 2)
    c = t.start_req(prompt_len=9, prompt_seed=2, max_new_tokens=6, ignore_eos=True)
    while not (a.finished and b.finished and c.finished):
        yield
        needy = [one for one in (a, b) if one.rid in t.state.running and not _in_flight(t, one)]
        t.sometimes(WAITS, bool(needy) and not t.state.kv.free and bool(t.state.in_flight))
        assert a.retractions == 0, "the one that came first gave way"
    assert [len(one.output_ids) for one in (a, b, c)] == [14, 14, 6]
