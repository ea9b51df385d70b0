"""Goal: a request of several choices is one thing to its client: aborted, hung up on and refused as a whole.

Window: one choice is in flight and another one still waits when the answer is aborted by its rid.
Covers: D04 n choices under one handle, B05.
Mutants: abort-of-an-answer-ends-its-last-choice, a-disconnect-ends-the-first-choice, choices-share-a-seed,
the-rid-of-an-answer-is-given-twice.
"""

import pytest

from ci.register import register_cpu_ci
from engine import EngineConfig
from scripted import BadCall, RequestRefused, scripted

register_cpu_ci(est_time=6, suite="base-cpu")

TWO_AT_A_TIME = EngineConfig(pp_size=2, pp_async_depth=1, max_running_requests=1, chunked_prefill_size=64)
SPLIT = "one choice is in flight, another one waits"


@scripted(EngineConfig(), tiers=("sim", "server"))
def test_choices_come_to_their_ends_under_one_handle(t):
    r = t.start_req(rid="r", prompt_len=20, max_new_tokens=3, n=3, temperature=1, seed=5)
    assert [t.status(rid) for rid in ("r-0", "r-1", "r-2")] == ["waiting"] * 3
    assert (r.status, r.finished, t.status("r")) == ("waiting", False, "waiting")
    yield from t.advance_to_decode_step(r.choices[1], 1)
    assert r.status == "running"
    yield from t.run_until_finished(r)
    assert (r.status, r.client.status, r.client.closed) == ("finished", 200, True)
    assert [choice.finish_reason for choice in r.choices] == ["length"] * 3
    assert [choice.client.token_ids for choice in r.choices] == [choice.output_ids for choice in r.choices]
    # A given seed counts up with the choices, and equal seeds give equal outputs.
    alone = t.start_req(prompt_len=20, max_new_tokens=3, temperature=1, seed=6)
    yield from t.run_until_finished(alone)
    assert r.choices[1].output_ids == alone.output_ids


@scripted(TWO_AT_A_TIME, tiers=("sim", "server"), must_reach=[SPLIT])
def test_abort_of_the_answer_ends_the_choice_in_flight_and_the_one_that_waits(t):
    r = t.start_req(rid="r", prompt_len=20, max_new_tokens=20, n=2)
    yield from t.run_until(lambda: t.state.in_flight)
    t.sometimes(SPLIT, [choice.status for choice in r.choices] == ["running", "waiting"])
    call = t.abort(r)
    # Its rid is free again at once, as after any abort.
    again = t.start_req(rid="r", prompt_len=20, max_new_tokens=2)
    yield from t.run_until_finished(r, max_steps=8)
    assert [choice.finish_reason for choice in r.choices] == ["abort", "abort"]
    assert [choice.client.finish_reason for choice in r.choices] == ["abort", "abort"]
    assert (r.status, r.client.closed, call.status) == ("aborted", True, 200)
    yield from t.run_until_finished(again)
    assert again.finish_reason == "length"


@scripted(TWO_AT_A_TIME, tiers=("sim", "server"))
@pytest.mark.parametrize("stream", [True, False])
def test_disconnect_ends_every_choice_and_a_choice_can_be_aborted_alone(t, stream):
    r = t.start_req(prompt_len=20, max_new_tokens=20, n=3, stream=stream)
    yield from t.advance_to_decode_step(r.choices[0], 2)
    t.abort(r.choices[1])
    yield from t.run_until_finished(r.choices[1])
    assert (r.choices[1].finish_reason, r.choices[0].finished, r.finished) == ("abort", False, False)
    t.disconnect(r)
    yield from t.run_until_finished(r)
    assert [choice.finish_reason for choice in r.choices] == ["abort"] * 3
    assert r.client.dropped is True


@scripted(EngineConfig(max_queued_requests=2, max_running_requests=1), tiers=("sim", "server"))
def test_an_answer_is_refused_as_a_whole(t):
    with pytest.raises(RequestRefused, match="429"):
        t.start_req(rid="r", prompt_len=20, n=3)
    yield from t.run_until_idle()
    r = t.start_req(rid="r", prompt_len=20, max_new_tokens=2, n=2)
    for rid in ("r", "r-1"):
        with pytest.raises(RequestRefused, match="409"):
            t.start_req(rid=rid, prompt_len=20)
    with pytest.raises(RequestRefused, match=r"sampling_params\.n"):
        t.start_req(prompt_len=20, n=0)
    with pytest.raises(BadCall, match=r"r has 2 choices, each with its own .output_ids; ask r.choices\[0\].output_ids"):
        r.output_ids.count(1)
    with pytest.raises(BadCall, match="takes the handle that start_req"):
        t.disconnect(r.choices[0])
    yield from t.run_until_finished(r)
    assert r.status == "finished"


@scripted(TWO_AT_A_TIME, tiers=("sim", "server"))
@pytest.mark.parametrize("stream", [True, False])
def test_time_and_failure_of_one_choice(t, stream):
    """A timed-out choice without tokens stands beside one with tokens; a failed choice ends the answer."""
    late = t.start_req(prompt_len=20, max_new_tokens=9, n=2, stream=stream, waiting_timeout_s=5)
    yield from t.advance_to_decode_step(late.choices[0], 2)
    t.clock.advance(6)
    yield from t.run_until_finished(late)
    assert [choice.client.finish_reason for choice in late.choices] == ["length", "timeout"]
    failing = t.start_req(prompt_len=20, max_new_tokens=9, n=2, stream=stream)
    yield from t.advance_to_decode_step(failing.choices[0], 1)
    t.fail_next_step(1)
    yield from t.run_until_finished(failing)
    assert [choice.finish_reason for choice in failing.choices] == ["error", "abort"]
    assert failing.client.error is not None
    assert [choice.client.finish_reason for choice in failing.choices] == ["error", "error"]
