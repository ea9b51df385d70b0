"""Scripts on the example scheduler, which knows nothing of this project.

Goal: an outsider can write every verb, wait and query that a scheduler of the usual shape declares. Method: small
pools, results two steps late, prompts that share prefixes. Origin: docs/your_scheduler.md. Mutants:
ended-request-is-remembered, only-the-first-block-comes-back, preemption-says-nothing, what-cannot-fit-is-taken,
half-of-the-budget, prefixes-are-never-hit, aborts-end-nothing, stop-tokens-are-ignored.
"""

import pytest

from ci.register import register_cpu_ci
from scripted import scripted

register_cpu_ci(est_time=2, suite="base-cpu")

EXAMPLE = "tests/registered/sdk/example_adapter.py"
WINDOW = "an aborted batch in flight"
PREEMPTED = "a preempted request computes again"


@scripted(adapter=EXAMPLE, must_reach=[WINDOW])
def test_a_flush_after_an_abort_with_its_batch_in_flight(t):
    a = t.start_req(rid="a", prompt_len=4, max_new_tokens=1)
    yield
    t.abort(a)
    flush = t.flush_cache()
    yield
    t.sometimes(WINDOW, a.status == "aborted" and t.state.in_flight)
    assert flush.status == 200
    c = t.start_req(rid="c", prompt_len=5, max_new_tokens=1)
    yield
    assert t.last_batch.positions["c"] == [0, 1, 2, 3, 4], "the flush has left something to hit"
    yield from t.run_until_finished(c)


@scripted(adapter=EXAMPLE)
def test_a_request_from_its_arrival_to_its_end(t):
    r = t.start_req(prompt_len=20, max_new_tokens=2)
    assert (r.rid, r.status, r.computed) == ("scripted-1", "waiting", 0)
    assert [(one.kind, one.rid) for one in t.state.arrived] == [("start", "scripted-1")]
    assert not t.state.is_fully_idle
    yield
    assert not t.state.arrived
    assert (r.status, r.is_chunking, r.computed) == ("running", True, 16)
    assert t.last_batch.rids == ["scripted-1"]
    assert (t.last_batch.launched_at_step, t.last_batch.due_at_step) == (1, 3)
    yield
    assert (r.status, r.is_chunking, r.computed) == ("running", False, 20)
    assert [batch.tokens for batch in t.state.in_flight] == [16, 4]
    assert t.last_batch.pages["scripted-1"] == [0, 1, 2, 3, 4]
    yield
    assert t.last_batch is None
    assert t.history[-1].stepped.replies == ()
    yield from t.run_until_finished(r)
    assert (r.status, r.finish_reason, len(r.output_ids)) == ("finished", "length", 2)
    assert t.status("scripted-1") == "finished"
    assert t.is_finished("scripted-1")
    assert t.find_req_by_rid("scripted-1") is None, "the live object is gone"
    yield from t.run_until_idle()
    assert t.state.is_fully_idle
    assert t.state.blocks_free == 12
    assert t.state.counts["in_flight"] == 0


@scripted(adapter=EXAMPLE, blocks=5, must_reach=[PREEMPTED])
def test_a_preempted_request_says_what_it_says_alone(t):
    requests = [t.start_req(prompt_len=6, prompt_seed=seed, max_new_tokens=8) for seed in range(2)]
    while not all(r.finished for r in requests):
        yield
        t.sometimes(PREEMPTED, any(r.retractions and r.computed for r in requests))
    assert [r.finish_reason for r in requests] == ["length", "length"]
    assert sum(r.retractions for r in requests) >= 1


@scripted(adapter=EXAMPLE)
def test_a_prefix_is_computed_once(t):
    first = t.start_req(prompt_len=8, max_new_tokens=1)
    yield from t.run_until_finished(first)
    branch = t.start_req(prompt_len=12, shared_len=8, tail_seed=3, max_new_tokens=2)
    yield
    assert t.last_batch.positions[branch.rid] == [8, 9, 10, 11]
    yield from t.run_until_finished(branch)


@scripted(adapter=EXAMPLE)
def test_held_results_come_one_by_one(t):
    r = t.start_req(prompt_len=20, max_new_tokens=1)
    t.hold_results()
    for _ in range(6):
        yield
    assert len(t.state.in_flight) == 2
    t.release_results(1)
    yield
    assert len(t.state.in_flight) == 1
    assert not r.finished
    t.release_results()
    yield
    assert r.finish_reason == "length"


@scripted(adapter=EXAMPLE)
@pytest.mark.parametrize("after", range(5))
def test_an_abort_at_any_step_ends_one_request(t, after):
    a = t.start_req(rid="a", prompt_len=20, max_new_tokens=4)
    b = t.start_req(rid="b", prompt_len=9, prompt_seed=1, max_new_tokens=4)
    for _ in range(after):
        yield
    t.abort("a")
    yield
    assert a.finish_reason == "abort"
    yield from t.run_until_all_finished([a, b])
    assert b.finish_reason == "length"
    again = t.start_req(rid="a", prompt_len=20, max_new_tokens=1)
    yield from t.run_until_finished(again)
    assert again.status == "finished"
    assert a.status == "aborted"


@scripted(adapter=EXAMPLE, blocks=4)
def test_what_can_never_fit_is_refused(t):
    r = t.start_req(prompt_len=16, max_new_tokens=1)
    yield
    assert (r.status, r.finish_reason, r.client.status) == ("finished", "error", 400)
    assert r.error == r.client.error


@scripted(adapter=EXAMPLE)
def test_a_stop_token_ends_it(t):
    said = t.start_req(prompt_ids=[40, 50, 60, 70], max_new_tokens=4)
    yield from t.run_until_finished(said)
    stopped = t.start_req(prompt_ids=[40, 50, 60, 70], max_new_tokens=4, stop_token_ids=said.output_ids[1:2])
    yield from t.run_until_finished(stopped)
    assert stopped.output_ids == said.output_ids[:2]
    assert stopped.finish_reason == "stop"


@scripted(adapter=EXAMPLE)
def test_time_stands_still_until_it_is_moved(t):
    r = t.start_req(prompt_len=4, max_new_tokens=2)
    yield
    assert t.clock.now() == 0
    t.clock.advance(1.5)
    assert t.state.now == 1.5
    yield
    assert t.history[-1].step.now == 1.5
    yield from t.run_until_finished(r)
