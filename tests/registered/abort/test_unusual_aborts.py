"""Aborts that name no request, name one twice, or meet the next life of a rid.

Goal: an abort is idempotent and answered, even for an unknown rid; a reused rid names a new request. Method: unknown
and finished rids, two aborts in one step, abort and restart of one rid side by side. Origin: the abort tests of
SGLang's scripted runtime; B11, D04. Mutants: abort-of-an-unknown-rid-kills, abort-and-finish-free-twice,
waiting-requests-are-not-aborted, disconnect-aborts-nothing, abort-waits-for-a-token.
"""

import pytest
from thinned import thinned

from ci.register import register_cpu_ci
from engine import EngineConfig
from scripted import scripted

register_cpu_ci(est_time=2, suite="base-cpu")

CHUNK = 64
ONE_STAGE = EngineConfig(chunked_prefill_size=CHUNK)
PP4 = EngineConfig(pp_size=4, pp_async_depth=2, chunked_prefill_size=CHUNK)


@scripted(ONE_STAGE)
def test_an_unknown_rid(t):
    r = t.start_req(prompt_len=10, max_new_tokens=3)
    call = t.abort("no-such-rid")
    yield
    assert call.status == 200
    yield from t.run_until_finished(r)
    assert r.finish_reason == "length"


@pytest.mark.parametrize("how", ["abort", "abort_all", "pause"])
@scripted(PP4)
def test_the_same_rid_again_in_the_step_of_its_abort(t, how):
    """The rid is free as soon as the abort has arrived; the old request's end comes first."""
    old = t.start_req(rid="one", prompt_len=2 * CHUNK - 3, max_new_tokens=5)
    yield from t.advance_to_stage(old, "last_chunk")
    if how == "abort":
        t.abort("one")
    elif how == "abort_all":
        t.abort_all()
    else:
        t.pause_generation("abort")
        t.continue_generation()
    new = t.start_req(rid="one", prompt_len=20, prompt_seed=1, max_new_tokens=2)
    assert [arrival.kind for arrival in t.state.arrived][-1] == "start"
    yield
    assert (old.status, new.finished) == ("aborted", False)
    assert old.client.finish_reason == "abort"
    yield from t.run_until_finished(new)
    assert new.finish_reason == "length"
    assert new.client.token_ids == new.output_ids
    assert (old.client.terminal_answers, new.client.terminal_answers) == (1, 1)


@scripted(ONE_STAGE)
def test_the_same_rid_again_in_the_step_of_a_token(t):
    """The old request's last token and its end are its own client's, and the new client is awaited for its own."""
    old = t.start_req(rid="one", prompt_len=10, max_new_tokens=5)
    yield from t.advance_to_decode_step(old, 1)
    t.abort(old)
    new = t.start_req(rid="one", prompt_len=20, prompt_seed=1, max_new_tokens=3)
    yield from t.run_until_finished(new)
    assert (old.finish_reason, len(old.output_ids)) == ("abort", 2)
    assert old.client.token_ids == old.output_ids
    assert new.client.token_ids == new.output_ids


@scripted(ONE_STAGE)
def test_a_finished_rid(t):
    r = t.start_req(prompt_len=10, max_new_tokens=3)
    yield from t.run_until_finished(r)
    call = t.abort(r)
    yield
    assert call.status == 200
    assert r.finish_reason == "length"
    assert r.client.terminal_answers == 1


@scripted(PP4)
def test_two_aborts_in_one_step(t):
    r = t.start_req(prompt_len=2 * CHUNK - 3, max_new_tokens=3)
    yield from t.advance_to_stage(r, "last_chunk")
    calls = [t.abort(r), t.abort(r), t.abort_all()]
    yield
    assert [call.status for call in calls] == [200, 200, 200]
    assert r.finish_reason == "abort"
    again = t.abort(r)
    yield from t.run_until_idle()
    assert again.done
    assert r.client.terminal_answers == 1
    assert t.engine_stats().requests_aborted == 1


@pytest.mark.parametrize("how", thinned(["abort", "abort_all", "pause"], one_in=3))
@scripted(PP4)
def test_the_client_hangs_up_in_the_step_of_its_abort(t, how):
    """The front end sends no second abort. ``disconnect`` waited ten seconds for one and then blamed the front end."""
    r = t.start_req(prompt_len=2 * CHUNK - 3, max_new_tokens=5)
    other = t.start_req(prompt_len=10, prompt_seed=1, max_new_tokens=3)
    yield from t.advance_to_stage(r, "last_chunk")
    if how == "abort":
        t.abort(r)
    elif how == "abort_all":
        t.abort_all()
    else:
        t.pause_generation("abort")
        t.continue_generation()
    t.disconnect(r)
    yield
    assert (r.finish_reason, r.client.dropped) == ("abort", True)
    yield from t.run_until_finished(other)
    assert other.finish_reason == ("length" if how == "abort" else "abort")


@scripted(ONE_STAGE)
def test_abort_before_the_first_step(t):
    """The request and its abort become visible in the same step, in this order."""
    r = t.start_req(prompt_len=10, max_new_tokens=3)
    t.abort(r)
    yield
    assert r.finish_reason == "abort"
    assert r.output_ids == ()
    assert t.forward_ct == 0
    assert t.is_fully_idle


@scripted(ONE_STAGE)
def test_a_stop_string_ends_a_request(t):
    free = t.start_req(prompt_len=10, max_new_tokens=12)
    yield from t.run_until_finished(free)
    stop = free.client.text[3:5]
    r = t.start_req(prompt_len=10, max_new_tokens=200, stop=stop)
    yield from t.run_until_finished(r, max_steps=20)
    assert r.client.finish_reason == "stop"
    assert stop not in r.client.text
    yield from t.run_until_idle()
    assert t.state.kv.held == 0


@scripted(PP4, must_reach=["it was aborted before its microbatch failed"])
def test_a_request_is_aborted_and_then_its_microbatch_fails(t):
    r = t.start_req(prompt_len=2 * CHUNK - 3, max_new_tokens=2)
    t.fail_next_step(0)
    yield
    t.abort(r)
    yield
    t.sometimes("it was aborted before its microbatch failed", r.status == "aborted" and r.kv_pages > 0)
    yield from t.run_until_idle()
    assert r.finish_reason == "abort"
    assert t.state.kv.free == t.state.kv.total, "its pages are kept"
