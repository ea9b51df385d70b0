"""Time limits: a request ends by itself when it was not started in time, or took too long.

Goal: a limit ends a request in the first step whose time has reached it, wherever it is, once; its client is told which
limit it was, and keeps the tokens that it has. Method: virtual time, in every place of a request's life; the limit and
both its neighbours. Origin: SGLang pull requests 17143, 17831, 34457 and 18760, imp issue 1640. Mutants:
time-is-looked-at-only-to-plan, time-limit-wakes-no-gate, timeout-is-called-length, timeout-frees-in-flight,
sent-back-must-start-in-time.
"""

import pytest

from ci.register import register_cpu_ci
from engine import EngineConfig
from scripted import scripted

register_cpu_ci(est_time=12, suite="base-cpu")

ONE_ROW = EngineConfig(max_running_requests=1, chunked_prefill_size=64)
SERVER_LIMIT = EngineConfig(max_running_requests=1, chunked_prefill_size=64, waiting_timeout_s=3)
PP4 = EngineConfig(pp_size=4, pp_async_depth=2, chunked_prefill_size=64)
SMALL_POOL = EngineConfig(pp_size=2, page_size=4, chunked_prefill_size=16, max_total_tokens=44, waiting_timeout_s=1)
WAITS = "it waits while another one has the row"
IN_FLIGHT = "its decode is in flight"
BETWEEN = "a part of its prompt is in flight, and it has no token"
SENT_BACK = "it waits again, with tokens of its own"


@pytest.mark.parametrize("stream", [False, True])
@scripted(ONE_ROW, must_reach=[WAITS])
def test_not_started_in_time(t, stream):
    a = t.start_req(prompt_len=20, max_new_tokens=8)
    yield from t.advance_to_decode_step(a, 1)
    b = t.start_req(prompt_len=20, prompt_seed=1, waiting_timeout_s=2, timeout_s=100, stream=stream)
    yield
    t.sometimes(WAITS, b.status == "waiting" and t.scheduler.deadline == 2)
    assert t.scheduler.deadline == 2, "nothing wakes a gate that waits when the time is over"
    t.clock.advance(1.75)
    yield
    assert b.status == "waiting"
    t.clock.advance(0.25)
    yield
    assert b.finished, "its time is over, and it waits on"
    assert b.finish_reason == "timeout"
    assert "not started after 2 s, waiting_timeout_s is 2" in b.error
    assert b.client.status == 504
    assert "waiting_timeout_s is 2" in b.client.error
    assert t.engine_stats().requests_timed_out == 1
    yield from t.run_until_finished(a)
    assert a.finish_reason == "length"


@pytest.mark.parametrize("own_s", [None, 2, 5])
@scripted(SERVER_LIMIT)
def test_of_the_servers_limit_and_its_own_the_shorter_counts(t, own_s):
    a = t.start_req(prompt_len=20, max_new_tokens=8)
    yield from t.advance_to_decode_step(a, 1)
    b = t.start_req(prompt_len=20, prompt_seed=1, waiting_timeout_s=own_s)
    yield
    t.clock.advance(2)
    yield
    assert b.finished == (own_s == 2)
    t.clock.advance(1)
    yield
    assert b.finished
    assert f"waiting_timeout_s is {2 if own_s == 2 else 3}" in b.error


@pytest.mark.parametrize("beside", [-1, 0, 1])
@scripted(ONE_ROW)
def test_the_limit_and_its_neighbours(t, beside):
    a = t.start_req(prompt_len=20, max_new_tokens=8, timeout_s=2)
    yield from t.advance_to_decode_step(a, 3)
    t.clock.advance(2 + beside / 1024)
    yield
    assert (a.finish_reason == "timeout") is (beside >= 0)
    yield from t.run_until_finished(a)


@scripted(PP4, must_reach=[IN_FLIGHT])
def test_a_running_request_keeps_what_it_has(t):
    r = t.start_req(prompt_len=40, max_new_tokens=8, timeout_s=5)
    yield from t.advance_to_decode_step(r, 3)
    yield
    t.sometimes(IN_FLIGHT, any(r.rid in one.rids for one in t.state.in_flight))
    t.clock.advance(5)
    yield
    assert r.finish_reason == "timeout", "a client cannot tell the end of its time from the end of its tokens"
    assert "not ended after 5 s, with 3 tokens, timeout_s is 5" in r.error
    assert len(r.output_ids) == 3
    assert r.kv_pages > 0, "its pages were freed while it is in flight"
    assert not t.is_fully_idle
    yield from t.run_until_idle()
    assert r.kv_pages == 0
    assert len(r.output_ids) == len(r.client.token_ids) == 3
    assert (r.client.status, r.client.finish_reason) == (200, "timeout")
    assert t.state.rows.free == t.state.rows.total


