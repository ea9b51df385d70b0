"""Handles of requests: rids, status, ends, priority, and one handle for each life of a rid.

Goal: a handle says what the scheduler and the client saw, from admission to the end and after it. Method: small
scripts, one claim each, on one stage. Origin: the core contracts of SGLang's scripted runtime; C02, D04. Mutants:
stop-token-is-ignored, finished-requests-stay-registered, priority-is-lost, minimum-length-is-ignored,
logprobs-are-lost, one-token-late, abort-waits-for-a-token, pause-does-not-stop-launches.
"""

import pytest

from ci.register import register_cpu_ci, register_cuda_ci
from engine import EngineConfig
from scripted import BadCall, RequestRefused, scripted

register_cpu_ci(est_time=2, suite="base-cpu")
register_cuda_ci(est_time=30, stage="base-b", runner_config="1-gpu-small")

ONE_STAGE = EngineConfig(chunked_prefill_size=64)


@scripted(ONE_STAGE)
def test_rids_are_given_and_made(t):
    named = t.start_req(rid="my-own-rid", prompt_len=10, max_new_tokens=3)
    made = [t.start_req(prompt_len=10, max_new_tokens=3) for _ in range(2)]
    assert [event.rid for event in t.state.arrived] == ["my-own-rid", *(r.rid for r in made)]
    assert t.find_req_by_rid(named.rid) is None
    yield
    assert t.find_req_by_rid(named.rid) is named.req
    assert named.req.rid == "my-own-rid"
    assert t.find_req_by_rid("missing") is None
    yield from t.run_until_all_finished([named, *made])
    assert t.find_req_by_rid(named.rid) is None
    assert named.req.rid == "my-own-rid", "the live object is kept for the very step of the end"
    yield
    assert named.req is None


@scripted(ONE_STAGE)
def test_status_goes_from_waiting_to_the_end(t):
    r = t.start_req(prompt_len=10, max_new_tokens=3)
    seen = [r.status]
    while not r.finished:
        yield
        if r.status != seen[-1]:
            seen.append(r.status)
    assert seen == ["waiting", "running", "finished"]
    assert t.status(r.rid) == "finished"
    assert t.status("missing") == "unknown"
    with pytest.raises(BadCall, match="never was"):
        t.is_finished("missing")
    aborted = t.start_req(prompt_len=10, max_new_tokens=30)
    yield
    t.abort(aborted)
    yield
    assert aborted.status == t.status(aborted.rid) == "aborted"


@scripted(ONE_STAGE)
def test_a_paused_engine_lets_requests_wait(t):
    t.pause_generation("in_place")
    r = t.start_req(prompt_len=10, max_new_tokens=3)
    for _ in range(3):
        yield
    assert r.status == "waiting"
    assert t.state.waiting == (r.rid,)
    assert not r.finished
    t.continue_generation()
    yield from t.run_until_finished(r)


@scripted(ONE_STAGE)
def test_every_finish_reason(t):
    length = t.start_req(prompt_len=10, max_new_tokens=6)
    yield from t.run_until_finished(length)
    assert length.finish_reason == "length"
    end = length.output_ids[3]
    stop = t.start_req(prompt_len=10, max_new_tokens=6, stop_token_ids=[end])
    yield from t.run_until_finished(stop)
    assert stop.finish_reason == "stop", "it went on after its stop token"
    assert stop.output_ids == length.output_ids[: length.output_ids.index(end) + 1]
    t.fail_next_step(0)
    error = t.start_req(prompt_len=12, prompt_seed=1, max_new_tokens=6)
    yield from t.run_until_finished(error)
    assert error.finish_reason == error.client.finish_reason == "error"
    assert error.error
    abort = t.start_req(prompt_len=12, prompt_seed=2, max_new_tokens=6)
    yield
    t.abort(abort)
    yield from t.run_until_finished(abort)
    assert abort.finish_reason == abort.client.finish_reason == "abort"


@scripted(ONE_STAGE)
def test_ignore_eos_runs_to_the_exact_length(t):
    requests = [t.start_req(prompt_len=10, max_new_tokens=n, ignore_eos=True) for n in (1, 2, 17)]
    yield from t.run_until_all_finished(requests)
    assert [len(r.output_ids) for r in requests] == [1, 2, 17]
    assert [len(r.client.token_ids) for r in requests] == [1, 2, 17]


@scripted(ONE_STAGE)
def test_min_new_tokens_holds_a_stop_back(t):
    free = t.start_req(prompt_len=10, max_new_tokens=8)
    yield from t.run_until_finished(free)
    held = t.start_req(prompt_len=10, max_new_tokens=8, min_new_tokens=5, stop_token_ids=list(set(free.output_ids)))
    yield from t.run_until_finished(held)
    assert len(held.output_ids) >= 5


@scripted(ONE_STAGE)
def test_priority_is_carried(t):
    r = t.start_req(prompt_len=10, max_new_tokens=3, priority=7)
    yield
    assert r.req.priority == 7
    yield from t.run_until_finished(r)


@scripted(ONE_STAGE)
def test_a_live_rid_is_refused_and_an_ended_one_is_free(t):
    first = t.start_req(rid="one-life", prompt_len=10, max_new_tokens=4)
    yield
    refused = None
    try:
        t.start_req(rid="one-life", prompt_len=10, max_new_tokens=4)
    except RequestRefused as exc:
        refused = exc
    assert refused is not None
    words = "rid must be unique among live requests, got 'one-life', which is live; wait for its end or omit rid"
    assert (refused.status, refused.body) == (409, words), "the same words in both tiers"
    yield from t.run_until_finished(first)
    second = t.start_req(rid="one-life", prompt_len=12, prompt_seed=3, max_new_tokens=2)
    assert not second.finished
    assert second.output_ids == ()
    yield from t.run_until_finished(second)
    assert (len(first.output_ids), len(second.output_ids)) == (4, 2)
    assert first.finish_reason == second.finish_reason == "length"


@scripted(ONE_STAGE)
def test_logprobs_come_with_the_tokens(t):
    asked = t.start_req(prompt_len=10, max_new_tokens=3, return_logprob=True, top_logprobs_num=2)
    silent = t.start_req(prompt_len=10, max_new_tokens=3)
    yield from t.run_until_all_finished([asked, silent])
    assert len(asked.logprobs) == 3
    assert all(entry.logprob <= 0 and len(entry.top) == 2 for entry in asked.logprobs)
    assert not any(silent.logprobs)
    assert asked.output_ids == silent.output_ids