@scripted(PP4, must_reach=[BETWEEN])
def test_in_the_middle_of_a_prompt(t):
    r = t.start_req(prompt_len=300, max_new_tokens=2, timeout_s=5)
    yield from t.advance_to_nth_chunk(r, 2)
    t.sometimes(BETWEEN, r.is_chunking and not r.output_ids)
    t.clock.advance(6)
    yield
    assert r.finish_reason == "timeout"
    assert r.client.status == 504, "an answer without a token is no success"
    assert "not ended after 6 s, with 0 tokens, timeout_s is 5" in r.client.error
    yield from t.run_until_idle()
    assert t.state.kv.held == 0


@scripted(SMALL_POOL, must_reach=[SENT_BACK])
def test_a_request_that_was_sent_back_is_not_bound_to_start_again(t):
    a = t.start_req(prompt_len=13, max_new_tokens=10)
    b = t.start_req(prompt_len=12, prompt_seed=1, max_new_tokens=10)
    c = t.start_req(prompt_len=9, prompt_seed=2, max_new_tokens=6)
    yield from t.run_until(lambda: any(one.retractions for one in (a, b, c)))
    (back,) = [one for one in (a, b, c) if one.retractions]
    t.sometimes(SENT_BACK, back.status == "waiting" and bool(back.output_ids))
    t.clock.advance(2)
    yield
    assert not back.finished, "it had started, and was ended with all its tokens for not starting in time"
    yield from t.run_until_all_finished([a, b, c])
    assert {one.finish_reason for one in (a, b, c)} == {"length"}


@scripted(SMALL_POOL, must_reach=[SENT_BACK])
def test_its_own_time_goes_on_while_it_waits_again(t):
    a = t.start_req(prompt_len=13, max_new_tokens=10, timeout_s=2)
    b = t.start_req(prompt_len=12, prompt_seed=1, max_new_tokens=10, timeout_s=2)
    c = t.start_req(prompt_len=9, prompt_seed=2, max_new_tokens=6, timeout_s=2)
    yield from t.run_until(lambda: any(one.retractions for one in (a, b, c)))
    (back,) = [one for one in (a, b, c) if one.retractions]
    t.sometimes(SENT_BACK, back.status == "waiting" and bool(back.output_ids))
    t.clock.advance(2)
    yield
    assert [one.finish_reason for one in (a, b, c)] == ["timeout"] * 3
    assert back.client.status == 200
    assert back.client.token_ids == back.output_ids
    yield from t.run_until_idle()
    assert t.state.kv.held == 0


@pytest.mark.parametrize("mode", ["in_place", "retract"])
@scripted(PP4)
def test_a_pause_stops_no_clock(t, mode):
    r = t.start_req(prompt_len=40, max_new_tokens=8, timeout_s=5)
    yield from t.advance_to_decode_step(r, 2)
    t.pause_generation(mode)
    yield
    t.clock.advance(5)
    yield
    assert r.finish_reason == "timeout", "its time is over, and it waits on"
    yield from t.run_until_idle()
    assert t.state.paused == mode
    t.continue_generation()
    yield


@scripted(ONE_ROW)
def test_a_flush_that_waits_is_done_in_the_step_that_ends_the_last_request(t):
    a = t.start_req(prompt_len=20, max_new_tokens=50, timeout_s=5)
    yield from t.advance_to_decode_step(a, 2)
    t.pause_generation("in_place")
    yield from t.run_until(lambda: not t.state.in_flight)
    flush = t.flush_cache(timeout_s=60)
    yield
    assert not flush.done
    t.clock.advance(5)
    yield
    assert a.finish_reason == "timeout"
    assert flush.done
    assert flush.status == 200
    t.continue_generation()
    yield


@scripted(ONE_ROW)
def test_ends_come_in_the_order_of_deadlines(t):
    a = t.start_req(prompt_len=20, max_new_tokens=50)
    yield from t.advance_to_decode_step(a, 1)
    late = t.start_req(prompt_len=5, prompt_seed=1, timeout_s=3)
    same = t.start_req(prompt_len=5, prompt_seed=2, waiting_timeout_s=2)
    early = t.start_req(prompt_len=5, prompt_seed=3, timeout_s=2)
    yield
    t.clock.advance(10)
    yield
    ended = [reply.rid for reply in t.history[-1].replies if reply.finish_reason is not None]
    assert ended == [same.rid, early.rid, late.rid]
    t.abort(a)
    yield from t.run_until_idle()
